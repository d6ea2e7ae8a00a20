//! A stand-in for `libnccl.so.2` on host memory: programs that open NCCL at run time can be tested without a GPU, with as
//! many ranks as they like, in threads or in processes.
//!
//! The shared object of this crate exports NCCL's functions; [`install`] links it into a folder under NCCL's name. It is
//! meant to lie beside a simulated CUDA driver, whose device memory is host memory: with a `libcuda.so.1` in the same
//! folder, or where the system's loader finds one, operations are enqueued on streams by `cuLaunchHostFunc`. Without one,
//! and on the null stream, they run on the calling thread.
//!
//! - `ncclGetUniqueId` starts a hub in the calling process: a listening socket of this machine, known by a port and a random
//!   token. Ranks send it what they bring to an operation, it computes and answers. It ends with its last connection.
//! - Sums are taken in the order of ranks; 16-bit and 8-bit floats are added as 32-bit ones and rounded once.
//! - A rank that ends makes `ncclCommGetAsyncError` of the others tell `ncclRemoteError`. Operations that wait for it wait on
//!   until their communicator is aborted, as NCCL's do; on the calling thread they return the error instead.
//! - Ranks that call different operations, types or counts break their communicator with `ncclInvalidUsage`; NCCL would do
//!   anything.
//! - A non-blocking communicator answers every operation with `ncclInProgress`, and once more when it is asked for its state.
//! - Operations may be captured into a graph, and match by capture and replay.
//! - Two ranks on one device of one host are refused. A host is known by its name, or by `NCCL_HOSTID`.
//!
//! # Environment
//!
//! | variable | default | meaning |
//! |---|---|---|
//! | `SIMULATED_NCCL_VERSION` | 22809 | what `ncclGetVersion` says; every function is there whatever it says |
//! | `SIMULATED_NCCL_FAIL` | | `function:nth:code`, separated by `;`: that call of that function, from 1, fails with that code; for `ncclCommGetAsyncError` the code is the state that it tells, from then on |
//! | `SIMULATED_NCCL_TRACE` | 0 | 1: each call and its result go to standard error |
//! | `NCCL_HOSTID` | the host's name | two processes with different ones count as two machines |
//! | `NCCL_MULTI_RANK_GPU_ENABLE` | 0 | 1, from version 2.30 on: ranks may share a device |
//!
//! # Examples
//! ```no_run
//! let folder = std::env::temp_dir();
//! let nccl = nccl_sys::Library::open(&nccl_sys::Search::file(simulated_nccl::install(&folder)?))?;
//! assert_eq!(nccl.version().to_string(), "2.28.9");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Not modelled
//! Time: an operation takes as long as loopback TCP does. Operations of one communicator on several streams are not ordered
//! among each other. Windows, one-sided operations and the device-side interface are missing.

mod batch;
mod comm;
mod cuda;
mod exports;
mod failure;
mod group;
mod hub;
mod install;
mod join;
mod link;
mod operation;
mod reduce;
mod registry;
mod settings;
mod wire;

pub use install::install;
