//! Bindings of PJRT, opened at run time: argument structs, open integers for its enums, descriptive errors.
//!
//! PJRT is the C interface of XLA's devices. A plugin, such as `libtpu.so`, exports one function that returns a table
//! of all others. This crate opens a plugin, checks its table, and calls its functions; it manages neither ownership,
//! threads nor time. Building it requires nothing of XLA.
//!
//! - [`Library`]: an open plugin. [`Search`]: the places that are searched for it.
//! - [`Arguments`], and a struct for each function that the crate binds, such as [`ClientCreateArgs`].
//! - [`Function`]: the places of functions in the table.
//! - [`Code`], [`BufferType`], [`HostBufferSemantics`], [`ValueType`]: PJRT's enums as open integers.
//! - [`Error`]: no plugin was found, it lacks a function, or a call failed, with the plugin's own text.
//!
//! # Examples
//! ```no_run
//! use pjrt_sys::{Arguments, ClientCreateArgs, ClientDestroyArgs, Library, PluginInitializeArgs, Search};
//!
//! let plugin = Library::open(&Search::file("/opt/pjrt/plugin.so"))?;
//! // SAFETY: the plugin is initialised once, before all else; null pointers mean no options and no callbacks.
//! let client = unsafe {
//!     plugin.call(&mut PluginInitializeArgs::new())?;
//!     let mut create = ClientCreateArgs::new();
//!     plugin.call(&mut create)?;
//!     create.client
//! };
//! // SAFETY: the client was created above and is no longer used.
//! unsafe { plugin.call(&mut ClientDestroyArgs { client, ..ClientDestroyArgs::new() })? };
//! # Ok::<(), pjrt_sys::Error>(())
//! ```
//!
//! # Invariants
//! - A function is called only if the table is long enough to have it and its entry is not null.
//! - Structs have the layout of version 0.81 of the header. A plugin that is older reads the part that it knows; one
//!   that needs longer structs returns an error that names both sizes.
//! - An open plugin is never unloaded, since its threads may be running.
//!
//! # Source
//! `pjrt_c_api.h` of OpenXLA.

mod args;
mod buffer_type;
mod code;
mod error;
mod function;
mod library;
mod search;
mod structs;
mod version;

pub use args::{
    Arguments, BufferCopyToDeviceArgs, BufferCopyToMemoryArgs, BufferDeleteArgs, BufferDestroyArgs, BufferDeviceArgs,
    BufferDimensionsArgs, BufferElementTypeArgs, BufferIsDeletedArgs, BufferIsOnCpuArgs, BufferMemoryArgs,
    BufferOnDeviceSizeInBytesArgs, BufferReadyEventArgs, BufferToHostBufferArgs, ClientAddressableDevicesArgs,
    ClientAddressableMemoriesArgs, ClientBufferFromHostBufferArgs, ClientCompileArgs, ClientCreateArgs,
    ClientDefaultDeviceAssignmentArgs, ClientDestroyArgs, ClientDevicesArgs, ClientLookupAddressableDeviceArgs,
    ClientLookupDeviceArgs, ClientPlatformNameArgs, ClientPlatformVersionArgs, ClientProcessIndexArgs,
    ClientTopologyDescriptionArgs, CompileArgs, DeviceAddressableMemoriesArgs, DeviceDefaultMemoryArgs,
    DeviceDescriptionAttributesArgs, DeviceDescriptionDebugStringArgs, DeviceDescriptionIdArgs,
    DeviceDescriptionKindArgs, DeviceDescriptionProcessIndexArgs, DeviceDescriptionToStringArgs,
    DeviceGetDescriptionArgs, DeviceIsAddressableArgs, DeviceLocalHardwareIdArgs, DeviceMemoryStatsArgs,
    ErrorDestroyArgs, ErrorGetCodeArgs, ErrorMessageArgs, EventAwaitArgs, EventDestroyArgs, EventErrorArgs,
    EventIsReadyArgs, EventOnReadyArgs, ExecutableDeserializeAndLoadArgs, ExecutableDestroyArgs,
    ExecutableFingerprintArgs, ExecutableGetCompiledMemoryStatsArgs, ExecutableGetCostAnalysisArgs, ExecutableNameArgs,
    ExecutableNumOutputsArgs, ExecutableNumPartitionsArgs, ExecutableNumReplicasArgs, ExecutableOptimizedProgramArgs,
    ExecutableOutputDimensionsArgs, ExecutableOutputElementTypesArgs, ExecutableOutputMemoryKindsArgs,
    ExecutableSerializeArgs, ExecutableSizeOfGeneratedCodeInBytesArgs, LoadedExecutableAddressableDevicesArgs,
    LoadedExecutableDeleteArgs, LoadedExecutableDestroyArgs, LoadedExecutableExecuteArgs,
    LoadedExecutableGetExecutableArgs, LoadedExecutableIsDeletedArgs, MemoryAddressableByDevicesArgs,
    MemoryDebugStringArgs, MemoryIdArgs, MemoryKindArgs, MemoryToStringArgs, PluginAttributesArgs,
    PluginInitializeArgs, TopologyDescriptionAttributesArgs, TopologyDescriptionCreateArgs,
    TopologyDescriptionDestroyArgs, TopologyDescriptionGetDeviceDescriptionsArgs, TopologyDescriptionPlatformNameArgs,
    TopologyDescriptionPlatformVersionArgs,
};
pub use buffer_type::{BufferType, HostBufferSemantics};
pub use code::Code;
pub use error::{Attempt, Error, Problem};
pub use function::Function;
pub use library::{Library, TABLE_START};
pub use search::{ENV_PLUGIN, ENV_SKIP_METADATA, ENV_TPU_LIBRARY, NamedBy, Search};
pub use structs::{
    Buffer, CallbackError, Client, Device, DeviceDescription, Event, Executable, ExecuteContext, ExecuteOptions,
    KeyValueGetArgs, KeyValueGetCallback, KeyValuePutArgs, KeyValuePutCallback, KeyValueTryGetArgs,
    KeyValueTryGetCallback, LoadedExecutable, Memory, MemoryLayout, NamedValue, NamedValueUnion, OnReadyCallback,
    PjrtError, Program, SerializedExecutable, TiledLayout, TopologyDescription, ValueDeleter, ValueType,
};
pub use version::Version;

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
