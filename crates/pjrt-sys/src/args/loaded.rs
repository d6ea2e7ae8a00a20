//! Programs loaded on devices, and their execution.

use std::ffi::c_char;

use crate::{Buffer, Client, Device, Event, Executable, ExecuteOptions, LoadedExecutable};

arguments! {
    /// Arguments of `PJRT_LoadedExecutable_Destroy`.
    struct LoadedExecutableDestroyArgs for PJRT_LoadedExecutable_Destroy {
        input executable: *mut LoadedExecutable,
    }

    /// Arguments of `PJRT_LoadedExecutable_GetExecutable`.
    struct LoadedExecutableGetExecutableArgs for PJRT_LoadedExecutable_GetExecutable {
        input loaded_executable: *mut LoadedExecutable,
        output executable: *mut Executable,
    }

    /// Arguments of `PJRT_LoadedExecutable_AddressableDevices`.
    struct LoadedExecutableAddressableDevicesArgs for PJRT_LoadedExecutable_AddressableDevices {
        input executable: *mut LoadedExecutable,
        output addressable_devices: *const *mut Device,
        output num_addressable_devices: usize,
    }

    /// Arguments of `PJRT_LoadedExecutable_Delete`.
    struct LoadedExecutableDeleteArgs for PJRT_LoadedExecutable_Delete {
        input executable: *mut LoadedExecutable,
    }

    /// Arguments of `PJRT_LoadedExecutable_IsDeleted`.
    struct LoadedExecutableIsDeletedArgs for PJRT_LoadedExecutable_IsDeleted {
        input executable: *mut LoadedExecutable,
        output is_deleted: bool,
    }

    /// Arguments of `PJRT_LoadedExecutable_Execute`.
    struct LoadedExecutableExecuteArgs for PJRT_LoadedExecutable_Execute {
        input executable: *mut LoadedExecutable,
        input options: *mut ExecuteOptions,
        input argument_lists: *const *const *mut Buffer,
        input num_devices: usize,
        input num_args: usize,
        output output_lists: *const *mut *mut Buffer,
        output device_complete_events: *mut *mut Event,
        input execute_device: *mut Device,
    }

    /// Arguments of `PJRT_Executable_DeserializeAndLoad`.
    struct ExecutableDeserializeAndLoadArgs for PJRT_Executable_DeserializeAndLoad {
        input client: *mut Client,
        input serialized_executable: *const c_char,
        input serialized_executable_size: usize,
        output loaded_executable: *mut LoadedExecutable,
        input overridden_serialized_compile_options: *const c_char,
        input overridden_serialized_compile_options_size: usize,
    }
}
