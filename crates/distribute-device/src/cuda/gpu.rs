//! Physical GPUs of this process: their properties, contexts and kernels.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, DriverError, result, sys};

use super::compiler::Kernels;
use super::driver::{driver, failed};
use crate::mutex::Mutex;
use crate::{DeviceKind, Error, PhysicalDevice, Result};

/// The driver's description of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuInfo {
    /// Its index among the GPUs visible to this process, in the order of `CUDA_VISIBLE_DEVICES`.
    pub ordinal: u32,
    /// The model.
    pub name: String,
    /// The size of its memory in bytes.
    pub memory_bytes: u64,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// The number of streaming multiprocessors.
    pub multiprocessors: u32,
    /// The size of the level 2 cache in bytes.
    pub l2_bytes: u64,
    /// The PCI bus id as in `/sys/bus/pci/devices`, which is the same for every process of this host.
    pub pci_bus_id: String,
    /// The driver's UUID, as `nvidia-smi -L` prints it, without `GPU-`.
    pub uuid: String,
    /// The newest CUDA version that the driver supports, major and minor.
    pub driver_cuda: (u32, u32),
}

/// One GPU's primary context, which all logical devices on it share.
#[derive(Debug)]
pub(super) struct Gpu {
    pub(super) info: GpuInfo,
    pub(super) context: Arc<CudaContext>,
    pub(super) has_pools: bool,
    pub(super) kernels: Kernels,
}

impl GpuInfo {
    /// Returns the GPU as a physical device.
    pub fn physical(&self) -> PhysicalDevice {
        PhysicalDevice {
            kind: DeviceKind::Gpu,
            index: self.ordinal,
            name: self.name.clone(),
            memory_bytes: Some(self.memory_bytes),
            cores: None,
        }
    }
}

/// Returns the GPUs visible to this process.
///
/// # Errors
/// A clause that gives the reason: no driver, a driver that is too old, or no visible GPU.
///
/// # Source
/// `cuDeviceGetCount`, `cuDeviceGetAttribute`, `cuDeviceTotalMem`.
pub fn gpus() -> Result<Vec<GpuInfo>, String> {
    let driver = driver()?;
    (0..driver.devices)
        .map(|ordinal| describe(ordinal, driver.version).map_err(|error| error.to_string()))
        .collect::<Result<Vec<GpuInfo>, String>>()
}

impl Gpu {
    /// Returns the GPU with the given ordinal; all holders share one value.
    pub(super) fn open(ordinal: u32) -> Result<Arc<Gpu>> {
        // A primary context belongs to the whole process; sharing only avoids compiling its kernels twice.
        static OPEN: Mutex<Option<HashMap<u32, Weak<Gpu>>>> = Mutex::new(None);
        let mut open = OPEN.lock();
        let open = open.get_or_insert_default();
        if let Some(gpu) = open.get(&ordinal).and_then(Weak::upgrade) {
            return Ok(gpu);
        }
        let gpu = Arc::new(Gpu::start(ordinal)?);
        open.insert(ordinal, Arc::downgrade(&gpu));
        Ok(gpu)
    }

    fn start(ordinal: u32) -> Result<Gpu> {
        let asked = || format!("GPU:{ordinal}");
        let driver = driver().map_err(|reason| Error::NoSuchDevice { asked: asked(), reason: reason.to_owned() })?;
        if ordinal >= driver.devices {
            let reason = format!("the driver shows {} GPUs to this process", driver.devices);
            return Err(Error::NoSuchDevice { asked: asked(), reason });
        }
        let info = describe(ordinal, driver.version)?;
        let started = CudaContext::new(ordinal as usize);
        let context = started.map_err(|error| failed("starting a context", &asked(), error))?;
        // SAFETY: cudarc's own slices, which need event tracking, are not used with this context: our events keep the
        // order.
        unsafe { context.disable_event_tracking() };
        let kernels = Kernels::new(info.capability);
        Ok(Gpu { has_pools: context.has_async_alloc(), info, context, kernels })
    }

    /// Makes the context current on the calling thread.
    pub(super) fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(|error| self.failed("using the context", error))
    }

    pub(super) fn failed(&self, operation: &'static str, error: DriverError) -> Error {
        failed(operation, &format!("GPU {} ({})", self.info.ordinal, self.info.name), error)
    }

    /// Returns whether kernels of this GPU could access `other`'s memory.
    pub(super) fn can_reach(&self, other: &Gpu) -> bool {
        if self.info.ordinal == other.info.ordinal {
            return true;
        }
        let mut can = 0;
        // SAFETY: both devices come from the driver, and `can` outlives the call.
        let answer =
            unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, self.context.cu_device(), other.context.cu_device()) };
        answer.result().is_ok() && can != 0
    }
}

fn describe(ordinal: u32, version: i32) -> Result<GpuInfo> {
    let name = format!("GPU:{ordinal}");
    let failed = |error| failed("asking for its properties", &name, error);
    let device = result::device::get(ordinal as i32).map_err(failed)?;
    // SAFETY: the device comes from the driver.
    let attribute = |attribute| unsafe { result::device::get_attribute(device, attribute) }.map_err(failed);
    let count = |name| attribute(name).map(|value| u32::try_from(value).unwrap_or_default());
    // SAFETY: the device comes from the driver.
    let memory_bytes = unsafe { result::device::total_mem(device) }.map_err(failed)? as u64;
    let uuid = result::device::get_uuid(device).map_err(failed)?;
    let [domain, bus, slot] = [
        count(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
        count(Attribute::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
        count(Attribute::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?,
    ];
    let version = u32::try_from(version).unwrap_or_default();
    Ok(GpuInfo {
        ordinal,
        name: result::device::get_name(device).map_err(failed)?,
        memory_bytes,
        capability: (
            count(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            count(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        multiprocessors: count(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        l2_bytes: u64::from(count(Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)?),
        pci_bus_id: format!("{domain:04x}:{bus:02x}:{slot:02x}.0"),
        uuid: dashed(uuid.bytes.map(|byte| byte as u8)),
        driver_cuda: (version / 1000, version % 1000 / 10),
    })
}

/// Formats a UUID in groups of 8, 4, 4, 4 and 12 digits.
fn dashed(bytes: [u8; 16]) -> String {
    let group =
        |range: std::ops::Range<usize>| bytes[range].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    [group(0..4), group(4..6), group(6..8), group(8..10), group(10..16)].join("-")
}
