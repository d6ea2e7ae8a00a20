//! A stand-in for `libnccl.so.2` on host memory: programs that open NCCL at run time can be tested without a GPU, with
//! any number of ranks, in threads or in processes.
//!
//! The shared object of this crate exports NCCL's functions; [`install`] links it into a folder under NCCL's name. It
//! is designed for use with a simulated CUDA driver, whose device memory is host memory: with a `libcuda.so.1` in the
//! same folder, or one found by the system's loader, operations are enqueued on streams by `cuLaunchHostFunc`. Without
//! one, and on the null stream, they run on the calling thread.
//!
//! - `ncclGetUniqueId` starts a hub in the calling process: a listening socket on this machine, identified by a port
//!   and a random token. Ranks send it their data for an operation; it computes and replies. It ends with its last
//!   connection.
//! - Sums are computed in rank order; 16-bit and 8-bit floats are added in 32 bits and rounded once.
//! - After a rank ends, `ncclCommGetAsyncError` of the others reports `ncclRemoteError`. Operations that wait for it
//!   keep waiting until their communicator is aborted, as with NCCL; on the calling thread they return the error
//!   instead.
//! - Ranks that call different operations, types or counts break their communicator with `ncclInvalidUsage`; NCCL's
//!   behaviour is undefined.
//! - A non-blocking communicator answers every operation with `ncclInProgress`, and once more when its state is
//!   queried.
//! - Operations may be captured into a graph, and are matched by capture and replay.
//! - With CUDA, memory of another device than the communicator's is refused, as are addresses that the driver does not
//!   know: NCCL does so with `NCCL_CHECK_POINTERS=1`. On the null stream, memory is not checked.
//! - Two ranks on one device of one host are refused. A host is identified by its name, or by `NCCL_HOSTID`.
//!
//! # Environment
//!
//! | variable | default | meaning |
//! |---|---|---|
//! | `SIMULATED_NCCL_VERSION` | 22809 | result of `ncclGetVersion`; all functions exist in any case |
//! | `SIMULATED_NCCL_FAIL` | | injected failures, see below |
//! | `SIMULATED_NCCL_TRACE` | 0 | 1: each call and its result are logged to standard error |
//! | `NCCL_HOSTID` | the host's name | two processes with different values count as two machines |
//! | `NCCL_MULTI_RANK_GPU_ENABLE` | 0 | 1, since version 2.30: ranks may share a device |
//!
//! `SIMULATED_NCCL_FAIL` is a list of `function:nth:code`, separated by `;`: the nth call (from 1) of the function
//! fails with the code; with `function:nth:code:microseconds` after that time. For `ncclCommGetAsyncError` the code is
//! the state that it reports, from that call on. A list with another function ends the process, with a sentence on
//! standard error.
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
//! Time: an operation takes as long as loopback TCP does. Operations of one communicator on several streams are not
//! ordered relative to each other. Windows, one-sided operations and the device-side interface are missing.

mod batch;
mod comm;
mod cuda;
mod exports;
mod failure;
mod functions;
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
