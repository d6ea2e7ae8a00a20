//! Adam and AdamW.

use crate::step::{Float, Step, correction};

/// The factors of one step of Adam or AdamW, computed in f64, rounded to the parameter's type once, and equal for all
/// elements.
///
/// The step is m = beta1·m + rest1·g; v = beta2·v + rest2·g²; p = keep·p − rate·m/(√(v·scale) + epsilon). Moments that
/// are subnormal become zero. Implementations other than the CPU's use these factors too, so that results are equal bit
/// for bit.
///
/// # Examples
/// ```
/// use distribute_rules::AdamFactors;
/// let factors = AdamFactors::new(1, 0.001, [0.9, 0.999], 1e-8, 0.0);
/// assert_eq!(factors.rest2 as f32, 0.001);                 // in f32, 1 − 0.999 is 0.00100005
/// assert!((factors.rate - 0.01).abs() < 1e-12);
/// ```
///
/// # Source
/// Kingma and Ba, "Adam: A method for stochastic optimization", 2015, algorithm 1 and the end of section 2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamFactors {
    /// The learning rate, divided by the first moment's bias correction 1 − beta1ⁿ.
    pub rate: f64,
    /// One divided by the second moment's bias correction 1 − beta2ⁿ.
    pub scale: f64,
    /// The factor that weight decay applies to a parameter: 1 without weight decay.
    pub keep: f64,
    /// The decay rate of the first moment.
    pub beta1: f64,
    /// 1 − beta1.
    pub rest1: f64,
    /// The decay rate of the second moment.
    pub beta2: f64,
    /// 1 − beta2.
    pub rest2: f64,
    /// The number that is added to the root.
    pub epsilon: f64,
}

impl AdamFactors {
    /// Computes the factors of a parameter's `step`, which counts from 1.
    pub fn new(
        step: u64,
        learning_rate: f64,
        [beta1, beta2]: [f64; 2],
        epsilon: f64,
        weight_decay: f64,
    ) -> AdamFactors {
        AdamFactors {
            rate: learning_rate / correction(beta1, step),
            scale: 1.0 / correction(beta2, step),
            keep: 1.0 - learning_rate * weight_decay,
            beta1,
            rest1: 1.0 - beta1,
            beta2,
            rest2: 1.0 - beta2,
            epsilon,
        }
    }
}

#[inline(always)]
pub(super) fn update<T: Float>(step: Step<'_, '_, T>, beta1: f64, beta2: f64, epsilon: f64, weight_decay: f64) {
    let factors = AdamFactors::new(step.number, step.learning_rate, [beta1, beta2], epsilon, weight_decay);
    let AdamFactors { rate, scale, keep, beta1, rest1, beta2, rest2, epsilon } = factors;
    let [rate, scale, keep, epsilon] = [rate, scale, keep, epsilon].map(T::from_f64);
    let [b1, rest1, b2, rest2] = [beta1, rest1, beta2, rest2].map(T::from_f64);
    let Step { parameter, gradient, slots: [m, v], .. } = step else { return };
    for (((p, &g), m), v) in parameter.iter_mut().zip(gradient).zip(m.iter_mut()).zip(v.iter_mut()) {
        *m = (b1 * *m + rest1 * g).flushed();
        *v = (b2 * *v + rest2 * g * g).flushed();
        *p = *p * keep - rate * *m / ((*v * scale).sqrt() + epsilon);
    }
}

#[cfg(test)]
mod tests {
    use crate::UpdateRule;

    #[test]
    fn the_first_step_moves_by_the_learning_rate() {
        let rule = UpdateRule::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 };
        let (mut p, mut m, mut v) = ([2.0f64, 2.0], [0.0f64; 2], [0.0f64; 2]);
        rule.update(1, 0.01, &mut p, &[1.5, -3.0], &mut [&mut m, &mut v]);
        assert!((p[0] - 1.99).abs() < 1e-8 && (p[1] - 2.01).abs() < 1e-8, "{p:?}");
        assert!((m[0] - 0.15).abs() < 1e-12 && (v[0] - 0.00225).abs() < 1e-12);
    }

    #[test]
    fn decay_acts_on_the_parameter_alone() {
        let rule = UpdateRule::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.5 };
        let (mut p, mut m, mut v) = ([2.0f32], [0.0f32], [0.0f32]);
        rule.update(1, 0.1, &mut p, &[0.0], &mut [&mut m, &mut v]);
        assert!((p[0] - 1.9).abs() < 1e-6, "{p:?}");
    }
}
