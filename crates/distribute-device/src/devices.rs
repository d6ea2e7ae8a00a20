//! The devices that a process uses.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::{
    CpuDevice, Device, DeviceIndex, DeviceKind, DeviceSpec, Error, LogicalDevice, PhysicalDevice, Result, absence,
    discover,
};

/// The devices of one process: a value that is created once and passed to its users.
///
/// # Examples
/// ```
/// use distribute_device::Devices;
///
/// let devices = Devices::with_cpus(2)?;
/// assert_eq!(devices.list(["CPU:*"])?.len(), 2);
/// let error = devices.find(&"CPU:3".parse()?).unwrap_err().to_string();
/// assert!(error.contains("CPU:3") && error.contains("CPU:0..CPU:1"));
/// # Ok::<(), distribute_device::Error>(())
/// ```
///
/// # Source
/// `tf.config.{list_physical_devices, list_logical_devices, set_logical_device_configuration}`,
/// without their global state.
#[derive(Clone, Debug)]
pub struct Devices {
    task: DeviceSpec,
    physical: Vec<(Arc<PhysicalDevice>, Parts)>,
    logical: Vec<LogicalDevice>,
}

/// The memory limit of each part of a physical device.
type Parts = Vec<Option<u64>>;

impl Devices {
    /// The largest number of logical devices that a physical device can be split into.
    pub const MAX_PARTS: usize = 1024;

    /// Returns this machine's devices as [`discover`] finds them, one logical device each.
    pub fn local() -> Devices {
        Devices::from_physical(discover())
    }

    /// Returns this machine's devices with the CPU split into `count` logical devices: `CPU:0`, `CPU:1`, ….
    ///
    /// # Errors
    /// [`Error::Split`] if `count` is not between 1 and [`Devices::MAX_PARTS`].
    pub fn with_cpus(count: usize) -> Result<Devices> {
        Devices::local().split_into(DeviceKind::Cpu, 0, count, |count| vec![None; count])
    }

    /// Returns the given devices, one logical device each.
    pub fn from_physical(physical: impl IntoIterator<Item = PhysicalDevice>) -> Devices {
        let physical = physical.into_iter().map(|device| (Arc::new(device), vec![None])).collect();
        Devices { task: DeviceSpec::default(), physical, logical: Vec::new() }.named()
    }

    /// Returns the same devices with the name of this process in a cluster, such as `/job:worker/task:1`.
    pub fn at(mut self, task: &DeviceSpec) -> Devices {
        self.task = DeviceSpec { device_type: None, device_index: None, ..task.clone() };
        self.named()
    }

    /// Splits the physical device `index` of `kind` into one logical device per entry of `memory_limits_bytes`.
    ///
    /// Logical devices of a kind are numbered consecutively, in the order of the physical ones.
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`] if there is no such physical device, [`Error::Split`] if there are not 1 to
    /// [`Devices::MAX_PARTS`] entries or their limits together exceed the device's memory.
    pub fn split(self, kind: DeviceKind, index: u32, memory_limits_bytes: &[Option<u64>]) -> Result<Devices> {
        self.split_into(kind, index, memory_limits_bytes.len(), |_| memory_limits_bytes.to_vec())
    }

    /// Returns the physical devices.
    pub fn physical(&self) -> impl ExactSizeIterator<Item = &PhysicalDevice> {
        self.physical.iter().map(|(device, _)| &**device)
    }

    /// Returns the logical devices, in the order of the physical ones.
    pub fn logical(&self) -> &[LogicalDevice] {
        &self.logical
    }

    /// Returns the logical devices of a kind.
    pub fn of_kind(&self, kind: DeviceKind) -> impl Iterator<Item = &LogicalDevice> {
        self.logical.iter().filter(move |device| device.physical().kind == kind)
    }

    /// Returns the device with a given name; missing fields default to this process's task and to CPU:0.
    ///
    /// # Errors
    /// [`Error::WildcardDevice`] for a `*`; [`Error::NoSuchDevice`] if there is no such device, with the existing
    /// devices and a remedy, or the reason why there are none of the kind.
    pub fn find(&self, name: &DeviceSpec) -> Result<&LogicalDevice> {
        let wanted = name.resolve([&self.task])?;
        let found = self.logical.iter().find(|device| *device.spec() == wanted);
        found.ok_or_else(|| self.missing(name, &wanted))
    }

    /// Returns the devices with the given names, in that order; a `*` stands for every device of its type.
    ///
    /// # Errors
    /// [`Error::DeviceString`] for a malformed name, [`Error::NoDevices`] for an empty list, [`Error::DuplicateDevice`]
    /// for a device named twice, [`Error::NoSuchDevice`] for one that does not exist.
    pub fn list<S: AsRef<str>>(&self, names: impl IntoIterator<Item = S>) -> Result<Vec<&LogicalDevice>> {
        let mut list = List::default();
        for (place, name) in names.into_iter().enumerate() {
            let name = name.as_ref();
            let pattern: DeviceSpec = name.parse()?;
            if pattern.device_index != Some(DeviceIndex::Any) {
                list.push(place, name, self.find(&pattern)?.spec().clone())?;
                continue;
            }
            let wanted = pattern.canonicalize(&self.task);
            let mut found = self.logical.iter().filter(|device| wanted.covers(device.spec())).peekable();
            if found.peek().is_none() {
                return Err(self.missing(&pattern, &wanted));
            }
            found.try_for_each(|device| list.push(place, name, device.spec().clone()))?;
        }
        list.finish()?.iter().map(|device| self.find(device)).collect()
    }

    /// Opens a device, to allocate memory on it and to create streams.
    ///
    /// Each call creates a new handle with its own memory account: open a device once and share the handle.
    ///
    /// # Errors
    /// The errors of [`Devices::find`], and [`Error::NoSuchDevice`] if this build cannot use the device.
    pub fn open(&self, name: &DeviceSpec) -> Result<Arc<dyn Device>> {
        let device = self.find(name)?;
        match device.physical().kind {
            DeviceKind::Cpu => Ok(Arc::new(CpuDevice::new(device.clone()))),
            #[cfg(feature = "cuda")]
            DeviceKind::Gpu => Ok(Arc::new(crate::cuda::CudaDevice::new(device.clone())?)),
            kind => Err(Error::NoSuchDevice { asked: device.spec().short(), reason: absence(kind) }),
        }
    }

    fn split_into(
        mut self,
        kind: DeviceKind,
        index: u32,
        count: usize,
        limits: impl FnOnce(usize) -> Parts,
    ) -> Result<Devices> {
        let found = self.physical.iter_mut().find(|(device, _)| device.kind == kind && device.index == index);
        let Some((device, parts)) = found else {
            return Err(Error::NoSuchDevice { asked: format!("{kind}:{index}"), reason: absence(kind) });
        };
        let refuse =
            |problem: String| Err(Error::Split { device: format!("{kind}:{index} ({})", device.name), count, problem });
        if count == 0 || count > Devices::MAX_PARTS {
            return refuse(format!("give 1 to {}", Devices::MAX_PARTS));
        }
        let limits = limits(count);
        let asked = limits.iter().flatten().fold(0u64, |sum, limit| sum.saturating_add(*limit));
        if let Some(memory_bytes) = device.memory_bytes.filter(|memory_bytes| asked > *memory_bytes) {
            return refuse(format!(
                "their memory limits add up to {asked} bytes, but it has {memory_bytes}; lower them"
            ));
        }
        *parts = limits;
        Ok(self.named())
    }

    fn named(mut self) -> Devices {
        let mut next = [0u32; 3];
        self.logical.clear();
        for (physical, parts) in &self.physical {
            let place = match physical.kind {
                DeviceKind::Cpu => &mut next[0],
                DeviceKind::Gpu => &mut next[1],
                DeviceKind::Tpu => &mut next[2],
            };
            for memory_limit_bytes in parts {
                let spec = DeviceSpec::local(physical.kind, *place).merge(&self.task);
                let physical = Arc::clone(physical);
                self.logical.push(LogicalDevice::new(spec, physical, *memory_limit_bytes));
                *place += 1;
            }
        }
        self
    }

    fn missing(&self, name: &DeviceSpec, wanted: &DeviceSpec) -> Error {
        let here = DeviceSpec::local(DeviceKind::Cpu, 0).merge(&self.task);
        let another_task = (&wanted.job, wanted.replica, wanted.task) != (&here.job, here.replica, here.task);
        let reason = match wanted.kind() {
            _ if another_task => {
                let here = DeviceSpec { device_type: None, device_index: None, ..here };
                format!("it belongs to another task, and this process is {here}; name a device of this process")
            }
            None => "this build knows CPU, GPU and TPU devices only; name one of those".to_owned(),
            Some(kind) => match self.of_kind(kind).count() {
                0 => absence(kind),
                count => {
                    let last = count - 1;
                    let have = if last == 0 { format!("{kind}:0") } else { format!("{kind}:0..{kind}:{last}") };
                    let needed = wanted.index().map_or(2, |index| u64::from(index) + 1);
                    let remedy = match kind {
                        DeviceKind::Cpu => {
                            format!("split the CPU further with Devices::with_cpus({needed})")
                        }
                        _ => format!("split a {kind} with Devices::split"),
                    };
                    format!("this process has {have}; give an index up to {last}, or {remedy}")
                }
            },
        };
        let asked = if another_task { wanted.to_string() } else { name.short() };
        Error::NoSuchDevice { asked, reason }
    }
}

/// Parses a list of device names into full names of single devices, without checking that the devices exist.
///
/// # Errors
/// [`Error::DeviceString`] for a malformed name, [`Error::NoDevices`] for an empty list, [`Error::DuplicateDevice`] if
/// two names denote the same device, [`Error::WildcardDevice`] for a `*` (use [`Devices::list`]).
///
/// # Examples
/// ```
/// use distribute_device::parse_device_list;
/// let devices = parse_device_list(["CPU:0", "/cpu:1"])?;
/// assert_eq!(devices[1].to_string(), "/job:localhost/replica:0/task:0/device:CPU:1");
/// assert!(parse_device_list(["CPU:0", "/device:CPU:0"]).is_err());
/// # Ok::<(), distribute_device::Error>(())
/// ```
///
/// # Source
/// The device list of `tf.distribute.MirroredStrategy`.
pub fn parse_device_list<S: AsRef<str>>(names: impl IntoIterator<Item = S>) -> Result<Vec<DeviceSpec>> {
    let mut list = List::default();
    for (place, name) in names.into_iter().enumerate() {
        let name = name.as_ref();
        list.push(place, name, name.parse::<DeviceSpec>()?.resolve([])?)?;
    }
    list.finish()
}

/// A device list under construction, with the text and position of each name.
#[derive(Default)]
struct List {
    devices: Vec<DeviceSpec>,
    written: Vec<(String, usize)>,
}

impl List {
    fn push(&mut self, place: usize, name: &str, device: DeviceSpec) -> Result<()> {
        if let Some(before) = self.devices.iter().position(|other| *other == device) {
            let (first, first_place) = self.written[before].clone();
            let (second, second_place) = (name.to_owned(), place);
            return Err(Error::DuplicateDevice { device: device.short(), first, first_place, second, second_place });
        }
        self.devices.push(device);
        self.written.push((name.to_owned(), place));
        Ok(())
    }

    fn finish(self) -> Result<Vec<DeviceSpec>> {
        if self.devices.is_empty() { Err(Error::NoDevices) } else { Ok(self.devices) }
    }
}
