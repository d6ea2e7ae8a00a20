//! All-reduces of several ranks.

use std::sync::Arc;
use std::time::Duration;

use distribute_collectives::{DeviceGroup, DeviceImplementation, ProcessGroup, ReduceOp};
use distribute_device::cuda::CudaDevice;
use distribute_device::{DType, Device, Stream};
use nccl_sys::Library;

use super::{Effort, Measurement, median, mib};
use crate::gpu::{Gpus, deadline};
use crate::{Error, Result};

/// Small sizes, for which only the time is of interest.
const SMALL: [usize; 3] = [4, 64 << 10, 1 << 20];

pub(super) fn measure(gpus: &Gpus, effort: Effort, ceiling: f64) -> Result<Vec<Measurement>> {
    let mut all = Vec::new();
    for count in [2, 4] {
        let devices = gpus.on_first(count, None)?;
        let name = format!("{count} parts of one GPU");
        for size in SMALL {
            let time = all_reduce(&devices, DeviceImplementation::Kernels, size, effort.repeats)?;
            all.push(Measurement::new(format!("all-reduce of {size} B, {name}"), 0, time, None));
        }
        for size in effort.sizes.iter().filter(|size| **size <= 256 << 20) {
            let time = all_reduce(&devices, DeviceImplementation::Kernels, *size, effort.repeats)?;
            let what = format!("all-reduce of {}, {name}", mib(*size));
            // Every rank's values are read once and written once.
            all.push(Measurement::new(what, (2 * count * size) as u64, time, Some(ceiling)));
        }
        let time = all_reduce(&devices, DeviceImplementation::Host, effort.sizes[0], effort.repeats.min(10))?;
        let what = format!("all-reduce of {}, {name}, through the host", mib(effort.sizes[0]));
        all.push(Measurement::new(what, (2 * count * effort.sizes[0]) as u64, time, None));
    }
    if let Some(devices) = gpus.on_each(gpus.infos().len())?.filter(|devices| devices.len() > 1) {
        let nccl = Library::load().is_ok().then_some(("NCCL", DeviceImplementation::Nccl));
        for (name, asked) in [("kernels", DeviceImplementation::Kernels)].into_iter().chain(nccl) {
            for size in effort.sizes {
                let time = all_reduce(&devices, asked, *size, effort.repeats)?;
                let ranks = devices.len();
                // Bytes that each rank sends and receives over its links: the bus bandwidth of nccl-tests.
                let bytes = 2 * (ranks - 1) * size / ranks;
                let what = format!("all-reduce of {}, {ranks} GPUs, {name} (busbw)", mib(*size));
                all.push(Measurement::new(what, bytes as u64, time, None));
            }
        }
    }
    Ok(all)
}

/// Returns the median time of one all-reduce, on the device of rank 0.
fn all_reduce(
    devices: &[Arc<CudaDevice>],
    asked: DeviceImplementation,
    size: usize,
    repeats: usize,
) -> Result<Duration> {
    let groups = ProcessGroup::local(devices.len())?;
    let times = std::thread::scope(|scope| {
        let run = |group: &ProcessGroup, device: &Arc<CudaDevice>| {
            let group = DeviceGroup::new(group, device.clone() as Arc<dyn Device>, asked)?;
            let stream = device.stream()?;
            let values = device.allocate(size)?;
            let time = median(&stream, (repeats, 1), |_| {
                Ok(group.all_reduce(&values, DType::F32, ReduceOp::Sum, &stream)?)
            })?;
            stream.synchronize(deadline())?;
            Ok(time)
        };
        let ranks: Vec<_> =
            groups.iter().zip(devices).map(|(group, device)| scope.spawn(move || run(group, device))).collect();
        let lost = || Err(Error::Wrong("a rank panicked".to_owned()));
        ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| lost())).collect::<Result<Vec<Duration>>>()
    })?;
    Ok(times[0])
}
