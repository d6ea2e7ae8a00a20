//! The interface of state that is restored after a failed run.

use std::error::Error as StdError;

use distribute_values::Undo;

/// Why state could not be saved or restored.
pub type RecoveryError = Box<dyn StdError + Send + Sync>;

/// State that replicas change during a run and that is restored if the run fails.
///
/// It is saved at the beginning of the run, and again whenever a step has
/// [committed](crate::ReplicaContext::commit). The state of this workspace's optimizers, random streams and variables
/// is covered already; implement this for other state.
///
/// # Examples
/// ```
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU64, Ordering};
/// use distribute_strategy::{Error, MirroredStrategy, Recoverable, RecoveryError};
///
/// /// Counts each replica's batches.
/// #[derive(Default)]
/// struct Batches {
///     present: [AtomicU64; 2],
///     noted: [AtomicU64; 2],
/// }
///
/// impl Recoverable for Batches {
///     fn note(&self, local: usize) -> Result<(), RecoveryError> {
///         self.noted[local].store(self.present[local].load(Ordering::Relaxed), Ordering::Relaxed);
///         Ok(())
///     }
///     fn take_back(&self, local: usize) -> Result<(), RecoveryError> {
///         self.present[local].store(self.noted[local].load(Ordering::Relaxed), Ordering::Relaxed);
///         Ok(())
///     }
/// }
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let batches = Arc::new(Batches::default());
/// let outcome = strategy.run_with((), |context, ()| {
///     context.recover(&(batches.clone() as Arc<dyn Recoverable>))?;       // before it changes
///     batches.present[context.local_replica_id()].fetch_add(1, Ordering::Relaxed);
///     if context.replica_id() == 1 { Err(Error::NoData) } else { Ok(()) }
/// });
/// assert!(outcome.is_err());
/// assert_eq!(batches.present[0].load(Ordering::Relaxed), 0);
/// # Ok::<(), Error>(())
/// ```
pub trait Recoverable: Send + Sync {
    /// Saves a local replica's present state as the one to restore.
    ///
    /// # Errors
    /// If the state cannot be read; the run then fails.
    fn note(&self, local: usize) -> Result<(), RecoveryError>;

    /// Restores the state that was saved last. Called while no replica runs, possibly twice in a row.
    ///
    /// # Errors
    /// If the state cannot be written; the run then returns [`Error::NotTakenBack`](crate::Error::NotTakenBack).
    fn take_back(&self, local: usize) -> Result<(), RecoveryError>;

    /// Saves a replica's present state when a step has committed or a run has succeeded. State that is computed from
    /// examples should be restored instead if `has_examples` is false, so that nothing learned from padding remains
    /// ([`ReplicaContext::has_examples`](crate::ReplicaContext::has_examples)). Default: calls
    /// [`note`](Recoverable::note) in both cases.
    ///
    /// # Errors
    /// If the state cannot be read or written; the run then fails.
    fn commit(&self, local: usize, has_examples: bool) -> Result<(), RecoveryError> {
        let _ = has_examples;
        self.note(local)
    }

    /// Takes notice that a replica begins another batch within its run, before its steps have committed. Changes by a
    /// batch without examples should be undone when the next one begins, and by [`commit`](Recoverable::commit),
    /// without a change to what [`take_back`](Recoverable::take_back) restores. `had_examples` is about the batch that
    /// ends, `has_examples` about the one that begins. Default: does nothing, for state that does not depend on
    /// examples.
    ///
    /// # Errors
    /// If the state cannot be read or written; the replica's closure gets it.
    fn begin_batch(&self, local: usize, had_examples: bool, has_examples: bool) -> Result<(), RecoveryError> {
        let _ = (local, had_examples, has_examples);
        Ok(())
    }

    /// Takes notice of the end of the run, after the state was committed or restored: what is saved is not needed any
    /// more. Default: does nothing.
    fn end(&self, local: usize) {
        let _ = local;
    }

    /// Makes replicas consistent again after a failure. Called once, after all replicas were restored. Default: does
    /// nothing.
    ///
    /// # Errors
    /// If the state cannot be written; the run then returns [`Error::NotTakenBack`](crate::Error::NotTakenBack).
    fn settle(&self) -> Result<(), RecoveryError> {
        Ok(())
    }
}

impl Recoverable for Undo {
    fn note(&self, local: usize) -> Result<(), RecoveryError> {
        self.begin(local);
        Ok(())
    }

    fn take_back(&self, local: usize) -> Result<(), RecoveryError> {
        Ok(Undo::take_back(self, local)?)
    }

    fn commit(&self, local: usize, has_examples: bool) -> Result<(), RecoveryError> {
        if has_examples { self.note(local) } else { Ok(self.take_back_batch(local)?) }
    }

    fn begin_batch(&self, local: usize, had_examples: bool, _: bool) -> Result<(), RecoveryError> {
        Ok(self.end_batch(local, had_examples)?)
    }

    fn end(&self, local: usize) {
        Undo::end(self, local);
    }
}
