//! Preemption: all workers stop after the same step, save once, and exit with a code that says so.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use distribute_strategy::{Request, Strategy};
use parking_lot::Mutex;

use crate::{Error, Result};

#[cfg(unix)]
pub use signal_hook::consts::SIGUSR1;
pub use signal_hook::consts::{SIGINT, SIGTERM};

/// The signals that announce that this process is about to be stopped, and how it then ends.
///
/// # Source
/// `tf.distribute.experimental.TerminationConfig`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TerminationConfig {
    /// The numbers of the signals. Default: SIGTERM.
    pub signals: Vec<i32>,
    /// The exit code. Default: 143, after which job managers restart the process.
    pub exit_code: u8,
    /// How long the process continues to run after the signal. Default: zero, so that it saves and leaves at once. With
    /// more, it saves at once, continues training, and saves again shortly before the time is over.
    pub grace_period: Duration,
}

impl Default for TerminationConfig {
    fn default() -> TerminationConfig {
        let signals = vec![SIGTERM];
        TerminationConfig { signals, exit_code: 143, grace_period: Duration::ZERO }
    }
}

distribute_types::setters! {
    TerminationConfig {
        signals: Vec<i32>,
        exit_code: u8,
        grace_period: Duration,
    }
}

/// Turns a signal to any worker into a step after which all of them stop.
///
/// The request travels with the gradients, so it costs nothing while no worker is asked to stop. A second signal ends
/// the process at once.
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
    handlers: Vec<signal_hook::SigId>,
    /// Whether this process has received a signal.
    signalled: Arc<AtomicBool>,
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
    /// Handles the signals until it is dropped.
    ///
    /// # Errors
    /// [`Error::Signal`] if a handler cannot be installed.
    pub fn install(strategy: &Strategy, config: TerminationConfig) -> Result<PreemptionHandler> {
        let first = if config.grace_period.is_zero() { Request::Leave } else { Request::Save };
        let (strategy, signalled) = (strategy.clone(), Arc::default());
        let mut handler =
            PreemptionHandler { strategy, config, handlers: Vec::new(), signalled, grace: Mutex::default() };
        for signal in handler.config.signals.clone() {
            let failed = |source| Error::Signal { signal, source };
            // Registered in this order, the first signal sets the flags, and the second one finds them set.
            let signalled = &handler.signalled;
            let ids = [
                signal_hook::flag::register_conditional_default(signal, signalled.clone()),
                signal_hook::flag::register(signal, signalled.clone()),
                signal_hook::flag::register(signal, handler.strategy.request_flag(first)),
            ];
            for id in ids {
                handler.handlers.push(id.map_err(failed)?);
            }
        }
        Ok(handler)
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
        if !grace.leaving
            && !period.is_zero()
            && grace.is_over(self.signalled.load(Ordering::Relaxed), period, Instant::now())
        {
            self.strategy.request(Request::Leave);
        }
        grace.leaving
    }

    /// Returns the error that the program ends with after it has saved; its exit code is the configured one.
    pub fn ended(&self, step: u64) -> Error {
        Error::Preempted { step, exit_code: self.config.exit_code }
    }
}

impl Drop for PreemptionHandler {
    fn drop(&mut self) {
        for handler in self.handlers.drain(..) {
            signal_hook::low_level::unregister(handler);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grace_ends_early_enough_for_some_steps_more() {
        let (mut grace, start, period) = (Grace::default(), Instant::now(), Duration::from_secs(20));
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        for seconds in 0..10 {
            assert!(!grace.is_over(false, period, at(seconds)));
        }
        // The signal came at 10, so the grace ends at 30, less four steps of a second and a twentieth of the period.
        for seconds in 10..25 {
            assert!(!grace.is_over(true, period, at(seconds)), "{seconds}");
        }
        assert!(grace.is_over(true, period, at(25)));
    }

    #[test]
    fn a_step_longer_than_the_grace_ends_it_at_once() {
        let (mut grace, start) = (Grace::default(), Instant::now());
        assert!(!grace.is_over(false, Duration::from_secs(5), start));
        assert!(grace.is_over(true, Duration::from_secs(5), start + Duration::from_secs(9)));
    }
}
