//! Running a closure on every replica, with this crate's error type.

use distribute_strategy::{ReplicaArgs, ReplicaContext, Strategy};
use distribute_values::PerReplica;

use crate::Result;

/// [`Strategy::run_with`] with the error type of programs, so that `?` works on every library's errors in the closure.
pub trait Run {
    /// Runs `body` once on each replica of this process, all at the same time, and collects what they return.
    ///
    /// Each replica gets its part of `args`; whatever is the same for all is borrowed by the closure.
    ///
    /// # Errors
    /// The first error of a replica; the others leave their collectives with an error that names it.
    ///
    /// # Source
    /// `tf.distribute.Strategy.run`.
    fn run<A: ReplicaArgs, R: Send>(
        &self,
        args: A,
        body: impl Fn(&ReplicaContext, A::Local) -> Result<R> + Sync,
    ) -> Result<PerReplica<R>>;
}

impl Run for Strategy {
    fn run<A: ReplicaArgs, R: Send>(
        &self,
        args: A,
        body: impl Fn(&ReplicaContext, A::Local) -> Result<R> + Sync,
    ) -> Result<PerReplica<R>> {
        self.run_with(args, body)
    }
}
