//! State that a failed run restores.

use std::error::Error as StdError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use distribute_values::Undo;

use crate::{Error, ReplicaContext, Result, Strategy};

/// Why state could not be saved or restored.
pub type RecoveryError = Box<dyn StdError + Send + Sync>;

/// State that replicas change during a run and that is restored if the run fails.
///
/// It is saved at the beginning of the run, and again whenever a step has [committed](ReplicaContext::commit). The
/// state of this workspace's optimizers, random streams and variables is covered already; implement this for other
/// state.
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
    /// If the state cannot be written; the run then returns [`Error::NotTakenBack`].
    fn take_back(&self, local: usize) -> Result<(), RecoveryError>;

    /// Saves a replica's present state when a step has committed or a run has succeeded. State that is computed from
    /// examples should be restored instead if `has_examples` is false, so that nothing learned from padding remains
    /// ([`ReplicaContext::has_examples`]). Default: calls [`note`](Recoverable::note) in both cases.
    ///
    /// # Errors
    /// If the state cannot be read or written; the run then fails.
    fn commit(&self, local: usize, has_examples: bool) -> Result<(), RecoveryError> {
        let _ = has_examples;
        self.note(local)
    }

    /// Makes replicas consistent again after a failure. Called once, after all replicas were restored. Default: does
    /// nothing.
    ///
    /// # Errors
    /// If the state cannot be written; the run then returns [`Error::NotTakenBack`].
    fn settle(&self) -> Result<(), RecoveryError> {
        Ok(())
    }
}

impl Strategy {
    /// Saves this state at the beginning of every run, for as long as it has another owner. For state that changes
    /// without this workspace's knowledge, such as the running statistics of a tensor library's layers. Prefer
    /// [`ReplicaContext::recover`], called before a change, for other state.
    pub fn recover(&self, state: Weak<dyn Recoverable>) {
        let mut watched = lock(&self.replicas().watched);
        watched.retain(|known| known.strong_count() > 0);
        watched.push(state);
    }
}

impl ReplicaContext {
    /// Saves this replica's part of a state that is about to change, unless this run has saved it already.
    ///
    /// # Errors
    /// [`Error::NotNoted`] if the state cannot be read.
    ///
    /// # Examples
    /// See [`Recoverable`].
    pub fn recover(&self, state: &Arc<dyn Recoverable>) -> Result<()> {
        self.recovery().keep(self.local_replica_id(), state)
    }

    /// Makes this replica's changes so far final. For authors of optimizers, to be called when a step is certain to
    /// succeed on all replicas of this process.
    ///
    /// # Errors
    /// [`Error::NotNoted`] if the state cannot be read.
    pub fn commit(&self) -> Result<()> {
        self.recovery().commit(self.local_replica_id())
    }

    /// Returns whether this replica's batch has examples of its own. A replica without any gets a row that another
    /// replica also has, so that no model meets an empty batch; its results have weight 0. They are excluded by
    /// normalisation over all replicas, and by [`Strategy::reduce`] and [`gather`](Strategy::gather) of the run's
    /// results; running statistics and on-read variables of the replica are unchanged.
    ///
    /// A closure that computes a loss or a reduction by hand multiplies it by [`weight`](ReplicaContext::weight). (The
    /// integration of a tensor library may offer a better way for losses, such as `weigh` for candle.)
    pub fn has_examples(&self) -> bool {
        self.recovery().has_examples(self.local_replica_id())
    }

    /// Returns the weight of this replica's results: 1, or 0 if its batch has no
    /// [examples](ReplicaContext::has_examples).
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::ReduceOp;
    /// use distribute_input::Dataset;
    /// use distribute_strategy::{Error, MirroredStrategy};
    /// use distribute_values::Axis;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let mut seen = 0.0;
    /// for batch in &strategy.distribute_dataset(&Dataset::range(0..9).batch(2))? {
    ///     // In the fifth step the second replica has nothing, and gets a row of the first one's.
    ///     let rows = strategy.run_with(batch?, |context, rows| {
    ///         assert_eq!(rows.shape(), [1]);
    ///         context.all_reduce(ReduceOp::Sum, &(context.weight() * rows.shape()[0] as f64))
    ///     })?;
    ///     seen += rows.values()[0];
    /// }
    /// assert_eq!(seen, 9.0);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn weight(&self) -> f64 {
        self.recovery().weighed[self.local_replica_id()].store(true, Ordering::Relaxed);
        f64::from(u8::from(self.has_examples()))
    }

    /// Sets whether the batch that this replica works on from now on has examples of its own, for closures that work on
    /// several batches. For batches passed as arguments of a run it is known.
    pub fn begin_batch(&self, has_examples: bool) {
        self.recovery().begin_batch(self.local_replica_id(), has_examples);
    }

    /// Checks that the [`weight`](ReplicaContext::weight) was read if this replica has no examples. For authors of
    /// optimizers.
    ///
    /// # Errors
    /// [`Error::Unweighed`] if it was not, so that the loss cannot have been multiplied by it.
    pub fn check_weighed(&self) -> Result<()> {
        let weighed = self.recovery().weighed[self.local_replica_id()].load(Ordering::Relaxed);
        if weighed || self.has_examples() { Ok(()) } else { Err(Error::Unweighed { replica: self.replica_id() }) }
    }
}

impl Recoverable for Undo {
    fn note(&self, local: usize) -> Result<(), RecoveryError> {
        self.forget(local);
        Ok(())
    }

    fn take_back(&self, local: usize) -> Result<(), RecoveryError> {
        Ok(Undo::take_back(self, local)?)
    }

    fn commit(&self, local: usize, has_examples: bool) -> Result<(), RecoveryError> {
        if self.is_on_read() && !has_examples { Recoverable::take_back(self, local) } else { self.note(local) }
    }
}

/// The state saved by a run.
pub(crate) struct Recovery {
    /// One list per local replica.
    states: Vec<Mutex<Vec<Arc<dyn Recoverable>>>>,
    /// Whether the batch of each local replica has examples.
    examples: Vec<AtomicBool>,
    /// Whether each has read its weight.
    weighed: Vec<AtomicBool>,
}

impl Recovery {
    /// Creates the record of a run that begins; [`begin`](Recovery::begin) saves the first states.
    pub(crate) fn new(replicas: usize, watched: &Mutex<Vec<Weak<dyn Recoverable>>>) -> Recovery {
        let watched: Vec<Arc<dyn Recoverable>> = lock(watched).iter().filter_map(Weak::upgrade).collect();
        Recovery {
            states: (0..replicas).map(|_| Mutex::new(watched.clone())).collect(),
            examples: (0..replicas).map(|_| AtomicBool::new(true)).collect(),
            weighed: (0..replicas).map(|_| AtomicBool::new(false)).collect(),
        }
    }

    /// Saves the state that every run saves, on the replica's thread.
    pub(crate) fn begin(&self, local: usize) -> Result<()> {
        let states = lock(&self.states[local]).clone();
        states.iter().try_for_each(|state| state.note(local)).map_err(Error::NotNoted)
    }

    /// Makes all states of a replica final: a later failure restores them as they are now.
    pub(crate) fn commit(&self, local: usize) -> Result<()> {
        let (states, has_examples) = (lock(&self.states[local]).clone(), self.has_examples(local));
        // Commits all of them despite an error, so that they belong to one step.
        let outcomes = states.iter().map(|state| state.commit(local, has_examples));
        outcomes.fold(Ok(()), Result::and).map_err(Error::NotNoted)
    }

    pub(crate) fn begin_batch(&self, local: usize, has_examples: bool) {
        self.examples[local].store(has_examples, Ordering::Relaxed);
        self.weighed[local].store(false, Ordering::Relaxed);
    }

    pub(crate) fn has_examples(&self, local: usize) -> bool {
        // Written by the replica itself, or before it begins.
        self.examples[local].load(Ordering::Relaxed)
    }

    /// Commits all replicas after the run has succeeded on all of them.
    pub(crate) fn end(&self) -> Result<()> {
        (0..self.states.len()).try_for_each(|local| self.commit(local))
    }

    fn keep(&self, local: usize, state: &Arc<dyn Recoverable>) -> Result<()> {
        let mut states = lock(&self.states[local]);
        if states.iter().any(|known| same(known, state)) {
            return Ok(());
        }
        states.push(Arc::clone(state));
        drop(states);
        state.note(local).map_err(Error::NotNoted)
    }

    /// Restores all saved states on all replicas. Tries all of them and returns the first failure.
    pub(crate) fn take_back(&self) -> Result<(), RecoveryError> {
        let mut outcome = Ok(());
        let mut note = |result: Result<(), RecoveryError>| {
            if outcome.is_ok() {
                outcome = result;
            }
        };
        let mut all: Vec<Arc<dyn Recoverable>> = Vec::new();
        for (local, states) in self.states.iter().enumerate() {
            for state in lock(states).iter() {
                note(state.take_back(local));
                if !all.iter().any(|known| same(known, state)) {
                    all.push(Arc::clone(state));
                }
            }
        }
        for state in all {
            note(state.settle());
        }
        outcome
    }
}

/// Compares addresses only, since one type may have several vtables.
fn same(one: &Arc<dyn Recoverable>, other: &Arc<dyn Recoverable>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
