//! Collective operations between the ranks of a process group: threads of one process, or processes on one or more
//! machines.
//!
//! The crate does not depend on training, tensors or models: it works on `&mut [T]`. Values are reduced in place,
//! without a copy into internal buffers.
//!
//! - [`ProcessGroup`] is the handle of one rank. Its methods are the blocking operations;
//!   [`start`](ProcessGroup::start) returns their asynchronous forms ([`Work`], a future), and
//!   [`parts`](ProcessGroup::parts) those for parts of different lengths.
//! - [`FusedAllReduce`] reduces many tensors in few operations, overlapped with backward, optionally with
//!   [`Compression`].
//! - [`schedule`] holds the algorithms, as plain lists of sends and receives that other code can execute or draw.
//! - [`transport`] has the byte streams between processes; implement [`transport::Transport`] for another network.
//! - [`DeviceGroup`] has the operations on device memory, ordered by streams.
//! - [`FlightRecord`] holds the last calls of each rank, and [`explain`] diagnoses a failure from them.
//! - [`Options`] has timeouts, transport and algorithm; [`Error`] is the error of all operations.
//!
//! # Examples
//! ```no_run
//! use distribute_collectives::{ProcessGroup, ReduceOp};
//!
//! let group = ProcessGroup::from_env()?;          // TF_CONFIG, or RANK/WORLD_SIZE/MASTER_ADDR, or a single process
//! let mut gradients = vec![1.0f32; 1 << 20];
//! group.all_reduce(&mut gradients, ReduceOp::Sum)?;
//! let work = group.start().all_reduce(gradients, ReduceOp::Mean)?;
//! // … compute meanwhile …
//! let gradients = work.wait()?;
//! # Ok::<(), distribute_collectives::Error>(())
//! ```
//!
//! # Invariants
//! - Every wait has a deadline; the loss of a peer is an error on the surviving ranks at once.
//! - Every call carries a fingerprint (kind, sequence number, type, length, tag, reduction, root); if ranks differ, all
//!   of them get an error that names both sides. A process that only sent in that call gets it from a later one.
//! - For a given number of ranks, placement and options the order of every reduction is fixed: results repeat bit for
//!   bit.

mod call;
mod compression;
mod cross_device;
mod device_group;
mod engine;
mod environment;
mod error;
mod fusion;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod group;
mod op;
mod options;
mod present;
mod recorder;
mod reduction;
pub mod schedule;
mod sync;
pub mod transport;

pub use call::{Call, Kind, Reducing};
pub use compression::{Compression, Compressor, CustomCompression, Payload};
pub use cross_device::{
    CrossDeviceOps, HierarchicalCopyAllReduce, NcclAllReduce, ReductionToOneDevice, SharedCrossDeviceOps,
};
pub use device_group::{DeviceGroup, DeviceImplementation, FusedDeviceAllReduce, FusedDeviceStep};
pub use distribute_device::{BufferMut, BufferRef, DType};
pub use distribute_types::{Rank, Scope};
pub use engine::memory::OwnedBuffers;
pub use error::{Error, Result};
pub use fusion::{Bucket, BucketPlan, FusedAllReduce, FusedStep, FusedTensor, FusionOptions};
pub use group::{
    Difference, Parts, ProcessGroup, SparseRows, Start, StartParts, Work, first_difference, on_each_local_rank,
    on_local_ranks,
};
pub use op::ReduceOp;
pub use options::Options;
pub use present::{EndedCall, Presence, PresentCall, present};
pub use recorder::{FlightRecord, RecordedOperation, RecordedState, explain};
pub use reduction::{Operator, Reduction};
pub use schedule::Algorithm;
pub use transport::TransportKind;

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
