//! The kernels of update rules on NVIDIA GPUs.

use distribute_device::cuda::FusedStep;

use super::{AdamFactors, UpdateRule, adamax, ftrl, nadam};
use crate::step::correction;

impl UpdateRule {
    /// Returns the kernel of a parameter's `step`, which counts from 1, and its factors.
    ///
    /// # Examples
    /// ```
    /// use distribute_device::cuda::FusedStep;
    /// use distribute_rules::UpdateRule;
    ///
    /// let rule = UpdateRule::Sgd { momentum: 0.9, nesterov: true };
    /// assert_eq!(rule.fused(1, 0.1), FusedStep::Sgd { rate: 0.1, momentum: 0.9, nesterov: true });
    /// ```
    pub fn fused(&self, step: u64, rate: f64) -> FusedStep {
        match *self {
            UpdateRule::Sgd { momentum, nesterov } => FusedStep::Sgd { rate, momentum, nesterov },
            UpdateRule::Adam { beta1, beta2, epsilon, weight_decay } => {
                let factors = AdamFactors::new(step, rate, [beta1, beta2], epsilon, weight_decay);
                let AdamFactors { rate, scale, keep, beta1, rest1, beta2, rest2, epsilon } = factors;
                FusedStep::Adam { rate, scale, keep, beta1, rest1, beta2, rest2, epsilon }
            }
            UpdateRule::Adagrad { epsilon, .. } => FusedStep::Adagrad { rate, epsilon },
            UpdateRule::RmsProp { rho, momentum, epsilon, centered } => {
                FusedStep::RmsProp { rate, rho, rest: 1.0 - rho, momentum, epsilon, centered }
            }
            UpdateRule::Lamb { beta1, beta2, epsilon, weight_decay } => FusedStep::Lamb {
                rate,
                scale1: 1.0 / correction(beta1, step),
                scale2: 1.0 / correction(beta2, step),
                beta1,
                rest1: 1.0 - beta1,
                beta2,
                rest2: 1.0 - beta2,
                epsilon,
                decay: weight_decay,
            },
            UpdateRule::Adadelta { rho, epsilon } => FusedStep::Adadelta { rate, rho, rest: 1.0 - rho, epsilon },
            UpdateRule::Adamax { beta1, beta2, epsilon } => {
                let rate = adamax::rate(step, rate, beta1);
                FusedStep::Adamax { rate, beta1, rest1: 1.0 - beta1, beta2, epsilon }
            }
            UpdateRule::Nadam { beta1, beta2, epsilon } => {
                let nadam::Factors { of_moment, of_gradient, scale } = nadam::Factors::new(step, rate, beta1, beta2);
                let (rest1, rest2) = (1.0 - beta1, 1.0 - beta2);
                FusedStep::Nadam { of_moment, of_gradient, scale, beta1, rest1, beta2, rest2, epsilon }
            }
            UpdateRule::Ftrl { l1, l2, l2_shrinkage, beta, .. } => {
                let penalties = ftrl::Penalties { l1, l2, l2_shrinkage, beta };
                FusedStep::Ftrl { rate, l1, shrinkage: penalties.shrinkage(), flat: penalties.flat(rate) }
            }
        }
    }
}
