//! A stand-in for `libcuda.so.1` and `libnvrtc.so` on host memory: programs that load CUDA at run time can be tested
//! end to end on a machine without a GPU, including the kernels that they contain.
//!
//! The shared object of this crate exports the driver's `cu*` functions and the compiler's `nvrtc*` functions.
//! [`install`] links it into a directory under the names that loaders search for, and [`command`] prepares a program
//! that finds it there. A test that calls [`inside`] runs in such a process itself.
//!
//! - Device memory is host memory followed by a guard page, filled with [`POISON`]; an address is never reused.
//! - Streams are threads; queued operations run in order within a stream, and in no order between streams without
//!   events.
//! - Kernels are compiled as C by the system's `cc`. Each takes one struct and is written
//!   `KERNEL(name, Params, MAX_THREADS) { .. p.field .. threadIdx.x .. }`; blocks run one by one, in a scrambled order,
//!   and so do the threads of a block: in ascending order, and in descending order in every second launch of a kernel.
//!   `PHASED_KERNEL` has shared memory, and a barrier of its block's threads between phases. `__shared__` and
//!   `__syncthreads` are not supported.
//! - A copy, fill or kernel that accesses memory that is not (or no longer) allocated fails the context permanently, as
//!   on a GPU.
//!
//! # Environment
//!
//! | variable | default | meaning |
//! |---|---|---|
//! | `SIMULATED_CUDA_DEVICES` | 2 | number of devices; with 0, `cuInit` finds none |
//! | `SIMULATED_CUDA_MEMORY_MIB` | 1024 | memory of each device, in MiB |
//! | `SIMULATED_CUDA_PEER` | `all` | devices with access to each other's memory: `all`, `none` or pairs, `0-1,1-0` |
//! | `SIMULATED_CUDA_ARCH` | `9.0` | compute capability |
//! | `SIMULATED_CUDA_DRIVER_VERSION` | 13000 | result of `cuDriverGetVersion` |
//! | `SIMULATED_CUDA_POOLS` | 1 | 0: memory pools, and with them `cuMemAllocAsync`, are not supported |
//! | `SIMULATED_CUDA_DELAY_US` | 0 | longest random pause of a stream before each operation, in microseconds |
//! | `SIMULATED_CUDA_SEED` | 1 | seed of those pauses and of the order of blocks |
//! | `SIMULATED_CUDA_FAIL` | | `function:nth:code`, separated by `;`: the nth call (from 1) fails with that code |
//! | `SIMULATED_CUDA_SLOW` | | `function:microseconds`, separated by `;`: each call takes at least that time |
//! | `SIMULATED_CUDA_DEADLINE_S` | 120 | longest wait for a stream, an event or the compiler |
//! | `SIMULATED_CUDA_CC` | `cc` | compiler of kernels |
//! | `SIMULATED_CUDA_TRACE` | 0 | 1: each call and its result are logged to standard error |
//! | `CUDA_VISIBLE_DEVICES` | | indices of visible devices, in order; `-1` or empty: none |
//!
//! Each call fails with `CUDA_ERROR_UNKNOWN` if a variable is malformed or names a function that is not exported, and
//! says so on standard error.
//!
//! # Examples
//!
//! ```no_run
//! # fn main() -> std::io::Result<()> {
//! let directory = std::env::temp_dir().join("cuda");
//! std::fs::create_dir_all(&directory)?;
//! simulated_cuda::install(&directory)?;
//! let status = simulated_cuda::command("./trains-on-cuda", &directory).status()?;
//! # drop(status);
//! # Ok(())
//! # }
//! ```
//!
//! # Not modelled
//!
//! Default streams are ordinary streams that do not synchronize with others. Managed memory, textures, external memory,
//! clusters and allocations inside graphs are missing, and a graph runs as one sequence.
#![expect(unsafe_code, reason = "the C interface of CUDA, on raw memory")]

mod context;
mod device;
mod error;
mod event;
mod exports;
mod ffi;
mod functions;
mod graph;
mod inside;
mod install;
mod mark;
mod memory;
mod module;
mod nvrtc;
mod pool;
mod random;
mod registry;
mod settings;
mod stream;
mod teardown;
mod work;

pub use inside::inside;
pub use install::{command, install};
pub use memory::POISON;
