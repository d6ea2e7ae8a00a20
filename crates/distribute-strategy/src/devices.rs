//! Checks the devices that replicas are to run on.

use distribute_device::{DeviceKind, DeviceSpec, Devices};

use crate::{Error, Result};

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
