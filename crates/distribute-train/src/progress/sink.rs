//! Destinations of a run's progress that are neither a bar nor lines.

use super::protocol::Status;

/// A destination that the chief's progress is passed to. Calls other than the last must not wait.
pub(crate) trait Sink: Send {
    /// Takes the progress after a step, or after an epoch and its validation.
    fn progress(&mut self, status: &Status, is_epoch: bool);

    /// Ends the run. This may wait for as long as the documentation of the destination states.
    fn finish(&mut self);
}
