//! Optimizers before they are built for a model.

use super::Optimizer;
use crate::rule::{OptimizerDescription, UpdateRule};
use crate::{TensorLibrary, Trainable};

/// Stochastic gradient descent, with momentum where asked for.
///
/// # Source
/// That of [`UpdateRule::Sgd`].
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
}

/// Adaptive moment estimation.
///
/// # Source
/// That of [`UpdateRule::Adam`].
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
}

/// Adam with decoupled weight decay.
///
/// # Source
/// That of [`UpdateRule::Adam`].
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
}

/// Learning rates that fall for each parameter by itself, with the squares of its gradients so far.
///
/// # Source
/// That of [`UpdateRule::Adagrad`].
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
}

/// Gradients divided by the root of a running mean of their squares.
///
/// # Source
/// That of [`UpdateRule::RmsProp`].
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
}

/// Adam whose step is scaled, for each variable, to the norm of the variable: for large global batches.
///
/// # Source
/// That of [`UpdateRule::Lamb`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lamb {
    learning_rate: f64,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    weight_decay: f64,
}

impl Lamb {
    /// LAMB with a learning rate, beta1 0.9, beta2 0.999, epsilon 1e-6 and weight decay 0.01.
    pub fn new(learning_rate: f64) -> Lamb {
        Lamb { learning_rate, beta1: 0.9, beta2: 0.999, epsilon: 1e-6, weight_decay: 0.01 }
    }

    /// How slowly the first and the second moment forget; both from 0 to below 1.
    pub fn betas(self, beta1: f64, beta2: f64) -> Lamb {
        Lamb { beta1, beta2, ..self }
    }

    /// What is added to the root of the second moment; above 0.
    pub fn epsilon(self, epsilon: f64) -> Lamb {
        Lamb { epsilon, ..self }
    }

    /// The weight decay; 0 or more.
    pub fn weight_decay(self, weight_decay: f64) -> Lamb {
        Lamb { weight_decay, ..self }
    }
}

macro_rules! builders {
    ($($builder:ident)*) => {$(
        impl $builder {
            /// The optimizer for a model.
            ///
            /// # Errors
            /// [`Error::Setting`](crate::Error::Setting) for settings outside their ranges; the library's.
            pub fn build<T: Trainable>(
                self,
                model: &T,
            ) -> Result<Optimizer<T::Library>, <T::Library as TensorLibrary>::Error> {
                Optimizer::build(self.into(), model)
            }
        }
    )*};
}

builders!(Sgd Adam AdamW Adagrad RmsProp Lamb);

impl From<Sgd> for OptimizerDescription {
    fn from(Sgd { learning_rate, momentum, nesterov }: Sgd) -> OptimizerDescription {
        OptimizerDescription { learning_rate, rule: UpdateRule::Sgd { momentum, nesterov } }
    }
}

impl From<Adam> for OptimizerDescription {
    fn from(Adam { learning_rate, beta1, beta2, epsilon, weight_decay }: Adam) -> OptimizerDescription {
        OptimizerDescription { learning_rate, rule: UpdateRule::Adam { beta1, beta2, epsilon, weight_decay } }
    }
}

impl From<AdamW> for OptimizerDescription {
    fn from(AdamW(adam): AdamW) -> OptimizerDescription {
        adam.into()
    }
}

impl From<Adagrad> for OptimizerDescription {
    fn from(Adagrad { learning_rate, initial_accumulator, epsilon }: Adagrad) -> OptimizerDescription {
        OptimizerDescription { learning_rate, rule: UpdateRule::Adagrad { initial_accumulator, epsilon } }
    }
}

impl From<RmsProp> for OptimizerDescription {
    fn from(RmsProp { learning_rate, rho, momentum, epsilon, centered }: RmsProp) -> OptimizerDescription {
        OptimizerDescription { learning_rate, rule: UpdateRule::RmsProp { rho, momentum, epsilon, centered } }
    }
}

impl From<Lamb> for OptimizerDescription {
    fn from(Lamb { learning_rate, beta1, beta2, epsilon, weight_decay }: Lamb) -> OptimizerDescription {
        OptimizerDescription { learning_rate, rule: UpdateRule::Lamb { beta1, beta2, epsilon, weight_decay } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adam_with_decay_is_adam_w() {
        let rule = |description: OptimizerDescription| description.rule;
        let adam = |weight_decay| UpdateRule::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay };
        assert_eq!(rule(Adam::new(0.1).into()), adam(0.0));
        assert_eq!(rule(AdamW::new(0.1, 0.5).into()), adam(0.5));
    }
}
