//! What can go wrong with devices.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use crate::DType;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A data type's name was not recognised.
    #[error("data type {given:?} is not known; give one of f32, f64, f16, bf16, i8, u8, i32, u32, i64, u64")]
    UnknownDType {
        /// The name that was given.
        given: String,
    },
    /// A device name could not be read.
    #[error("device {given:?}: {problem}; write it like GPU:0 or /job:worker/replica:0/task:1/device:GPU:0")]
    DeviceString {
        /// What was given.
        given: String,
        /// What is wrong with it.
        problem: String,
    },
    /// One device was needed, and the name stands for every device of its type.
    #[error("device {given} names every device of its type, but one is needed here; give a number in place of the *")]
    WildcardDevice {
        /// The name.
        given: String,
    },
    /// A list of devices has no entry.
    #[error("the list of devices is empty; name at least one, such as CPU:0")]
    NoDevices,
    /// A list of devices names one device twice.
    #[error(
        "the list of devices names {device} twice, as {first:?} (place {first_place}) and as {second:?} (place \
         {second_place}); name each device once"
    )]
    DuplicateDevice {
        /// The canonical name.
        device: String,
        /// How it was written first.
        first: String,
        /// Where, from 0.
        first_place: usize,
        /// How it was written the second time.
        second: String,
        /// Where, from 0.
        second_place: usize,
    },
    /// A device is not among those of this process.
    #[error("device {asked} is not there: {reason}")]
    NoSuchDevice {
        /// What was asked for.
        asked: String,
        /// What is there instead, or why it is not, and what to do.
        reason: String,
    },
    /// A physical device cannot be split as asked.
    #[error("{device} cannot be split into {count} logical devices: {problem}")]
    Split {
        /// The physical device.
        device: String,
        /// How many logical devices were asked for.
        count: usize,
        /// What is wrong with that.
        problem: String,
    },
    /// A view was asked for elements of another type than it holds.
    #[error("elements of type {asked} were asked for, but the buffer holds {held}; ask for {held}, or convert first")]
    WrongDType {
        /// The type that was asked for.
        asked: DType,
        /// The type that is there.
        held: DType,
    },
    /// A range of elements is not inside the buffer.
    #[error("elements {start}..{end} were asked for, but the buffer holds {len}")]
    OutOfRange {
        /// First element of the range.
        start: usize,
        /// One past its last element.
        end: usize,
        /// Elements in the buffer.
        len: usize,
    },
    /// A range of bytes is not inside the buffer.
    #[error(
        "{what}: bytes {start}..{end} were asked for, but there are {len_bytes}; shorten the range \
         or allocate more"
    )]
    ByteRange {
        /// Which buffer.
        what: &'static str,
        /// First byte of the range.
        start: usize,
        /// One past its last byte; `usize::MAX` where it cannot be counted.
        end: usize,
        /// Bytes in the buffer.
        len_bytes: usize,
    },
    /// Memory does not divide into whole elements.
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
    /// Memory does not begin where it must.
    #[error("memory at an address that is no multiple of {needed_bytes} was given; copy it to a HostBuffer first")]
    Misaligned {
        /// What the address must be a multiple of.
        needed_bytes: usize,
    },
    /// The host has not that much memory.
    #[error("{len_bytes} bytes of host memory could not be allocated; use smaller buffers or fewer of them")]
    HostMemory {
        /// The size that was asked for.
        len_bytes: usize,
    },
    /// A device's memory, or its share of it, is used up.
    #[error(
        "{device}: {asked_bytes} bytes were asked for, but {used_bytes} of {limit_bytes} are in use; \
         free buffers, use \
         smaller ones, or raise the device's memory limit"
    )]
    DeviceMemory {
        /// The device.
        device: String,
        /// The size that was asked for.
        asked_bytes: u64,
        /// What is in use.
        used_bytes: u64,
        /// What the device may use.
        limit_bytes: u64,
    },
    /// The two ends of a copy are not of one size.
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
    /// A buffer or event of one device or backend was given to another.
    #[error("{user} cannot use this {what}, which belongs to {owner}; {remedy}")]
    Foreign {
        /// A buffer, an event or a device.
        what: &'static str,
        /// Where it belongs.
        owner: String,
        /// Who was asked to use it.
        user: String,
        /// What to do instead.
        remedy: &'static str,
    },
    /// A wait ended before what it waited for.
    #[error("{operation} did not finish within {waited:.1?} ({state}); give it more time if it is only slow")]
    Deadline {
        /// What was waited for, and where.
        operation: String,
        /// How long.
        waited: Duration,
        /// What was known of it then.
        state: String,
    },
    /// An operation of a stream failed; later ones were not run.
    #[error(
        "{stream}: {operation} failed, and what was queued after it was not run; make a new \
         stream once it is mended"
    )]
    Stream {
        /// The stream.
        stream: String,
        /// The first operation that failed.
        operation: &'static str,
        /// Why it failed.
        source: Arc<Error>,
    },
    /// The driver of a GPU refused a call, or what was enqueued failed.
    #[error("{device}: {operation} failed: {cause}")]
    Cuda {
        /// What was asked of it.
        operation: &'static str,
        /// The device.
        device: String,
        /// The driver's name for the error and its words.
        cause: String,
    },
    /// CUDA's run-time compiler cannot be used.
    #[error(
        "kernels cannot be compiled for this GPU: {problem}; install libnvrtc of CUDA 12 or 13 (the Python package \
         nvidia-cuda-nvrtc has it), or name its file in DISTRIBUTE_NVRTC_LIBRARY"
    )]
    Nvrtc {
        /// What is wrong.
        problem: String,
    },
    /// A kernel was not accepted by the compiler.
    #[error("kernel {name} could not be compiled: {problem}")]
    Kernel {
        /// The file.
        name: String,
        /// What the compiler said.
        problem: String,
    },
    /// Memory for a kernel does not fit what it is to do.
    #[error("{operation}: {problem}")]
    Operands {
        /// What was asked for.
        operation: &'static str,
        /// What is wrong, and what to give.
        problem: String,
    },
    /// A function of the caller, run in a stream, returned an error.
    #[error("a host function returned an error: {source}")]
    HostFunction {
        /// What it returned.
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
        /// What the system said.
        source: io::Error,
    },
}

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;
