//! Copies within a GPU, and between it and the host.

use distribute_device::{Device, HostBuffer, Stream};

use super::{Effort, Measurement, median, mib, turns};
use crate::Result;
use crate::gpu::{Gpus, deadline, put};
use crate::values::Random;

/// Returns the copies, and the rate of the best one within the GPU's memory.
pub(super) fn measure(gpus: &Gpus, effort: Effort) -> Result<(Vec<Measurement>, f64)> {
    let (device, stream) = gpus.first()?;
    let mut all = Vec::new();
    let mut random = Random::fresh();
    for size in effort.sizes {
        let seed = random.bytes(1 << 20);
        let sets = (0..turns(gpus, 2 * size))
            .map(|_| {
                let from = device.allocate(*size)?;
                // Zeros would be moved faster than values.
                let piece = put(&device, &stream, &seed)?;
                for start in (0..*size).step_by(1 << 20) {
                    stream.copy(&piece, &from.slice(start..start + (1 << 20))?)?;
                }
                Ok((from, device.allocate(*size)?))
            })
            .collect::<Result<Vec<_>>>()?;
        let time = median(&stream, (effort.repeats, effort.in_row), |turn| {
            let (from, to) = &sets[turn % sets.len()];
            Ok(stream.copy(from, to)?)
        })?;
        all.push(Measurement::new(format!("copy in device memory, {}", mib(*size)), 2 * *size as u64, time, None));
    }
    let ceiling = all.iter().map(|copy| copy.gigabytes_per_second).fold(0.0, f64::max);
    for copy in &mut all {
        copy.share_of_copy = Some(copy.gigabytes_per_second / ceiling);
    }
    let size = effort.sizes[0];
    let buffer = device.allocate(size)?;
    for (name, memory) in [("pinned", device.allocate_host(size)?), ("pageable", HostBuffer::zeroed(size)?)] {
        let mut memory = Some(memory);
        let mut take = || memory.take().map_or_else(|| HostBuffer::zeroed(size), Ok);
        let mut held = take()?;
        held.as_bytes_mut().fill(7);
        let mut slot = Some(held);
        let to = median(&stream, (effort.repeats, 1), |_| {
            let held = slot.take().map_or_else(|| HostBuffer::zeroed(size), Ok)?;
            slot = Some(stream.copy_from_host(held, 0, &buffer)?.wait(deadline())?);
            Ok(())
        })?;
        let from = median(&stream, (effort.repeats, 1), |_| {
            let held = slot.take().map_or_else(|| HostBuffer::zeroed(size), Ok)?;
            slot = Some(stream.copy_to_host(&buffer, held, 0)?.wait(deadline())?);
            Ok(())
        })?;
        all.push(Measurement::new(format!("host to device, {name}, {}", mib(size)), size as u64, to, None));
        all.push(Measurement::new(format!("device to host, {name}, {}", mib(size)), size as u64, from, None));
    }
    Ok((all, ceiling))
}
