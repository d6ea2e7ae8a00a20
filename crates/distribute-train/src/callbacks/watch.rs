//! Detection of improvements of a value.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A monitored value and its history.
#[derive(Clone, Debug)]
pub(super) struct Watch {
    pub(super) monitor: String,
    pub(super) min_delta: f64,
    pub(super) patience: u32,
    pub(super) rises: bool,
    pub(super) seen: Seen,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(super) struct Seen {
    pub(super) best: Option<f64>,
    /// Epochs since the best one.
    pub(super) waited: u32,
}

impl Watch {
    pub(super) fn new(monitor: &str) -> Watch {
        let falling = ["loss", "error", "cross_entropy", "perplexity"];
        let rises = !falling.iter().any(|falling| monitor.ends_with(falling));
        Watch { monitor: monitor.to_owned(), min_delta: 0.0, patience: 0, rises, seen: Seen::default() }
    }

    /// Records a value and returns whether it is the best so far.
    pub(super) fn is_best(&mut self, value: f64) -> bool {
        let better = |best: f64| match self.rises {
            true => value > best + self.min_delta,
            false => value < best - self.min_delta,
        };
        let best = self.seen.best.is_none_or(better) && !value.is_nan();
        if best {
            self.seen = Seen { best: Some(value), waited: 0 };
        } else {
            self.seen.waited += 1;
        }
        best
    }

    /// Returns whether the value has not improved for more epochs than the patience allows.
    pub(super) fn is_out_of_patience(&self) -> bool {
        self.seen.waited > self.patience
    }

    pub(super) fn state(&self) -> Value {
        serde_json::to_value(self.seen).unwrap_or_default()
    }

    pub(super) fn set_state(&mut self, state: &Value) {
        if let Ok(seen) = Seen::deserialize(state) {
            self.seen = seen;
        }
    }
}
