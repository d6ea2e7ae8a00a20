//! Devices to compute and store on: device strings, data types, discovery, buffers, streams and copies.
//!
//! This crate does not depend on tensors, collectives or networks. It describes the devices of a process and moves
//! bytes between host and devices; all crates above it name devices and memory by its types.
//!
//! | to | use |
//! |---|---|
//! | name a device as TensorFlow does | [`DeviceSpec`], [`DeviceKind`], [`DeviceIndex`], [`parse_device_list`] |
//! | list the machine's devices | [`discover`], [`PhysicalDevice`], [`absence`] |
//! | choose the devices of a process | [`Devices`], [`LogicalDevice`] |
//! | describe elements | [`DType`], [`Element`] |
//! | borrow host memory of any data type | [`BufferRef`], [`BufferMut`] |
//! | own host memory, aligned or pinned | [`HostBuffer`], [`HostMemory`] |
//! | hold memory on a device | [`DeviceBuffer`], [`DeviceMemory`] |
//! | order work and copies | [`Device`], [`Stream`], [`Event`], [`Transfer`] |
//! | do all of this without an accelerator | [`CpuDevice`] |
//! | compute on GPUs, with the feature `cuda` | `cuda::CudaDevice`, `cuda::CudaStream` |
//! | run StableHLO on devices of XLA, with the feature `pjrt` | `pjrt::Client`, `pjrt::Executable`, `pjrt::Buffer` |
//!
//! # Examples
//! Two logical CPUs; one stream each; a copy to the first, across to the second, and back:
//! ```
//! use std::time::{Duration, Instant};
//! use distribute_device::{Devices, HostBuffer};
//!
//! let devices = Devices::with_cpus(2)?;
//! let first = devices.open(&"CPU:0".parse()?)?;
//! let second = devices.open(&"CPU:1".parse()?)?;
//! let (there, back) = (first.create_stream()?, second.create_stream()?);
//! let (a, b) = (first.allocate(8)?, second.allocate(8)?);
//!
//! let arrived = first.create_event()?;
//! there.copy_from_host(HostBuffer::from_slice(&[1.0f32, 2.0])?, 0, &a)?;
//! there.copy_peer(&a, &b)?;
//! there.record(&*arrived)?;
//! back.wait(&*arrived)?;
//! let mut read = back.copy_to_host(&b, second.allocate_host(8)?, 0)?;
//!
//! let host = read.wait(Instant::now() + Duration::from_secs(10))?;
//! assert_eq!(host.as_slice::<f32>()?, [1.0, 2.0]);
//! # Ok::<(), distribute_device::Error>(())
//! ```
//!
//! # Invariants
//! - There is no global state: a [`Devices`] is a value, and two of them are independent.
//! - Every wait has a deadline, and its error names the operation that was waited for.
//! - Memory that an asynchronous copy uses lives until the copy has ended, whatever the caller drops.
//! - Malformed names and missing devices are errors with a message, never panics.

mod account;
mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod device;
mod devices;
mod discover;
#[cfg(any(feature = "cuda", feature = "pjrt"))]
mod environment;
mod error;
mod event;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz;
mod host_buffer;
mod host_fn;
mod logical;
mod mutex;
#[cfg(feature = "pjrt")]
pub mod pjrt;
mod spec;
mod transfer;
mod view;
#[cfg(any(feature = "cuda", feature = "pjrt"))]
mod whole_file;

pub use account::MemoryUse;
pub use cpu::{CpuDevice, CpuOptions};
pub use device::{Device, DeviceBuffer, DeviceMemory, Stream};
pub use devices::{Devices, parse_device_list};
pub use discover::{PhysicalDevice, absence, discover};
pub use distribute_types::{DType, Element, bf16, f16};
pub use error::{Error, Result};
pub use event::Event;
pub use host_buffer::{HOST_ALIGN_BYTES, HostBuffer, HostMemory};
pub use host_fn::HostFn;
pub use logical::LogicalDevice;
pub use spec::{DeviceIndex, DeviceKind, DeviceSpec};
pub use transfer::{HostSlot, Transfer};
pub use view::{BufferMut, BufferRef};

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
