//! The operations of a replica on an optimizer.

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
    /// Makes one step: runs backward from `loss`, sums the gradients over all replicas, and updates every replica's
    /// copy in place.
    ///
    /// Every replica must call this. The loss is this replica's share of the global loss, as computed by `average_loss`
    /// of the library's adapter.
    ///
    /// A step is applied on all replicas of this process or on none: after an error, a panic or an early return of any
    /// replica before the update, everything is unchanged. Once `minimize` has returned `Ok`, the step is final, even
    /// if the run fails later.
    ///
    /// # Errors
    /// - [`Error::NoGradient`] if no variable got a gradient, and [`Error::UntrainableType`] if a variable's type
    ///   cannot be trained.
    /// - [`Unweighed`](distribute_strategy::Error::Unweighed) on a replica without examples whose loss was not
    ///   multiplied by its weight.
    /// - [`Error::Torn`] if an earlier failure has left no replica with complete parameters, until a checkpoint is
    ///   restored.
    /// - [`Error::Diverged`] if copies of a parameter differ ([`Optimizer::audit_every`]).
    /// - The library's error if backward or an update fails, and the collective's if a replica is missing or fails.
    pub fn minimize(&self, context: &ReplicaContext, loss: &L::Loss) -> Result<(), L::Error> {
        self.check(context)?;
        self.optimizer.step(context, self.local, loss)
    }

    /// Runs backward from `loss` and keeps the gradients, which are added, unreduced, to those of the next
    /// [`minimize`](ReplicaOptimizer::minimize). A global batch can thus be several times larger than memory allows,
    /// with one reduction: scale each loss by the number of examples of all parts together.
    ///
    /// It does not communicate, so it may be called conditionally, and a different number of times on each replica.
    ///
    /// # Errors
    /// The library's error if backward fails.
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
    /// `DistributedDataParallel.no_sync` of PyTorch.
    pub fn accumulate(&self, context: &ReplicaContext, loss: &L::Loss) -> Result<(), L::Error> {
        self.check(context)?;
        self.optimizer.accumulate(context, self.local, loss)
    }

    fn check(&self, context: &ReplicaContext) -> Result<(), Error> {
        let (built, given) = (self.optimizer.states.each.len(), context.strategy().num_local_replicas());
        if built == given { Ok(()) } else { Err(Error::OtherStrategy { built, given }) }
    }

    /// Returns the learning rate of the next step.
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
