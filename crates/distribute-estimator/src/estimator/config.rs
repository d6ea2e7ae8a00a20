//! The configuration of an estimator apart from its model.

use std::path::{Path, PathBuf};
use std::time::Duration;

use distribute_strategy::Strategy;
use distribute_train::preemption::TerminationConfig;

use crate::{Error, Result};

/// The configuration of an [`Estimator`](crate::Estimator): its folder, its strategies, and how often it saves and
/// logs.
///
/// # Examples
/// ```
/// use distribute_estimator::{Error, RunConfig};
/// use distribute_strategy::MirroredStrategy;
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let config = RunConfig::new("runs/census").train_distribute(&strategy).save_checkpoints_steps(500).seed(7);
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `tf.estimator.RunConfig`.
#[derive(Clone, Debug)]
pub struct RunConfig {
    pub(super) model_dir: PathBuf,
    pub(super) train_distribute: Option<Strategy>,
    pub(super) eval_distribute: Option<Strategy>,
    pub(super) save_summary_steps: u64,
    save_checkpoints_steps: Option<u64>,
    save_checkpoints_every: Option<Duration>,
    pub(super) keep_checkpoint_max: usize,
    pub(super) log_step_count_steps: u64,
    pub(super) seed: u64,
    pub(super) termination: Option<TerminationConfig>,
    pub(super) first_checkpoint: Duration,
    pub(super) next_checkpoint: Duration,
}

/// When checkpoints are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Saving {
    Steps(u64),
    Every(Duration),
}

impl RunConfig {
    /// Keeps checkpoints and event files in a folder, which is created with the first checkpoint.
    pub fn new(model_dir: impl Into<PathBuf>) -> RunConfig {
        RunConfig {
            model_dir: model_dir.into(),
            train_distribute: None,
            eval_distribute: None,
            save_summary_steps: 100,
            save_checkpoints_steps: None,
            save_checkpoints_every: None,
            keep_checkpoint_max: 5,
            log_step_count_steps: 100,
            seed: 0,
            termination: None,
            first_checkpoint: Duration::from_secs(3600),
            next_checkpoint: Duration::from_secs(3600),
        }
    }

    /// Sets the strategy of training. Default: the default strategy.
    pub fn train_distribute(mut self, strategy: &Strategy) -> RunConfig {
        self.train_distribute = Some(strategy.clone());
        self
    }

    /// Sets the strategy of evaluation and prediction. Default: the strategy of training if it has several workers,
    /// else the default strategy.
    pub fn eval_distribute(mut self, strategy: &Strategy) -> RunConfig {
        self.eval_distribute = Some(strategy.clone());
        self
    }

    /// Writes the loss to `model_dir` for TensorBoard every `steps` steps. Default: 100; 0 turns this off.
    pub fn save_summary_steps(self, steps: u64) -> RunConfig {
        RunConfig { save_summary_steps: steps, ..self }
    }

    /// Saves every `steps` steps instead of by time.
    pub fn save_checkpoints_steps(self, steps: u64) -> RunConfig {
        RunConfig { save_checkpoints_steps: Some(steps), ..self }
    }

    /// Saves whenever this time has passed. Default: 10 minutes. With several workers the chief's clock decides, which
    /// is consulted whenever the speed is logged.
    ///
    /// # Source
    /// `save_checkpoints_secs`.
    pub fn save_checkpoints_every(self, time: Duration) -> RunConfig {
        RunConfig { save_checkpoints_every: Some(time), ..self }
    }

    /// Keeps the newest `count` checkpoints. Default: 5; 0 keeps all.
    pub fn keep_checkpoint_max(self, count: usize) -> RunConfig {
        RunConfig { keep_checkpoint_max: count, ..self }
    }

    /// Logs the loss and the speed every `steps` steps. Default: 100; 0 turns this off.
    pub fn log_step_count_steps(self, steps: u64) -> RunConfig {
        RunConfig { log_step_count_steps: steps, ..self }
    }

    /// Sets the seed of initial values. Default: 0.
    ///
    /// # Source
    /// `tf_random_seed`.
    pub fn seed(self, seed: u64) -> RunConfig {
        RunConfig { seed, ..self }
    }

    /// Makes all workers save and stop after the same step when one of them is told to stop; training then returns
    /// [`Preempted`](distribute_train::Error::Preempted). All workers must call this, or none.
    pub fn stop_on(self, config: TerminationConfig) -> RunConfig {
        RunConfig { termination: Some(config), ..self }
    }

    /// Sets how long an evaluator waits for the first and for each further checkpoint before it fails, or before it
    /// takes one that was there already as the last one. Default: one hour each.
    pub fn wait_for_checkpoints(self, first: Duration, next: Duration) -> RunConfig {
        RunConfig { first_checkpoint: first, next_checkpoint: next, ..self }
    }

    /// Returns the folder.
    pub fn model_dir(&self) -> &Path {
        &self.model_dir
    }

    /// Declares the settings that must be equal on all workers: those that decide which steps all of them report and
    /// save together, and whether they stop together.
    pub(super) fn declare(&self, strategy: &Strategy) {
        let saving = match self.saving() {
            Saving::Steps(steps) => steps.to_string(),
            // The chief's time applies.
            Saving::Every(_) => "by time".to_owned(),
        };
        strategy.declare("save_checkpoints_steps", saving);
        strategy.declare("save_summary_steps", self.save_summary_steps);
        strategy.declare("log_step_count_steps", self.log_step_count_steps);
        strategy.declare("stop_on", if self.termination.is_some() { "yes" } else { "no" });
    }

    pub(super) fn saving(&self) -> Saving {
        match self.save_checkpoints_steps {
            Some(steps) => Saving::Steps(steps),
            None => Saving::Every(self.save_checkpoints_every.unwrap_or(Duration::from_secs(600))),
        }
    }

    /// Returns the number of steps between two readings of the chief's clock.
    pub(super) fn steps_between_words(&self) -> u64 {
        if self.log_step_count_steps == 0 { 100 } else { self.log_step_count_steps }
    }

    /// Returns whether this process writes what is written once.
    pub(super) fn is_chief(&self) -> bool {
        self.train_distribute.as_ref().is_none_or(Strategy::is_chief)
    }

    pub(super) fn check(&self) -> Result<()> {
        let problem = if self.model_dir.as_os_str().is_empty() {
            "model_dir is empty; name a folder for checkpoints and summaries"
        } else if self.save_checkpoints_steps.is_some() && self.save_checkpoints_every.is_some() {
            "save_checkpoints_steps and save_checkpoints_every are both given; choose one"
        } else if self.save_checkpoints_steps == Some(0) {
            "save_checkpoints_steps is 0; give at least 1"
        } else {
            return Ok(());
        };
        Err(Error::Configuration { what: "RunConfig", problem: problem.to_owned() })
    }
}
