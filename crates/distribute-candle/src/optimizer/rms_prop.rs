//! RMSprop.

use super::{Optimizer, Rule, check};
use crate::{Model, Result};

/// Gradients divided by the root of a running mean of their squares.
///
/// # Source
/// Hinton, lecture 6e of "Neural networks for machine learning", 2012, in the form of `tf.keras.optimizers.RMSprop`:
/// v = ρ·v + (1 − ρ)·g², d = lr·g/√(v + ε), p = p − d; centred, v − m² takes the place of v, with m the running mean of g;
/// with momentum, a running sum takes the place of d.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsProp {
    learning_rate: f64,
    rho: f64,
    momentum: f64,
    epsilon: f64,
    centered: bool,
}

impl RmsProp {
    /// RMSprop with a learning rate, rho 0.9, no momentum and epsilon 1e-7.
    pub fn new(learning_rate: f64) -> RmsProp {
        RmsProp { learning_rate, rho: 0.9, momentum: 0.0, epsilon: 1e-7, centered: false }
    }

    /// How slowly the running mean forgets, from 0 to below 1.
    pub fn rho(self, rho: f64) -> RmsProp {
        RmsProp { rho, ..self }
    }

    /// Momentum, from 0 (none) to below 1.
    pub fn momentum(self, momentum: f64) -> RmsProp {
        RmsProp { momentum, ..self }
    }

    /// What is added to the mean square; above 0.
    pub fn epsilon(self, epsilon: f64) -> RmsProp {
        RmsProp { epsilon, ..self }
    }

    /// Divides by the root of the variance instead of that of the mean square.
    pub fn centered(self) -> RmsProp {
        RmsProp { centered: true, ..self }
    }

    /// The optimizer for a model.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::Error::Setting) for settings outside their ranges.
    pub fn build<M>(self, model: &Model<M>) -> Result<Optimizer> {
        check("the learning rate of RmsProp", self.learning_rate, self.learning_rate >= 0.0, "0 or more")?;
        check("rho of RmsProp", self.rho, (0.0..1.0).contains(&self.rho), "from 0 to below 1")?;
        check("the momentum of RmsProp", self.momentum, (0.0..1.0).contains(&self.momentum), "from 0 to below 1")?;
        check("epsilon of RmsProp", self.epsilon, self.epsilon > 0.0, "above 0, such as 1e-7")?;
        Optimizer::build(Box::new(self), self.learning_rate, model)
    }
}

macro_rules! update {
    ($name:ident, $t:ty) => {
        fn $name(&self, _: u64, lr: f64, parameter: &mut [$t], gradient: &[$t], slots: &mut [&mut [$t]]) {
            let (square, mut rest) = match slots {
                [square, rest @ ..] => (square, rest.iter_mut()),
                [] => return,
            };
            // Which slots there are is said by `slots`, in this order.
            let mut mean = if self.centered { rest.next() } else { None };
            let mut sum = if self.momentum > 0.0 { rest.next() } else { None };
            let (lr, rho, momentum, epsilon) = (lr as $t, self.rho as $t, self.momentum as $t, self.epsilon as $t);
            for (i, (p, g)) in parameter.iter_mut().zip(gradient).enumerate() {
                square[i] = rho * square[i] + (1.0 - rho) * g * g;
                let mut spread = square[i] + epsilon;
                if let Some(mean) = &mut mean {
                    mean[i] = rho * mean[i] + (1.0 - rho) * g;
                    spread -= mean[i] * mean[i];
                }
                let mut change = lr * g / spread.sqrt();
                if let Some(sum) = &mut sum {
                    sum[i] = momentum * sum[i] + change;
                    change = sum[i];
                }
                *p -= change;
            }
        }
    };
}

impl Rule for RmsProp {
    fn slots(&self) -> &'static [&'static str] {
        match (self.centered, self.momentum > 0.0) {
            (false, false) => &["velocity"],
            (true, false) => &["velocity", "average_gradient"],
            (false, true) => &["velocity", "momentum"],
            (true, true) => &["velocity", "average_gradient", "momentum"],
        }
    }

    update!(update_f32, f32);
    update!(update_f64, f64);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_steps(rule: RmsProp) -> f64 {
        let mut p = [1.0f64];
        let mut memory = vec![[0.0f64]; rule.slots().len()];
        for step in 1..=2 {
            let mut slots: Vec<&mut [f64]> = memory.iter_mut().map(|slot| &mut slot[..]).collect();
            rule.update_f64(step, 0.1, &mut p, &[2.0], &mut slots);
        }
        p[0]
    }

    #[test]
    fn two_steps_by_hand() {
        let rule = RmsProp::new(0.1).rho(0.5).epsilon(1e-9);
        // Squares: 2, 3. Means: 1, 1.5.
        let (first, second) = (0.2 / 2f64.sqrt(), 0.2 / 3f64.sqrt());
        assert!((two_steps(rule) - (1.0 - first - second)).abs() < 1e-8);
        assert!((two_steps(rule.momentum(0.9)) - (1.0 - first - (0.9 * first + second))).abs() < 1e-8);
        let centered = 1.0 - 0.2 / 1f64.sqrt() - 0.2 / 0.75f64.sqrt();
        assert!((two_steps(rule.centered()) - centered).abs() < 1e-7);
        assert_eq!(rule.centered().momentum(0.5).slots(), ["velocity", "average_gradient", "momentum"]);
    }
}
