//! Optimizer settings that must be equal on all workers.

use std::fmt::Debug;
use std::sync::Arc;

use distribute_strategy::digest;

use super::Optimizer;
use crate::TensorLibrary;
use crate::gradient::Scaling;

/// Settings that stay the same for the life of the optimizer, and their digest.
#[derive(Debug)]
pub(super) struct Fixed {
    lines: Vec<String>,
    digest: u64,
}

/// All settings of one step.
#[derive(Clone)]
pub(crate) struct Settings {
    fixed: Arc<Fixed>,
    learning_rate: f64,
    loss_scale: Option<f64>,
}

impl<L: TensorLibrary> Optimizer<L> {
    /// The settings of a step that begins now.
    pub(super) fn settings(&self, scaling: Option<Scaling>) -> Settings {
        let fixed = self.fixed.get_or_init(|| {
            let line = |name: &str, value: &dyn Debug| format!("{name}: {value:?}");
            let lines = vec![
                line("optimizer", &self.rule),
                line("gradient clipping", &self.clip),
                line("compression", &self.compression),
                line("sharded optimizer state (zero1)", &self.sharded),
                line("steps between audits", &self.audit_every),
            ];
            let digest = digest(0, lines.iter().flat_map(|line| line.bytes()));
            Arc::new(Fixed { lines, digest })
        });
        let loss_scale = scaling.map(|scaling| scaling.scale);
        Settings { fixed: fixed.clone(), learning_rate: self.learning_rate(), loss_scale }
    }
}

impl Settings {
    pub(crate) fn digest(&self) -> u64 {
        let numbers = [self.learning_rate, self.loss_scale.unwrap_or(f64::NAN)];
        digest(self.fixed.digest, numbers.into_iter().flat_map(|number| number.to_bits().to_le_bytes()))
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        let mut lines = self.fixed.lines.clone();
        lines.push(format!("learning rate: {}", self.learning_rate));
        lines.push(format!("loss scale: {:?}", self.loss_scale));
        lines
    }
}
