//! RMSprop.

use crate::step::{Float, Step};

#[inline(always)]
pub(super) fn update<T: Float>(step: Step<'_, '_, T>, rho: f64, momentum: f64, epsilon: f64, centered: bool) {
    let [zero, lr, momentum, epsilon] = [0.0, step.learning_rate, momentum, epsilon].map(T::from_f64);
    let [rho, fresh] = [rho, 1.0 - rho].map(T::from_f64);
    let Step { parameter, gradient, slots: [square, rest @ ..], .. } = step else { return };
    let spread = |v: &mut T, g: T| {
        *v = (rho * *v + fresh * g * g).flushed();
        *v
    };
    // Rounding can make this variance slightly negative if gradients hardly change.
    let variance = |square: T, m: &mut T, g: T| {
        *m = (rho * *m + fresh * g).flushed();
        let variance = square - *m * *m;
        if variance < zero { zero } else { variance }
    };
    let gather = |s: &mut T, change: T| {
        *s = (momentum * *s + change).flushed();
        *s
    };
    let elements = parameter.iter_mut().zip(gradient).zip(square.iter_mut());
    // `UpdateRule::slots` defines the slots and their order. Each case has its own loop, so that the compiler can
    // vectorise it.
    match rest {
        [] => elements.for_each(|((p, &g), v)| *p -= lr * g / (spread(v, g) + epsilon).sqrt()),
        [mean] if centered => {
            for (((p, &g), v), m) in elements.zip(mean.iter_mut()) {
                *p -= lr * g / (variance(spread(v, g), m, g) + epsilon).sqrt();
            }
        }
        [sum] => {
            for (((p, &g), v), s) in elements.zip(sum.iter_mut()) {
                *p -= gather(s, lr * g / (spread(v, g) + epsilon).sqrt());
            }
        }
        [mean, sum, ..] => {
            for ((((p, &g), v), m), s) in elements.zip(mean.iter_mut()).zip(sum.iter_mut()) {
                *p -= gather(s, lr * g / (variance(spread(v, g), m, g) + epsilon).sqrt());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::UpdateRule;

    fn two_steps(momentum: f64, centered: bool) -> f64 {
        let rule = UpdateRule::RmsProp { rho: 0.5, momentum, epsilon: 1e-9, centered };
        let mut p = [1.0f64];
        let mut memory = vec![[0.0f64]; rule.slots().len()];
        for step in 1..=2 {
            let mut slots: Vec<&mut [f64]> = memory.iter_mut().map(|slot| &mut slot[..]).collect();
            rule.update(step, 0.1, &mut p, &[2.0], &mut slots);
        }
        p[0]
    }

    #[test]
    fn two_steps_by_hand() {
        // Squares: 2, 3. Means: 1, 1.5.
        let (first, second) = (0.2 / 2f64.sqrt(), 0.2 / 3f64.sqrt());
        assert!((two_steps(0.0, false) - (1.0 - first - second)).abs() < 1e-8);
        assert!((two_steps(0.9, false) - (1.0 - first - (0.9 * first + second))).abs() < 1e-8);
        let centered = 1.0 - 0.2 / 1f64.sqrt() - 0.2 / 0.75f64.sqrt();
        assert!((two_steps(0.0, true) - centered).abs() < 1e-7);
        let all = UpdateRule::RmsProp { rho: 0.5, momentum: 0.5, epsilon: 1e-9, centered: true };
        assert_eq!(all.slots(), ["velocity", "average_gradient", "momentum"]);
    }
}
