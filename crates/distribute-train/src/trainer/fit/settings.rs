//! Settings of a training run that must be equal on all workers.

use distribute_strategy::Strategy;

use super::Fit;
use crate::Result;
use crate::metrics::Metrics;
use crate::trainer::compare_settings;

/// The settings, as names and values.
pub(super) struct Settings(Vec<(&'static str, String)>);

impl Settings {
    pub(super) fn of<B, E>(fit: &Fit<B, E>, metrics: &Metrics) -> Settings {
        let or = |number: Option<u64>, default: &str| number.map_or(default.to_owned(), |number| number.to_string());
        let yes = |is: bool| if is { "yes" } else { "no" }.to_owned();
        let collective = || fit.callbacks.iter().filter(|callback| callback.is_collective());
        let names: Vec<&str> = collective().map(|callback| callback.name()).collect();
        let settings: Vec<String> = collective().map(|callback| callback.settings()).collect();
        Settings(vec![
            ("fit, epochs", fit.epochs.to_string()),
            ("fit, steps_per_epoch", or(fit.steps_per_epoch, "those of a pass")),
            ("fit, steps_per_execution", fit.steps_per_execution.to_string()),
            ("fit, class_weights", format!("{:?}", fit.class_weights)),
            ("fit, validation", yes(fit.validation.is_some())),
            ("fit, validation_steps", or(fit.validation_steps.map(|steps| steps as u64), "all")),
            ("fit, validation_every", fit.validation_every.to_string()),
            ("fit, metrics", format!("[{}]", metrics.names().join(", "))),
            ("fit, collective callbacks", format!("[{}]", names.join(", "))),
            ("fit, settings of callbacks", format!("[{}]", settings.join(", "))),
            ("fit, stop_on", yes(fit.termination.is_some())),
        ])
    }

    /// Declares the settings, so that every step compares them.
    pub(super) fn declare(&self, strategy: &Strategy) {
        self.0.iter().for_each(|(name, value)| strategy.declare(name, value));
    }

    /// Returns one line for each setting.
    pub(super) fn lines(&self) -> Vec<String> {
        self.0.iter().map(|(name, value)| line(name, value)).collect()
    }

    /// Compares the settings of all workers. Every worker calls this.
    ///
    /// # Errors
    /// The errors of [`compare_settings`] occur in the same cases.
    pub(super) fn compare(&self, strategy: &Strategy) -> Result<()> {
        compare_settings(strategy, &self.lines())
    }

    /// Compares the settings with those of the members of an elastic job, from which this process has its state.
    /// Settings that one of both does not have, being of another version, are left out.
    ///
    /// # Errors
    /// [`SettingsDiffer`](distribute_strategy::Error::SettingsDiffer) names the first setting that differs.
    pub(super) fn check(&self, strategy: &Strategy, theirs: &[String]) -> Result<()> {
        for (name, value) in &self.0 {
            let (mine, prefix) = (line(name, value), line(name, ""));
            if let Some(theirs) = theirs.iter().find(|theirs| theirs.starts_with(&prefix) && **theirs != mine) {
                let (here, there, theirs) = (here(strategy), "the members of the job".to_owned(), theirs.clone());
                return Err(distribute_strategy::Error::SettingsDiffer { here, mine, there, theirs }.into());
            }
        }
        Ok(())
    }
}

fn line(name: &str, value: &str) -> String {
    format!("{name}: {value}")
}

/// Returns the name of this process.
fn here(strategy: &Strategy) -> String {
    strategy.groups().first().map_or_else(String::new, |group| group.rank_name(group.rank()).to_owned())
}
