//! Notification during backward that a variable's gradient is complete.

use std::sync::Arc;

use parking_lot::Mutex;

/// A callback that takes a variable's index and its gradient.
pub type Sink<T> = Box<dyn FnMut(usize, T) + Send>;

/// The receiver of one replica's gradients while its backward runs.
///
/// The adapter of a tensor library hooks each variable, so that [`gradient`](Tape::gradient) is called when all uses of
/// the variable have contributed.
pub struct Tape<T>(Mutex<Option<Recording<T>>>);

/// A backward pass in progress.
struct Recording<T> {
    sink: Sink<T>,
    /// Whether any variable has reported its gradient.
    reported: bool,
}

impl<T> Tape<T> {
    /// Creates a tape that records nothing until a backward pass runs.
    pub fn new() -> Arc<Tape<T>> {
        Arc::new(Tape(Mutex::new(None)))
    }

    /// Passes a complete gradient to the backward pass in progress, if any.
    pub fn gradient(&self, index: usize, gradient: T) {
        if let Some(recording) = &mut *self.0.lock() {
            recording.reported = true;
            (recording.sink)(index, gradient);
        }
    }

    /// Returns whether a backward pass waits for gradients.
    pub fn is_recording(&self) -> bool {
        self.0.lock().is_some()
    }

    /// Runs `backward` and calls `sink` with each variable's index and gradient meanwhile. Returns the sink too if no
    /// variable reported its gradient.
    pub(crate) fn record<R>(&self, sink: Sink<T>, backward: impl FnOnce() -> R) -> (R, Option<Sink<T>>) {
        *self.0.lock() = Some(Recording { sink, reported: false });
        let result = backward();
        let recording = self.0.lock().take();
        (result, recording.filter(|recording| !recording.reported).map(|recording| recording.sink))
    }
}

impl<T> std::fmt::Debug for Tape<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tape").finish_non_exhaustive()
    }
}
