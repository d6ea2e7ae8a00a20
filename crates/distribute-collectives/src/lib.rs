//! Collective operations between the ranks of a process group: threads of one process, or processes of one or many
//! machines.
//!
//! The crate knows nothing of training, tensors or models: it works on `&mut [T]`. Values are reduced where they are,
//! without a copy into buffers of its own.
//!
//! - [`ProcessGroup`]: one rank's handle; its methods are the operations, which wait; [`start`](ProcessGroup::start) has those that
//!   return at once ([`Work`], a future), [`parts`](ProcessGroup::parts) those on parts of different lengths.
//! - [`FusedAllReduce`]: many tensors in few operations, overlapped with backward; with [`Compression`].
//! - [`schedule`]: the algorithms, as plain lists of sends and receives that anybody can execute or draw.
//! - [`transport`]: byte streams between processes; implement [`transport::Transport`] for a network of your own.
//! - [`DeviceGroup`]: the operations on memory of devices, in the order of their streams.
//! - [`FlightRecord`]: the last calls of each rank, and [`explain`], which diagnoses a failure from them.
//! - [`Options`]: timeouts, transport and algorithm; [`Error`].
//!
//! # Examples
//! ```no_run
//! use distribute_collectives::{ProcessGroup, ReduceOp};
//!
//! let group = ProcessGroup::from_env()?;          // TF_CONFIG, or RANK/WORLD_SIZE/MASTER_ADDR, or alone
//! let mut gradients = vec![1.0f32; 1 << 20];
//! group.all_reduce(&mut gradients, ReduceOp::Sum)?;
//! let work = group.start().all_reduce(gradients, ReduceOp::Mean)?;
//! // … compute meanwhile …
//! let gradients = work.wait()?;
//! # Ok::<(), distribute_collectives::Error>(())
//! ```
//!
//! # Invariants
//! - Every wait has a deadline; a lost peer is an error on the survivors, at once.
//! - Every call carries a fingerprint (kind, sequence number, type, length, reduction, root); a difference between
//!   ranks is an error on all of them that names both sides.
//! - For a given rank count, placement and options the order of every reduction is fixed: results repeat bit for bit.

mod call;
mod compression;
mod cross_device;
mod device_group;
mod engine;
mod environment;
mod error;
mod fusion;
mod group;
mod kernel;
mod op;
mod options;
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
    Difference, Parts, ProcessGroup, SparseRows, Start, StartParts, Work, first_difference, on_local_ranks,
};
pub use op::ReduceOp;
pub use options::Options;
pub use recorder::{FlightRecord, RecordedOperation, RecordedState, explain};
pub use reduction::{Operator, Reduction};
pub use schedule::Algorithm;
pub use transport::TransportKind;
