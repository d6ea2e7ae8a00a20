//! Clients.

use std::ffi::{c_char, c_int, c_void};

use crate::{
    Buffer, BufferType, Client, Device, Event, HostBufferSemantics, KeyValueGetCallback, KeyValuePutCallback,
    KeyValueTryGetCallback, LoadedExecutable, Memory, MemoryLayout, NamedValue, Program, TopologyDescription,
};

arguments! {
    /// Arguments of `PJRT_Client_Create`.
    struct ClientCreateArgs for PJRT_Client_Create {
        input create_options: *const NamedValue,
        input num_options: usize,
        input kv_get_callback: Option<KeyValueGetCallback>,
        input kv_get_user_arg: *mut c_void,
        input kv_put_callback: Option<KeyValuePutCallback>,
        input kv_put_user_arg: *mut c_void,
        output client: *mut Client,
        input kv_try_get_callback: Option<KeyValueTryGetCallback>,
        input kv_try_get_user_arg: *mut c_void,
    }

    /// Arguments of `PJRT_Client_Destroy`.
    struct ClientDestroyArgs for PJRT_Client_Destroy {
        input client: *mut Client,
    }

    /// Arguments of `PJRT_Client_PlatformName`.
    struct ClientPlatformNameArgs for PJRT_Client_PlatformName {
        input client: *mut Client,
        output platform_name: *const c_char,
        output platform_name_size: usize,
    }

    /// Arguments of `PJRT_Client_ProcessIndex`.
    struct ClientProcessIndexArgs for PJRT_Client_ProcessIndex {
        input client: *mut Client,
        output process_index: c_int,
    }

    /// Arguments of `PJRT_Client_PlatformVersion`.
    struct ClientPlatformVersionArgs for PJRT_Client_PlatformVersion {
        input client: *mut Client,
        output platform_version: *const c_char,
        output platform_version_size: usize,
    }

    /// Arguments of `PJRT_Client_TopologyDescription`.
    struct ClientTopologyDescriptionArgs for PJRT_Client_TopologyDescription {
        input client: *mut Client,
        output topology: *mut TopologyDescription,
    }

    /// Arguments of `PJRT_Client_Devices`.
    struct ClientDevicesArgs for PJRT_Client_Devices {
        input client: *mut Client,
        output devices: *const *mut Device,
        output num_devices: usize,
    }

    /// Arguments of `PJRT_Client_AddressableDevices`.
    struct ClientAddressableDevicesArgs for PJRT_Client_AddressableDevices {
        input client: *mut Client,
        output addressable_devices: *const *mut Device,
        output num_addressable_devices: usize,
    }

    /// Arguments of `PJRT_Client_LookupDevice`.
    struct ClientLookupDeviceArgs for PJRT_Client_LookupDevice {
        input client: *mut Client,
        input id: c_int,
        output device: *mut Device,
    }

    /// Arguments of `PJRT_Client_LookupAddressableDevice`.
    struct ClientLookupAddressableDeviceArgs for PJRT_Client_LookupAddressableDevice {
        input client: *mut Client,
        input local_hardware_id: c_int,
        output addressable_device: *mut Device,
    }

    /// Arguments of `PJRT_Client_AddressableMemories`.
    struct ClientAddressableMemoriesArgs for PJRT_Client_AddressableMemories {
        input client: *mut Client,
        output addressable_memories: *const *mut Memory,
        output num_addressable_memories: usize,
    }

    /// Arguments of `PJRT_Client_Compile`.
    struct ClientCompileArgs for PJRT_Client_Compile {
        input client: *mut Client,
        input program: *const Program,
        input compile_options: *const c_char,
        input compile_options_size: usize,
        output executable: *mut LoadedExecutable,
    }

    /// Arguments of `PJRT_Client_DefaultDeviceAssignment`.
    struct ClientDefaultDeviceAssignmentArgs for PJRT_Client_DefaultDeviceAssignment {
        input client: *mut Client,
        input num_replicas: c_int,
        input num_partitions: c_int,
        input default_assignment_size: usize,
        output default_assignment: *mut c_int,
    }

    /// Arguments of `PJRT_Client_BufferFromHostBuffer`.
    struct ClientBufferFromHostBufferArgs for PJRT_Client_BufferFromHostBuffer {
        input client: *mut Client,
        input data: *const c_void,
        input kind: BufferType,
        input dims: *const i64,
        input num_dims: usize,
        input byte_strides: *const i64,
        input num_byte_strides: usize,
        input host_buffer_semantics: HostBufferSemantics,
        input device: *mut Device,
        input memory: *mut Memory,
        input device_layout: *mut MemoryLayout,
        output done_with_host_buffer: *mut Event,
        output buffer: *mut Buffer,
    }
}
