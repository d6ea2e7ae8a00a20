//! Adamax.

use crate::step::{Float, Step, correction};

#[inline(always)]
pub(super) fn update<T: Float>(step: Step<'_, '_, T>, beta1: f64, beta2: f64, epsilon: f64) {
    let rate = rate(step.number, step.learning_rate, beta1);
    let [zero, rate, epsilon] = [0.0, rate, epsilon].map(T::from_f64);
    let [b1, rest1, b2] = [beta1, 1.0 - beta1, beta2].map(T::from_f64);
    let Step { parameter, gradient, slots: [m, u], .. } = step else { return };
    for (((p, &g), m), u) in parameter.iter_mut().zip(gradient).zip(m.iter_mut()).zip(u.iter_mut()) {
        *m = (b1 * *m + rest1 * g).flushed();
        let (decayed, size) = ((b2 * *u).flushed(), if g < zero { zero - g } else { g });
        // A gradient that is NaN stays in the state.
        *u = if decayed > size { decayed } else { size };
        *p -= rate * *m / (*u + epsilon);
    }
}

/// Returns the learning rate, divided by the first moment's bias correction.
pub(super) fn rate(step: u64, learning_rate: f64, beta1: f64) -> f64 {
    learning_rate / correction(beta1, step)
}

#[cfg(test)]
mod tests {
    use crate::UpdateRule;

    #[test]
    fn steps_are_divided_by_the_largest_recent_gradient() {
        let rule = UpdateRule::Adamax { beta1: 0.5, beta2: 0.75, epsilon: 1e-12 };
        let (mut p, mut m, mut u) = ([1.0f64], [0.0f64], [0.0f64]);
        rule.update(1, 0.1, &mut p, &[-4.0], &mut [&mut m, &mut u]);
        assert!((p[0] - 1.1).abs() < 1e-9 && u[0] == 4.0, "{p:?} {u:?}");
        rule.update(2, 0.1, &mut p, &[1.0], &mut [&mut m, &mut u]);
        // m = -0.5, corrected by 0.75; u = 3.
        assert!((p[0] - (1.1 + 0.1 / 0.75 * 0.5 / 3.0)).abs() < 1e-9 && u[0] == 3.0, "{p:?} {u:?}");
    }

    #[test]
    fn no_number_is_not_the_largest() {
        let rule = UpdateRule::Adamax { beta1: 0.5, beta2: 0.75, epsilon: 1e-7 };
        let (mut p, mut m, mut u) = ([1.0f32], [0.0f32], [4.0f32]);
        rule.update(1, 0.1, &mut p, &[f32::NAN], &mut [&mut m, &mut u]);
        assert!(p[0].is_nan() && u[0].is_nan());
    }
}
