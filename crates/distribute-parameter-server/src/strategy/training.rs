//! The strategy's side of a training loop on the coordinator.

use std::fmt::Display;

use distribute_types::FailureKind;

use super::ParameterServerStrategy;
use crate::Updates;

impl ParameterServerStrategy {
    /// Returns how the workers' updates are combined.
    pub fn updates(&self) -> Updates {
        self.inner.options.updates
    }

    /// Returns the learning rate for gradients that servers apply from now on; `None` for an unknown optimizer.
    pub fn learning_rate(&self, optimizer: u32) -> Option<f64> {
        let made = self.inner.made.lock();
        made.optimizers.get(optimizer as usize).map(|(description, _)| description.learning_rate)
    }

    /// Records a failure of the coordinator's program, such as one of a callback. If no function succeeds afterwards,
    /// workers and servers end as they do after the failure of a function: with this message, or, if `kind` is
    /// [`FailureKind::Retryable`], they wait for the next coordinator.
    pub fn report_failure(&self, failure: impl Display, kind: FailureKind) {
        self.inner.note(failure.to_string(), kind);
    }
}
