//! Being told to stop: all workers end after the same step, save once, and leave with a code that says so.

use distribute_strategy::Strategy;

use crate::{Error, Result};

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
}

impl Default for TerminationConfig {
    fn default() -> TerminationConfig {
        TerminationConfig { signals: vec![signal_hook::consts::SIGTERM], exit_code: 143 }
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
/// // In the loop, after each step; where it is true, save a checkpoint and return preemption.ended(step).
/// assert!(!preemption.should_stop());
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
}

impl PreemptionHandler {
    /// Takes the signals until it is dropped.
    ///
    /// # Errors
    /// [`Error::Signal`] for signals that cannot be taken.
    pub fn install(strategy: &Strategy, config: TerminationConfig) -> Result<PreemptionHandler> {
        let mut handler = PreemptionHandler { strategy: strategy.clone(), config, handlers: Vec::new() };
        for signal in handler.config.signals.clone() {
            let failed = |source| Error::Signal { signal, source };
            // In this order: the first signal sets the flag, the second one finds it set.
            let flag = strategy.stop_flag();
            handler
                .handlers
                .push(signal_hook::flag::register_conditional_default(signal, flag.clone()).map_err(failed)?);
            handler.handlers.push(signal_hook::flag::register(signal, flag).map_err(failed)?);
        }
        Ok(handler)
    }

    /// Whether to stop after this step: the same answer on all workers.
    pub fn should_stop(&self) -> bool {
        self.strategy.stop_agreed()
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
