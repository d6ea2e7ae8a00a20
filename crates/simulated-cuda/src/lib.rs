//! A stand-in for `libcuda.so.1` and `libnvrtc.so` on host memory: programs that load CUDA at run time can be tested from
//! end to end on a machine without a GPU, and run the kernels that they bring.
//!
//! The shared object of this crate exports the driver's `cu*` functions and the compiler's `nvrtc*` functions. [`install`]
//! links it into a directory under the names that loaders look for, and [`command`] prepares a program that finds it there.
//! A test that calls [`inside`] runs in such a process itself.
//!
//! - Device memory is host memory behind a guard page, filled with [`POISON`]; an address is never given out twice.
//! - Streams are threads; what is queued runs in order within a stream and in no order between streams without events.
//! - Kernels are compiled as C by the system's `cc`. Each takes one struct and is written
//!   `KERNEL(name, Params, MAX_THREADS) { .. p.field .. threadIdx.x .. }`; blocks run one by one, in a scrambled order.
//!   There is no shared memory and no `__syncthreads`.
//! - A copy, fill or kernel that meets memory that is not (or no longer) allocated fails the context for good, as a GPU does.
//!
//! # Environment
//!
//! | variable | default | meaning |
//! |---|---|---|
//! | `SIMULATED_CUDA_DEVICES` | 2 | number of devices; with 0, `cuInit` finds none |
//! | `SIMULATED_CUDA_MEMORY_MIB` | 1024 | memory of each device, in MiB |
//! | `SIMULATED_CUDA_PEER` | `all` | devices that reach each other's memory: `all`, `none` or pairs, `0-1,1-0` |
//! | `SIMULATED_CUDA_ARCH` | `9.0` | compute capability |
//! | `SIMULATED_CUDA_DRIVER_VERSION` | 13000 | what `cuDriverGetVersion` says |
//! | `SIMULATED_CUDA_POOLS` | 1 | 0: memory pools, and with them `cuMemAllocAsync`, are not supported |
//! | `SIMULATED_CUDA_DELAY_US` | 0 | before each operation a stream pauses at random for up to so many microseconds |
//! | `SIMULATED_CUDA_SEED` | 1 | seed of those pauses and of the order of blocks |
//! | `SIMULATED_CUDA_FAIL` | | `function:nth:code`, separated by `;`: that call of that function, from 1, fails with that code |
//! | `SIMULATED_CUDA_DEADLINE_S` | 120 | longest wait for a stream, an event or the compiler |
//! | `SIMULATED_CUDA_CC` | `cc` | compiler of kernels |
//! | `SIMULATED_CUDA_TRACE` | 0 | 1: each call and its result go to standard error |
//! | `CUDA_VISIBLE_DEVICES` | | indices of visible devices, in order; `-1` or nothing: none |
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
//! Default streams are streams like others: they wait for nobody. Managed memory, textures, external memory, clusters and
//! allocations inside graphs are missing, and a graph runs as one sequence.
#![expect(unsafe_code, reason = "the C interface of CUDA, on raw memory")]

mod context;
mod device;
mod error;
mod event;
mod exports;
mod ffi;
mod graph;
mod inside;
mod install;
mod memory;
mod module;
mod nvrtc;
mod pool;
mod registry;
mod settings;
mod simulator;
mod stream;
mod work;

pub use inside::inside;
pub use install::{command, install};
pub use memory::POISON;
