//! Nadam.

use crate::step::{Float, Step, correction};

/// The factors of one step, computed in f64 and equal for all elements.
pub(super) struct Factors {
    /// The factor of the first moment.
    pub(super) of_moment: f64,
    /// The factor of the gradient.
    pub(super) of_gradient: f64,
    /// One divided by the second moment's bias correction.
    pub(super) scale: f64,
}

/// The momentum of a step is beta1·(1 − 0.96ⁿ/2).
const DECAY: f64 = 0.96;

/// The number of steps after which the momentum has reached beta1 in f64: 0.96⁹⁰⁰ is 1e-16.
const WARM: u64 = 1000;

impl Factors {
    pub(super) fn new(step: u64, learning_rate: f64, beta1: f64, beta2: f64) -> Factors {
        let of_step = |step: u64| beta1 * (1.0 - 0.5 * DECAY.powi(step.min(WARM) as i32));
        // The product of the momenta of all steps so far is a function of the number of the step, and no state.
        let warm: f64 = (1..=step.min(WARM)).map(of_step).product();
        let so_far = warm * beta1.powi(i32::try_from(step.saturating_sub(WARM)).unwrap_or(i32::MAX));
        let (momentum, next) = (of_step(step), of_step(step.saturating_add(1)));
        Factors {
            of_moment: learning_rate * next / (1.0 - so_far * next),
            of_gradient: learning_rate * (1.0 - momentum) / (1.0 - so_far),
            scale: 1.0 / correction(beta2, step),
        }
    }
}

#[inline(always)]
pub(super) fn update<T: Float>(step: Step<'_, '_, T>, beta1: f64, beta2: f64, epsilon: f64) {
    let Factors { of_moment, of_gradient, scale } = Factors::new(step.number, step.learning_rate, beta1, beta2);
    let [of_moment, of_gradient, scale, epsilon] = [of_moment, of_gradient, scale, epsilon].map(T::from_f64);
    let [b1, rest1, b2, rest2] = [beta1, 1.0 - beta1, beta2, 1.0 - beta2].map(T::from_f64);
    let Step { parameter, gradient, slots: [m, v], .. } = step else { return };
    for (((p, &g), m), v) in parameter.iter_mut().zip(gradient).zip(m.iter_mut()).zip(v.iter_mut()) {
        *m = (b1 * *m + rest1 * g).flushed();
        *v = (b2 * *v + rest2 * g * g).flushed();
        *p -= (of_moment * *m + of_gradient * g) / ((*v * scale).sqrt() + epsilon);
    }
}

#[cfg(test)]
mod tests {
    use super::Factors;
    use crate::UpdateRule;

    #[test]
    fn two_steps_by_hand() {
        let rule = UpdateRule::Nadam { beta1: 0.9, beta2: 0.999, epsilon: 1e-12 };
        let (mut p, mut m, mut v) = ([1.0f64], [0.0f64], [0.0f64]);
        let momenta = [1, 2, 3].map(|step| 0.9 * (1.0 - 0.5 * 0.96f64.powi(step)));
        let mut expected = 1.0;
        let (mut mean, mut product) = (0.0, 1.0);
        for step in 0..2 {
            rule.update(step as u64 + 1, 0.1, &mut p, &[2.0], &mut [&mut m, &mut v]);
            mean = 0.9 * mean + 0.1 * 2.0;
            product *= momenta[step];
            let ahead = momenta[step + 1] * mean / (1.0 - product * momenta[step + 1]);
            // The corrected mean square of one value is that value's.
            expected -= 0.1 * (ahead + (1.0 - momenta[step]) * 2.0 / (1.0 - product)) / 2.0;
        }
        assert!((p[0] - expected).abs() < 1e-9, "{p:?} {expected}");
    }

    #[test]
    fn late_steps_have_the_momentum_of_the_limit() {
        for step in [1_000, 1_001, 5_000, u64::MAX] {
            let Factors { of_moment, of_gradient, .. } = Factors::new(step, 1.0, 0.9, 0.999);
            assert!((of_moment - 0.9).abs() < 1e-12 && (of_gradient - 0.1).abs() < 1e-12, "{step}: {of_moment}");
        }
    }
}
