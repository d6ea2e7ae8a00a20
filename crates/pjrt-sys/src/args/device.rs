//! Devices, their descriptions, and memories.

use std::ffi::{c_char, c_int};

use crate::{Device, DeviceDescription, Memory, NamedValue};

arguments! {
    /// Arguments of `PJRT_DeviceDescription_Id`.
    struct DeviceDescriptionIdArgs for PJRT_DeviceDescription_Id {
        input device_description: *mut DeviceDescription,
        output id: c_int,
    }

    /// Arguments of `PJRT_DeviceDescription_ProcessIndex`.
    struct DeviceDescriptionProcessIndexArgs for PJRT_DeviceDescription_ProcessIndex {
        input device_description: *mut DeviceDescription,
        output process_index: c_int,
    }

    /// Arguments of `PJRT_DeviceDescription_Attributes`.
    struct DeviceDescriptionAttributesArgs for PJRT_DeviceDescription_Attributes {
        input device_description: *mut DeviceDescription,
        output num_attributes: usize,
        output attributes: *const NamedValue,
    }

    /// Arguments of `PJRT_DeviceDescription_Kind`.
    struct DeviceDescriptionKindArgs for PJRT_DeviceDescription_Kind {
        input device_description: *mut DeviceDescription,
        output device_kind: *const c_char,
        output device_kind_size: usize,
    }

    /// Arguments of `PJRT_DeviceDescription_DebugString`.
    struct DeviceDescriptionDebugStringArgs for PJRT_DeviceDescription_DebugString {
        input device_description: *mut DeviceDescription,
        output debug_string: *const c_char,
        output debug_string_size: usize,
    }

    /// Arguments of `PJRT_DeviceDescription_ToString`.
    struct DeviceDescriptionToStringArgs for PJRT_DeviceDescription_ToString {
        input device_description: *mut DeviceDescription,
        output to_string: *const c_char,
        output to_string_size: usize,
    }

    /// Arguments of `PJRT_Device_GetDescription`.
    struct DeviceGetDescriptionArgs for PJRT_Device_GetDescription {
        input device: *mut Device,
        output device_description: *mut DeviceDescription,
    }

    /// Arguments of `PJRT_Device_IsAddressable`.
    struct DeviceIsAddressableArgs for PJRT_Device_IsAddressable {
        input device: *mut Device,
        output is_addressable: bool,
    }

    /// Arguments of `PJRT_Device_LocalHardwareId`.
    struct DeviceLocalHardwareIdArgs for PJRT_Device_LocalHardwareId {
        input device: *mut Device,
        output local_hardware_id: c_int,
    }

    /// Arguments of `PJRT_Device_AddressableMemories`.
    struct DeviceAddressableMemoriesArgs for PJRT_Device_AddressableMemories {
        input device: *mut Device,
        output memories: *const *mut Memory,
        output num_memories: usize,
    }

    /// Arguments of `PJRT_Device_DefaultMemory`.
    struct DeviceDefaultMemoryArgs for PJRT_Device_DefaultMemory {
        input device: *mut Device,
        output memory: *mut Memory,
    }

    /// Arguments of `PJRT_Device_MemoryStats`.
    struct DeviceMemoryStatsArgs for PJRT_Device_MemoryStats {
        input device: *mut Device,
        output bytes_in_use: i64,
        output peak_bytes_in_use: i64,
        output peak_bytes_in_use_is_set: bool,
        output num_allocs: i64,
        output num_allocs_is_set: bool,
        output largest_alloc_size: i64,
        output largest_alloc_size_is_set: bool,
        output bytes_limit: i64,
        output bytes_limit_is_set: bool,
        output bytes_reserved: i64,
        output bytes_reserved_is_set: bool,
        output peak_bytes_reserved: i64,
        output peak_bytes_reserved_is_set: bool,
        output bytes_reservable_limit: i64,
        output bytes_reservable_limit_is_set: bool,
        output largest_free_block_bytes: i64,
        output largest_free_block_bytes_is_set: bool,
        output pool_bytes: i64,
        output pool_bytes_is_set: bool,
        output peak_pool_bytes: i64,
        output peak_pool_bytes_is_set: bool,
    }

    /// Arguments of `PJRT_Memory_Id`.
    struct MemoryIdArgs for PJRT_Memory_Id {
        input memory: *mut Memory,
        output id: c_int,
    }

    /// Arguments of `PJRT_Memory_Kind`.
    struct MemoryKindArgs for PJRT_Memory_Kind {
        input memory: *mut Memory,
        output kind: *const c_char,
        output kind_size: usize,
    }

    /// Arguments of `PJRT_Memory_DebugString`.
    struct MemoryDebugStringArgs for PJRT_Memory_DebugString {
        input memory: *mut Memory,
        output debug_string: *const c_char,
        output debug_string_size: usize,
    }

    /// Arguments of `PJRT_Memory_ToString`.
    struct MemoryToStringArgs for PJRT_Memory_ToString {
        input memory: *mut Memory,
        output to_string: *const c_char,
        output to_string_size: usize,
    }

    /// Arguments of `PJRT_Memory_AddressableByDevices`.
    struct MemoryAddressableByDevicesArgs for PJRT_Memory_AddressableByDevices {
        input memory: *mut Memory,
        output devices: *const *mut Device,
        output num_devices: usize,
    }
}
