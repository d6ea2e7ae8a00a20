//! LAMB.

use crate::step::{Float, Step, correction};

#[inline(always)]
pub(super) fn update<T: Float>(step: Step<'_, '_, T>, beta1: f64, beta2: f64, epsilon: f64, weight_decay: f64) {
    let [scale1, scale2] = [beta1, beta2].map(|beta| T::from_f64(1.0 / correction(beta, step.number)));
    let [b1, rest1, b2, rest2] = [beta1, 1.0 - beta1, beta2, 1.0 - beta2].map(T::from_f64);
    let [epsilon, decay] = [epsilon, weight_decay].map(T::from_f64);
    let direction = |p: T, m: T, v: T| m * scale1 / ((v * scale2).sqrt() + epsilon) + decay * p;
    let Step { parameter, gradient, slots: [m, v], .. } = step else { return };
    let (mut of_parameter, mut of_direction) = (0.0f64, 0.0f64);
    for (((&p, &g), m), v) in parameter.iter().zip(gradient).zip(m.iter_mut()).zip(v.iter_mut()) {
        *m = (b1 * *m + rest1 * g).flushed();
        *v = (b2 * *v + rest2 * g * g).flushed();
        // Squares are summed in f64, in which squares of f32 neither overflow nor underflow.
        let (towards, p): (f64, f64) = (direction(p, *m, *v).into(), p.into());
        of_parameter += p * p;
        of_direction += towards * towards;
    }
    let ratio = match of_parameter > 0.0 && of_direction > 0.0 {
        true => (of_parameter / of_direction).sqrt(),
        false => 1.0,
    };
    let rate = T::from_f64(step.learning_rate * ratio);
    // The direction is computed again instead of stored: memory is slower than arithmetic.
    for ((p, &m), &v) in parameter.iter_mut().zip(m.iter()).zip(v.iter()) {
        *p -= rate * direction(*p, m, v);
    }
}

#[cfg(test)]
mod tests {
    use crate::UpdateRule;

    #[test]
    fn a_step_is_as_long_as_the_learning_rate_times_the_norm() {
        let rule = UpdateRule::Lamb { beta1: 0.9, beta2: 0.999, epsilon: 1e-6, weight_decay: 0.0 };
        let (mut p, mut m, mut v) = ([3.0f64, 4.0], [0.0f64; 2], [0.0f64; 2]);
        rule.update(1, 0.1, &mut p, &[1.0, -1.0], &mut [&mut m, &mut v]);
        let length = ((p[0] - 3.0).powi(2) + (p[1] - 4.0).powi(2)).sqrt();
        assert!((length - 0.5).abs() < 1e-9, "{p:?}");
        // A parameter of norm 0 has no norm to scale to.
        let (mut p, mut m, mut v) = ([0.0f32], [0.0f32], [0.0f32]);
        rule.update(1, 0.1, &mut p, &[2.0], &mut [&mut m, &mut v]);
        assert!((p[0] + 0.1).abs() < 1e-6, "{p:?}");
    }
}
