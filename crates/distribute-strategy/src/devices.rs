//! The devices that replicas are to run on: named, counted or found.

use distribute_cluster::LocalPlace;
use distribute_device::{DeviceKind, DeviceSpec, Devices, LogicalDevice, absence};

use crate::{Error, Result};

/// How the devices of a strategy are chosen.
#[derive(Clone, Debug, Default)]
pub(crate) enum DeviceChoice {
    /// Every GPU of this process, or one CPU if there is none.
    #[default]
    Found,
    /// These.
    Named(Vec<String>),
    /// The first GPUs, as many as this.
    Gpus(usize),
    /// As many replicas as this, on the first GPUs, or on CPUs if there is no GPU.
    Replicas(usize),
}

impl DeviceChoice {
    pub(crate) fn named<D: Into<String>>(devices: impl IntoIterator<Item = D>) -> DeviceChoice {
        DeviceChoice::Named(devices.into_iter().map(Into::into).collect())
    }

    /// Returns the devices, at least one. Each replica has `ranks` of them.
    pub(crate) fn devices(self, own: &OwnDevices<'_>, ranks: usize) -> Result<Vec<DeviceSpec>> {
        match self {
            DeviceChoice::Named(names) => check_devices(own.strategy, names, own.table),
            DeviceChoice::Found => match own.gpus(own.uses_gpus())? {
                gpus if gpus.is_empty() => own.cpus(1),
                gpus => Ok(gpus),
            },
            DeviceChoice::Gpus(count) => own.first(own.gpus(true)?, count, "num_gpus"),
            DeviceChoice::Replicas(replicas) => {
                let count = replicas.saturating_mul(ranks);
                match own.gpus(own.uses_gpus())? {
                    gpus if gpus.is_empty() && (1..=Devices::MAX_PARTS).contains(&count) => own.cpus(count),
                    gpus => own.first(gpus, count, "num_replicas"),
                }
            }
        }
    }
}

/// The devices among which a process chooses.
#[derive(Clone, Copy)]
pub(crate) struct OwnDevices<'a> {
    /// The strategy that is being built.
    pub(crate) strategy: &'static str,
    /// The table of devices; `None` for this machine's.
    pub(crate) table: Option<&'a Devices>,
    /// The number of GPUs of each task, if the cluster's description contains it or the scheduler says it.
    pub(crate) gpus_per_task: Option<usize>,
    /// The place of this process among those of its job on the same machine, if it is known.
    pub(crate) place: Option<LocalPlace>,
}

impl<'a> OwnDevices<'a> {
    /// Returns the devices of a process that is its job's only one.
    pub(crate) fn of_one_process(strategy: &'static str, table: Option<&'a Devices>) -> OwnDevices<'a> {
        OwnDevices { strategy, table, gpus_per_task: None, place: None }
    }

    /// Returns whether replicas run on GPUs without being asked to: a library that computes on them is part of this
    /// build, or the program gave a table of them.
    fn uses_gpus(&self) -> bool {
        cfg!(feature = "cuda") || self.table.is_some()
    }

    /// Returns this process's share of the GPUs that it sees; none if `wanted` is false.
    fn gpus(&self, wanted: bool) -> Result<Vec<DeviceSpec>> {
        let specs = |devices: &Devices| -> Vec<DeviceSpec> {
            devices.of_kind(DeviceKind::Gpu).map(LogicalDevice::spec).cloned().collect()
        };
        let visible = match (wanted, self.table) {
            (false, _) => Vec::new(),
            (true, Some(table)) => specs(table),
            (true, None) => specs(&Devices::local()),
        };
        if visible.is_empty() {
            return Ok(visible);
        }
        let all = visible.len();
        let own = share(visible, self.gpus_per_task, self.place).map_err(|problem| self.refuse(problem))?;
        let names: Vec<String> = own.iter().map(DeviceSpec::short).collect();
        tracing::info!("{} of the {all} GPUs that this process sees are its own: {}", own.len(), names.join(", "));
        Ok(own)
    }

    /// Returns the first `count` CPUs, and logs why replicas are not on GPUs: as a warning if the cluster's description
    /// has some for this task.
    fn cpus(&self, count: usize) -> Result<Vec<DeviceSpec>> {
        let reason = if self.uses_gpus() {
            absence(DeviceKind::Gpu)
        } else {
            "no library that computes on GPUs is part of this build (Cargo feature candle-cuda)".to_owned()
        };
        match self.gpus_per_task {
            Some(gpus @ 1..) => distribute_notice::warn!(
                "the cluster's description gives each task {gpus} GPUs, but {} uses none: {reason}",
                self.strategy
            ),
            _ => tracing::info!("replicas run on the CPU: {reason}"),
        }
        check_devices(self.strategy, (0..count).map(|index| format!("CPU:{index}")).collect(), self.table)
    }

    /// Returns the first `count` of the GPUs.
    fn first(&self, mut gpus: Vec<DeviceSpec>, count: usize, option: &str) -> Result<Vec<DeviceSpec>> {
        if count == 0 || gpus.len() < count {
            let reason = if gpus.is_empty() { format!(": {}", absence(DeviceKind::Gpu)) } else { String::new() };
            let problem =
                format!("{option} asks for {count} devices, but this process has {} GPUs{reason}", gpus.len());
            return Err(self.refuse(problem));
        }
        gpus.truncate(count);
        Ok(gpus)
    }

    fn refuse(&self, problem: String) -> Error {
        Error::Devices { strategy: self.strategy, problem }
    }
}

/// Returns a task's share of the GPUs that it sees. Tasks on the same machine usually see the same GPUs, and then
/// divide them; a scheduler may also show each task only its own.
fn share(
    visible: Vec<DeviceSpec>,
    per_task: Option<usize>,
    place: Option<LocalPlace>,
) -> Result<Vec<DeviceSpec>, String> {
    let (seen, place) = (visible.len(), place.unwrap_or(LocalPlace { rank: 0, size: 1 }));
    let each = match per_task {
        Some(each) if seen < each => {
            return Err(format!(
                "the cluster's description gives each task {each} GPUs, but this one sees {seen}; name the devices if \
                 it is to use fewer"
            ));
        }
        // They are this task's own.
        Some(each) if seen == each => return Ok(visible),
        Some(each) if seen < each.saturating_mul(place.size) => {
            return Err(format!(
                "the cluster's description gives each of the {} tasks on this machine {each} GPUs, but this one sees \
                 {seen}, which are neither its own nor enough for all; set CUDA_VISIBLE_DEVICES, or name the devices",
                place.size
            ));
        }
        Some(each) => each,
        // Too few to be those of all tasks, they are taken for this task's own.
        None if seen < place.size => return Ok(visible),
        None => seen / place.size,
    };
    Ok(visible.into_iter().skip(place.rank * each).take(each).collect())
}

/// Parses a list of devices, which must not be empty or name a device twice; every device must exist.
pub(crate) fn check_devices(
    strategy: &'static str,
    names: Vec<String>,
    table: Option<&Devices>,
) -> Result<Vec<DeviceSpec>> {
    let mut devices: Vec<DeviceSpec> = Vec::with_capacity(names.len());
    for name in &names {
        let device = check_device(name.parse()?, table)?;
        if devices.contains(&device) {
            let problem = format!("device {} is named twice; name each device once", device.short());
            return Err(Error::Devices { strategy, problem });
        }
        devices.push(device);
    }
    if devices.is_empty() {
        let problem = "the list of devices is empty; name at least one, such as \"CPU:0\"".to_owned();
        return Err(Error::Devices { strategy, problem });
    }
    Ok(devices)
}

/// Checks a device of this process and fills in its type and index; GPUs are looked up in the table, or on this
/// machine.
pub(crate) fn check_device(given: DeviceSpec, table: Option<&Devices>) -> Result<DeviceSpec> {
    let device = given.canonicalize(&DeviceSpec::default());
    if device.job.as_deref() != Some("localhost") {
        let problem = format!("{given} is a device of another task; a replica of this process needs a local device");
        return Err(Error::Devices { strategy: "the strategy", problem });
    }
    match device.kind() {
        // Any number of logical CPUs may be named.
        Some(DeviceKind::Cpu) => {}
        Some(DeviceKind::Gpu) => {
            table.map_or_else(|| Devices::local().find(&device).map(drop), |table| table.find(&device).map(drop))?
        }
        _ => {
            let problem =
                format!("{} was asked for, but replicas run on CPUs and GPUs; name CPU:0 or GPU:0", device.short());
            return Err(Error::Devices { strategy: "the strategy", problem });
        }
    }
    Ok(device)
}

#[cfg(test)]
mod tests;
