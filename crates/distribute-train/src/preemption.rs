//! Being told to stop: all workers end after the same step, save once, and leave with a code that says so.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use distribute_strategy::{Request, Strategy};

use crate::{Error, Result};

pub use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};

/// Which signals mean that this process is about to be stopped, and how it then ends.
///
/// # Source
/// `tf.distribute.experimental.TerminationConfig`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TerminationConfig {
    /// Numbers of signals. Default: SIGTERM.
    pub signals: Vec<i32>,
    /// The code to exit with. Default: 143, after which job managers start the process again.
    pub exit_code: u8,
    /// How long the process lives on after the signal. Default: zero, so that it saves and leaves at once. With more, it saves
    /// at once, goes on training, and saves again shortly before the time is over.
    pub grace_period: Duration,
}

impl Default for TerminationConfig {
    fn default() -> TerminationConfig {
        let signals = vec![SIGTERM];
        TerminationConfig { signals, exit_code: 143, grace_period: Duration::ZERO }
    }
}

/// Turns a signal to any worker into a step after which all of them stop.
///
/// The word travels with the gradients, so it costs nothing while nobody is asked to stop. A second signal ends the process at
/// once.
///
/// # Examples
/// ```
/// use distribute_strategy::Strategy;
/// use distribute_train::preemption::{PreemptionHandler, TerminationConfig};
/// let strategy = Strategy::default_strategy()?;
/// let preemption = PreemptionHandler::install(&strategy, TerminationConfig::default())?;
/// // In the loop, after each step; where one is true, save a checkpoint. After the second, have it finished everywhere and return
/// // preemption.ended(step).
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
    /// Whether a signal came to this process.
    signalled: Arc<AtomicBool>,
    grace: Mutex<Grace>,
}

/// When this process, which was told to stop, has to.
#[derive(Debug, Default)]
struct Grace {
    ends: Option<Instant>,
    /// When it was last looked at, and the longest time between two looks: a step with its saving.
    looked: Option<Instant>,
    longest: Duration,
    /// Whether all have agreed to.
    leaving: bool,
}

impl Grace {
    /// Whether the time is over, or will be before a few more steps are done.
    fn is_over(&mut self, signalled: bool, period: Duration, now: Instant) -> bool {
        if let Some(looked) = self.looked.replace(now) {
            self.longest = self.longest.max(now - looked);
        }
        if !signalled {
            return false;
        }
        // The others learn of it a step later, the signal may have come as long ago, and then everything is saved once more.
        let margin = self.longest * 4 + period / 20;
        let ends = *self.ends.get_or_insert(now + period);
        now + margin >= ends
    }
}

impl PreemptionHandler {
    /// Takes the signals until it is dropped.
    ///
    /// # Errors
    /// [`Error::Signal`] for signals that cannot be taken.
    pub fn install(strategy: &Strategy, config: TerminationConfig) -> Result<PreemptionHandler> {
        let first = if config.grace_period.is_zero() { Request::Leave } else { Request::Save };
        let (strategy, signalled) = (strategy.clone(), Arc::default());
        let mut handler =
            PreemptionHandler { strategy, config, handlers: Vec::new(), signalled, grace: Mutex::default() };
        for signal in handler.config.signals.clone() {
            let failed = |source| Error::Signal { signal, source };
            // In this order: the first signal sets the flags, the second one finds them set.
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

    /// Whether to save after this step and go on: the same answer on all workers, once. Only with a grace period.
    pub fn should_save(&self) -> bool {
        self.strategy.take_agreed(Request::Save)
    }

    /// Whether to save and stop after this step: the same answer on all workers.
    pub fn should_stop(&self) -> bool {
        let period = self.config.grace_period;
        let mut grace = self.grace.lock().unwrap_or_else(PoisonError::into_inner);
        grace.leaving |= self.strategy.take_agreed(Request::Leave);
        if !grace.leaving
            && !period.is_zero()
            && grace.is_over(self.signalled.load(Ordering::Relaxed), period, Instant::now())
        {
            self.strategy.ask(Request::Leave);
        }
        grace.leaving
    }

    /// What the program returns after it has saved: an error whose exit code is the configured one.
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
        // Told at 10, so that it ends at 30, less four steps of a second and a twentieth.
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
