//! Descriptions of optimizers, from which they are built for a model.

use distribute_rules::{OptimizerDescription, UpdateRule};

use super::Optimizer;
use super::slots::StateMemory;
use crate::{TensorLibrary, Trainable};

/// Stochastic gradient descent, optionally with momentum.
///
/// # Source
/// See [`UpdateRule::Sgd`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    learning_rate: f64,
    momentum: f64,
    nesterov: bool,
}

impl Sgd {
    /// Creates plain gradient descent with a learning rate.
    pub fn new(learning_rate: f64) -> Sgd {
        Sgd { learning_rate, momentum: 0.0, nesterov: false }
    }

    /// Sets the momentum, from 0 (none) to below 1.
    pub fn momentum(self, momentum: f64) -> Sgd {
        Sgd { momentum, ..self }
    }

    /// Uses Nesterov momentum; it has no effect without momentum.
    pub fn nesterov(self) -> Sgd {
        Sgd { nesterov: true, ..self }
    }
}

/// Adaptive moment estimation.
///
/// # Source
/// See [`UpdateRule::Adam`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    learning_rate: f64,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    /// The weight decay, which only [`AdamW`] sets.
    weight_decay: f64,
}

impl Adam {
    /// Creates Adam with a learning rate, beta1 0.9, beta2 0.999 and epsilon 1e-8.
    pub fn new(learning_rate: f64) -> Adam {
        Adam { learning_rate, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 }
    }

    /// Sets the decay rates of the first and the second moment, each from 0 to below 1.
    pub fn betas(self, beta1: f64, beta2: f64) -> Adam {
        Adam { beta1, beta2, ..self }
    }

    /// Sets the number that is added to the root of the second moment, above 0.
    pub fn epsilon(self, epsilon: f64) -> Adam {
        Adam { epsilon, ..self }
    }
}

/// Adam with decoupled weight decay.
///
/// # Source
/// See [`UpdateRule::Adam`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamW(Adam);

impl AdamW {
    /// Creates AdamW with a learning rate and a weight decay, beta1 0.9, beta2 0.999 and epsilon 1e-8.
    pub fn new(learning_rate: f64, weight_decay: f64) -> AdamW {
        AdamW(Adam { weight_decay, ..Adam::new(learning_rate) })
    }

    /// Sets the decay rates of the first and the second moment, each from 0 to below 1.
    pub fn betas(self, beta1: f64, beta2: f64) -> AdamW {
        AdamW(self.0.betas(beta1, beta2))
    }

    /// Sets the number that is added to the root of the second moment, above 0.
    pub fn epsilon(self, epsilon: f64) -> AdamW {
        AdamW(self.0.epsilon(epsilon))
    }
}

/// Adagrad: the learning rate of each element falls with the sum of its squared gradients.
///
/// # Source
/// See [`UpdateRule::Adagrad`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adagrad {
    learning_rate: f64,
    initial_accumulator: f64,
    epsilon: f64,
}

impl Adagrad {
    /// Creates Adagrad with a learning rate, accumulators that start at 0.1, and epsilon 1e-7.
    pub fn new(learning_rate: f64) -> Adagrad {
        Adagrad { learning_rate, initial_accumulator: 0.1, epsilon: 1e-7 }
    }

    /// Sets the initial value of the accumulators, 0 or more.
    pub fn initial_accumulator(self, initial_accumulator: f64) -> Adagrad {
        Adagrad { initial_accumulator, ..self }
    }

    /// Sets the number that is added to the sums of squares, above 0.
    pub fn epsilon(self, epsilon: f64) -> Adagrad {
        Adagrad { epsilon, ..self }
    }
}

/// RMSprop: gradients are divided by the root of a moving average of their squares.
///
/// # Source
/// See [`UpdateRule::RmsProp`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsProp {
    learning_rate: f64,
    rho: f64,
    momentum: f64,
    epsilon: f64,
    centered: bool,
}

impl RmsProp {
    /// Creates RMSprop with a learning rate, rho 0.9, no momentum and epsilon 1e-7.
    pub fn new(learning_rate: f64) -> RmsProp {
        RmsProp { learning_rate, rho: 0.9, momentum: 0.0, epsilon: 1e-7, centered: false }
    }

    /// Sets the decay rate of the moving average, from 0 to below 1.
    pub fn rho(self, rho: f64) -> RmsProp {
        RmsProp { rho, ..self }
    }

    /// Sets the momentum, from 0 (none) to below 1.
    pub fn momentum(self, momentum: f64) -> RmsProp {
        RmsProp { momentum, ..self }
    }

    /// Sets the number that is added to the mean square, above 0.
    pub fn epsilon(self, epsilon: f64) -> RmsProp {
        RmsProp { epsilon, ..self }
    }

    /// Divides by the root of the variance instead of the root of the mean square.
    pub fn centered(self) -> RmsProp {
        RmsProp { centered: true, ..self }
    }
}

/// LAMB: Adam whose step is scaled, for each variable, to the norm of the variable. Suited to large global batches.
///
/// # Source
/// See [`UpdateRule::Lamb`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Lamb {
    learning_rate: f64,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    weight_decay: f64,
}

impl Lamb {
    /// Creates LAMB with a learning rate, beta1 0.9, beta2 0.999, epsilon 1e-6 and weight decay 0.01.
    pub fn new(learning_rate: f64) -> Lamb {
        Lamb { learning_rate, beta1: 0.9, beta2: 0.999, epsilon: 1e-6, weight_decay: 0.01 }
    }

    /// Sets the decay rates of the first and the second moment, each from 0 to below 1.
    pub fn betas(self, beta1: f64, beta2: f64) -> Lamb {
        Lamb { beta1, beta2, ..self }
    }

    /// Sets the number that is added to the root of the second moment, above 0.
    pub fn epsilon(self, epsilon: f64) -> Lamb {
        Lamb { epsilon, ..self }
    }

    /// Sets the weight decay, 0 or more.
    pub fn weight_decay(self, weight_decay: f64) -> Lamb {
        Lamb { weight_decay, ..self }
    }
}

/// Adadelta: gradients are scaled by the ratio of the root mean squares of changes and of gradients.
///
/// # Source
/// See [`UpdateRule::Adadelta`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adadelta {
    learning_rate: f64,
    rho: f64,
    epsilon: f64,
}

impl Adadelta {
    /// Creates Adadelta with a learning rate, rho 0.95 and epsilon 1e-7. The paper's learning rate is 1.
    pub fn new(learning_rate: f64) -> Adadelta {
        Adadelta { learning_rate, rho: 0.95, epsilon: 1e-7 }
    }

    /// Sets the decay rate of the moving averages, from 0 to below 1.
    pub fn rho(self, rho: f64) -> Adadelta {
        Adadelta { rho, ..self }
    }

    /// Sets the number that is added to both mean squares, above 0.
    pub fn epsilon(self, epsilon: f64) -> Adadelta {
        Adadelta { epsilon, ..self }
    }
}

/// Adamax: Adam whose second moment is the largest recent gradient.
///
/// # Source
/// See [`UpdateRule::Adamax`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adamax {
    learning_rate: f64,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
}

/// Nadam: Adam with Nesterov momentum.
///
/// # Source
/// See [`UpdateRule::Nadam`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Nadam {
    learning_rate: f64,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
}

macro_rules! moments {
    ($($builder:ident $name:literal)*) => {$(
        impl $builder {
            #[doc = concat!("Creates ", $name, " with a learning rate, beta1 0.9, beta2 0.999 and epsilon 1e-7.")]
            pub fn new(learning_rate: f64) -> $builder {
                $builder { learning_rate, beta1: 0.9, beta2: 0.999, epsilon: 1e-7 }
            }

            /// Sets the decay rates of both moments, each from 0 to below 1.
            pub fn betas(self, beta1: f64, beta2: f64) -> $builder {
                $builder { beta1, beta2, ..self }
            }

            /// Sets the number that is added to the divisor, above 0.
            pub fn epsilon(self, epsilon: f64) -> $builder {
                $builder { epsilon, ..self }
            }
        }

        impl From<$builder> for OptimizerDescription {
            fn from($builder { learning_rate, beta1, beta2, epsilon }: $builder) -> OptimizerDescription {
                OptimizerDescription { learning_rate, rule: UpdateRule::$builder { beta1, beta2, epsilon } }
            }
        }
    )*};
}

moments!(Adamax "Adamax" Nadam "Nadam");

/// FTRL-Proximal, for models of many sparse features, of which it keeps few.
///
/// # Source
/// See [`UpdateRule::Ftrl`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ftrl {
    learning_rate: f64,
    initial_accumulator: f64,
    l1: f64,
    l2: f64,
    l2_shrinkage: f64,
    beta: f64,
}

impl Ftrl {
    /// Creates FTRL with a learning rate, accumulators that start at 0.1, and no regularization.
    pub fn new(learning_rate: f64) -> Ftrl {
        Ftrl { learning_rate, initial_accumulator: 0.1, l1: 0.0, l2: 0.0, l2_shrinkage: 0.0, beta: 0.0 }
    }

    /// Sets the initial value of the sums of squares, above 0.
    pub fn initial_accumulator(self, initial_accumulator: f64) -> Ftrl {
        Ftrl { initial_accumulator, ..self }
    }

    /// Sets the strengths of the L1 and the L2 regularization, each 0 or more.
    pub fn regularization(self, l1: f64, l2: f64) -> Ftrl {
        Ftrl { l1, l2, ..self }
    }

    /// Sets the strength of a penalty on the magnitude, which acts where there is a gradient, 0 or more.
    pub fn l2_shrinkage(self, l2_shrinkage: f64) -> Ftrl {
        Ftrl { l2_shrinkage, ..self }
    }

    /// Sets the number that is added to the root of the sums of squares, 0 or more.
    pub fn beta(self, beta: f64) -> Ftrl {
        Ftrl { beta, ..self }
    }
}

macro_rules! builders {
    ($($builder:ident)*) => {$(
        impl $builder {
            /// Builds the optimizer for a model.
            ///
            /// # Errors
            /// [`Error::Setting`](crate::Error::Setting) for a setting out of range; the library's error if a slot
            /// cannot be created.
            pub fn build<T: Trainable>(
                self,
                model: &T,
            ) -> Result<Optimizer<T::Library>, <T::Library as TensorLibrary>::Error> {
                Optimizer::build(self.into(), model, StateMemory::OfVariables)
            }
        }
    )*};
}

builders!(Sgd Adam AdamW Adagrad RmsProp Lamb Adadelta Adamax Nadam Ftrl);

macro_rules! offloading_builders {
    ($($builder:ident)*) => {$(
        impl $builder {
            /// Builds the optimizer for a model on GPUs whose variables are sharded, with their state in host memory.
            ///
            /// The slots of sharded variables, and the f32 copies of those of 16 bits, are never on the GPU. Each
            /// replica's part of a gradient stays in host memory, where it was reduced; the update is computed there,
            /// and the updated part of the parameter is copied to the GPU. Parameters and slots get the values that
            /// they get with `build`, bit for bit, and checkpoints of either are restored by the other. The state of
            /// variables that every replica has whole is where `build` has it. Workers may differ in this.
            ///
            /// # Errors
            /// The errors of `build`, and [`Error::Combination`](crate::Error::Combination) if no variable that is
            /// trained is sharded, if all that are sharded are in host memory already, or if no state is kept for them.
            ///
            /// # Cost
            /// Per step, each replica copies its parts of f32 and f64 parameters to the host and back, and those of 16
            /// bits to the GPU.
            ///
            /// # Examples
            /// ```
            /// use distribute_optim::{Adam, HostError, HostModel};
            /// use distribute_strategy::FullyShardedStrategy;
            /// use distribute_values::HostTensor;
            ///
            /// let strategy = FullyShardedStrategy::builder().devices(["CPU:0", "CPU:1"]).mirror_below(1).build()?;
            /// let model = HostModel::new(&strategy, [("w", HostTensor::new(&[3], vec![0.5; 3])?)])?;
            /// let refused = Adam::new(0.1).build_offloaded(&model).map(drop);
            /// assert!(refused.is_err_and(|error| error.to_string().contains("in host memory already")));
            /// # Ok::<(), HostError>(())
            /// ```
            ///
            /// # Source
            /// Ren and others, "ZeRO-Offload: democratizing billion-scale model training", 2021; `CPUOffloadPolicy` of
            /// `torch.distributed.fsdp`, which also keeps parameters on the host.
            pub fn build_offloaded<T: Trainable>(
                self,
                model: &T,
            ) -> Result<Optimizer<T::Library>, <T::Library as TensorLibrary>::Error> {
                Optimizer::build(self.into(), model, StateMemory::Host)
            }
        }
    )*};
}

// Not LAMB, which does not go with sharded variables.
offloading_builders!(Sgd Adam AdamW Adagrad RmsProp Adadelta Adamax Nadam Ftrl);

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

impl From<Adadelta> for OptimizerDescription {
    fn from(Adadelta { learning_rate, rho, epsilon }: Adadelta) -> OptimizerDescription {
        OptimizerDescription { learning_rate, rule: UpdateRule::Adadelta { rho, epsilon } }
    }
}

impl From<Ftrl> for OptimizerDescription {
    fn from(ftrl: Ftrl) -> OptimizerDescription {
        let Ftrl { learning_rate, initial_accumulator, l1, l2, l2_shrinkage, beta } = ftrl;
        let rule = UpdateRule::Ftrl { initial_accumulator, l1, l2, l2_shrinkage, beta };
        OptimizerDescription { learning_rate, rule }
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
