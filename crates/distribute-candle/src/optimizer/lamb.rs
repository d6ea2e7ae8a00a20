//! LAMB.

use super::{Optimizer, Rule, check};
use crate::{Model, Result};

/// Adam whose step is scaled, for each variable, to the norm of the variable: for large global batches.
///
/// # Source
/// You et al., "Large batch optimization for deep learning: training BERT in 76 minutes", 2020, algorithm 2:
/// r = m̂/(√v̂ + ε) + λ·p, p = p − lr·(‖p‖/‖r‖)·r. The ratio is 1 where either norm is 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lamb {
    learning_rate: f64,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    weight_decay: f64,
}

impl Lamb {
    /// LAMB with a learning rate, beta1 0.9, beta2 0.999, epsilon 1e-6 and weight decay 0.01.
    pub fn new(learning_rate: f64) -> Lamb {
        Lamb { learning_rate, beta1: 0.9, beta2: 0.999, epsilon: 1e-6, weight_decay: 0.01 }
    }

    /// How slowly the first and the second moment forget; both from 0 to below 1.
    pub fn betas(self, beta1: f64, beta2: f64) -> Lamb {
        Lamb { beta1, beta2, ..self }
    }

    /// What is added to the root of the second moment; above 0.
    pub fn epsilon(self, epsilon: f64) -> Lamb {
        Lamb { epsilon, ..self }
    }

    /// The weight decay; 0 or more.
    pub fn weight_decay(self, weight_decay: f64) -> Lamb {
        Lamb { weight_decay, ..self }
    }

    /// The optimizer for a model.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::Error::Setting) for settings outside their ranges.
    pub fn build<M>(self, model: &Model<M>) -> Result<Optimizer> {
        check("the learning rate of Lamb", self.learning_rate, self.learning_rate >= 0.0, "0 or more")?;
        check("beta1 of Lamb", self.beta1, (0.0..1.0).contains(&self.beta1), "from 0 to below 1")?;
        check("beta2 of Lamb", self.beta2, (0.0..1.0).contains(&self.beta2), "from 0 to below 1")?;
        check("epsilon of Lamb", self.epsilon, self.epsilon > 0.0, "above 0, such as 1e-6")?;
        check("the weight decay of Lamb", self.weight_decay, self.weight_decay >= 0.0, "0 or more")?;
        Optimizer::build(Box::new(self), self.learning_rate, model)
    }
}

macro_rules! update {
    ($name:ident, $t:ty) => {
        fn $name(&self, step: u64, lr: f64, parameter: &mut [$t], gradient: &[$t], slots: &mut [&mut [$t]]) {
            let [m, v] = slots else { return };
            let exponent = i32::try_from(step).unwrap_or(i32::MAX);
            let scale1 = (1.0 / (1.0 - self.beta1.powi(exponent))) as $t;
            let scale2 = (1.0 / (1.0 - self.beta2.powi(exponent))) as $t;
            let (b1, b2) = (self.beta1 as $t, self.beta2 as $t);
            let (epsilon, decay) = (self.epsilon as $t, self.weight_decay as $t);
            let direction = |p: $t, m: $t, v: $t| m * scale1 / ((v * scale2).sqrt() + epsilon) + decay * p;
            let (mut of_parameter, mut of_direction) = (0.0f64, 0.0f64);
            for (((p, g), m), v) in parameter.iter().zip(gradient).zip(m.iter_mut()).zip(v.iter_mut()) {
                *m = b1 * *m + (1.0 - b1) * g;
                *v = b2 * *v + (1.0 - b2) * g * g;
                of_parameter += f64::from(p * p);
                of_direction += f64::from(direction(*p, *m, *v).powi(2));
            }
            let ratio = match of_parameter > 0.0 && of_direction > 0.0 {
                true => (of_parameter / of_direction).sqrt(),
                false => 1.0,
            };
            let rate = (lr * ratio) as $t;
            // The direction is computed again rather than kept: memory is slower than arithmetic.
            for ((p, m), v) in parameter.iter_mut().zip(m.iter()).zip(v.iter()) {
                *p -= rate * direction(*p, *m, *v);
            }
        }
    };
}

impl Rule for Lamb {
    fn is_elementwise(&self) -> bool {
        false
    }

    fn slots(&self) -> &'static [&'static str] {
        &["m", "v"]
    }

    update!(update_f32, f32);
    update!(update_f64, f64);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_as_long_as_the_learning_rate_times_the_norm() {
        let rule = Lamb::new(0.1).weight_decay(0.0);
        let (mut p, mut m, mut v) = ([3.0f64, 4.0], [0.0f64; 2], [0.0f64; 2]);
        rule.update_f64(1, 0.1, &mut p, &[1.0, -1.0], &mut [&mut m, &mut v]);
        let length = ((p[0] - 3.0).powi(2) + (p[1] - 4.0).powi(2)).sqrt();
        assert!((length - 0.5).abs() < 1e-9, "{p:?}");
        // From zero there is no norm to scale to.
        let (mut p, mut m, mut v) = ([0.0f32], [0.0f32], [0.0f32]);
        rule.update_f32(1, 0.1, &mut p, &[2.0], &mut [&mut m, &mut v]);
        assert!((p[0] + 0.1).abs() < 1e-6, "{p:?}");
    }
}
