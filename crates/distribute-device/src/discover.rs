//! Discovery of the machine's devices.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::LazyLock;
use std::thread::available_parallelism;

use crate::DeviceKind;

/// A device of this machine, before it is split into logical devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PhysicalDevice {
    /// The kind of device.
    pub kind: DeviceKind,
    /// Its index among the physical devices of its kind.
    pub index: u32,
    /// The model, as the system names it.
    pub name: String,
    /// The size of its memory, if known; for a CPU, of the machine's memory.
    pub memory_bytes: Option<u64>,
    /// For a CPU, the number of cores that this process may use, as limited by its affinity and, on Linux, by its
    /// control group's quota.
    pub cores: Option<NonZeroUsize>,
}

/// Returns the devices of this machine that this build can use: the host's CPU as one device and, with the feature
/// `cuda`, the GPUs that the driver reports.
///
/// A kind of device that is missing is not an error; [`absence`] returns the reason.
///
/// # Examples
/// ```
/// use distribute_device::{DeviceKind, discover};
/// let found = discover();
/// assert_eq!((found[0].kind, found[0].index), (DeviceKind::Cpu, 0));
/// ```
///
/// # Source
/// `tf.config.list_physical_devices`; `/proc/cpuinfo`, `/proc/meminfo`.
pub fn discover() -> Vec<PhysicalDevice> {
    // Read once: each reading asks every processor for its frequency.
    static MODEL: LazyLock<Option<String>> =
        LazyLock::new(|| fs::read_to_string("/proc/cpuinfo").ok().and_then(|text| cpu_model(&text)));
    let cpu = PhysicalDevice {
        kind: DeviceKind::Cpu,
        index: 0,
        name: MODEL.clone().unwrap_or_else(|| format!("{} processor", std::env::consts::ARCH)),
        memory_bytes: fs::read_to_string("/proc/meminfo").ok().and_then(|text| total_memory_bytes(&text)),
        cores: available_parallelism().ok(),
    };
    [cpu].into_iter().chain(gpus()).collect()
}

#[cfg(feature = "cuda")]
fn gpus() -> Vec<PhysicalDevice> {
    // `absence` reports the reason if there are none.
    crate::cuda::gpus().into_iter().flatten().map(|gpu| gpu.physical()).collect()
}

#[cfg(not(feature = "cuda"))]
fn gpus() -> Vec<PhysicalDevice> {
    Vec::new()
}

/// Returns the reason why this build cannot use GPUs, if it cannot.
#[cfg(feature = "cuda")]
fn gpu_problem() -> Option<String> {
    crate::cuda::gpus().err()
}

#[cfg(not(feature = "cuda"))]
fn gpu_problem() -> Option<String> {
    Some("this build has no CUDA support (Cargo feature cuda)".to_owned())
}

/// Returns the reason why this build finds no device of a kind on this machine, with a remedy, as a clause for an error
/// or a report.
///
/// # Examples
/// ```
/// use distribute_device::{DeviceKind, absence};
/// assert!(absence(DeviceKind::Tpu).contains("TPU"));
/// ```
pub fn absence(kind: DeviceKind) -> String {
    match kind {
        DeviceKind::Cpu => "this table was made without the host's CPU; make it with Devices::local()".to_owned(),
        DeviceKind::Gpu => match gpu_problem() {
            Some(problem) => gpu_absence(Path::new("/proc/driver/nvidia"), &problem),
            None => {
                "this table was made without the GPUs that the driver shows; make it with Devices::local()".to_owned()
            }
        },
        DeviceKind::Tpu => "this build has no support for TPUs; use CPU devices".to_owned(),
    }
}

fn gpu_absence(driver: &Path, problem: &str) -> String {
    let models: Vec<String> = fs::read_dir(driver.join("gpus"))
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| fs::read_to_string(entry.path().join("information")).ok())
        .filter_map(|text| field(&text, "Model"))
        .collect();
    if !models.is_empty() {
        format!("the NVIDIA driver shows {}, but {problem}; use CPU devices", models.join(", "))
    } else if driver.join("version").exists() {
        format!("the NVIDIA driver is loaded but shows no GPU to this process, and {problem}; use CPU devices")
    } else {
        format!("no NVIDIA driver is loaded on this machine, and {problem}; use CPU devices")
    }
}

/// Returns the name of the first processor. ARM kernels report no `model name`.
fn cpu_model(cpuinfo: &str) -> Option<String> {
    field(cpuinfo, "model name").or_else(|| field(cpuinfo, "Model"))
}

/// Returns the total memory, which the kernel reports in units of 1024 bytes.
fn total_memory_bytes(meminfo: &str) -> Option<u64> {
    let total = field(meminfo, "MemTotal")?;
    total.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Returns the value of the first `name : value` line.
fn field(text: &str, name: &str) -> Option<String> {
    let mut pairs = text.lines().filter_map(|line| line.split_once(':'));
    let (_, value) = pairs.find(|(key, _)| key.trim() == name)?;
    Some(value.trim().to_owned()).filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_files_are_read() {
        let x86 = "processor\t: 0\nmodel name\t: Intel(R) Xeon(R) @ 2.10GHz\n\
                   processor\t: 1\nmodel name\t: other\n";
        assert_eq!(cpu_model(x86).as_deref(), Some("Intel(R) Xeon(R) @ 2.10GHz"));
        assert_eq!(
            cpu_model("processor : 0\nCPU part : 0xd0c\nModel : Raspberry Pi 4\n").as_deref(),
            Some("Raspberry Pi 4")
        );
        assert_eq!(cpu_model("processor : 0\nmodel name :\n"), None);
        assert_eq!(total_memory_bytes("MemTotal:        4028432 kB\nMemFree: 1 kB\n"), Some(4_028_432 * 1024));
        assert_eq!(total_memory_bytes("MemFree: 1 kB\n"), None);
        assert_eq!(total_memory_bytes("MemTotal: many kB\n"), None);
        assert_eq!(total_memory_bytes(&format!("MemTotal: {} kB\n", u64::MAX)), None);
    }

    #[test]
    fn the_host_has_one_cpu_device() {
        let found = discover();
        assert_eq!(found.iter().filter(|device| device.kind == DeviceKind::Cpu).count(), 1);
        assert!(!found[0].name.is_empty());
        assert_eq!(found[0].cores, available_parallelism().ok());
        if cfg!(target_os = "linux") {
            assert!(found[0].memory_bytes.is_some_and(|bytes| bytes > 1 << 20));
        }
    }

    #[test]
    fn a_missing_gpu_is_explained_from_what_the_driver_shows() {
        let driver = std::env::temp_dir().join(format!("distribute-device-driver-{}", std::process::id()));
        let problem = "this build has no CUDA support";
        assert!(gpu_absence(&driver, problem).starts_with("no NVIDIA driver is loaded"));
        let gpu = driver.join("gpus/0000:01:00.0");
        fs::create_dir_all(&gpu).unwrap();
        fs::write(driver.join("version"), "NVRM version\n").unwrap();
        let none_shown = gpu_absence(&driver, problem);
        fs::write(gpu.join("information"), "Model: \t\t NVIDIA H200\nIRQ: 1\n").unwrap();
        let shown = gpu_absence(&driver, problem);
        fs::remove_dir_all(&driver).unwrap();
        assert!(none_shown.contains("shows no GPU"), "{none_shown}");
        assert!(shown.contains("shows NVIDIA H200, but this build has no CUDA"), "{shown}");
    }
}
