//! State that a failed run leaves as it was.

use std::error::Error as StdError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use distribute_values::Undo;

use crate::{Error, ReplicaContext, Result, Strategy};

/// Why state could not be noted or taken back.
pub type RecoveryError = Box<dyn StdError + Send + Sync>;

/// State that replicas change in the middle of a run, and that goes back to what it was where the run fails.
///
/// What is noted is the state at the beginning of the run, and again whenever a step has
/// [committed](ReplicaContext::commit). Values that an optimizer, a random stream or a variable of this workspace keeps are
/// covered already; this is for authors of others.
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
    /// Keeps a local replica's present state as the one to go back to.
    ///
    /// # Errors
    /// The state cannot be read; the run fails.
    fn note(&self, local: usize) -> Result<(), RecoveryError>;

    /// Puts back what was noted last. Called when no replica runs; also twice in a row.
    ///
    /// # Errors
    /// The state cannot be written; [`Error::NotTakenBack`] then says that it has to be restored.
    fn take_back(&self, local: usize) -> Result<(), RecoveryError>;

    /// Makes a replica's present state the one to go back to, as [`note`](Recoverable::note), when a step has committed or a run
    /// has succeeded. What a replica without [examples](ReplicaContext::has_examples) has learnt from its padding is not to
    /// stay: state that is made of examples goes back instead. Default: notes it either way.
    ///
    /// # Errors
    /// As [`note`](Recoverable::note).
    fn commit(&self, local: usize, has_examples: bool) -> Result<(), RecoveryError> {
        let _ = has_examples;
        self.note(local)
    }

    /// Brings replicas together that a failure has left apart: called once, after all were taken back. Default: nothing.
    ///
    /// # Errors
    /// As [`take_back`](Recoverable::take_back).
    fn settle(&self) -> Result<(), RecoveryError> {
        Ok(())
    }
}

impl Strategy {
    /// Notes this state at the beginning of every run, for as long as somebody else holds it: for state that is written behind
    /// this workspace's back, such as the running statistics of a tensor library's layers. Other state is better named when
    /// it is about to change, by [`ReplicaContext::recover`].
    pub fn recover(&self, state: Weak<dyn Recoverable>) {
        let mut watched = lock(&self.replicas().watched);
        watched.retain(|known| known.strong_count() > 0);
        watched.push(state);
    }
}

impl ReplicaContext {
    /// Notes this replica's part of a state that is about to change, unless this run has noted it before.
    ///
    /// # Errors
    /// [`Error::NotNoted`] where the state cannot be read.
    ///
    /// # Examples
    /// See [`Recoverable`].
    pub fn recover(&self, state: &Arc<dyn Recoverable>) -> Result<()> {
        self.recovery().keep(self.local_replica_id(), state)
    }

    /// Makes what this replica has changed so far final: for authors of optimizers, to be called when a step is certain to
    /// succeed on all replicas of this process.
    ///
    /// # Errors
    /// [`Error::NotNoted`] where the state cannot be read.
    pub fn commit(&self) -> Result<()> {
        self.recovery().commit(self.local_replica_id())
    }

    /// Whether the batch that this replica works on has examples of its own. One without has a row that another replica has,
    /// too, so that no model meets an empty batch; what comes of it weighs nothing. Normalisation over all replicas leaves it
    /// out, and so do [`Strategy::reduce`] and [`gather`](Strategy::gather) of what the run returns; running statistics and
    /// on-read variables of the replica stay as they were.
    ///
    /// A closure that computes a loss by hand, or reduces something itself, multiplies it by [`weight`](ReplicaContext::weight).
    /// (The integration of a tensor library may have a way that is better for losses, such as `weigh` for candle.)
    pub fn has_examples(&self) -> bool {
        self.recovery().has_examples(self.local_replica_id())
    }

    /// What the results of this replica's batch are to be multiplied by: 1, or 0 where it has no
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

    /// Says whether the batch that this replica works on from now on has examples of its own: for closures that work on several
    /// batches. Of those that a run was given as arguments it is known.
    pub fn begin_batch(&self, has_examples: bool) {
        self.recovery().begin_batch(self.local_replica_id(), has_examples);
    }

    /// Refuses the loss of a replica without examples for which nobody has asked for the [`weight`](ReplicaContext::weight):
    /// for authors of optimizers.
    ///
    /// # Errors
    /// [`Error::Unweighed`].
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

/// What a run has noted.
pub(crate) struct Recovery {
    /// Of each local replica.
    states: Vec<Mutex<Vec<Arc<dyn Recoverable>>>>,
    /// Whether the batch of each local replica has examples.
    examples: Vec<AtomicBool>,
    /// Whether each has asked for its weight.
    weighed: Vec<AtomicBool>,
}

impl Recovery {
    /// For a run that begins; [`begin`](Recovery::begin) notes the first states.
    pub(crate) fn new(replicas: usize, watched: &Mutex<Vec<Weak<dyn Recoverable>>>) -> Recovery {
        let watched: Vec<Arc<dyn Recoverable>> = lock(watched).iter().filter_map(Weak::upgrade).collect();
        Recovery {
            states: (0..replicas).map(|_| Mutex::new(watched.clone())).collect(),
            examples: (0..replicas).map(|_| AtomicBool::new(true)).collect(),
            weighed: (0..replicas).map(|_| AtomicBool::new(false)).collect(),
        }
    }

    /// Notes what every run notes, on the replica's thread.
    pub(crate) fn begin(&self, local: usize) -> Result<()> {
        let states = lock(&self.states[local]).clone();
        states.iter().try_for_each(|state| state.note(local)).map_err(Error::NotNoted)
    }

    /// Makes all states of a replica final: what is there now is what a failure goes back to.
    pub(crate) fn commit(&self, local: usize) -> Result<()> {
        let (states, has_examples) = (lock(&self.states[local]).clone(), self.has_examples(local));
        // All of them, so that they are of one step.
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

    /// The run has succeeded on all replicas.
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

    /// Takes everything back that was noted, on all replicas; all of it is tried, and the first failure is returned.
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

/// By address alone: one type's table of methods may be there several times.
fn same(one: &Arc<dyn Recoverable>, other: &Arc<dyn Recoverable>) -> bool {
    std::ptr::addr_eq(Arc::as_ptr(one), Arc::as_ptr(other))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
