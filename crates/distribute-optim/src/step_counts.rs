//! The number of steps of each variable.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The step counts of variables. A step in which a variable got no gradient on any replica does not count for it, so
/// that its bias corrections match its own moments.
///
/// # Source
/// `state["step"]` of each parameter in torch.optim. tf.keras counts steps per optimizer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepCounts(Vec<u64>);

impl StepCounts {
    /// Returns the number of a variable's last step; 0 before its first.
    pub fn of(&self, index: usize) -> u64 {
        self.0.get(index).copied().unwrap_or(0)
    }

    /// Returns the counts of the variables with these indices, from 0.
    pub(crate) fn from_counts(counts: Vec<u64>) -> StepCounts {
        StepCounts(counts)
    }

    /// Counts a step of these variables.
    pub(crate) fn advance(&mut self, stepped: impl IntoIterator<Item = usize>) {
        for index in stepped {
            if self.0.len() <= index {
                self.0.resize(index + 1, 0);
            }
            self.0[index] += 1;
        }
    }

    /// Returns the counts of trained variables, given with their indices, that differ from the optimizer's number of
    /// steps.
    pub(crate) fn saved<'a>(&self, trained: impl Iterator<Item = (usize, &'a str)>, steps: u64) -> SavedCounts {
        let others = trained.filter(|(index, _)| self.of(*index) != steps);
        SavedCounts(others.map(|(index, name)| (name.to_owned(), self.of(index))).collect())
    }

    /// Returns the counts of the variables with these names: those in a checkpoint, else the optimizer's number of
    /// steps.
    pub(crate) fn restored<'a>(names: impl Iterator<Item = &'a str>, steps: u64, saved: &SavedCounts) -> StepCounts {
        StepCounts(names.map(|name| saved.0.get(name).copied().unwrap_or(steps)).collect())
    }
}

/// The counts of variables that made fewer steps than their optimizer, by name. Checkpoints of earlier versions have
/// none; every variable then continues with the optimizer's count, as it did in those versions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct SavedCounts(BTreeMap<String, u64>);

impl SavedCounts {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::OptimizerState;

    const NAMES: [&str; 3] = ["a", "b", "mean"];

    /// The last one is not trained.
    fn trained() -> impl Iterator<Item = (usize, &'static str)> {
        NAMES.into_iter().enumerate().take(2)
    }

    #[test]
    fn a_checkpoint_of_an_earlier_version_gives_all_variables_the_count_of_the_optimizer() {
        let old = r#"{"steps": 5, "learning_rate": 0.1, "loss_scale": null, "good_steps": 0}"#;
        let state: OptimizerState = serde_json::from_str(old).unwrap();
        let counts = StepCounts::restored(NAMES.into_iter(), state.steps, &state.counts);
        assert_eq!((counts.of(0), counts.of(1)), (5, 5));
        // Counts that equal the optimizer's are not written, so that earlier versions can read checkpoints without
        // other counts.
        assert!(counts.saved(trained(), 5).is_empty());
    }

    #[test]
    fn what_is_saved_is_restored() {
        let mut counts = StepCounts::default();
        for stepped in [vec![0, 1], vec![0], vec![0]] {
            counts.advance(stepped);
        }
        let saved = counts.saved(trained(), 3);
        assert_eq!(serde_json::to_string(&saved).unwrap(), r#"{"b":1}"#);
        let restored = StepCounts::restored(NAMES.into_iter(), 3, &saved);
        assert_eq!((restored.of(0), restored.of(1)), (3, 1));
    }
}
