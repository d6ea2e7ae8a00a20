//! The values of a training run, epoch by epoch.

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize};

/// Losses and metrics of every epoch.
///
/// # Examples
/// ```
/// use distribute_train::history::History;
/// let mut history = History::default();
/// history.push(1, &[("loss".to_owned(), 0.5), ("accuracy".to_owned(), 0.75)]);
/// history.push(2, &[("loss".to_owned(), 0.25), ("accuracy".to_owned(), 0.875)]);
/// assert_eq!(history.of("loss"), [0.5, 0.25]);
/// assert_eq!(history.to_string(), "epoch    loss  accuracy\n    1  0.5000    0.7500\n    2  0.2500    0.8750\n");
/// ```
///
/// # Source
/// `tf.keras.callbacks.History`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct History {
    /// Each epoch's number, from 1, and values by their names.
    #[serde(deserialize_with = "epochs")]
    pub epochs: Vec<(u32, Vec<(String, f64)>)>,
}

type Epochs<V> = Vec<(u32, Vec<(String, V)>)>;

/// Reads the null that JSON has for NaN and for infinities as NaN, so that a checkpoint of a diverged training can be
/// read.
fn epochs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Epochs<f64>, D::Error> {
    let epochs: Epochs<Option<f64>> = Deserialize::deserialize(deserializer)?;
    let values = |values: Vec<(String, Option<f64>)>| {
        values.into_iter().map(|(name, value)| (name, value.unwrap_or(f64::NAN))).collect()
    };
    Ok(epochs.into_iter().map(|(epoch, of_epoch)| (epoch, values(of_epoch))).collect())
}

impl History {
    /// Adds an epoch.
    pub fn push(&mut self, epoch: u32, values: &[(String, f64)]) {
        self.epochs.push((epoch, values.to_vec()));
    }

    /// Returns one value of every epoch that has it.
    pub fn of(&self, name: &str) -> Vec<f64> {
        let value =
            |values: &Vec<(String, f64)>| values.iter().find(|(known, _)| known == name).map(|(_, value)| *value);
        self.epochs.iter().filter_map(|(_, values)| value(values)).collect()
    }

    /// Returns the last value of a name.
    pub fn last(&self, name: &str) -> Option<f64> {
        self.of(name).last().copied()
    }
}

impl fmt::Display for History {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut names: Vec<&str> = Vec::new();
        for (name, _) in self.epochs.iter().flat_map(|(_, values)| values) {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        if names.is_empty() {
            return Ok(());
        }
        let width = |name: &str| name.len().max(6);
        write!(f, "epoch")?;
        names.iter().try_for_each(|name| write!(f, "  {name:>0$}", width(name)))?;
        writeln!(f)?;
        for (epoch, values) in &self.epochs {
            write!(f, "{epoch:>5}")?;
            for name in &names {
                match values.iter().find(|(known, _)| known == name) {
                    Some((_, value)) => write!(f, "  {value:>0$.4}", width(name))?,
                    None => write!(f, "  {:>1$}", "", width(name))?,
                }
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_only_some_epochs_have_has_a_column() {
        let mut history = History::default();
        history.push(1, &[("loss".to_owned(), 0.5)]);
        history.push(2, &[("loss".to_owned(), 0.25), ("val_loss".to_owned(), 0.75)]);
        assert_eq!(history.to_string(), "epoch    loss  val_loss\n    1  0.5000          \n    2  0.2500    0.7500\n");
    }

    #[test]
    fn values_that_are_no_numbers_survive_a_checkpoint() {
        let mut history = History::default();
        history.push(1, &[("loss".to_owned(), f64::NAN), ("auc".to_owned(), 0.5), ("most".to_owned(), f64::INFINITY)]);
        let read: History = serde_json::from_str(&serde_json::to_string(&history).unwrap()).unwrap();
        assert!(read.of("loss")[0].is_nan() && read.of("most")[0].is_nan());
        assert_eq!(read.of("auc"), [0.5]);
    }
}
