//! Replicas that update their variables by their own gradients, and synchronize from time to time.

use distribute_collectives::ProcessGroup;
use distribute_device::BufferMut;

use crate::Result;

/// How replicas train that do not sum their gradients: each updates its own copies of the variables by its own
/// gradients, without communication, and after some steps the copies become equal again. For authors of strategies, who
/// return it from [`StrategyExtended::local_updates`](crate::StrategyExtended::local_updates).
///
/// # Examples
/// Local SGD over the replicas of any other strategy: they train apart, and every `every` steps their variables become
/// the mean of all.
/// ```
/// use distribute_strategy::{Error, LocalUpdates, MirroredStrategy, Replicas, Strategy, StrategyExtended};
///
/// struct LocalSgd {
///     over: Strategy,
///     every: u64,
/// }
///
/// impl LocalUpdates for LocalSgd {
///     fn is_due(&self, steps: u64) -> bool {
///         steps.is_multiple_of(self.every)
///     }
/// }
///
/// impl StrategyExtended for LocalSgd {
///     fn name(&self) -> &'static str {
///         "LocalSgd"
///     }
///     fn replicas(&self) -> &Replicas {
///         self.over.extended().replicas()
///     }
///     fn describe(&self) -> String {
///         format!("LocalSgd every {} steps over {}", self.every, self.over.describe())
///     }
///     fn local_updates(&self) -> Option<&dyn LocalUpdates> {
///         Some(self)
///     }
/// }
///
/// let over = MirroredStrategy::builder().num_replicas(2).build()?;
/// let strategy = Strategy::new(LocalSgd { over, every: 8 });
/// assert_eq!(strategy.num_replicas_in_sync(), 2);
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// Stich, "Local SGD converges fast and communicates little", 2019. With another
/// [`synchronize`](LocalUpdates::synchronize): Douillard and others, "DiLoCo: distributed low-communication training of
/// language models", 2023.
pub trait LocalUpdates: Send + Sync {
    /// Returns whether replicas synchronize after this number of steps of an optimizer, counted from 1. The number is
    /// the same on all replicas, and the answer must depend on it alone.
    fn is_due(&self, steps: u64) -> bool;

    /// Makes the variables of all replicas equal. Every replica calls this, after the same step. Default: variables and
    /// the optimizer's state become the means over all replicas.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective) if a replica is missing or fails, and
    /// [`Error::Values`](crate::Error::Values) if a variable cannot be read or written.
    fn synchronize(&self, replica: &dyn LocalReplica) -> Result<()> {
        replica.average_variables()?;
        replica.average_state()
    }
}

/// A replica that synchronizes with all others.
pub trait LocalReplica {
    /// Returns this replica's rank in the group of all replicas.
    fn group(&self) -> &ProcessGroup;

    /// Sets each trained variable to the mean over all replicas. Every replica must call this.
    ///
    /// The means replace the variables after all of them have arrived, so a failure leaves the variables as they were.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective) if a replica is missing or fails, and
    /// [`Error::Values`](crate::Error::Values) if a variable cannot be read or written.
    fn average_variables(&self) -> Result<()>;

    /// Sets the optimizer's state, such as momentum, to the mean over all replicas, and each variable's number of steps
    /// to the largest. Every replica must call this. The state of a tensor library's own optimizer stays as it is.
    ///
    /// # Errors
    /// The errors of [`average_variables`](LocalReplica::average_variables) occur in the same cases.
    fn average_state(&self) -> Result<()>;

    /// Passes each trained variable's name and this replica's copy of it to `body`, in the order of the model, which is
    /// the same on all replicas. For variables of 16 bits this is the optimizer's copy in f32, from which they are
    /// rounded afterwards.
    ///
    /// # Errors
    /// The first error of `body`, after which the replica's variables may be changed in part: the run then fails, and
    /// the replica gets the values of another; and [`Error::Values`](crate::Error::Values) if a variable cannot be read
    /// or written.
    fn change_variables(&self, body: &mut dyn FnMut(&str, &mut BufferMut<'_>) -> Result<()>) -> Result<()>;
}
