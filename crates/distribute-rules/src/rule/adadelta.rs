//! Adadelta.

use crate::step::{Float, Step};

#[inline(always)]
pub(super) fn update<T: Float>(step: Step<'_, '_, T>, rho: f64, epsilon: f64) {
    let [lr, epsilon, rho, fresh] = [step.learning_rate, epsilon, rho, 1.0 - rho].map(T::from_f64);
    let Step { parameter, gradient, slots: [squares, changes], .. } = step else { return };
    for (((p, &g), v), d) in parameter.iter_mut().zip(gradient).zip(squares.iter_mut()).zip(changes.iter_mut()) {
        *v = (rho * *v + fresh * g * g).flushed();
        let change = (*d + epsilon).sqrt() / (*v + epsilon).sqrt() * g;
        *d = (rho * *d + fresh * change * change).flushed();
        *p -= lr * change;
    }
}

#[cfg(test)]
mod tests {
    use crate::UpdateRule;

    #[test]
    fn two_steps_by_hand() {
        let rule = UpdateRule::Adadelta { rho: 0.5, epsilon: 0.25 };
        let (mut p, mut v, mut d) = ([1.0f64], [0.0f64], [0.0f64]);
        rule.update(1, 1.0, &mut p, &[2.0], &mut [&mut v, &mut d]);
        // The mean square is 2; the change is 2·0.5/1.5.
        let first = 2.0 / 3.0;
        assert!((p[0] - (1.0 - first)).abs() < 1e-12 && (d[0] - first * first / 2.0).abs() < 1e-12, "{p:?} {d:?}");
        rule.update(2, 1.0, &mut p, &[2.0], &mut [&mut v, &mut d]);
        let second = 2.0 * (first * first / 2.0 + 0.25f64).sqrt() / 3.25f64.sqrt();
        assert!((p[0] - (1.0 - first - second)).abs() < 1e-12, "{p:?}");
    }
}
