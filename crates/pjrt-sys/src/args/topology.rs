//! Topologies, and compilation without devices.

use std::ffi::c_char;

use crate::{Client, DeviceDescription, Executable, NamedValue, Program, TopologyDescription};

arguments! {
    /// Arguments of `PJRT_TopologyDescription_Create`.
    struct TopologyDescriptionCreateArgs for PJRT_TopologyDescription_Create {
        input topology_name: *const c_char,
        input topology_name_size: usize,
        input create_options: *const NamedValue,
        input num_options: usize,
        output topology: *mut TopologyDescription,
    }

    /// Arguments of `PJRT_TopologyDescription_Destroy`.
    struct TopologyDescriptionDestroyArgs for PJRT_TopologyDescription_Destroy {
        input topology: *mut TopologyDescription,
    }

    /// Arguments of `PJRT_TopologyDescription_PlatformName`.
    struct TopologyDescriptionPlatformNameArgs for PJRT_TopologyDescription_PlatformName {
        input topology: *const TopologyDescription,
        output platform_name: *const c_char,
        output platform_name_size: usize,
    }

    /// Arguments of `PJRT_TopologyDescription_PlatformVersion`.
    struct TopologyDescriptionPlatformVersionArgs for PJRT_TopologyDescription_PlatformVersion {
        input topology: *mut TopologyDescription,
        output platform_version: *const c_char,
        output platform_version_size: usize,
    }

    /// Arguments of `PJRT_TopologyDescription_GetDeviceDescriptions`.
    struct TopologyDescriptionGetDeviceDescriptionsArgs for PJRT_TopologyDescription_GetDeviceDescriptions {
        input topology: *const TopologyDescription,
        output descriptions: *const *mut DeviceDescription,
        output num_descriptions: usize,
    }

    /// Arguments of `PJRT_TopologyDescription_Attributes`.
    struct TopologyDescriptionAttributesArgs for PJRT_TopologyDescription_Attributes {
        input topology: *mut TopologyDescription,
        output attributes: *const NamedValue,
        output num_attributes: usize,
    }

    /// Arguments of `PJRT_Compile`.
    struct CompileArgs for PJRT_Compile {
        input topology: *const TopologyDescription,
        input program: *const Program,
        input compile_options: *const c_char,
        input compile_options_size: usize,
        input client: *mut Client,
        output executable: *mut Executable,
    }
}
