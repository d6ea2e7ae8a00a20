//! Buffers on devices.

use std::ffi::c_void;

use crate::{Buffer, BufferType, Device, Event, Memory, MemoryLayout};

arguments! {
    /// Arguments of `PJRT_Buffer_Destroy`.
    struct BufferDestroyArgs for PJRT_Buffer_Destroy {
        input buffer: *mut Buffer,
    }

    /// Arguments of `PJRT_Buffer_ElementType`.
    struct BufferElementTypeArgs for PJRT_Buffer_ElementType {
        input buffer: *mut Buffer,
        output kind: BufferType,
    }

    /// Arguments of `PJRT_Buffer_Dimensions`.
    struct BufferDimensionsArgs for PJRT_Buffer_Dimensions {
        input buffer: *mut Buffer,
        output dims: *const i64,
        output num_dims: usize,
    }

    /// Arguments of `PJRT_Buffer_OnDeviceSizeInBytes`.
    struct BufferOnDeviceSizeInBytesArgs for PJRT_Buffer_OnDeviceSizeInBytes {
        input buffer: *mut Buffer,
        output on_device_size_in_bytes: usize,
    }

    /// Arguments of `PJRT_Buffer_Device`.
    struct BufferDeviceArgs for PJRT_Buffer_Device {
        input buffer: *mut Buffer,
        output device: *mut Device,
    }

    /// Arguments of `PJRT_Buffer_Memory`.
    struct BufferMemoryArgs for PJRT_Buffer_Memory {
        input buffer: *mut Buffer,
        output memory: *mut Memory,
    }

    /// Arguments of `PJRT_Buffer_Delete`.
    struct BufferDeleteArgs for PJRT_Buffer_Delete {
        input buffer: *mut Buffer,
    }

    /// Arguments of `PJRT_Buffer_IsDeleted`.
    struct BufferIsDeletedArgs for PJRT_Buffer_IsDeleted {
        input buffer: *mut Buffer,
        output is_deleted: bool,
    }

    /// Arguments of `PJRT_Buffer_CopyToDevice`.
    struct BufferCopyToDeviceArgs for PJRT_Buffer_CopyToDevice {
        input buffer: *mut Buffer,
        input dst_device: *mut Device,
        output dst_buffer: *mut Buffer,
    }

    /// Arguments of `PJRT_Buffer_CopyToMemory`.
    struct BufferCopyToMemoryArgs for PJRT_Buffer_CopyToMemory {
        input buffer: *mut Buffer,
        input dst_memory: *mut Memory,
        output dst_buffer: *mut Buffer,
    }

    /// Arguments of `PJRT_Buffer_ToHostBuffer`.
    struct BufferToHostBufferArgs for PJRT_Buffer_ToHostBuffer {
        input src: *mut Buffer,
        input host_layout: *mut MemoryLayout,
        output dst: *mut c_void,
        output dst_size: usize,
        output event: *mut Event,
    }

    /// Arguments of `PJRT_Buffer_IsOnCpu`.
    struct BufferIsOnCpuArgs for PJRT_Buffer_IsOnCpu {
        input buffer: *mut Buffer,
        output is_on_cpu: bool,
    }

    /// Arguments of `PJRT_Buffer_ReadyEvent`.
    struct BufferReadyEventArgs for PJRT_Buffer_ReadyEvent {
        input buffer: *mut Buffer,
        output event: *mut Event,
    }
}
