//! Settings of a step that must be equal on all workers.

use std::fmt::Debug;
use std::sync::Arc;

use distribute_rules::check_setting;

use super::Optimizer;
use crate::gradient::Scaling;
use crate::settings::{FixedSettings, Settings};
use crate::{Error, TensorLibrary};

impl<L: TensorLibrary> Optimizer<L> {
    /// Checks the rate of a step that begins.
    pub(super) fn check_learning_rate(&self) -> Result<(), Error> {
        let rate = self.learning_rate();
        Ok(check_setting("the learning rate", rate, rate >= 0.0, "0 or more; see to what sets it between steps")?)
    }

    /// Returns the settings of a step that begins now, which must be equal on all workers.
    pub(super) fn settings(&self, scaling: Option<Scaling>) -> Settings {
        let fixed = self.fixed.get_or_init(|| {
            let line = |name: &str, value: &dyn Debug| format!("{name}: {value:?}");
            Arc::new(FixedSettings::new(vec![
                match &self.library {
                    Some(library) => format!("optimizer: {}", library.describe()),
                    None => line("optimizer", &self.rule),
                },
                line("gradient clipping", &self.clip),
                line(
                    "loss scaling",
                    &self.states.first(|state| state.standing.scaling.map(|it| it.settings())).flatten(),
                ),
                line("compression", &self.compression),
                line("sharded optimizer state (zero1)", &self.sharded),
                line("gradients of few rows", &self.sparse_gradients),
                line("steps between audits", &self.audit_every),
            ]))
        });
        Settings::new(fixed, self.learning_rate(), scaling.map(|scaling| scaling.scale))
    }
}
