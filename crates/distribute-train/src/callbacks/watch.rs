//! Detection of improvements of a value.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Training, state};
use crate::{Error, Result};

/// A monitored value and its history.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    pub(super) monitor: String,
    pub(super) min_delta: f64,
    pub(super) patience: u32,
    /// Whether the value should rise; until the program has set it or the training tells it, `None`.
    pub(super) rises: Option<bool>,
    pub(super) seen: Seen,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    pub(super) best: Option<f64>,
    /// Epochs since the best one.
    pub(super) waited: u32,
}

/// The state of a watch in checkpoints.
#[derive(Serialize, Deserialize)]
pub(super) struct Watched {
    /// The name of the value; earlier versions did not save it.
    monitor: Option<String>,
    best: Option<f64>,
    waited: u32,
}

impl Watch {
    pub(super) fn new(monitor: &str) -> Watch {
        Watch { monitor: monitor.to_owned(), min_delta: 0.0, patience: 0, rises: None, seen: Seen::default() }
    }

    /// Checks the settings of a callback that begins.
    ///
    /// # Errors
    /// [`Error::CallbackSetting`] for what is not a number, and the error of [`settle`](Watch::settle).
    pub(super) fn begin(&mut self, callback: &'static str, training: &Training<'_>) -> Result<()> {
        let expected = "a number; nothing compares with one that is not";
        for (setting, given) in [("min_delta", self.min_delta), ("baseline", self.seen.best.unwrap_or_default())] {
            if given.is_nan() {
                return Err(Error::CallbackSetting { callback, setting, given, expected });
            }
        }
        self.settle(training)
    }

    /// Finds whether the value should rise, if the program has not set it.
    ///
    /// # Errors
    /// [`Error::Direction`] if neither the value's metric nor its name tells it.
    pub(super) fn settle(&mut self, training: &Training<'_>) -> Result<()> {
        if self.rises.is_none() {
            let unknown = || Error::Direction { name: self.monitor.clone() };
            self.rises = Some(training.rises(&self.monitor).ok_or_else(unknown)?);
        }
        Ok(())
    }

    /// Returns the value of the epoch that has ended; `None` if the epoch has none. Afterwards it can be compared.
    ///
    /// # Errors
    /// [`Error::Monitor`] if there is no such value, and the error of [`settle`](Watch::settle).
    pub(super) fn value(&mut self, training: &Training<'_>) -> Result<Option<f64>> {
        let value = training.monitored(&self.monitor)?;
        self.settle(training)?;
        Ok(value)
    }

    /// Returns the settings that decide which values are improvements; without `rises` if the program has not set it.
    pub(super) fn settings(&self) -> Vec<String> {
        let rises = self.rises.map(|rises| format!("rises {rises}"));
        let delta = (self.min_delta != 0.0).then(|| format!("min_delta {}", self.min_delta));
        [Some(self.monitor.clone()), rises, delta].into_iter().flatten().collect()
    }

    /// Records a value and returns whether it is the best so far.
    pub(super) fn is_best(&mut self, value: f64) -> bool {
        let best = self.seen.best.is_none_or(|best| self.is_better(value, best)) && !value.is_nan();
        if best {
            self.seen = Seen { best: Some(value), waited: 0 };
        } else {
            self.seen.waited += 1;
        }
        best
    }

    /// Returns whether a value improves on another one.
    pub(super) fn is_better(&self, value: f64, best: f64) -> bool {
        match self.rises {
            Some(true) => value > best + self.min_delta,
            _ => value < best - self.min_delta,
        }
    }

    /// Returns whether as many epochs as the patience have passed without improvement.
    pub(super) fn is_out_of_patience(&self) -> bool {
        self.seen.waited >= self.patience
    }

    pub(super) fn watched(&self) -> Watched {
        let Seen { best, waited } = self.seen;
        Watched { monitor: Some(self.monitor.clone()), best, waited }
    }

    /// Continues from a state. Returns whether it is of the same value; else a warning is given.
    pub(super) fn adopt(&mut self, callback: &str, Watched { monitor, best, waited }: Watched) -> bool {
        let other = monitor.filter(|monitor| *monitor != self.monitor);
        match &other {
            None => self.seen = Seen { best, waited },
            Some(other) => {
                let why = format!("it watches {:?}, and the state is of one that watched {other:?}", self.monitor);
                state::begins_anew(callback, &why);
            }
        }
        other.is_none()
    }

    pub(super) fn state(&self, callback: &str) -> Value {
        state::of(callback, self.watched())
    }

    pub(super) fn set_state(&mut self, callback: &str, given: &Value) {
        if let Some(watched) = state::read(callback, given, |given| Watched::deserialize(given).ok()) {
            self.adopt(callback, watched);
        }
    }
}

/// Returns whether a value with this name should rise; `None` for a name that does not tell.
pub(super) fn rises_by_name(name: &str) -> Option<bool> {
    let ends_with = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
    match (ends_with(&FALLING), ends_with(&RISING)) {
        (true, _) => Some(false),
        (false, true) => Some(true),
        (false, false) => None,
    }
}

/// The ends of names of values that should fall, and of those that should rise.
const FALLING: [&str; 4] = ["loss", "error", "cross_entropy", "perplexity"];
const RISING: [&str; 5] = ["accuracy", "auc", "precision", "recall", "f1"];
