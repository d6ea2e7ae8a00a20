//! Descriptions of devices, of a client or of a topology.
#![expect(unsafe_code, reason = "functions of a plugin are called")]

use std::fmt;

use pjrt_sys::{
    Arguments, DeviceDescriptionAttributesArgs, DeviceDescriptionDebugStringArgs, DeviceDescriptionIdArgs,
    DeviceDescriptionKindArgs, DeviceDescriptionProcessIndexArgs,
};

use super::plugin::Plugin;
use super::value::{Attributes, attributes, text};
use crate::Result;

/// The description of a device, which may be of another process or of a machine that is not there.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct DeviceDescription {
    /// The number of the device, by which programs are assigned to it.
    pub id: i32,
    /// The process that has it, from 0.
    pub process_index: i32,
    /// The vendor's name of its kind, such as `TPU v5 lite`.
    pub kind: String,
    /// A short name, such as `TPU_0(process=0,(0,0,0,0))`.
    pub name: String,
    /// Further properties, which depend on the plugin.
    pub attributes: Attributes,
}

impl DeviceDescription {
    /// Returns the position of a TPU's chip in its topology, if the plugin tells it.
    pub fn coords(&self) -> Option<&[i64]> {
        self.attributes.get("coords")?.as_integers()
    }

    /// Returns the number of the core on its chip, if the plugin tells it.
    pub fn core_on_chip(&self) -> Option<i64> {
        self.attributes.get("core_on_chip")?.as_integer()
    }

    /// Reads a description.
    ///
    /// # Safety
    /// The description belongs to a client or a topology of this plugin that exists during the call.
    pub(super) unsafe fn read(plugin: &Plugin, description: *mut pjrt_sys::DeviceDescription) -> Result<Self> {
        let mut id = DeviceDescriptionIdArgs { device_description: description, ..Arguments::new() };
        // SAFETY: the caller promises that the description is valid.
        unsafe { plugin.call(plugin, &mut id) }?;
        let subject = format!("device {}", id.id);
        let mut process = DeviceDescriptionProcessIndexArgs { device_description: description, ..Arguments::new() };
        // SAFETY: as above.
        unsafe { plugin.call(&subject, &mut process) }?;
        let mut kind = DeviceDescriptionKindArgs { device_description: description, ..Arguments::new() };
        // SAFETY: as above.
        unsafe { plugin.call(&subject, &mut kind) }?;
        let mut name = DeviceDescriptionDebugStringArgs { device_description: description, ..Arguments::new() };
        // SAFETY: as above.
        unsafe { plugin.call(&subject, &mut name) }?;
        let mut list = DeviceDescriptionAttributesArgs { device_description: description, ..Arguments::new() };
        // SAFETY: as above.
        unsafe { plugin.call(&subject, &mut list) }?;
        Ok(DeviceDescription {
            id: id.id,
            process_index: process.process_index,
            // SAFETY: texts live as long as the description.
            kind: unsafe { text(kind.device_kind, kind.device_kind_size) },
            // SAFETY: as above.
            name: unsafe { text(name.debug_string, name.debug_string_size) },
            // SAFETY: as above.
            attributes: unsafe { attributes(list.attributes, list.num_attributes) },
        })
    }
}

/// Formats the number and the name: `device 3 (TFRT_CPU_3)`.
impl fmt::Display for DeviceDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {} ({})", self.id, self.name)
    }
}
