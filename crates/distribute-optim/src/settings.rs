//! Optimizer settings that must be equal on all workers.

use std::sync::Arc;

use distribute_types::{FNV64, fnv1a_64};

/// Settings that do not change during the life of the optimizer, and their digest.
#[derive(Debug)]
pub(crate) struct FixedSettings {
    lines: Vec<String>,
    digest: u64,
}

/// All settings of one step.
#[derive(Clone)]
pub(crate) struct Settings {
    fixed: Arc<FixedSettings>,
    learning_rate: f64,
    loss_scale: Option<f64>,
}

impl FixedSettings {
    /// Creates the settings from `lines`, each of which has the name and the value of one.
    pub(crate) fn new(lines: Vec<String>) -> FixedSettings {
        let digest = fnv1a_64(FNV64, lines.iter().flat_map(|line| line.bytes()));
        FixedSettings { lines, digest }
    }
}

impl Settings {
    pub(crate) fn new(fixed: &Arc<FixedSettings>, learning_rate: f64, loss_scale: Option<f64>) -> Settings {
        Settings { fixed: fixed.clone(), learning_rate, loss_scale }
    }

    pub(crate) fn digest(&self) -> u64 {
        let numbers = [self.learning_rate, self.loss_scale.unwrap_or(f64::NAN)];
        fnv1a_64(FNV64 ^ self.fixed.digest, numbers.into_iter().flat_map(|number| number.to_bits().to_le_bytes()))
    }

    pub(crate) fn lines(&self) -> Vec<String> {
        let mut lines = self.fixed.lines.clone();
        lines.push(format!("learning rate: {}", self.learning_rate));
        lines.push(format!("loss scale: {:?}", self.loss_scale));
        lines
    }
}
