//! What a replica does with an optimizer.

use distribute_strategy::{ReplicaArgs, ReplicaContext, counted};

use super::Optimizer;
use crate::{Error, TensorLibrary};

/// One replica's view of an [`Optimizer`].
pub struct ReplicaOptimizer<'a, L: TensorLibrary> {
    pub(super) optimizer: &'a Optimizer<L>,
    pub(super) local: usize,
}

impl<L: TensorLibrary> Clone for ReplicaOptimizer<'_, L> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<L: TensorLibrary> Copy for ReplicaOptimizer<'_, L> {}

impl<L: TensorLibrary> ReplicaOptimizer<'_, L> {
    /// One step: backward from `loss`, gradients summed over all replicas, and every replica's copy updated in place.
    ///
    /// Every replica must call this. The loss is this replica's share of the global loss, as
    /// `average_loss` of the library's adapter computes it.
    ///
    /// A step is made on all replicas of this process or on none: an error, a panic or an early end of any replica before it
    /// leaves everything as it was. Once it has returned `Ok` the step is made, and stays where the run fails later on.
    ///
    /// # Errors
    /// candle's, the collectives', [`Error::NoGradient`], [`Error::UntrainableType`];
    /// [`Unweighed`](distribute_strategy::Error::Unweighed) for a replica without examples whose loss was not multiplied by
    /// its weight; [`Error::Torn`] until a checkpoint is
    /// restored, where an earlier failure has left no replica with whole parameters; [`Error::Diverged`] where copies of a
    /// parameter have come to differ ([`Optimizer::audit_every`]).
    pub fn minimize(&self, context: &ReplicaContext, loss: &L::Loss) -> Result<(), L::Error> {
        self.check(context)?;
        self.optimizer.step(context, self.local, loss)
    }

    /// Backward from `loss` alone: the gradients wait, unreduced, and are added to those of the next
    /// [`minimize`](ReplicaOptimizer::minimize). So a global batch can be several times what fits into memory, with one
    /// reduction: scale each loss by the examples of all parts together.
    ///
    /// It communicates with nobody, so it may be called under any condition, and a different number of times on each
    /// replica.
    ///
    /// # Errors
    /// candle's.
    ///
    /// # Examples
    /// ```
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use candle_nn::linear;
    /// use distribute_candle::{CandleContext, CandleStrategy, Error, Sgd};
    /// use distribute_strategy::MirroredStrategy;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let model = strategy.scope(|vb| linear(3, 1, vb.pp("fc")))?;
    /// let optimizer = Sgd::new(0.1).build(&model)?;
    /// strategy.run_with((&model, &optimizer), |context, (model, optimizer)| {
    ///     for part in 0..4 {
    ///         let examples = model.forward(&Tensor::ones((2, 3), DType::F32, &Device::Cpu)?)?.sqr()?;
    ///         // Two replicas, four parts of two examples each.
    ///         let loss = context.average_loss(&examples, 16)?;
    ///         if part < 3 { optimizer.accumulate(context, &loss)? } else { optimizer.minimize(context, &loss)? }
    ///     }
    ///     Ok::<_, Error>(())
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Source
    /// `DistributedDataParallel.no_sync` of torch.
    pub fn accumulate(&self, context: &ReplicaContext, loss: &L::Loss) -> Result<(), L::Error> {
        self.check(context)?;
        self.optimizer.accumulate(context, self.local, loss)
    }

    fn check(&self, context: &ReplicaContext) -> Result<(), Error> {
        let (built, given) = (self.optimizer.states.each.len(), context.strategy().num_local_replicas());
        if built == given { Ok(()) } else { Err(Error::OtherStrategy { built, given }) }
    }

    /// The learning rate of the next step.
    pub fn learning_rate(&self) -> f64 {
        self.optimizer.learning_rate()
    }
}

impl<'a, L: TensorLibrary> ReplicaArgs for &'a Optimizer<L> {
    type Local = ReplicaOptimizer<'a, L>;

    fn split(self, replicas: usize) -> distribute_strategy::Result<Vec<ReplicaOptimizer<'a, L>>> {
        let views = (0..self.states.each.len()).map(|local| ReplicaOptimizer { optimizer: self, local }).collect();
        counted(views, replicas)
    }
}
