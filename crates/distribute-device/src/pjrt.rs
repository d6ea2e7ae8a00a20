//! Devices of XLA: StableHLO programs on TPUs and other devices, by PJRT plugins (feature `pjrt`).
//!
//! | to | use |
//! |---|---|
//! | open a plugin | [`Plugin`], [`Search`] |
//! | use its devices | [`Client`], [`ClientOptions`], [`PjrtDevice`] |
//! | form one client of several hosts | [`KeyValueStore`] |
//! | move values to a device and back | [`Buffer`], [`Download`], [`ElementType`] |
//! | compile and run a program | [`CompileOptions`], [`Executable`], [`Execution`] |
//! | compile for devices that are not there | [`Topology`], [`CompiledProgram`] |
//! | keep compiled programs on disk | [`ProgramCache`] |
//!
//! # Examples
//! ```no_run
//! use std::time::{Duration, Instant};
//! use distribute_device::pjrt::{Client, ClientOptions, CompileOptions, Plugin, Search};
//!
//! let soon = || Instant::now() + Duration::from_secs(60);
//! let plugin = Plugin::open(&Search::new(), soon())?;
//! let client = Client::create(&plugin, ClientOptions::new(), soon())?;
//! let devices = client.addressable_devices();
//!
//! let program = "module { func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> {
//!     %y = stablehlo.add %x, %x : tensor<2xf32>
//!     return %y : tensor<2xf32>
//! } }";
//! let double = client.compile(program, &CompileOptions::for_devices(&devices[..1]), soon())?;
//! let x = devices[0].upload_slice(&[1.0f32, 2.0], &[2])?;
//! let outputs = double.execute(&[vec![&x]], soon())?;
//! assert_eq!(outputs[0][0].to_vec::<f32>(soon())?, [2.0, 4.0]);
//! # Ok::<(), distribute_device::Error>(())
//! ```
//!
//! # Invariants
//! - Values keep alive what they need: a buffer its client, a client its plugin. They may be dropped in any order, on
//!   any thread.
//! - Host memory that a copy reads or writes is not freed, and cannot be changed, before the plugin reports the end of
//!   the copy.
//! - Every wait has a deadline. What the plugin never finishes is leaked: the host memory of that copy, about 200 bytes
//!   for the event, and the client, which is not destroyed while the plugin has not finished
//!   ([`Plugin::abandoned_clients`]).
//! - Opening, creating a client and compiling run on a thread of their own, which is abandoned at the deadline. All
//!   other calls return when the plugin does: PJRT starts their work and does not wait for it.
//!
//! # Source
//! `pjrt_c_api.h` of OpenXLA, by the crate `pjrt-sys`.

mod bounded;
mod buffer;
mod cache;
mod client;
mod compile_options;
mod completion;
mod description;
mod device;
mod element_type;
mod executable;
mod handle;
mod key_value;
mod plugin;
mod program;
mod topology;
mod value;

pub use buffer::{Buffer, Download};
pub use cache::{CacheOutcome, ProgramCache};
pub use client::{Client, ClientOptions};
pub use compile_options::CompileOptions;
pub use completion::Completion;
pub use description::DeviceDescription;
pub use device::{DeviceMemoryStats, PjrtDevice};
pub use distribute_types::ElementType;
pub use executable::{Executable, ExecuteOptions, Execution};
pub use key_value::{KeyValueError, KeyValueStore};
pub use pjrt_sys::{Code, Search, Version};
pub use plugin::Plugin;
pub use program::{CompiledProgram, OptimizedProgram, ProgramMemoryStats};
pub use topology::Topology;
pub use value::{Attributes, Value};
