//! Connections between the GPUs of a process.

use std::fmt;
use std::fs;
use std::path::Path;

use cudarc::driver::{result, sys};

use super::gpu::{GpuInfo, gpus};

/// The connection between two GPUs, best first, in the terms of `nvidia-smi topo -m`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Link {
    /// The same GPU.
    Same,
    /// Peer access that the driver ranks as NVLink: native atomics work over it.
    NvLink,
    /// Peer access over PCI Express below one switch or root port.
    Pcie,
    /// Peer access over PCI Express through the processor.
    Host,
    /// No peer access: the driver copies through host memory.
    Staged,
}

/// The GPUs visible to a process and the connection of each pair.
///
/// # Examples
/// ```no_run
/// use distribute_device::cuda::Topology;
/// match Topology::of_this_process() {
///     Ok(topology) => println!("{topology}"),
///     Err(reason) => println!("no GPU: {reason}"),
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    gpus: Vec<GpuInfo>,
    links: Vec<Vec<Link>>,
}

impl Topology {
    /// Reads the topology from the driver and the kernel.
    ///
    /// # Errors
    /// The reason why no GPU is visible, see [`gpus`].
    ///
    /// # Source
    /// `cuDeviceCanAccessPeer`, `cuDeviceGetP2PAttribute`, `/sys/bus/pci/devices`.
    pub fn of_this_process() -> Result<Topology, String> {
        let gpus = gpus()?;
        let links = gpus.iter().map(|a| gpus.iter().map(|b| link(a, b)).collect()).collect();
        Ok(Topology { gpus, links })
    }

    /// Returns the GPUs in the order of their ordinals.
    pub fn gpus(&self) -> &[GpuInfo] {
        &self.gpus
    }

    /// Returns the connection between the GPUs with two ordinals, or `None` if one does not exist.
    pub fn link(&self, from: u32, to: u32) -> Option<Link> {
        self.links.get(from as usize)?.get(to as usize).copied()
    }
}

impl Link {
    /// Returns a description of the connection.
    pub const fn words(self) -> &'static str {
        match self {
            Link::Same => "the same GPU",
            Link::NvLink => "NVLink",
            Link::Pcie => "PCI Express below one port",
            Link::Host => "PCI Express through the processor",
            Link::Staged => "copies through the host",
        }
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Link::Same => "X",
            Link::NvLink => "NV",
            Link::Pcie => "PIX",
            Link::Host => "SYS",
            Link::Staged => "-",
        })
    }
}

impl fmt::Display for Topology {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:6}", "")?;
        self.gpus.iter().try_for_each(|gpu| write!(f, " {:<6}", format!("GPU:{}", gpu.ordinal)))?;
        for (gpu, links) in self.gpus.iter().zip(&self.links) {
            write!(f, "\n{:<6}", format!("GPU:{}", gpu.ordinal))?;
            links.iter().try_for_each(|link| write!(f, " {link:<6}"))?;
        }
        Ok(())
    }
}

fn link(from: &GpuInfo, to: &GpuInfo) -> Link {
    use sys::CUdevice_P2PAttribute as Attribute;
    if from.ordinal == to.ordinal {
        return Link::Same;
    }
    let device = |gpu: &GpuInfo| result::device::get(gpu.ordinal as i32).ok();
    let (Some(a), Some(b)) = (device(from), device(to)) else { return Link::Staged };
    let ask = |attribute| {
        let mut value = 0;
        // SAFETY: both devices come from the driver, and `value` outlives the call.
        let answer = unsafe { sys::cuDeviceGetP2PAttribute(&raw mut value, attribute, a, b) };
        answer.result().map_or(0, |()| value)
    };
    if ask(Attribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED) == 0 {
        Link::Staged
    } else if ask(Attribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED) != 0 {
        Link::NvLink
    } else if share_a_port(Path::new("/sys/bus/pci/devices"), &from.pci_bus_id, &to.pci_bus_id) {
        Link::Pcie
    } else {
        Link::Host
    }
}

/// Returns whether two devices are below one root port, that is, whether their paths in the device tree share a bridge.
fn share_a_port(devices: &Path, a: &str, b: &str) -> bool {
    let path = |id: &str| fs::canonicalize(devices.join(id)).ok();
    let (Some(a), Some(b)) = (path(a), path(b)) else { return false };
    let common: Vec<_> = a.components().zip(b.components()).take_while(|(a, b)| a == b).map(|(a, _)| a).collect();
    // `pciDDDD:BB` is a root complex; the next part is a port or a switch.
    let root = common.iter().position(|part| part.as_os_str().to_string_lossy().starts_with("pci"));
    root.is_some_and(|root| common.len() > root + 1)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn devices_below_one_switch_share_a_port() {
        let root = std::env::temp_dir().join(format!("distribute-topology-{}", std::process::id()));
        let ids = ["0000:02:00.0", "0000:03:00.0", "0000:81:00.0"];
        let paths = [
            "pci0000:00/0000:00:01.0/0000:02:00.0",
            "pci0000:00/0000:00:01.0/0000:03:00.0",
            "pci0000:80/0000:80:01.0/0000:81:00.0",
        ];
        let devices = root.join("bus");
        fs::create_dir_all(&devices).unwrap();
        for (id, path) in ids.iter().zip(paths) {
            fs::create_dir_all(root.join(path)).unwrap();
            symlink(root.join(path), devices.join(id)).unwrap();
        }
        let shared = |a: usize, b: usize| share_a_port(&devices, ids[a], ids[b]);
        let answers = [shared(0, 1), shared(0, 2), share_a_port(&devices, ids[0], "0000:99:00.0")];
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(answers, [true, false, false]);
    }
}
