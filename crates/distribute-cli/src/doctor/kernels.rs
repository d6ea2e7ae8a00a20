//! The compiler of GPU kernels, and the links between GPUs.

use super::report::Check;

/// Checks the GPUs that the driver reports, the kernel compiler, and the links between several GPUs.
#[cfg(feature = "cuda")]
pub(crate) fn kernels() -> Vec<Check> {
    use distribute_device::cuda::{Topology, compiler_version};
    let Ok(topology) = Topology::of_this_process() else {
        return vec![Check::skipped("nvrtc", "there is not a GPU that kernels would be compiled for")];
    };
    let mut checks: Vec<Check> = topology
        .gpus()
        .iter()
        .map(|gpu| {
            let gib = gpu.memory_bytes as f64 / f64::from(1 << 30);
            let ((major, minor), (cuda, point)) = (gpu.capability, gpu.driver_cuda);
            let found = format!(
                "{gib:.1} GiB, compute capability {major}.{minor}, {} SMs, PCI {}, driver for CUDA {cuda}.{point}",
                gpu.multiprocessors, gpu.pci_bus_id
            );
            Check::ok(&format!("GPU:{}", gpu.ordinal), found).details([format!("UUID {}", gpu.uuid)])
        })
        .collect();
    checks.push(match compiler_version() {
        Ok((major, minor)) => Check::ok("nvrtc", format!("NVRTC {major}.{minor}")),
        Err(error) => Check::fail("nvrtc", error.to_string())
            .why("kernels of ours are compiled when they are first used")
            .remedy("install libnvrtc of CUDA 12 or 13, or name its file by DISTRIBUTE_NVRTC_LIBRARY"),
    });
    if topology.gpus().len() > 1 {
        let lines: Vec<String> = topology.to_string().lines().map(str::to_owned).collect();
        checks.push(Check::ok("links", pairs(&topology)).details(lines));
    }
    checks
}

/// Formats the links between pairs of GPUs.
#[cfg(feature = "cuda")]
fn pairs(topology: &distribute_device::cuda::Topology) -> String {
    let count = u32::try_from(topology.gpus().len()).unwrap_or(u32::MAX);
    let mut by_link = std::collections::BTreeMap::<_, Vec<String>>::new();
    for (a, b) in (0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b))) {
        by_link.entry(topology.link(a, b)).or_default().push(format!("{a}-{b}"));
    }
    let named =
        by_link.into_iter().filter_map(|(link, pairs)| Some(format!("{} by {}", pairs.join(" "), link?.words())));
    named.collect::<Vec<String>>().join(", ")
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn kernels() -> Vec<Check> {
    Vec::new()
}
