//! Stochastic gradient descent.

use super::{Optimizer, Rule, check};
use crate::{Model, Result};

/// Stochastic gradient descent, with momentum where asked for.
///
/// # Source
/// Sutskever et al., "On the importance of initialization and momentum in deep learning", 2013, in the form of
/// `tf.keras.optimizers.SGD`: v = momentum·v − lr·g, and p = p + v, or p = p + momentum·v − lr·g after Nesterov.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    learning_rate: f64,
    momentum: f64,
    nesterov: bool,
}

impl Sgd {
    /// Plain descent with a learning rate.
    pub fn new(learning_rate: f64) -> Sgd {
        Sgd { learning_rate, momentum: 0.0, nesterov: false }
    }

    /// With momentum, from 0 (none) to below 1.
    pub fn momentum(self, momentum: f64) -> Sgd {
        Sgd { momentum, ..self }
    }

    /// Looks ahead by one step of momentum; without momentum it changes nothing.
    pub fn nesterov(self) -> Sgd {
        Sgd { nesterov: true, ..self }
    }

    /// The optimizer for a model.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::Error::Setting) for a negative learning rate or a momentum outside 0..1.
    pub fn build<M>(self, model: &Model<M>) -> Result<Optimizer> {
        check("the learning rate of Sgd", self.learning_rate, self.learning_rate >= 0.0, "0 or more")?;
        check("the momentum of Sgd", self.momentum, (0.0..1.0).contains(&self.momentum), "from 0 to below 1")?;
        Optimizer::build(Box::new(self), self.learning_rate, model)
    }
}

macro_rules! update {
    ($name:ident, $t:ty) => {
        fn $name(&self, _: u64, lr: f64, parameter: &mut [$t], gradient: &[$t], slots: &mut [&mut [$t]]) {
            let (lr, momentum) = (lr as $t, self.momentum as $t);
            match slots {
                [velocity] if self.nesterov => {
                    for ((p, g), v) in parameter.iter_mut().zip(gradient).zip(velocity.iter_mut()) {
                        *v = momentum * *v - lr * g;
                        *p += momentum * *v - lr * g;
                    }
                }
                [velocity] => {
                    for ((p, g), v) in parameter.iter_mut().zip(gradient).zip(velocity.iter_mut()) {
                        *v = momentum * *v - lr * g;
                        *p += *v;
                    }
                }
                _ => parameter.iter_mut().zip(gradient).for_each(|(p, g)| *p -= lr * g),
            }
        }
    };
}

impl Rule for Sgd {
    fn slots(&self) -> &'static [&'static str] {
        if self.momentum > 0.0 { &["velocity"] } else { &[] }
    }

    update!(update_f32, f32);
    update!(update_f64, f64);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn momentum_accumulates() {
        let rule = Sgd::new(0.1).momentum(0.9);
        let (mut p, mut v) = ([1.0f64], [0.0f64]);
        for _ in 0..2 {
            rule.update_f64(1, 0.1, &mut p, &[1.0], &mut [&mut v]);
        }
        assert!((v[0] + 0.19).abs() < 1e-12 && (p[0] - 0.71).abs() < 1e-12, "{p:?} {v:?}");
        let (mut p, mut v) = ([1.0f64], [0.0f64]);
        rule.nesterov().update_f64(1, 0.1, &mut p, &[1.0], &mut [&mut v]);
        assert!((v[0] + 0.1).abs() < 1e-12 && (p[0] - 0.81).abs() < 1e-12, "{p:?} {v:?}");
        let mut p = [1.0f32];
        Sgd::new(0.5).update_f32(1, 0.5, &mut p, &[1.0], &mut []);
        assert_eq!(p, [0.5]);
    }
}
