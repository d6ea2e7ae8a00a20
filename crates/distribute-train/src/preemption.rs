//! Preemption: all workers stop after the same step, save once, and exit with a code that says so.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use distribute_strategy::{Request, Strategy};
use parking_lot::Mutex;

use self::signals::Taken;
use self::watcher::Watching;
use crate::{Error, Result};

mod config;
mod departures;
mod signals;
mod watcher;

pub use config::{ExitFunction, TerminationConfig, Watcher};
pub(crate) use departures::{Departure, Departures};
#[cfg(unix)]
pub use signal_hook::consts::SIGUSR1;
pub use signal_hook::consts::{SIGINT, SIGTERM};

/// Turns a signal to any worker, or an event that its [`Watcher`] sees, into a step after which all of them stop.
///
/// The request travels with the gradients, so it costs nothing while no worker is asked to stop. A second signal ends
/// the process at once; the first one after an event does not. When the handler is dropped, as [`fit`] does at its end,
/// signals have their default effect again, so that they end the process; on Linux unless the program had handled or
/// ignored them before.
///
/// In an elastic job a signal is meant for its process alone, which leaves the others: see
/// [`after_step`](PreemptionHandler::after_step). A process that waits for other members ends at the signal, if need be
/// after some seconds, with [`Stopped`](distribute_strategy::Error::Stopped). The request travels with the steps of an
/// optimizer there too; a loop without one asks [`is_told`](PreemptionHandler::is_told).
///
/// [`fit`]: crate::trainer::fit()
///
/// # Examples
/// ```
/// use distribute_strategy::Strategy;
/// use distribute_train::preemption::{PreemptionHandler, TerminationConfig};
/// let strategy = Strategy::default_strategy()?;
/// let preemption = PreemptionHandler::install(&strategy, TerminationConfig::default())?;
/// // In the loop, after each step: if either is true, save a checkpoint. After the second, also finish it everywhere
/// // and return preemption.ended(step).
/// assert!(!preemption.should_save() && !preemption.should_stop());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Source
/// `tf.distribute.experimental.PreemptionCheckpointHandler`.
#[derive(Debug)]
pub struct PreemptionHandler {
    strategy: Strategy,
    config: TerminationConfig,
    taken: Vec<Taken>,
    /// Whether this process has received a signal.
    signalled: Arc<AtomicBool>,
    watching: Option<Watching>,
    grace: Mutex<Grace>,
    departures: Departures,
}

/// The deadline of a process that was told to stop.
#[derive(Debug, Default)]
struct Grace {
    /// When it was found to be told.
    told: Option<Instant>,
    /// The time of the last check, and the longest time between two checks: a step with its saving.
    looked: Option<Instant>,
    longest: Duration,
    /// Whether all workers have agreed to leave.
    leaving: bool,
}

impl Grace {
    /// Returns whether the time is over, or will be before a few more steps are done.
    fn is_over(&mut self, signalled: bool, period: Duration, now: Instant) -> bool {
        if let Some(looked) = self.looked.replace(now) {
            self.longest = self.longest.max(now - looked);
        }
        if !signalled {
            return false;
        }
        // The other workers learn of it a step later, the signal may have arrived a step ago, and everything is saved
        // once more.
        let margin = self.longest.saturating_mul(4).saturating_add(period / 20);
        self.since_told(now).saturating_add(margin) >= period
    }

    /// Returns the time for which the process is known to be told.
    fn since_told(&mut self, now: Instant) -> Duration {
        now - *self.told.get_or_insert(now)
    }
}

impl PreemptionHandler {
    /// Handles the signals, and calls the watcher on the thread "distribute-watch", until it is dropped.
    ///
    /// # Errors
    /// [`Error::Signal`] if a handler cannot be installed, [`Error::WatcherThread`] if the system gives no thread,
    /// [`Error::Elastic`] for a grace period under an elastic strategy.
    pub fn install(strategy: &Strategy, config: TerminationConfig) -> Result<PreemptionHandler> {
        config.check(strategy)?;
        let first = if config.grace_period.is_zero() { Request::Leave } else { Request::Save };
        let (strategy, signalled) = (strategy.clone(), Arc::default());
        let (taken, grace, departures) = (Vec::new(), Mutex::default(), Departures::default());
        let mut handler = PreemptionHandler { strategy, config, taken, signalled, watching: None, grace, departures };
        for signal in handler.config.signals.clone() {
            let taken = Taken::take(signal, &handler.signalled, handler.strategy.request_flag(first));
            handler.taken.push(taken.map_err(|source| Error::Signal { signal, source })?);
        }
        if let Some(watcher) = &handler.config.watcher {
            let request = handler.strategy.request_flag(first);
            let leave = handler.strategy.request_flag(Request::Leave);
            let (every, is_elastic) = (handler.config.watch_every, handler.strategy.elastic().is_some());
            handler.watching = Some(Watching::start(watcher, every, request, leave, is_elastic)?);
        }
        Ok(handler)
    }

    /// Saves after a step if a worker was told to stop, and returns the error that the program ends with if all workers
    /// stop after this step. Call it after each step, on all workers, in place of
    /// [`should_save`](PreemptionHandler::should_save) and [`should_stop`](PreemptionHandler::should_stop). `save` must
    /// have the checkpoint on disk when it returns.
    ///
    /// In an elastic job only a process that was told to stop gets the error, after it has
    /// [left](Strategy::leave_job); the others have its state. `save` is called on all members if fewer would remain
    /// than the job needs, such as after signals to all of them.
    ///
    /// # Errors
    /// The error of `save`, and that of [`ended`](PreemptionHandler::ended).
    ///
    /// # Examples
    /// ```
    /// use distribute_strategy::Strategy;
    /// use distribute_train::checkpoint::CheckpointManager;
    /// use distribute_train::preemption::{PreemptionHandler, TerminationConfig};
    /// # let folder = tempfile::tempdir()?;
    /// let strategy = Strategy::default_strategy()?;
    /// let mut checkpoints = CheckpointManager::new(folder.path());
    /// let preemption = PreemptionHandler::install(&strategy, TerminationConfig::default())?;
    /// for step in 1..=3 {
    ///     // A step of the model and its optimizer, which are the parts to save.
    ///     preemption.after_step(step, || {
    ///         checkpoints.save(&strategy, step, &[], &())?;
    ///         checkpoints.finish_everywhere(&strategy)
    ///     })?;
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Source
    /// `save_fn` of `tf.distribute.experimental.TerminationConfig`, and `PreemptionCheckpointHandler.run`.
    pub fn after_step<E: From<Error>>(&self, step: u64, save: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let (noticed, stopping) = (self.should_save(), self.should_stop());
        let is_elastic = self.strategy.elastic().is_some();
        if noticed || (stopping && !is_elastic) {
            save()?;
        }
        if !stopping {
            return Ok(());
        }
        if is_elastic {
            self.strategy.leave_job().map_err(Error::from)?;
        }
        Err(self.ended(step).into())
    }

    /// Returns whether to save after this step and continue: the same answer on all workers, true once. Only with a
    /// grace period; in an elastic job, before too many members leave.
    pub fn should_save(&self) -> bool {
        if self.strategy.elastic().is_none() {
            return self.strategy.take_request(Request::Save);
        }
        let saves = self.departures.look(&self.strategy, self.is_told()).saves;
        if saves {
            self.departures.note_saved();
        }
        saves
    }

    /// Returns whether to save and stop after this step: the same answer on all workers. In an elastic job, whether
    /// this process alone leaves by [`Strategy::leave_job`]; save there only if
    /// [`should_save`](PreemptionHandler::should_save) returns true, as it does on all members.
    pub fn should_stop(&self) -> bool {
        if self.strategy.elastic().is_some() {
            return self.departures.look(&self.strategy, self.is_told()).leaves;
        }
        let period = self.config.grace_period;
        let mut grace = self.grace.lock();
        grace.leaving |= self.strategy.take_request(Request::Leave);
        let is_told = self.is_told();
        if !grace.leaving && !period.is_zero() && grace.is_over(is_told, period, Instant::now()) {
            self.strategy.request(Request::Leave);
        }
        grace.leaving
    }

    /// Calls the configured exit function, if there is one, and returns the error that the program ends with after it
    /// has saved: [`Error::Preempted`] with the configured exit code, [`Error::Left`] if it has left the others of an
    /// elastic job that have not saved, or [`Error::WatcherPanicked`] if this worker's watcher panicked.
    pub fn ended(&self, step: u64) -> Error {
        let leaves = self.strategy.elastic().is_some() && !self.departures.has_saved();
        self.end(step, if leaves { End::Left } else { End::Saved })
    }

    /// Returns the error of [`ended`](PreemptionHandler::ended) for a program that knows what it has saved.
    pub(crate) fn end(&self, step: u64, end: End) -> Error {
        if let Some(problem) = self.watching.as_ref().and_then(Watching::problem) {
            return Error::WatcherPanicked { step, problem };
        }
        if let Some(exit) = &self.config.exit {
            exit.call(step);
        }
        let exit_code = self.config.exit_code;
        match end {
            End::Saved => Error::Preempted { step, exit_code },
            End::Unsaved => Error::Unsaved { step, exit_code },
            End::Left => Error::Left { step, exit_code },
        }
    }

    /// Returns whether this process itself was told to stop, or its watcher has panicked. In an elastic job it then
    /// leaves the others by [`Strategy::leave_job`].
    pub fn is_told(&self) -> bool {
        self.has_event() || self.watching.as_ref().is_some_and(|watching| watching.problem().is_some())
    }

    /// Returns whether this process was told to stop, by a signal or an event.
    pub(crate) fn has_event(&self) -> bool {
        self.signalled.load(Ordering::Relaxed) || self.watching.as_ref().is_some_and(Watching::has_event)
    }

    /// Returns whether this process was told to stop and its grace period, if it has one, is about to be over.
    pub(crate) fn has_to_end(&self) -> bool {
        let (period, now) = (self.config.grace_period, Instant::now());
        self.has_event() && self.grace.lock().since_told(now).saturating_add(period / 20) >= period
    }
}

/// The state in which a process that is told to stop leaves its last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It is saved.
    Saved,
    /// No callback has saved it.
    Unsaved,
    /// Other members of an elastic job have it.
    Left,
}

#[cfg(test)]
mod tests;
