//! Events, for which the host and other streams can wait.

use std::any::Any;
use std::fmt::Debug;
use std::time::Instant;

use crate::{DeviceSpec, Result};

/// A point in a stream that the host and other streams can wait for.
///
/// # Source
/// CUDA driver API: `CUevent`.
pub trait Event: Any + Debug + Send + Sync {
    /// Returns the device that created the event.
    fn device(&self) -> &DeviceSpec;

    /// Returns whether the recorded operations have ended; true before the first recording.
    ///
    /// # Errors
    /// [`Error::Stream`](crate::Error::Stream) if one of them failed.
    ///
    /// # Source
    /// `cuEventQuery`.
    fn is_ready(&self) -> Result<bool>;

    /// Waits for the current recording.
    ///
    /// # Errors
    /// [`Error::Stream`](crate::Error::Stream) if an operation failed, [`Error::Deadline`](crate::Error::Deadline) if
    /// `deadline` passes.
    ///
    /// # Source
    /// `cuEventQuery` until the deadline, since `cuEventSynchronize` has none.
    fn wait(&self, deadline: Instant) -> Result<()>;
}
