//! Notification during backward that a variable's gradient is complete.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use distribute_values::IndexedRows;
use parking_lot::Mutex;

/// A variable's gradient, as a backward pass reports it.
#[derive(Clone, Debug)]
pub enum Gradient<T> {
    /// All elements, in the variable's shape.
    Whole(T),
    /// Some rows, each index once, in ascending order; all others are zeros. Their shape is the variable's, with the
    /// number of rows in place of the first length.
    Rows(IndexedRows<T>),
}

/// A callback that takes a variable's index and its gradient.
pub type Sink<T> = Box<dyn FnMut(usize, Gradient<T>) + Send>;

/// The receiver of one replica's gradients while its backward runs.
///
/// The adapter of a tensor library hooks each variable, so that [`gradient`](Tape::gradient) is called when all uses of
/// the variable have contributed.
pub struct Tape<T> {
    recording: Mutex<Option<Recording<T>>>,
    /// The number of passes that have begun.
    passes: AtomicU64,
}

/// A backward pass in progress.
struct Recording<T> {
    sink: Sink<T>,
    /// Its number, from 1.
    pass: u64,
    /// Whether any variable has reported its gradient.
    reported: bool,
}

impl<T> Tape<T> {
    /// Creates a tape that records nothing until a backward pass runs.
    pub fn new() -> Arc<Tape<T>> {
        Arc::new(Tape { recording: Mutex::new(None), passes: AtomicU64::new(0) })
    }

    /// Passes a complete gradient to the backward pass in progress, if any.
    pub fn gradient(&self, index: usize, gradient: T) {
        self.report(index, Gradient::Whole(gradient));
    }

    /// Passes a complete gradient, of which the library may have computed some rows only, to the backward pass in
    /// progress, if any.
    pub fn report(&self, index: usize, gradient: Gradient<T>) {
        if let Some(recording) = &mut *self.recording.lock() {
            recording.reported = true;
            (recording.sink)(index, gradient);
        }
    }

    /// Returns whether a backward pass waits for gradients.
    pub fn is_recording(&self) -> bool {
        self.pass().is_some()
    }

    /// Returns the number of the backward pass that waits for gradients, by which parts of a gradient that belong to
    /// one that has failed are known; `None` if none waits.
    pub fn pass(&self) -> Option<u64> {
        self.recording.lock().as_ref().map(|recording| recording.pass)
    }

    /// Runs `backward` and calls `sink` with each variable's index and gradient meanwhile. Returns the sink too if no
    /// variable reported its gradient.
    pub(crate) fn record<R>(&self, sink: Sink<T>, backward: impl FnOnce() -> R) -> (R, Option<Sink<T>>) {
        let pass = self.passes.fetch_add(1, Ordering::Relaxed) + 1;
        *self.recording.lock() = Some(Recording { sink, pass, reported: false });
        let result = backward();
        let recording = self.recording.lock().take();
        (result, recording.filter(|recording| !recording.reported).map(|recording| recording.sink))
    }
}

impl<T> std::fmt::Debug for Tape<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tape").finish_non_exhaustive()
    }
}
