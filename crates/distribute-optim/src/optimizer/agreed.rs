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

#[cfg(test)]
mod tests {
    use distribute_collectives::Compression;
    use distribute_strategy::MirroredStrategy;
    use distribute_values::{Host, HostTensor};

    use crate::{Adam, Clip, HostError, HostLoss, HostModel, LossScale, Optimizer, SparseGradients};

    #[test]
    fn a_setting_after_a_step_is_among_those_that_are_compared() {
        type Change = fn(Optimizer<Host>) -> Result<Optimizer<Host>, HostError>;
        let changes: [(&str, Change); 6] = [
            ("gradient clipping", |optimizer| optimizer.clip(Clip::Value(0.5))),
            ("loss scaling", |optimizer| optimizer.scale_losses(LossScale::fixed(4.0))),
            ("compression", |optimizer| optimizer.compress(Compression::Bf16)),
            ("sharded optimizer state", |optimizer| optimizer.zero1()),
            ("gradients of few rows", |optimizer| Ok(optimizer.sparse_gradients(SparseGradients::Whole))),
            ("steps between audits", |optimizer| Ok(optimizer.audit_every(7))),
        ];
        let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build().unwrap();
        let tensor = || HostTensor::new(&[2], vec![0.5, 1.0]).unwrap();
        for (name, change) in changes {
            let model = HostModel::new(&strategy, [("w", tensor())]).unwrap();
            let optimizer = Adam::new(0.1).build(&model).unwrap();
            let step = |context: &_, optimizer: crate::ReplicaOptimizer<'_, Host>| {
                optimizer.minimize(context, &HostLoss(vec![Some(tensor())]))
            };
            strategy.run_with(&optimizer, step).unwrap();
            let line = |optimizer: &Optimizer<Host>| {
                let lines = optimizer.settings(None).lines();
                lines.into_iter().find(|line| line.starts_with(name)).unwrap()
            };
            let before = line(&optimizer);
            assert_ne!(line(&change(optimizer).unwrap()), before);
        }
    }
}
