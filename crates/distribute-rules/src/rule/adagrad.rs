//! Adagrad.

use crate::step::{Float, Step};

#[inline(always)]
pub(super) fn update<T: Float>(step: Step<'_, '_, T>, epsilon: f64) {
    let [lr, epsilon] = [step.learning_rate, epsilon].map(T::from_f64);
    let Step { parameter, gradient, slots: [accumulator], .. } = step else { return };
    for ((p, &g), a) in parameter.iter_mut().zip(gradient).zip(accumulator.iter_mut()) {
        *a += g * g;
        *p -= lr * g / (*a + epsilon).sqrt();
    }
}

#[cfg(test)]
mod tests {
    use crate::UpdateRule;

    #[test]
    fn steps_shrink_as_squares_accumulate() {
        let rule = UpdateRule::Adagrad { initial_accumulator: 0.1, epsilon: 1e-12 };
        let (mut p, mut a) = ([1.0f64], [0.44f64]);
        rule.update(1, 0.5, &mut p, &[1.0], &mut [&mut a]);
        // 1 - 0.5 / 1.2
        assert!((p[0] - (1.0 - 0.5 / 1.2)).abs() < 1e-9 && (a[0] - 1.44).abs() < 1e-12, "{p:?} {a:?}");
    }
}
