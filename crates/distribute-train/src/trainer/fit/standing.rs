//! The state of a training run, as checkpoints and processes that join get it.

use distribute_input::InputPosition;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::checkpoint::RunId;
use crate::elastic;
use crate::history::History;

/// The state of training apart from its model and optimizer.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Standing {
    pub(super) epochs_done: u32,
    /// Steps of the current epoch.
    pub(super) steps: u64,
    /// The pass over the data, from 0, and the position in it if it has started.
    pub(super) pass: u64,
    pub(super) position: Option<InputPosition>,
    /// Sums of the current epoch over all replicas.
    #[serde(deserialize_with = "numbers")]
    pub(super) sums: Vec<f64>,
    pub(super) history: History,
    /// The states of callbacks.
    pub(super) callbacks: Vec<Value>,
    /// The names of these callbacks; empty from earlier versions.
    #[serde(default)]
    pub(super) callback_names: Vec<String>,
    /// The reason why training ended before the last epoch.
    pub(super) ended: Option<String>,
    /// Whether all steps of the current epoch have been made.
    #[serde(default)]
    pub(super) all_steps: bool,
    /// Whether the last epoch has ended, and not all callbacks have saved after it.
    #[serde(default)]
    pub(super) unsaved: bool,
}

/// The state of a process that trains, for one that joins it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Whole {
    pub(super) standing: Standing,
    pub(super) steps: u64,
    pub(super) examples: u64,
    pub(super) run: Option<RunId>,
    pub(super) stop: Option<String>,
    pub(super) commits: u64,
    /// The settings that a process that joins must have too, one in each line; empty from earlier versions.
    #[serde(default)]
    pub(super) settings: Vec<String>,
    /// The optimizer's learning rate; `None` from earlier versions.
    #[serde(default)]
    pub(super) learning_rate: Option<f64>,
}

impl elastic::Standing for Whole {
    fn commits(&self) -> u64 {
        self.commits
    }

    fn progress(&self) -> u64 {
        let Standing { epochs_done, steps, all_steps, unsaved, .. } = &self.standing;
        // What happens to these, in the order in which it happens.
        ((u64::from(*epochs_done) << 32) + (steps << 2)) + (u64::from(*all_steps) << 1) + u64::from(!unsaved)
    }
}

/// Reads null, which JSON has for NaN and infinities, as NaN.
fn numbers<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<f64>, D::Error> {
    let numbers: Vec<Option<f64>> = Deserialize::deserialize(deserializer)?;
    Ok(numbers.into_iter().map(|number| number.unwrap_or(f64::NAN)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_is_no_number_survives_a_checkpoint() {
        let standing = Standing { sums: vec![f64::NAN, 12.0, f64::INFINITY], ..Standing::default() };
        let read: Standing = serde_json::from_str(&serde_json::to_string(&standing).unwrap()).unwrap();
        assert!(read.sums[0].is_nan() && read.sums[1] == 12.0 && read.sums[2].is_nan());
    }
}
