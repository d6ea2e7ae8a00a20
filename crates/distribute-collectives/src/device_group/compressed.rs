//! Buckets in a GPU's memory that are sent in 16 bits.

use std::ops::Range;
use std::sync::Mutex;

use distribute_device::{DType, Device, DeviceBuffer, Stream};

use super::backends;
use crate::Result;
use crate::sync::lock;

/// The memory of a bucket that is sent in 16 bits, with the rounding errors of earlier steps.
#[derive(Debug)]
pub(super) struct Short {
    dtype: DType,
    /// The rounded values.
    sent: DeviceBuffer,
    /// The errors of the last step and of the one before it.
    errors: [DeviceBuffer; 2],
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Which of `errors` the next step adds.
    current: usize,
    /// Whether a step has begun that could be rolled back.
    begun: bool,
}

impl Short {
    /// Allocates the memory for a bucket of f32 of this size.
    pub(super) fn new(device: &dyn Device, dtype: DType, len_bytes: usize) -> distribute_device::Result<Short> {
        let errors = [device.allocate(len_bytes)?, device.allocate(len_bytes)?];
        let sent = device.allocate(len_bytes / DType::F32.size_bytes() * dtype.size_bytes())?;
        Ok(Short { dtype, sent, errors, state: Mutex::default() })
    }

    /// Commits the last step.
    pub(super) fn settle(&self) {
        lock(&self.state).begun = false;
    }

    /// Restores the errors from before the last step, unless it was committed.
    pub(super) fn take_back(&self) {
        let mut state = lock(&self.state);
        if std::mem::take(&mut state.begun) {
            state.current = 1 - state.current;
        }
    }

    /// Restores the errors of some bytes of the bucket from before the last step, in the stream's order.
    pub(super) fn discard(&self, stream: &dyn Stream, bytes: Range<usize>) -> distribute_device::Result<()> {
        let state = lock(&self.state);
        if !state.begun {
            return Ok(());
        }
        let [now, before] = [state.current, 1 - state.current].map(|index| self.errors[index].slice(bytes.clone()));
        stream.copy(&before?, &now?)
    }

    /// Rounds `values` and the errors of earlier steps together, lets `reduce` reduce the rounded values in place, and
    /// writes the result to `values`.
    pub(super) fn exchange(
        &self,
        stream: &dyn Stream,
        values: &DeviceBuffer,
        failed: impl Fn(distribute_device::Error) -> crate::Error,
        reduce: impl FnOnce(&DeviceBuffer, DType) -> Result<()>,
    ) -> Result<()> {
        {
            let mut state = lock(&self.state);
            let [first, second] = &self.errors;
            let errors = if state.current == 0 { [first, second] } else { [second, first] };
            backends::round_off(stream, self.dtype, values, errors, &self.sent).map_err(&failed)?;
            *state = State { current: 1 - state.current, begun: true };
        }
        reduce(&self.sent, self.dtype)?;
        backends::widen(stream, self.dtype, &self.sent, values).map_err(&failed)
    }
}
