//! Sizes and offsets, as a C compiler finds them in version 0.81 of `pjrt_c_api.h`.

use std::mem::offset_of;

use super::*;
use crate::structs::*;

/// Compares the size that a struct tells, and the offset of each field, with those of the header.
macro_rules! layout {
    ($($name:ident: $size:literal { $($field:ident $offset:literal),* })*) => {$(
        assert_eq!($name::new().struct_size, $size, stringify!($name));
        assert!(size_of::<$name>() - $size < 8, stringify!($name));
        $(assert_eq!(offset_of!($name, $field), $offset, concat!(stringify!($name), "::", stringify!($field)));)*
    )*};
}

#[test]
fn structs_have_the_layout_of_the_header() {
    layout! {
        ErrorDestroyArgs: 24 { struct_size 0, extension_start 8, error 16 }
        ErrorMessageArgs: 40 { struct_size 0, extension_start 8, error 16, message 24, message_size 32 }
        ErrorGetCodeArgs: 28 { struct_size 0, extension_start 8, error 16, code 24 }
        PluginInitializeArgs: 16 { struct_size 0, extension_start 8 }
        PluginAttributesArgs: 32 { struct_size 0, extension_start 8, attributes 16, num_attributes 24 }
        EventDestroyArgs: 24 { struct_size 0, extension_start 8, event 16 }
        EventIsReadyArgs: 25 { struct_size 0, extension_start 8, event 16, is_ready 24 }
        EventErrorArgs: 24 { struct_size 0, extension_start 8, event 16 }
        EventAwaitArgs: 24 { struct_size 0, extension_start 8, event 16 }
        EventOnReadyArgs: 40 { struct_size 0, extension_start 8, event 16, callback 24, user_arg 32 }
        ClientCreateArgs: 88 {
            struct_size 0, extension_start 8, create_options 16, num_options 24, kv_get_callback 32, kv_get_user_arg 40,
            kv_put_callback 48, kv_put_user_arg 56, client 64, kv_try_get_callback 72, kv_try_get_user_arg 80
        }
        ClientDestroyArgs: 24 { struct_size 0, extension_start 8, client 16 }
        ClientPlatformNameArgs: 40 {
            struct_size 0, extension_start 8, client 16, platform_name 24, platform_name_size 32
        }
        ClientProcessIndexArgs: 28 { struct_size 0, extension_start 8, client 16, process_index 24 }
        ClientPlatformVersionArgs: 40 {
            struct_size 0, extension_start 8, client 16, platform_version 24, platform_version_size 32
        }
        ClientTopologyDescriptionArgs: 32 { struct_size 0, extension_start 8, client 16, topology 24 }
        ClientDevicesArgs: 40 { struct_size 0, extension_start 8, client 16, devices 24, num_devices 32 }
        ClientAddressableDevicesArgs: 40 {
            struct_size 0, extension_start 8, client 16, addressable_devices 24, num_addressable_devices 32
        }
        ClientLookupDeviceArgs: 40 { struct_size 0, extension_start 8, client 16, id 24, device 32 }
        ClientLookupAddressableDeviceArgs: 40 {
            struct_size 0, extension_start 8, client 16, local_hardware_id 24, addressable_device 32
        }
        ClientAddressableMemoriesArgs: 40 {
            struct_size 0, extension_start 8, client 16, addressable_memories 24, num_addressable_memories 32
        }
        ClientCompileArgs: 56 {
            struct_size 0, extension_start 8, client 16, program 24, compile_options 32, compile_options_size 40,
            executable 48
        }
        ClientDefaultDeviceAssignmentArgs: 48 {
            struct_size 0, extension_start 8, client 16, num_replicas 24, num_partitions 28, default_assignment_size 32,
            default_assignment 40
        }
        ClientBufferFromHostBufferArgs: 120 {
            struct_size 0, extension_start 8, client 16, data 24, kind 32, dims 40, num_dims 48, byte_strides 56,
            num_byte_strides 64, host_buffer_semantics 72, device 80, memory 88, device_layout 96, done_with_host_buffer
            104, buffer 112
        }
        DeviceDescriptionIdArgs: 28 { struct_size 0, extension_start 8, device_description 16, id 24 }
        DeviceDescriptionProcessIndexArgs: 28 {
            struct_size 0, extension_start 8, device_description 16, process_index 24
        }
        DeviceDescriptionAttributesArgs: 40 {
            struct_size 0, extension_start 8, device_description 16, num_attributes 24, attributes 32
        }
        DeviceDescriptionKindArgs: 40 {
            struct_size 0, extension_start 8, device_description 16, device_kind 24, device_kind_size 32
        }
        DeviceDescriptionDebugStringArgs: 40 {
            struct_size 0, extension_start 8, device_description 16, debug_string 24, debug_string_size 32
        }
        DeviceDescriptionToStringArgs: 40 {
            struct_size 0, extension_start 8, device_description 16, to_string 24, to_string_size 32
        }
        DeviceGetDescriptionArgs: 32 { struct_size 0, extension_start 8, device 16, device_description 24 }
        DeviceIsAddressableArgs: 25 { struct_size 0, extension_start 8, device 16, is_addressable 24 }
        DeviceLocalHardwareIdArgs: 28 { struct_size 0, extension_start 8, device 16, local_hardware_id 24 }
        DeviceAddressableMemoriesArgs: 40 { struct_size 0, extension_start 8, device 16, memories 24, num_memories 32 }
        DeviceDefaultMemoryArgs: 32 { struct_size 0, extension_start 8, device 16, memory 24 }
        DeviceMemoryStatsArgs: 185 {
            struct_size 0, extension_start 8, device 16, bytes_in_use 24, peak_bytes_in_use 32, peak_bytes_in_use_is_set
            40, num_allocs 48, num_allocs_is_set 56, largest_alloc_size 64, largest_alloc_size_is_set 72, bytes_limit
            80, bytes_limit_is_set 88, bytes_reserved 96, bytes_reserved_is_set 104, peak_bytes_reserved 112,
            peak_bytes_reserved_is_set 120, bytes_reservable_limit 128, bytes_reservable_limit_is_set 136,
            largest_free_block_bytes 144, largest_free_block_bytes_is_set 152, pool_bytes 160, pool_bytes_is_set 168,
            peak_pool_bytes 176, peak_pool_bytes_is_set 184
        }
        MemoryIdArgs: 28 { struct_size 0, extension_start 8, memory 16, id 24 }
        MemoryKindArgs: 40 { struct_size 0, extension_start 8, memory 16, kind 24, kind_size 32 }
        MemoryDebugStringArgs: 40 { struct_size 0, extension_start 8, memory 16, debug_string 24, debug_string_size 32 }
        MemoryToStringArgs: 40 { struct_size 0, extension_start 8, memory 16, to_string 24, to_string_size 32 }
        MemoryAddressableByDevicesArgs: 40 { struct_size 0, extension_start 8, memory 16, devices 24, num_devices 32 }
        TopologyDescriptionCreateArgs: 56 {
            struct_size 0, extension_start 8, topology_name 16, topology_name_size 24, create_options 32, num_options
            40, topology 48
        }
        TopologyDescriptionDestroyArgs: 24 { struct_size 0, extension_start 8, topology 16 }
        TopologyDescriptionPlatformNameArgs: 40 {
            struct_size 0, extension_start 8, topology 16, platform_name 24, platform_name_size 32
        }
        TopologyDescriptionPlatformVersionArgs: 40 {
            struct_size 0, extension_start 8, topology 16, platform_version 24, platform_version_size 32
        }
        TopologyDescriptionGetDeviceDescriptionsArgs: 40 {
            struct_size 0, extension_start 8, topology 16, descriptions 24, num_descriptions 32
        }
        TopologyDescriptionAttributesArgs: 40 {
            struct_size 0, extension_start 8, topology 16, attributes 24, num_attributes 32
        }
        CompileArgs: 64 {
            struct_size 0, extension_start 8, topology 16, program 24, compile_options 32, compile_options_size 40,
            client 48, executable 56
        }
        ExecutableDestroyArgs: 24 { struct_size 0, extension_start 8, executable 16 }
        ExecutableNameArgs: 40 {
            struct_size 0, extension_start 8, executable 16, executable_name 24, executable_name_size 32
        }
        ExecutableNumReplicasArgs: 32 { struct_size 0, extension_start 8, executable 16, num_replicas 24 }
        ExecutableNumPartitionsArgs: 32 { struct_size 0, extension_start 8, executable 16, num_partitions 24 }
        ExecutableNumOutputsArgs: 32 { struct_size 0, extension_start 8, executable 16, num_outputs 24 }
        ExecutableSizeOfGeneratedCodeInBytesArgs: 32 {
            struct_size 0, extension_start 8, executable 16, size_in_bytes 24
        }
        ExecutableGetCostAnalysisArgs: 40 {
            struct_size 0, extension_start 8, executable 16, num_properties 24, properties 32
        }
        ExecutableOutputMemoryKindsArgs: 48 {
            struct_size 0, extension_start 8, executable 16, num_outputs 24, memory_kinds 32, memory_kind_sizes 40
        }
        ExecutableOptimizedProgramArgs: 32 { struct_size 0, extension_start 8, executable 16, program 24 }
        ExecutableSerializeArgs: 56 {
            struct_size 0, extension_start 8, executable 16, serialized_bytes 24, serialized_bytes_size 32,
            serialized_executable 40, serialized_executable_deleter 48
        }
        ExecutableOutputElementTypesArgs: 40 {
            struct_size 0, extension_start 8, executable 16, output_types 24, num_output_types 32
        }
        ExecutableOutputDimensionsArgs: 48 {
            struct_size 0, extension_start 8, executable 16, num_outputs 24, dims 32, dim_sizes 40
        }
        ExecutableFingerprintArgs: 40 {
            struct_size 0, extension_start 8, executable 16, executable_fingerprint 24, executable_fingerprint_size 32
        }
        ExecutableGetCompiledMemoryStatsArgs: 112 {
            struct_size 0, extension_start 8, executable 16, generated_code_size_in_bytes 24, argument_size_in_bytes 32,
            output_size_in_bytes 40, alias_size_in_bytes 48, temp_size_in_bytes 56, host_generated_code_size_in_bytes
            64, host_argument_size_in_bytes 72, host_output_size_in_bytes 80, host_alias_size_in_bytes 88,
            host_temp_size_in_bytes 96, peak_memory_in_bytes 104
        }
        LoadedExecutableDestroyArgs: 24 { struct_size 0, extension_start 8, executable 16 }
        LoadedExecutableGetExecutableArgs: 32 { struct_size 0, extension_start 8, loaded_executable 16, executable 24 }
        LoadedExecutableAddressableDevicesArgs: 40 {
            struct_size 0, extension_start 8, executable 16, addressable_devices 24, num_addressable_devices 32
        }
        LoadedExecutableDeleteArgs: 24 { struct_size 0, extension_start 8, executable 16 }
        LoadedExecutableIsDeletedArgs: 25 { struct_size 0, extension_start 8, executable 16, is_deleted 24 }
        LoadedExecutableExecuteArgs: 80 {
            struct_size 0, extension_start 8, executable 16, options 24, argument_lists 32, num_devices 40, num_args 48,
            output_lists 56, device_complete_events 64, execute_device 72
        }
        ExecutableDeserializeAndLoadArgs: 64 {
            struct_size 0, extension_start 8, client 16, serialized_executable 24, serialized_executable_size 32,
            loaded_executable 40, overridden_serialized_compile_options 48, overridden_serialized_compile_options_size
            56
        }
        BufferDestroyArgs: 24 { struct_size 0, extension_start 8, buffer 16 }
        BufferElementTypeArgs: 28 { struct_size 0, extension_start 8, buffer 16, kind 24 }
        BufferDimensionsArgs: 40 { struct_size 0, extension_start 8, buffer 16, dims 24, num_dims 32 }
        BufferOnDeviceSizeInBytesArgs: 32 { struct_size 0, extension_start 8, buffer 16, on_device_size_in_bytes 24 }
        BufferDeviceArgs: 32 { struct_size 0, extension_start 8, buffer 16, device 24 }
        BufferMemoryArgs: 32 { struct_size 0, extension_start 8, buffer 16, memory 24 }
        BufferDeleteArgs: 24 { struct_size 0, extension_start 8, buffer 16 }
        BufferIsDeletedArgs: 25 { struct_size 0, extension_start 8, buffer 16, is_deleted 24 }
        BufferCopyToDeviceArgs: 40 { struct_size 0, extension_start 8, buffer 16, dst_device 24, dst_buffer 32 }
        BufferCopyToMemoryArgs: 40 { struct_size 0, extension_start 8, buffer 16, dst_memory 24, dst_buffer 32 }
        BufferToHostBufferArgs: 56 {
            struct_size 0, extension_start 8, src 16, host_layout 24, dst 32, dst_size 40, event 48
        }
        BufferIsOnCpuArgs: 25 { struct_size 0, extension_start 8, buffer 16, is_on_cpu 24 }
        BufferReadyEventArgs: 32 { struct_size 0, extension_start 8, buffer 16, event 24 }
        NamedValue: 56 { struct_size 0, extension_start 8, name 16, name_size 24, kind 32, value_size 48 }
        TiledLayout: 56 { minor_to_major 16, minor_to_major_size 24, tile_dims 32, tile_dim_sizes 40, num_tiles 48 }
        MemoryLayout: 76 { tiled 16, kind 72 }
        Program: 48 { struct_size 0, extension_start 8, code 16, code_size 24, format 32, format_size 40 }
        ExecuteOptions: 112 {
            struct_size 0, extension_start 8, send_callbacks 16, recv_callbacks 24, num_send_ops 32, num_recv_ops 40,
            launch_id 48, non_donatable_input_indices 56, num_non_donatable_input_indices 64, context 72, call_location
            80, num_tasks 88, task_ids 96, incarnation_ids 104
        }
        KeyValueGetArgs: 80 {
            struct_size 0, extension_start 8, key 16, key_size 24, timeout_in_ms 32, callback_error 40, user_arg 48,
            value 56, value_size 64, value_deleter_callback 72
        }
        KeyValueTryGetArgs: 72 {
            struct_size 0, extension_start 8, key 16, key_size 24, callback_error 32, user_arg 40, value 48, value_size
            56, value_deleter_callback 64
        }
        KeyValuePutArgs: 64 {
            struct_size 0, extension_start 8, key 16, key_size 24, value 32, value_size 40, callback_error 48, user_arg
            56
        }
    }
}

#[test]
fn each_struct_names_its_own_function() {
    assert_eq!(ErrorDestroyArgs::FUNCTION, Function::PJRT_Error_Destroy);
    assert_eq!(ExecutableDeserializeAndLoadArgs::FUNCTION, Function::PJRT_Executable_DeserializeAndLoad);
    assert_eq!(CompileArgs::FUNCTION.name(), "PJRT_Compile");
}
