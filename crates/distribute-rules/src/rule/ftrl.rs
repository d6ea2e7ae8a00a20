//! FTRL-Proximal.

use crate::step::{Float, Step};

/// The strengths of the regularizations.
#[derive(Clone, Copy)]
pub(super) struct Penalties {
    pub(super) l1: f64,
    pub(super) l2: f64,
    pub(super) l2_shrinkage: f64,
    pub(super) beta: f64,
}

impl Penalties {
    /// Returns the factor of the parameter in the gradient.
    pub(super) fn shrinkage(self) -> f64 {
        2.0 * self.l2_shrinkage
    }

    /// Returns the part of the divisor that all elements share.
    pub(super) fn flat(self, learning_rate: f64) -> f64 {
        self.beta / learning_rate + 2.0 * self.l2
    }
}

#[inline(always)]
pub(super) fn update<T: Float>(step: Step<'_, '_, T>, penalties: Penalties) {
    // The proximal term is divided by the rate: without one, the parameter stays where it is.
    if step.learning_rate == 0.0 {
        return;
    }
    let [zero, lr, l1] = [0.0, step.learning_rate, penalties.l1].map(T::from_f64);
    let [shrinkage, flat] = [penalties.shrinkage(), penalties.flat(step.learning_rate)].map(T::from_f64);
    let Step { parameter, gradient, slots: [accumulator, linear], .. } = step else { return };
    for (((p, &g), n), z) in parameter.iter_mut().zip(gradient).zip(accumulator.iter_mut()).zip(linear.iter_mut()) {
        let before = n.sqrt();
        *n += g * g;
        let after = n.sqrt();
        *z += g + shrinkage * *p - (after - before) / lr * *p;
        let below = zero - l1;
        // NaN stays NaN.
        let clipped = if *z > l1 {
            l1
        } else if *z < below {
            below
        } else {
            *z
        };
        *p = (clipped - *z) / (after / lr + flat);
    }
}

#[cfg(test)]
mod tests {
    use crate::UpdateRule;

    fn ftrl(l1: f64) -> UpdateRule {
        UpdateRule::Ftrl { initial_accumulator: 0.25, l1, l2: 0.5, l2_shrinkage: 0.25, beta: 1.0 }
    }

    #[test]
    fn a_step_by_hand() {
        let (mut p, mut n, mut z) = ([2.0f64], [0.25f64], [0.0f64]);
        ftrl(0.5).update(1, 0.1, &mut p, &[3.0], &mut [&mut n, &mut z]);
        let root = 9.25f64.sqrt();
        let linear = 3.0 + 2.0 * 0.25 * 2.0 - (root - 0.5) / 0.1 * 2.0;
        assert!((n[0], z[0]) == (9.25, linear), "{n:?} {z:?}");
        let expected = (-0.5 - linear) / ((1.0 + root) / 0.1 + 2.0 * 0.5);
        assert!((p[0] - expected).abs() < 1e-12, "{p:?} {expected}");
    }

    #[test]
    fn weak_features_are_exactly_zero() {
        let (mut p, mut n, mut z) = ([0.0f32; 2], [0.25f32; 2], [0.0f32; 2]);
        ftrl(1.0).update(1, 0.1, &mut p, &[0.9, -1.1], &mut [&mut n, &mut z]);
        assert!(p[0] == 0.0 && p[1] > 0.0, "{p:?}");
    }

    #[test]
    fn a_rate_of_zero_changes_nothing() {
        let (mut p, mut n, mut z) = ([2.0f32], [0.25f32], [0.5f32]);
        ftrl(0.5).update(1, 0.0, &mut p, &[3.0], &mut [&mut n, &mut z]);
        assert_eq!((p, n, z), ([2.0], [0.25], [0.5]));
    }
}
