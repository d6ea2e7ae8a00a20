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
mod signals;
mod watcher;

pub use config::{ExitFunction, TerminationConfig, Watcher};
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
}

/// The deadline of a process that was told to stop.
#[derive(Debug, Default)]
struct Grace {
    ends: Option<Instant>,
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
        let margin = self.longest * 4 + period / 20;
        let ends = *self.ends.get_or_insert(now + period);
        now + margin >= ends
    }
}

impl PreemptionHandler {
    /// Handles the signals, and calls the watcher on the thread "distribute-watch", until it is dropped.
    ///
    /// # Errors
    /// [`Error::Signal`] if a handler cannot be installed, [`Error::WatcherThread`] if the system gives no thread.
    pub fn install(strategy: &Strategy, config: TerminationConfig) -> Result<PreemptionHandler> {
        let first = if config.grace_period.is_zero() { Request::Leave } else { Request::Save };
        // The members of an elastic job leave one by one, without asking the others.
        let flag = |strategy: &Strategy, request| match strategy.elastic() {
            Some(_) => Arc::default(),
            None => strategy.request_flag(request),
        };
        let (strategy, signalled) = (strategy.clone(), Arc::default());
        let (taken, grace) = (Vec::new(), Mutex::default());
        let mut handler = PreemptionHandler { strategy, config, taken, signalled, watching: None, grace };
        for signal in handler.config.signals.clone() {
            let taken = Taken::take(signal, &handler.signalled, flag(&handler.strategy, first));
            handler.taken.push(taken.map_err(|source| Error::Signal { signal, source })?);
        }
        if let Some(watcher) = &handler.config.watcher {
            let request = flag(&handler.strategy, first);
            let leave = flag(&handler.strategy, Request::Leave);
            handler.watching = Some(Watching::start(watcher, handler.config.watch_every, request, leave)?);
        }
        Ok(handler)
    }

    /// Saves after a step if a worker was told to stop, and returns the error that the program ends with if all workers
    /// stop after this step. Call it after each step, on all workers, in place of
    /// [`should_save`](PreemptionHandler::should_save) and [`should_stop`](PreemptionHandler::should_stop). `save` must
    /// have the checkpoint on disk when it returns.
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
        if noticed || stopping {
            save()?;
        }
        if stopping { Err(self.ended(step).into()) } else { Ok(()) }
    }

    /// Returns whether to save after this step and continue: the same answer on all workers, true once. Only with a
    /// grace period.
    pub fn should_save(&self) -> bool {
        self.strategy.take_request(Request::Save)
    }

    /// Returns whether to save and stop after this step: the same answer on all workers.
    pub fn should_stop(&self) -> bool {
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
    /// has saved: [`Error::Preempted`] with the configured exit code, or [`Error::WatcherPanicked`] if this worker's
    /// watcher panicked.
    pub fn ended(&self, step: u64) -> Error {
        if let Some(problem) = self.watching.as_ref().and_then(Watching::problem) {
            return Error::WatcherPanicked { step, problem };
        }
        if let Some(exit) = &self.config.exit {
            exit.call(step);
        }
        Error::Preempted { step, exit_code: self.config.exit_code }
    }
}

impl PreemptionHandler {
    /// Returns whether this process itself was told to stop. In an elastic job it then leaves the others by
    /// [`Strategy::leave_job`].
    pub fn is_told(&self) -> bool {
        self.signalled.load(Ordering::Relaxed) || self.watching.as_ref().is_some_and(Watching::has_event)
    }
}

#[cfg(test)]
mod tests;
