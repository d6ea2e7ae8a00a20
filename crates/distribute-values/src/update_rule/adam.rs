//! Adam and AdamW.

use super::{Real, Step};

pub(super) fn update<T: Real>(step: Step<'_, '_, T>, beta1: f64, beta2: f64, epsilon: f64, weight_decay: f64) {
    // Bias corrections are the same for all elements, so they go into the factors.
    let (rate, scale) = (step.learning_rate / step.correction(beta1), 1.0 / step.correction(beta2));
    let keep = 1.0 - step.learning_rate * weight_decay;
    let [rate, scale, keep] = [rate, scale, keep].map(T::from_f64);
    let [one, b1, b2, epsilon] = [1.0, beta1, beta2, epsilon].map(T::from_f64);
    let Step { parameter, gradient, slots: [m, v], .. } = step else { return };
    for (((p, &g), m), v) in parameter.iter_mut().zip(gradient).zip(m.iter_mut()).zip(v.iter_mut()) {
        *m = b1 * *m + (one - b1) * g;
        *v = b2 * *v + (one - b2) * g * g;
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
