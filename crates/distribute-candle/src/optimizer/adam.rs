//! Adam and AdamW.

use super::{Optimizer, Rule, check};
use crate::{Model, Result};

/// Adaptive moment estimation.
///
/// # Source
/// Kingma and Ba, "Adam: A method for stochastic optimization", 2015, algorithm 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    learning_rate: f64,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    /// Only [`AdamW`] sets it.
    weight_decay: f64,
}

impl Adam {
    /// Adam with a learning rate, beta1 0.9, beta2 0.999 and epsilon 1e-8.
    pub fn new(learning_rate: f64) -> Adam {
        Adam { learning_rate, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 }
    }

    /// How slowly the first and the second moment forget; both from 0 to below 1.
    pub fn betas(self, beta1: f64, beta2: f64) -> Adam {
        Adam { beta1, beta2, ..self }
    }

    /// What is added to the root of the second moment.
    pub fn epsilon(self, epsilon: f64) -> Adam {
        Adam { epsilon, ..self }
    }

    /// The optimizer for a model.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::Error::Setting) for settings outside their ranges.
    pub fn build<M>(self, model: &Model<M>) -> Result<Optimizer> {
        check("the learning rate of Adam", self.learning_rate, self.learning_rate >= 0.0, "0 or more")?;
        check("beta1 of Adam", self.beta1, (0.0..1.0).contains(&self.beta1), "from 0 to below 1")?;
        check("beta2 of Adam", self.beta2, (0.0..1.0).contains(&self.beta2), "from 0 to below 1")?;
        check("epsilon of Adam", self.epsilon, self.epsilon > 0.0, "above 0, such as 1e-8")?;
        check("the weight decay of AdamW", self.weight_decay, self.weight_decay >= 0.0, "0 or more")?;
        Optimizer::build(Box::new(self), self.learning_rate, model)
    }
}

/// Adam with decoupled weight decay.
///
/// # Source
/// Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW(Adam);

impl AdamW {
    /// AdamW with a learning rate and a weight decay, beta1 0.9, beta2 0.999 and epsilon 1e-8.
    pub fn new(learning_rate: f64, weight_decay: f64) -> AdamW {
        AdamW(Adam { weight_decay, ..Adam::new(learning_rate) })
    }

    /// How slowly the first and the second moment forget; both from 0 to below 1.
    pub fn betas(self, beta1: f64, beta2: f64) -> AdamW {
        AdamW(self.0.betas(beta1, beta2))
    }

    /// What is added to the root of the second moment.
    pub fn epsilon(self, epsilon: f64) -> AdamW {
        AdamW(self.0.epsilon(epsilon))
    }

    /// The optimizer for a model.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::Error::Setting) for settings outside their ranges.
    pub fn build<M>(self, model: &Model<M>) -> Result<Optimizer> {
        self.0.build(model)
    }
}

macro_rules! update {
    ($name:ident, $t:ty) => {
        fn $name(&self, step: u64, lr: f64, parameter: &mut [$t], gradient: &[$t], slots: &mut [&mut [$t]]) {
            let [m, v] = slots else { return };
            let exponent = i32::try_from(step).unwrap_or(i32::MAX);
            // Bias corrections are the same for all elements, so they go into the factors.
            let rate = (lr / (1.0 - self.beta1.powi(exponent))) as $t;
            let scale = (1.0 / (1.0 - self.beta2.powi(exponent))) as $t;
            let keep = (1.0 - lr * self.weight_decay) as $t;
            let (b1, b2, epsilon) = (self.beta1 as $t, self.beta2 as $t, self.epsilon as $t);
            for (((p, g), m), v) in parameter.iter_mut().zip(gradient).zip(m.iter_mut()).zip(v.iter_mut()) {
                *m = b1 * *m + (1.0 - b1) * g;
                *v = b2 * *v + (1.0 - b2) * g * g;
                *p = *p * keep - rate * *m / ((*v * scale).sqrt() + epsilon);
            }
        }
    };
}

impl Rule for Adam {
    fn slots(&self) -> &'static [&'static str] {
        &["m", "v"]
    }

    update!(update_f32, f32);
    update!(update_f64, f64);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_step_moves_by_the_learning_rate() {
        let rule = Adam::new(0.01);
        let (mut p, mut m, mut v) = ([2.0f64, 2.0], [0.0f64; 2], [0.0f64; 2]);
        rule.update_f64(1, 0.01, &mut p, &[1.5, -3.0], &mut [&mut m, &mut v]);
        assert!((p[0] - 1.99).abs() < 1e-8 && (p[1] - 2.01).abs() < 1e-8, "{p:?}");
        assert!((m[0] - 0.15).abs() < 1e-12 && (v[0] - 0.00225).abs() < 1e-12);
    }

    #[test]
    fn decay_acts_on_the_parameter_alone() {
        let AdamW(rule) = AdamW::new(0.1, 0.5);
        let (mut p, mut m, mut v) = ([2.0f32], [0.0f32], [0.0f32]);
        rule.update_f32(1, 0.1, &mut p, &[0.0], &mut [&mut m, &mut v]);
        assert!((p[0] - 1.9).abs() < 1e-6, "{p:?}");
    }
}
