//! Adagrad.

use super::{Optimizer, Rule, check};
use crate::{Model, Result};

/// Learning rates that fall for each parameter by itself, with the squares of its gradients so far.
///
/// # Source
/// Duchi, Hazan and Singer, "Adaptive subgradient methods for online learning and stochastic optimization", 2011, in the
/// form of `tf.keras.optimizers.Adagrad`: a = a + g², p = p − lr·g/√(a + ε).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adagrad {
    learning_rate: f64,
    initial_accumulator: f64,
    epsilon: f64,
}

impl Adagrad {
    /// Adagrad with a learning rate, accumulators that begin with 0.1, and epsilon 1e-7.
    pub fn new(learning_rate: f64) -> Adagrad {
        Adagrad { learning_rate, initial_accumulator: 0.1, epsilon: 1e-7 }
    }

    /// What the sums of squares begin with; 0 or more.
    pub fn initial_accumulator(self, initial_accumulator: f64) -> Adagrad {
        Adagrad { initial_accumulator, ..self }
    }

    /// What is added to the sums of squares; above 0.
    pub fn epsilon(self, epsilon: f64) -> Adagrad {
        Adagrad { epsilon, ..self }
    }

    /// The optimizer for a model.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::Error::Setting) for settings outside their ranges.
    pub fn build<M>(self, model: &Model<M>) -> Result<Optimizer> {
        check("the learning rate of Adagrad", self.learning_rate, self.learning_rate >= 0.0, "0 or more")?;
        let initial = self.initial_accumulator;
        check("the initial accumulator of Adagrad", initial, initial >= 0.0, "0 or more, such as 0.1")?;
        check("epsilon of Adagrad", self.epsilon, self.epsilon > 0.0, "above 0, such as 1e-7")?;
        Optimizer::build(Box::new(self), self.learning_rate, model)
    }
}

macro_rules! update {
    ($name:ident, $t:ty) => {
        fn $name(&self, _: u64, lr: f64, parameter: &mut [$t], gradient: &[$t], slots: &mut [&mut [$t]]) {
            let [accumulator] = slots else { return };
            let (lr, epsilon) = (lr as $t, self.epsilon as $t);
            for ((p, g), a) in parameter.iter_mut().zip(gradient).zip(accumulator.iter_mut()) {
                *a += g * g;
                *p -= lr * g / (*a + epsilon).sqrt();
            }
        }
    };
}

impl Rule for Adagrad {
    fn slots(&self) -> &'static [&'static str] {
        &["accumulator"]
    }

    fn initial(&self, _: &str) -> f64 {
        self.initial_accumulator
    }

    update!(update_f32, f32);
    update!(update_f64, f64);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_shrink_as_squares_accumulate() {
        let rule = Adagrad::new(0.5).epsilon(1e-12);
        let (mut p, mut a) = ([1.0f64], [0.44f64]);
        rule.update_f64(1, 0.5, &mut p, &[1.0], &mut [&mut a]);
        // 1 - 0.5 / 1.2
        assert!((p[0] - (1.0 - 0.5 / 1.2)).abs() < 1e-9 && (a[0] - 1.44).abs() < 1e-12, "{p:?} {a:?}");
    }
}
