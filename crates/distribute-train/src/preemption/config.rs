//! The configuration of preemption: the events that announce it, and how the process ends.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use distribute_strategy::Strategy;

use super::SIGTERM;
use crate::{Error, Result};

/// The events that announce that this process is about to be stopped, and how it then ends.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use distribute_train::preemption::TerminationConfig;
/// // The scheduler of a cluster writes a file before it takes the machine away.
/// let config = TerminationConfig::default()
///     .watch(|| std::path::Path::new("/run/scheduler/leave").exists())
///     .grace_period(Duration::from_secs(60))
///     .on_exit(|step| println!("saved after step {step}"));
/// ```
///
/// # Source
/// `tf.distribute.experimental.TerminationConfig`. Its `save_fn` is
/// [`PreemptionHandler::after_step`](super::PreemptionHandler::after_step) here.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TerminationConfig {
    /// The numbers of the signals. Default: SIGTERM.
    pub signals: Vec<i32>,
    /// The exit code. Default: 143, after which job managers restart the process.
    pub exit_code: u8,
    /// How long the process continues to run after the event. Default: zero, so that it saves and leaves at once. With
    /// more, it saves at once, continues training, and saves again shortly before the time is over. An error under an
    /// elastic strategy, whose other processes train on.
    pub grace_period: Duration,
    /// The function that is asked whether the process is about to be stopped. Default: none.
    pub watcher: Option<Watcher>,
    /// The pause between two calls of the watcher. Default: 1 s; at least 10 ms.
    pub watch_every: Duration,
    /// The function that is called before the process ends. Default: none.
    pub exit: Option<ExitFunction>,
}

impl Default for TerminationConfig {
    fn default() -> TerminationConfig {
        TerminationConfig {
            signals: vec![SIGTERM],
            exit_code: 143,
            grace_period: Duration::ZERO,
            watcher: None,
            watch_every: Duration::from_secs(1),
            exit: None,
        }
    }
}

distribute_types::setters! {
    TerminationConfig {
        signals: Vec<i32>,
        exit_code: u8,
        grace_period: Duration,
        watch_every: Duration,
    }
}

impl TerminationConfig {
    /// Refuses what an elastic job cannot do.
    pub(crate) fn check(&self, strategy: &Strategy) -> Result<()> {
        if self.grace_period.is_zero() || strategy.elastic().is_none() {
            return Ok(());
        }
        let why = "a process that is told to stop leaves at once, and the others train on with its state; leave \
                   grace_period out";
        Err(Error::Elastic { what: "a grace_period of TerminationConfig", why })
    }

    /// Calls a function once per [`watch_every`](field@Self::watch_every), on a thread of its own, until it returns
    /// true; this has the effect of a signal. On a worker where the process is not told of such events, leave it out:
    /// one worker is enough to stop all.
    ///
    /// A function that panics is not called again: all workers save and stop after the same step, and this one ends
    /// with [`Error::WatcherPanicked`](crate::Error::WatcherPanicked), which is not retried. In an elastic job this
    /// process alone leaves, after the event as after a panic.
    ///
    /// # Source
    /// `termination_watcher_fn` of `tf.distribute.experimental.TerminationConfig`.
    #[must_use]
    pub fn watch(self, is_ending: impl Fn() -> bool + Send + Sync + 'static) -> TerminationConfig {
        TerminationConfig { watcher: Some(Watcher(Arc::new(is_ending))), ..self }
    }

    /// Calls a function with the last step, on each worker that stops, when everything is saved. If it returns, the
    /// training returns [`Error::Preempted`](crate::Error::Preempted), as without it; a function that calls
    /// [`std::process::exit`] ends the process in another way.
    ///
    /// # Source
    /// `exit_fn` of `tf.distribute.experimental.TerminationConfig`.
    #[must_use]
    pub fn on_exit(self, exit: impl Fn(u64) + Send + Sync + 'static) -> TerminationConfig {
        TerminationConfig { exit: Some(ExitFunction(Arc::new(exit))), ..self }
    }
}

/// The function of [`TerminationConfig::watch`]. Clones are equal; two functions never are.
#[derive(Clone)]
pub struct Watcher(Arc<dyn Fn() -> bool + Send + Sync>);

impl Watcher {
    pub(super) fn is_ending(&self) -> bool {
        (self.0)()
    }
}

/// The function of [`TerminationConfig::on_exit`]. Clones are equal; two functions never are.
#[derive(Clone)]
pub struct ExitFunction(Arc<dyn Fn(u64) + Send + Sync>);

impl ExitFunction {
    pub(super) fn call(&self, step: u64) {
        (self.0)(step);
    }
}

impl fmt::Debug for Watcher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Watcher(function)")
    }
}

impl fmt::Debug for ExitFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ExitFunction(function)")
    }
}

impl PartialEq for Watcher {
    fn eq(&self, other: &Watcher) -> bool {
        Arc::as_ptr(&self.0).cast::<()>() == Arc::as_ptr(&other.0).cast::<()>()
    }
}

impl Eq for Watcher {}

impl PartialEq for ExitFunction {
    fn eq(&self, other: &ExitFunction) -> bool {
        Arc::as_ptr(&self.0).cast::<()>() == Arc::as_ptr(&other.0).cast::<()>()
    }
}

impl Eq for ExitFunction {}
