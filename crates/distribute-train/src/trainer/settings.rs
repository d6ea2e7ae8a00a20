//! Comparison of settings between workers.

use distribute_collectives::first_difference;
use distribute_strategy::{Error, Strategy};
use distribute_types::ErrorClass;

use crate::Result;

/// Compares settings of all workers, one in each line, such as `predict, names: [y]`. Every worker must call this.
///
/// # Errors
/// [`Error::Strategy`](crate::Error::Strategy) on all workers: with
/// [`SettingsDiffer`](distribute_strategy::Error::SettingsDiffer), which names the first line that differs, or if a
/// worker is missing or fails.
///
/// # Examples
/// ```
/// use distribute_strategy::Strategy;
/// use distribute_train::trainer::compare_settings;
/// let strategy = Strategy::default_strategy()?;
/// compare_settings(&strategy, &["evaluate, steps: 20".to_owned()])?;
/// # Ok::<(), distribute_train::Error>(())
/// ```
pub fn compare_settings(strategy: &Strategy, lines: &[String]) -> Result<()> {
    let groups = strategy.groups();
    let found = first_difference(&groups, lines).map_err(Error::from)?;
    let (Some(found), Some(first)) = (found, groups.first()) else { return Ok(()) };
    let error = Error::of_difference(first, found);
    // A worker that has not read all answers yet ends with the same error.
    groups.iter().for_each(|group| group.abort(&error.to_string(), error.failure_kind()));
    Err(error.into())
}
