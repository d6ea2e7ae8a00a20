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
    /// The library's, the collectives', [`Error::NoGradient`], [`Error::UntrainableType`];
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
    /// The library's.
    ///
    /// # Examples
    /// ```
    /// use distribute_optim::{HostError, HostLoss, HostModel, Sgd};
    /// use distribute_strategy::MirroredStrategy;
    /// use distribute_values::HostTensor;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let model = HostModel::new(&strategy, [("w", HostTensor::new(&[1], vec![0.0])?)])?;
    /// let optimizer = Sgd::new(0.1).build(&model)?;
    /// strategy.run_with(&optimizer, |context, optimizer| {
    ///     for part in 0..4 {
    ///         // One part's share of the mean over two replicas and four parts.
    ///         let loss = HostLoss(vec![Some(HostTensor::new(&[1], vec![-10.0 / 8.0])?)]);
    ///         if part < 3 { optimizer.accumulate(context, &loss)? } else { optimizer.minimize(context, &loss)? }
    ///     }
    ///     Ok::<_, HostError>(())
    /// })?;
    /// assert_eq!(model.values()?, [[1.0]]);
    /// # Ok::<(), HostError>(())
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
