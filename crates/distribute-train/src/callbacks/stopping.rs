//! Callbacks that end training.

use serde_json::Value;

use super::watch::Watch;
use super::{Callback, Training, refuse_elastic, settings};
use crate::checkpoint::Snapshot;
use crate::{Error, Result};

/// Ends the training when a value has not improved for some epochs.
///
/// # Examples
/// ```
/// use distribute_train::callbacks::EarlyStopping;
/// let stopping = EarlyStopping::new("val_loss").patience(3).min_delta(1e-4).restore_best();
/// ```
///
/// # Source
/// `tf.keras.callbacks.EarlyStopping`; keeping its state in checkpoints follows Lightning.
#[derive(Clone, Debug)]
pub struct EarlyStopping {
    watch: Watch,
    start_from_epoch: u32,
    restores: bool,
    /// The model of the best epoch that this process has seen, and its value.
    kept: Option<(f64, Snapshot)>,
    /// The best value of the checkpoint from which training resumed: the model with it is gone.
    before: Option<f64>,
}

impl EarlyStopping {
    /// Monitors a value, such as `val_loss`. Whether it should rise is told by its metric
    /// ([`Metric::rises`](crate::metrics::Metric::rises)), or by its name: values whose names end in `loss`, `error`,
    /// `cross_entropy` or `perplexity` should fall, and those in `accuracy`, `auc`, `precision`, `recall` or `f1` rise.
    /// For others, call [`rises`](EarlyStopping::rises); without it, training ends before the first step with
    /// [`Error::Direction`].
    pub fn new(monitor: &str) -> EarlyStopping {
        EarlyStopping { watch: Watch::new(monitor), start_from_epoch: 0, restores: false, kept: None, before: None }
    }

    /// Sets the number of epochs in a row without improvement after which training ends, though never after the first
    /// epoch. Default: 0, which ends it as soon as 1 does.
    pub fn patience(mut self, epochs: u32) -> EarlyStopping {
        self.watch.patience = epochs;
        self
    }

    /// Sets the smallest change that counts as an improvement. Default: any change.
    pub fn min_delta(mut self, delta: f64) -> EarlyStopping {
        self.watch.min_delta = delta.abs();
        self
    }

    /// Sets whether the value should rise. Default: as its metric or its name tells.
    pub fn rises(mut self, rises: bool) -> EarlyStopping {
        self.watch.rises = Some(rises);
        self
    }

    /// Sets a value that must be passed to count as an improvement. Default: the first one.
    pub fn baseline(mut self, value: f64) -> EarlyStopping {
        self.watch.seen.best = Some(value);
        self
    }

    /// Ignores the epochs before this one.
    pub fn start_from_epoch(mut self, epoch: u32) -> EarlyStopping {
        self.start_from_epoch = epoch;
        self
    }

    /// Restores the model of the best epoch at the end, also if none has passed the baseline; after a restart, the best
    /// one since then, with a warning if one before was better, whose model is gone.
    ///
    /// Each process keeps it in memory; under a strategy that shards, the chief keeps the whole, and each process gets
    /// it in the end. [`ModelCheckpoint::best`](crate::callbacks::ModelCheckpoint::best) needs no such memory.
    pub fn restore_best(mut self) -> EarlyStopping {
        self.restores = true;
        self
    }
}

impl EarlyStopping {
    /// Returns whether the model of an epoch with this value is the best that this process has seen. The best value of
    /// all may be one of before a restart, whose model is gone.
    fn is_to_keep(&self, value: f64) -> bool {
        let is_better = |(best, _): &(f64, Snapshot)| self.watch.is_better(value, *best);
        self.restores && !value.is_nan() && self.kept.as_ref().is_none_or(is_better)
    }

    /// Returns the value of the best epoch if its model is gone with the process that has seen it.
    pub(super) fn lost(&self) -> Option<f64> {
        let is_gone = |best: &f64| match &self.kept {
            Some((value, _)) => self.watch.is_better(*best, *value),
            // No epoch has ended since: the model is the best one if the last epoch was.
            None => self.watch.seen.waited > 0,
        };
        self.before.filter(|_| self.restores).filter(is_gone)
    }
}

/// The name in checkpoints.
const NAME: &str = "EarlyStopping";

impl Callback for EarlyStopping {
    fn name(&self) -> &'static str {
        NAME
    }

    fn is_collective(&self) -> bool {
        // The model of the best epoch is that of all.
        self.restores
    }

    fn settings(&self) -> String {
        let start = (self.start_from_epoch > 0).then(|| format!("start_from_epoch {}", self.start_from_epoch));
        settings::of(NAME, self.watch.settings().into_iter().chain(start))
    }

    fn train_begin(&mut self, training: &mut Training<'_>) -> Result<()> {
        let why = "each process keeps the best model in its memory, and one that joins would not have it; use \
                   ModelCheckpoint::best";
        refuse_elastic(training, self.restores, "restore_best", why)?;
        self.watch.begin(NAME, training)
    }

    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        let Some(value) = self.watch.value(training)? else { return Ok(()) };
        if training.epoch < self.start_from_epoch {
            return Ok(());
        }
        if self.is_to_keep(value) {
            self.kept = Some((value, training.snapshot()?));
        }
        if !self.watch.is_best(value) && self.watch.is_out_of_patience() && training.epoch > 1 {
            let best = self.watch.seen.best.unwrap_or(f64::NAN);
            let (monitor, waited) = (&self.watch.monitor, self.watch.seen.waited);
            *training.stop = Some(format!("{monitor} has not got better than {best} for {waited} epochs"));
        }
        Ok(())
    }

    fn train_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        if let Some(best) = self.lost().filter(|_| training.is_chief()) {
            let (monitor, since) = (&self.watch.monitor, self.kept.as_ref().map(|(value, _)| value));
            let last = "that of the last epoch".to_owned();
            let now = since.map_or(last, |value| format!("the best one since then, with {value}"));
            distribute_notice::warn!(
                "EarlyStopping cannot restore the best model, with {monitor} of {best}: its epoch was before a \
                 restart, and it was in memory alone; the model is now {now}. ModelCheckpoint::best keeps it over \
                 restarts"
            );
        }
        match self.kept.take() {
            Some((_, best)) => {
                let best = best.of_chief(training.strategy)?;
                training.run.model().load(training.strategy, &best).map_err(Error::Part)
            }
            None => Ok(()),
        }
    }

    fn state(&self) -> Value {
        self.watch.state(NAME)
    }

    fn set_state(&mut self, state: &Value) {
        let baseline = self.watch.seen.best;
        self.watch.set_state(NAME, state);
        self.before = self.watch.seen.best.filter(|best| Some(*best) != baseline);
    }
}

/// Ends the training when the loss is no longer finite, and names the variables that are not finite.
///
/// It checks after every step; the other workers learn of it with the next one.
///
/// # Source
/// `tf.keras.callbacks.TerminateOnNaN`.
#[derive(Clone, Copy, Debug, Default)]
pub struct TerminateOnNan {
    /// The step after which the loss was first not finite.
    step: Option<u64>,
}

impl Callback for TerminateOnNan {
    fn name(&self) -> &'static str {
        "TerminateOnNan"
    }

    fn is_collective(&self) -> bool {
        // It looks for the variables that are not finite.
        true
    }

    fn step_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        let loss = training.value("loss")?;
        if !loss.is_finite() && self.step.is_none() {
            self.step = Some(training.step);
            *training.stop = Some(format!("the loss is {loss}"));
        }
        Ok(())
    }

    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        let Some(loss) = training.monitored("loss")? else { return Ok(()) };
        if !loss.is_finite() {
            let step = self.step.map_or_else(String::new, |step| format!(" after step {step}"));
            let variables = not_finite(&training.snapshot()?);
            *training.stop = Some(format!("the loss is {loss}{step}; {variables}"));
        }
        Ok(())
    }
}

/// Names the tensors of a model that hold values which are not finite.
fn not_finite(snapshot: &Snapshot) -> String {
    let mut named = Vec::new();
    for name in snapshot.names("model") {
        let values = snapshot.numbers("model", name).unwrap_or_default();
        let bad = values.iter().filter(|value| !value.is_finite()).count();
        if bad > 0 {
            named.push(format!("{name} ({bad} of {})", values.len()));
        }
    }
    match named.as_slice() {
        [] => "all variables are still finite: look at the inputs and the loss".to_owned(),
        _ => format!("not finite are {}", named.join(", ")),
    }
}
