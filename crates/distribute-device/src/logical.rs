//! One device of a process.

use std::sync::Arc;

use crate::{DeviceSpec, PhysicalDevice};

/// A physical device, or a part of one, with a name of its own.
///
/// Parts of one physical device share its memory and cores; a memory limit is a budget that allocations count against.
///
/// # Source
/// `tf.config.LogicalDevice`, `tf.config.LogicalDeviceConfiguration`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogicalDevice {
    spec: DeviceSpec,
    physical: Arc<PhysicalDevice>,
    memory_limit_bytes: Option<u64>,
}

impl LogicalDevice {
    pub(crate) fn new(
        spec: DeviceSpec,
        physical: Arc<PhysicalDevice>,
        memory_limit_bytes: Option<u64>,
    ) -> LogicalDevice {
        LogicalDevice { spec, physical, memory_limit_bytes }
    }

    /// Returns the full name.
    pub fn spec(&self) -> &DeviceSpec {
        &self.spec
    }

    /// Returns the physical device that it is, or is a part of.
    pub fn physical(&self) -> &PhysicalDevice {
        &self.physical
    }

    /// Returns its memory limit in bytes, if it has one.
    pub fn memory_limit_bytes(&self) -> Option<u64> {
        self.memory_limit_bytes
    }
}
