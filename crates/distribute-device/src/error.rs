//! Errors of devices.

use distribute_types::{Class, ErrorClass, FailureKind, Scope};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::DType;

/// An error of a device, a stream or a buffer.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A device name is malformed.
    #[error("device {given:?}: {problem}; write it like GPU:0 or /job:worker/replica:0/task:1/device:GPU:0")]
    DeviceString {
        /// The given name.
        given: String,
        /// The problem.
        problem: String,
    },
    /// A single device is required, but the name stands for every device of its type.
    #[error("device {given} names every device of its type, but one is needed here; give a number in place of the *")]
    WildcardDevice {
        /// The name.
        given: String,
    },
    /// A list of devices is empty.
    #[error("the list of devices is empty; name at least one, such as CPU:0")]
    NoDevices,
    /// A list of devices names a device twice.
    #[error(
        "the list of devices names {device} twice, as {first:?} (place {first_place}) and as {second:?} (place \
         {second_place}); name each device once"
    )]
    DuplicateDevice {
        /// The canonical name.
        device: String,
        /// The first spelling.
        first: String,
        /// The position of the first spelling, from 0.
        first_place: usize,
        /// The second spelling.
        second: String,
        /// The position of the second spelling, from 0.
        second_place: usize,
    },
    /// A device is not among those of this process.
    #[error("device {asked} is not there: {reason}")]
    NoSuchDevice {
        /// The requested device.
        asked: String,
        /// The existing devices or the reason for the absence, with a remedy.
        reason: String,
    },
    /// A physical device cannot be split as requested.
    #[error("{device} cannot be split into {count} logical devices: {problem}")]
    Split {
        /// The physical device.
        device: String,
        /// The requested number of logical devices.
        count: usize,
        /// The problem.
        problem: String,
    },
    /// A view was accessed as another element type than it holds.
    #[error("elements of type {asked} were asked for, but the buffer holds {held}; ask for {held}, or convert first")]
    WrongDType {
        /// The requested type.
        asked: DType,
        /// The type of the view.
        held: DType,
    },
    /// A range of elements is not inside the buffer.
    #[error("elements {start}..{end} were asked for, but the buffer holds {len}")]
    OutOfRange {
        /// The first element of the range.
        start: usize,
        /// One past its last element.
        end: usize,
        /// The number of elements in the buffer.
        len: usize,
    },
    /// A range of bytes is not inside the buffer.
    #[error(
        "{what}: bytes {start}..{end} were asked for, but there are {len_bytes}; shorten the range \
         or allocate more"
    )]
    ByteRange {
        /// The buffer.
        what: &'static str,
        /// The first byte of the range.
        start: usize,
        /// One past its last byte; `usize::MAX` if it overflows.
        end: usize,
        /// The number of bytes in the buffer.
        len_bytes: usize,
    },
    /// A size is not a multiple of the element size.
    #[error(
        "{len_bytes} bytes are not a whole number of {dtype} elements of {} bytes; give a multiple of that",
        dtype.size_bytes()
    )]
    PartialElement {
        /// The size of the memory.
        len_bytes: usize,
        /// The data type.
        dtype: DType,
    },
    /// Memory is not aligned.
    #[error("memory at an address that is not a multiple of {needed_bytes} was given; copy it to a HostBuffer first")]
    Misaligned {
        /// The required alignment.
        needed_bytes: usize,
    },
    /// The host has not enough memory.
    #[error("{len_bytes} bytes of host memory could not be allocated; use smaller buffers or fewer of them")]
    HostMemory {
        /// The requested size.
        len_bytes: usize,
    },
    /// The memory limit of a device is reached.
    #[error(
        "{device}: {asked_bytes} bytes were asked for, but {used_bytes} of {limit_bytes} are in use; \
         free buffers, use \
         smaller ones, or raise the device's memory limit"
    )]
    DeviceMemory {
        /// The device.
        device: String,
        /// The requested size.
        asked_bytes: u64,
        /// The bytes in use.
        used_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// Source and destination of a copy differ in size.
    #[error(
        "a copy from {source_bytes} bytes to {destination_bytes} bytes was asked for; \
         slice the longer end to the other's size"
    )]
    CopyLength {
        /// The size of the source.
        source_bytes: usize,
        /// The size of the destination.
        destination_bytes: usize,
    },
    /// A buffer, event or device was used with another device or backend.
    #[error("{user} cannot use this {what}, which belongs to {owner}; {remedy}")]
    Foreign {
        /// The kind of object: a buffer, an event or a device.
        what: &'static str,
        /// The owner of the object.
        owner: String,
        /// The device or stream that was to use it.
        user: String,
        /// The remedy.
        remedy: &'static str,
    },
    /// A wait reached its deadline.
    #[error("{operation} did not finish within {waited:.1?} ({state}); give it more time if it is only slow")]
    Deadline {
        /// The operation waited for, and its stream or device.
        operation: String,
        /// The duration of the wait.
        waited: Duration,
        /// The state of the operation at the deadline.
        state: String,
    },
    /// An operation of a stream failed; later ones were not run.
    #[error(
        "{stream}: {operation} failed, and what was queued after it was not run; make a new \
         stream once it is remedied"
    )]
    Stream {
        /// The stream.
        stream: String,
        /// The first operation that failed.
        operation: &'static str,
        /// The reason.
        source: Arc<Error>,
    },
    /// A driver call on a GPU or an enqueued operation failed.
    #[error("{device}: {operation} failed: {cause}")]
    Cuda {
        /// The operation.
        operation: &'static str,
        /// The device.
        device: String,
        /// The driver's name and description of the error.
        cause: String,
    },
    /// CUDA's run-time compiler cannot be used.
    #[error(
        "kernels cannot be compiled for this GPU: {problem}; install libnvrtc of CUDA 12 or 13 (the Python package \
         nvidia-cuda-nvrtc has it), or name its file in DISTRIBUTE_NVRTC_LIBRARY"
    )]
    Nvrtc {
        /// The problem.
        problem: String,
    },
    /// The compiler rejected a kernel.
    #[error("kernel {name} could not be compiled: {problem}")]
    Kernel {
        /// The source file.
        name: String,
        /// The compiler's message.
        problem: String,
    },
    /// A PJRT plugin cannot be used.
    #[error("{problem}")]
    PjrtPlugin {
        /// The problem, with a remedy: no plugin was found, or it lacks a function.
        problem: String,
    },
    /// A call of a PJRT plugin, or an operation that it started, failed.
    #[error("{subject}: {call} failed: {name} (code {code}): {text}")]
    Pjrt {
        /// The device, program or client.
        subject: String,
        /// The function.
        call: &'static str,
        /// The code of the error, as in Abseil: 8 for exhausted memory, 14 for a lost device.
        code: i32,
        /// The code's name, such as `INVALID_ARGUMENT`.
        name: &'static str,
        /// The plugin's text.
        text: String,
    },
    /// A cache of compiled programs cannot be used.
    #[error("the program cache {}: {source}; name a folder that can be written", path.display())]
    ProgramCache {
        /// The folder.
        path: std::path::PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The buffers given to a kernel do not fit the operation.
    #[error("{operation}: {problem}")]
    Operands {
        /// The operation.
        operation: &'static str,
        /// The problem, with a remedy.
        problem: String,
    },
    /// A function of the caller, run in a stream, returned an error.
    #[error("a host function returned an error: {source}")]
    HostFunction {
        /// The error that it returned.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A function of the caller, run in a stream, panicked.
    #[error("a host function panicked: {message}")]
    HostPanic {
        /// The panic's message.
        message: String,
    },
    /// An operation was dropped before it ran.
    #[error(
        "the operation was dropped before it ran, because its stream ended; keep the stream until it \
         is synchronized"
    )]
    Dropped,
    /// The host buffer of a transfer was taken already.
    #[error("the host buffer of this transfer was taken already; wait for a transfer once")]
    TransferTaken,
    /// A thread of a stream could not be started.
    #[error("{stream}: its thread could not be started: {source}; use fewer streams or raise the limit on threads")]
    Thread {
        /// The stream.
        stream: String,
        /// The system's error.
        source: io::Error,
    },
}

distribute_types::debug_is_display!(Error);

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl ErrorClass for Error {
    fn class(&self) -> Class {
        match self {
            Error::DeviceString { .. }
            | Error::WildcardDevice { .. }
            | Error::NoDevices
            | Error::DuplicateDevice { .. }
            | Error::NoSuchDevice { .. }
            | Error::Split { .. }
            | Error::PjrtPlugin { .. }
            | Error::ProgramCache { .. } => Class::CONFIGURATION,
            // Cancelled, past a deadline, aborted, or not available, as a device that was lost.
            Error::Pjrt { code: 1 | 4 | 10 | 14, .. } => Class::new(Scope::Caller, FailureKind::Retryable),
            _ => Class::PERMANENT,
        }
    }
}
