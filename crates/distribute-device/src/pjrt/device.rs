//! Devices of a client.
#![expect(unsafe_code, reason = "functions of a plugin are called")]

use std::fmt;

use pjrt_sys::{Arguments, DeviceMemoryStatsArgs};

use super::description::Facts;
use super::handle::Handle;
use super::{Client, DeviceDescription};
use crate::Result;

/// A device of a client. Clones are cheap.
#[derive(Clone)]
pub struct PjrtDevice {
    client: Client,
    place: usize,
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

impl Client {
    /// Returns all devices, also those of other processes.
    pub fn devices(&self) -> Vec<PjrtDevice> {
        (0..self.inner.devices.len()).map(|place| PjrtDevice::new(self, place)).collect()
    }

    /// Returns the devices of this process.
    pub fn addressable_devices(&self) -> Vec<PjrtDevice> {
        self.devices().into_iter().filter(PjrtDevice::is_addressable).collect()
    }

    /// Returns the device with a number; `None` if there is none.
    pub fn device(&self, id: i32) -> Option<PjrtDevice> {
        let place = self.inner.devices.iter().position(|device| device.description.id == id)?;
        Some(PjrtDevice::new(self, place))
    }
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
