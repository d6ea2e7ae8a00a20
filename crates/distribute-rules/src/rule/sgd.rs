//! Stochastic gradient descent.

use crate::step::{Float, Step};

#[inline(always)]
pub(super) fn update<T: Float>(step: Step<'_, '_, T>, momentum: f64, nesterov: bool) {
    let Step { parameter, gradient, slots, .. } = step;
    let [lr, momentum] = [step.learning_rate, momentum].map(T::from_f64);
    match slots {
        [velocity] if nesterov => {
            for ((p, &g), v) in parameter.iter_mut().zip(gradient).zip(velocity.iter_mut()) {
                *v = (momentum * *v - lr * g).flushed();
                *p += momentum * *v - lr * g;
            }
        }
        [velocity] => {
            for ((p, &g), v) in parameter.iter_mut().zip(gradient).zip(velocity.iter_mut()) {
                *v = (momentum * *v - lr * g).flushed();
                *p += *v;
            }
        }
        _ => parameter.iter_mut().zip(gradient).for_each(|(p, &g)| *p -= lr * g),
    }
}

#[cfg(test)]
mod tests {
    use crate::UpdateRule;

    #[test]
    fn momentum_accumulates() {
        let rule = UpdateRule::Sgd { momentum: 0.9, nesterov: false };
        let (mut p, mut v) = ([1.0f64], [0.0f64]);
        for _ in 0..2 {
            rule.update(1, 0.1, &mut p, &[1.0], &mut [&mut v]);
        }
        assert!((v[0] + 0.19).abs() < 1e-12 && (p[0] - 0.71).abs() < 1e-12, "{p:?} {v:?}");
        let rule = UpdateRule::Sgd { momentum: 0.9, nesterov: true };
        let (mut p, mut v) = ([1.0f64], [0.0f64]);
        rule.update(1, 0.1, &mut p, &[1.0], &mut [&mut v]);
        assert!((v[0] + 0.1).abs() < 1e-12 && (p[0] - 0.81).abs() < 1e-12, "{p:?} {v:?}");
        let rule = UpdateRule::Sgd { momentum: 0.0, nesterov: false };
        let mut p = [1.0f32];
        rule.update(1, 0.5, &mut p, &[1.0], &mut []);
        assert_eq!(p, [0.5]);
    }
}
