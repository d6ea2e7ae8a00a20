//! Devices, and their drivers.

use distribute_device::{DeviceKind, PhysicalDevice};

use super::report::Check;
use super::seen::{Seen, bytes};

/// Returns one check for the devices that were found, and one for each kind of accelerator that was not.
///
/// `absence` returns why a kind is missing, with the same text as in errors.
pub(crate) fn devices(seen: &Seen, found: &[PhysicalDevice], absence: impl Fn(DeviceKind) -> String) -> Vec<Check> {
    let mut checks = vec![match found {
        [] => Check::fail("devices", "none").why(absence(DeviceKind::Cpu)),
        found => Check::ok("devices", found.iter().map(named).collect::<Vec<_>>().join(", ")),
    }];
    for (kind, topic) in [(DeviceKind::Gpu, "gpu"), (DeviceKind::Tpu, "tpu")] {
        if found.iter().any(|device| device.kind == kind) {
            continue;
        }
        let unused = match kind {
            DeviceKind::Gpu => seen.path(GPUS).read_dir().is_ok_and(|mut gpus| gpus.next().is_some()),
            _ => seen.variable("TPU_NAME").is_some() || seen.exists("/dev/accel0"),
        };
        let check = if unused { Check::warn } else { Check::skipped };
        checks.push(check(topic, absence(kind)));
    }
    checks
}

/// Checks the NVIDIA driver, and whether this process can access it.
pub(crate) fn driver(seen: &Seen) -> Check {
    let Some(version) = seen.text(&format!("{DRIVER}/version")) else {
        return Check::skipped("driver", "no NVIDIA driver is loaded").why(format!("there is no {DRIVER}/version"));
    };
    // `NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  …`; the text before the number varies.
    let is_number = |word: &&str| word.contains('.') && word.split('.').all(|part| part.parse::<u32>().is_ok());
    let number = version.split_whitespace().find(is_number).unwrap_or("of an unknown version");
    let found = format!("NVIDIA {number}");
    if !seen.exists("/dev/nvidiactl") {
        return Check::warn("driver", found)
            .why("it is loaded, but this process has no /dev/nvidiactl to reach it by")
            .remedy(
                "start the container with GPUs: docker run --gpus all, or resources.limits nvidia.com/gpu of the pod",
            );
    }
    Check::ok("driver", found)
}

/// Formats as `GPU:0 NVIDIA H200 with 139.8 GiB`. A CPU has checks of its own.
fn named(device: &PhysicalDevice) -> String {
    let PhysicalDevice { kind, index, name, memory_bytes, .. } = device;
    match (kind, memory_bytes) {
        (DeviceKind::Cpu, _) => format!("CPU:{index}"),
        (_, Some(memory)) => format!("{kind}:{index} {name} with {}", bytes(*memory)),
        (_, None) => format!("{kind}:{index} {name}"),
    }
}

const DRIVER: &str = "/proc/driver/nvidia";
const GPUS: &str = "/proc/driver/nvidia/gpus";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::report::Status;

    fn device(kind: DeviceKind, name: &str) -> PhysicalDevice {
        PhysicalDevice { kind, index: 0, name: name.to_owned(), memory_bytes: Some(141 << 30), cores: None }
    }

    #[test]
    fn a_kind_of_device_is_found_or_its_absence_explained() {
        let seen = Seen::variables_only(&[("TPU_NAME", "v5")]);
        let cpu = [device(DeviceKind::Cpu, "Xeon")];
        let checks = devices(&seen, &cpu, |kind| format!("no {kind}"));
        let lines: Vec<_> = checks.iter().map(|check| (check.topic.as_str(), check.status, &*check.found)).collect();
        let gpu = ("gpu", Status::Skipped, "no GPU");
        assert_eq!(lines, [("devices", Status::Ok, "CPU:0"), gpu, ("tpu", Status::Warn, "no TPU")]);

        let both = [device(DeviceKind::Cpu, "Xeon"), device(DeviceKind::Gpu, "NVIDIA H200")];
        let checks = devices(&seen, &both, |kind| format!("no {kind}"));
        assert_eq!(checks[0].found, "CPU:0, GPU:0 NVIDIA H200 with 141 GiB");
        assert_eq!(checks.len(), 2);
        assert_eq!(devices(&seen, &[], |_| "why".to_owned())[0].status, Status::Fail);
    }

    #[test]
    fn a_gpu_that_this_build_cannot_use_is_a_warning() {
        let gpu = [("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: NVIDIA H200")];
        let (seen, _folder) = Seen::variables_only(&[]).with_files(&gpu);
        let checks = devices(&seen, &[device(DeviceKind::Cpu, "Xeon")], |kind| format!("no {kind}"));
        assert_eq!((checks[1].topic.as_str(), checks[1].status), ("gpu", Status::Warn));
    }

    #[test]
    fn both_spellings_of_the_driver_are_read() {
        assert_eq!(driver(&Seen::variables_only(&[])).status, Status::Skipped);
        for (text, number) in [
            ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39 UTC 2023\n", "535.54.03"),
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC: 12\n",
                "580.95.05",
            ),
        ] {
            let version = ("proc/driver/nvidia/version", text);
            let (seen, _folder) = Seen::variables_only(&[]).with_files(&[version, ("dev/nvidiactl", "")]);
            assert_eq!(driver(&seen), Check::ok("driver", format!("NVIDIA {number}")));
            let (seen, _folder) = Seen::variables_only(&[]).with_files(&[version]);
            assert_eq!(driver(&seen).status, Status::Warn);
        }
    }
}
