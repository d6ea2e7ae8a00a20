//! Devices of a client.
#![expect(unsafe_code, reason = "functions of a plugin are called")]

use std::fmt;
use std::sync::Arc;

use pjrt_sys::{Arguments, DeviceGetDescriptionArgs, DeviceLocalHardwareIdArgs, DeviceMemoryStatsArgs};

use super::handle::Handle;
use super::plugin::Plugin;
use super::{Buffer, Client, DeviceDescription, ElementType};
use crate::{Element, HostBuffer, Result};

/// A device of a client. Clones are cheap.
#[derive(Clone)]
pub struct PjrtDevice {
    client: Client,
    place: usize,
}

/// What is known of a device.
pub(super) struct Facts {
    pub(super) raw: Handle<pjrt_sys::Device>,
    pub(super) description: DeviceDescription,
    is_addressable: bool,
    local_hardware_id: Option<i32>,
}

/// The memory of a device, in bytes. What a plugin does not tell is `None`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceMemoryStats {
    /// Bytes in use.
    pub in_use_bytes: i64,
    /// The most bytes that were in use.
    pub peak_bytes: Option<i64>,
    /// The bytes that may be in use.
    pub limit_bytes: Option<i64>,
    /// The largest block that was allocated.
    pub largest_allocation_bytes: Option<i64>,
    /// The largest block that is free.
    pub largest_free_bytes: Option<i64>,
    /// The number of allocations.
    pub allocations: Option<i64>,
}

impl PjrtDevice {
    pub(super) fn new(client: &Client, place: usize) -> PjrtDevice {
        PjrtDevice { client: client.clone(), place }
    }

    /// Returns the client.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the device's number, by which programs are assigned to it.
    pub fn id(&self) -> i32 {
        self.description().id
    }

    /// Returns the device's description.
    pub fn description(&self) -> &DeviceDescription {
        &self.facts().description
    }

    /// Returns whether the device is of this process.
    pub fn is_addressable(&self) -> bool {
        self.facts().is_addressable
    }

    /// Returns the device's number on this machine, if the plugin tells it.
    pub fn local_hardware_id(&self) -> Option<i32> {
        self.facts().local_hardware_id
    }

    /// Returns the use of the device's memory at this moment.
    ///
    /// # Errors
    /// [`Error::Pjrt`](crate::Error::Pjrt) if the plugin does not tell it, as that for CPUs.
    ///
    /// # Source
    /// `PJRT_Device_MemoryStats`.
    pub fn memory_stats(&self) -> Result<DeviceMemoryStats> {
        let mut stats = DeviceMemoryStatsArgs { device: self.raw().as_ptr(), ..Arguments::new() };
        // SAFETY: the device lives as long as its client.
        unsafe { self.client.plugin().call(self, &mut stats) }?;
        Ok(DeviceMemoryStats {
            in_use_bytes: stats.bytes_in_use,
            peak_bytes: stats.peak_bytes_in_use_is_set.then_some(stats.peak_bytes_in_use),
            limit_bytes: stats.bytes_limit_is_set.then_some(stats.bytes_limit),
            largest_allocation_bytes: stats.largest_alloc_size_is_set.then_some(stats.largest_alloc_size),
            largest_free_bytes: stats.largest_free_block_bytes_is_set.then_some(stats.largest_free_block_bytes),
            allocations: stats.num_allocs_is_set.then_some(stats.num_allocs),
        })
    }

    /// Starts a copy of host memory to the device. The memory is kept, and cannot be changed, until the plugin has read
    /// it.
    ///
    /// # Shapes
    /// `memory` has the elements of `dims` in row-major order; no dimensions for a scalar.
    ///
    /// # Errors
    /// [`Error::Operands`](crate::Error::Operands) if the sizes differ, or a truth value is neither 0 nor 1;
    /// [`Error::Pjrt`](crate::Error::Pjrt) if the device has not enough memory.
    ///
    /// # Source
    /// `PJRT_Client_BufferFromHostBuffer`, `kImmutableUntilTransferCompletes`.
    pub fn upload(
        &self,
        element_type: ElementType,
        dims: &[usize],
        memory: impl Into<Arc<HostBuffer>>,
    ) -> Result<Buffer> {
        Buffer::upload(self, element_type, dims, memory.into())
    }

    /// Copies elements to the device, as [`upload`](Self::upload) does.
    ///
    /// # Errors
    /// As for [`upload`](Self::upload), and [`Error::HostMemory`](crate::Error::HostMemory).
    pub fn upload_slice<T: Element>(&self, elements: &[T], dims: &[usize]) -> Result<Buffer> {
        self.upload(T::DTYPE.into(), dims, HostBuffer::from_slice(elements)?)
    }

    pub(super) fn raw(&self) -> Handle<pjrt_sys::Device> {
        self.facts().raw
    }

    fn facts(&self) -> &Facts {
        &self.client.inner.devices[self.place]
    }
}

impl PartialEq for PjrtDevice {
    fn eq(&self, other: &PjrtDevice) -> bool {
        super::client::same(&self.client, &other.client) && self.place == other.place
    }
}

impl Eq for PjrtDevice {}

/// Formats the number and the name: `device 3 (TFRT_CPU_3)`.
impl fmt::Display for PjrtDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.description().fmt(f)
    }
}

impl fmt::Debug for PjrtDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PjrtDevice({self})")
    }
}

impl Facts {
    /// Reads what does not change.
    ///
    /// # Safety
    /// The device belongs to a client of this plugin that exists during the call.
    pub(super) unsafe fn read(plugin: &Plugin, raw: Handle<pjrt_sys::Device>, is_addressable: bool) -> Result<Facts> {
        let mut get = DeviceGetDescriptionArgs { device: raw.as_ptr(), ..Arguments::new() };
        // SAFETY: the caller promises that the device is valid.
        unsafe { plugin.call(plugin, &mut get) }?;
        let described = Handle::new(get.device_description, DeviceGetDescriptionArgs::FUNCTION.name())?;
        // SAFETY: the description lives as long as the device.
        let description = unsafe { DeviceDescription::read(plugin, described.as_ptr()) }?;
        let mut local = DeviceLocalHardwareIdArgs { device: raw.as_ptr(), ..Arguments::new() };
        // SAFETY: as above. Devices of other processes have none, which is an error of some plugins.
        let told = is_addressable && unsafe { plugin.call(&description, &mut local) }.is_ok();
        let local_hardware_id = told.then_some(local.local_hardware_id).filter(|id| *id >= 0);
        Ok(Facts { raw, description, is_addressable, local_hardware_id })
    }
}
