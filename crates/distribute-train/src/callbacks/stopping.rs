//! Callbacks that watch a value.

use super::{Callback, EpochEnd};
use crate::Result;

/// Whether a value got better.
#[derive(Clone, Debug)]
struct Watch {
    monitor: String,
    min_delta: f64,
    patience: u32,
    best: Option<f64>,
    /// Epochs since it was best.
    waited: u32,
}

impl Watch {
    fn new(monitor: &str) -> Watch {
        Watch { monitor: monitor.to_owned(), min_delta: 0.0, patience: 0, best: None, waited: 0 }
    }

    /// Losses and errors should fall, everything else should rise.
    fn should_rise(&self) -> bool {
        !["loss", "error", "cross_entropy", "perplexity"].iter().any(|falling| self.monitor.ends_with(falling))
    }

    /// Whether patience is at its end.
    fn note(&mut self, value: f64) -> bool {
        let better = |best: f64| match self.should_rise() {
            true => value > best + self.min_delta,
            false => value < best - self.min_delta,
        };
        if self.best.is_none_or(better) && !value.is_nan() {
            (self.best, self.waited) = (Some(value), 0);
            return false;
        }
        self.waited += 1;
        self.waited > self.patience
    }
}

/// Ends the training when a value has not got better for some epochs.
///
/// # Examples
/// ```
/// use distribute_train::callbacks::EarlyStopping;
/// let stopping = EarlyStopping::new("val_loss").patience(3).min_delta(1e-4);
/// ```
///
/// # Source
/// `tf.keras.callbacks.EarlyStopping`.
#[derive(Clone, Debug)]
pub struct EarlyStopping(Watch);

impl EarlyStopping {
    /// Watches a value, such as `val_loss`. Names that end in `loss`, `error`, `cross_entropy` and `perplexity` should fall, others
    /// rise.
    pub fn new(monitor: &str) -> EarlyStopping {
        EarlyStopping(Watch::new(monitor))
    }

    /// How many epochs without progress are borne. Default: 0.
    pub fn patience(mut self, epochs: u32) -> EarlyStopping {
        self.0.patience = epochs;
        self
    }

    /// What counts as progress. Default: anything.
    pub fn min_delta(mut self, delta: f64) -> EarlyStopping {
        self.0.min_delta = delta.abs();
        self
    }
}

impl Callback for EarlyStopping {
    fn epoch_end(&mut self, end: &mut EpochEnd<'_>) -> Result<()> {
        let value = end.value(&self.0.monitor)?;
        if self.0.note(value) {
            let best = self.0.best.unwrap_or(f64::NAN);
            let Watch { monitor, waited, .. } = &self.0;
            *end.stop = Some(format!("{monitor} has not got better than {best} for {waited} epochs"));
        }
        Ok(())
    }
}

/// Multiplies the learning rate by a factor when a value has not got better for some epochs.
///
/// # Source
/// `tf.keras.callbacks.ReduceLROnPlateau`.
#[derive(Clone, Debug)]
pub struct ReduceLrOnPlateau {
    watch: Watch,
    factor: f64,
    min_learning_rate: f64,
}

impl ReduceLrOnPlateau {
    /// Watches a value, as [`EarlyStopping::new`] does; patience 10, a tenth each time.
    pub fn new(monitor: &str) -> ReduceLrOnPlateau {
        let watch = Watch { patience: 10, ..Watch::new(monitor) };
        ReduceLrOnPlateau { watch, factor: 0.1, min_learning_rate: 0.0 }
    }

    /// How many epochs without progress are borne.
    pub fn patience(mut self, epochs: u32) -> ReduceLrOnPlateau {
        self.watch.patience = epochs;
        self
    }

    /// What the rate is multiplied by.
    pub fn factor(mut self, factor: f64) -> ReduceLrOnPlateau {
        self.factor = factor;
        self
    }

    /// It does not fall below this.
    pub fn min_learning_rate(mut self, learning_rate: f64) -> ReduceLrOnPlateau {
        self.min_learning_rate = learning_rate;
        self
    }
}

impl Callback for ReduceLrOnPlateau {
    fn epoch_end(&mut self, end: &mut EpochEnd<'_>) -> Result<()> {
        let value = end.value(&self.watch.monitor)?;
        if self.watch.note(value) {
            self.watch.waited = 0;
            *end.learning_rate = (*end.learning_rate * self.factor).max(self.min_learning_rate);
        }
        Ok(())
    }
}

/// Ends the training when the loss is no number any more.
///
/// # Source
/// `tf.keras.callbacks.TerminateOnNaN`.
#[derive(Clone, Copy, Debug, Default)]
pub struct TerminateOnNan;

impl Callback for TerminateOnNan {
    fn epoch_end(&mut self, end: &mut EpochEnd<'_>) -> Result<()> {
        let loss = end.value("loss")?;
        if !loss.is_finite() {
            *end.stop = Some(format!("the loss is {loss}"));
        }
        Ok(())
    }
}
