//! Kernels, relative to a copy of the same number of bytes.

use distribute_device::cuda::{Combine, CudaDevice, CudaStream, FusedStep, GradientChange, StepTensor};
use distribute_device::{DType, Device, DeviceBuffer};

use super::{Effort, Measurement, median, mib, turns};
use crate::Result;
use crate::gpu::{Gpus, put};
use crate::values::Random;

/// Number of tensors of a bucket in the measurement of packing.
const TENSORS: usize = 200;

struct Bench<'a> {
    gpus: &'a Gpus,
    device: &'a CudaDevice,
    stream: &'a CudaStream,
    effort: Effort,
    ceiling: f64,
    /// One MiB of values other than zero.
    values: DeviceBuffer,
    all: Vec<Measurement>,
}

pub(super) fn measure(gpus: &Gpus, effort: Effort, ceiling: f64) -> Result<Vec<Measurement>> {
    let (device, stream) = gpus.first()?;
    let values = put(&device, &stream, &Random::fresh().elements(DType::F32, 1 << 18))?;
    let mut bench = Bench { gpus, device: &device, stream: &stream, effort, ceiling, values, all: Vec::new() };
    for size in effort.sizes.iter().copied().filter(|size| *size <= 256 << 20) {
        bench.reductions(size)?;
        bench.packing(size)?;
        bench.steps(size)?;
        bench.elementwise(size)?;
    }
    Ok(bench.all)
}

impl Bench<'_> {
    /// Creates a buffer of values.
    fn filled(&self, size: usize) -> Result<DeviceBuffer> {
        let buffer = self.device.allocate(size)?;
        for start in (0..size).step_by(1 << 20) {
            let part = buffer.slice(start..(start + (1 << 20)).min(size))?;
            distribute_device::Stream::copy(self.stream, &self.values.slice(0..part.len_bytes())?, &part)?;
        }
        Ok(buffer)
    }

    /// Creates sets of buffers that are rotated.
    fn sets(&self, count: usize, size: usize) -> Result<Vec<Vec<DeviceBuffer>>> {
        let set = || (0..count).map(|_| self.filled(size)).collect::<Result<Vec<_>>>();
        (0..turns(self.gpus, count * size)).map(|_| set()).collect()
    }

    fn note(&mut self, what: String, bytes: usize, enqueue: impl FnMut(usize) -> Result<()>) -> Result<()> {
        let time = median(self.stream, (self.effort.repeats, self.effort.in_row), enqueue)?;
        self.all.push(Measurement::new(what, bytes as u64, time, Some(self.ceiling)));
        Ok(())
    }

    fn reductions(&mut self, size: usize) -> Result<()> {
        let stream = self.stream;
        for (dtype, count) in [(DType::F32, 2), (DType::F32, 4), (DType::F32, 8), (DType::BF16, 2), (DType::BF16, 4)] {
            let sets = self.sets(count, size)?;
            let what = format!("sum of {count} × {} {dtype}", mib(size));
            self.note(format!("{what} into one"), (count + 1) * size, |turn| {
                let set: Vec<&DeviceBuffer> = sets[turn % sets.len()].iter().collect();
                Ok(stream.reduce(Combine::Sum, dtype, &set, &set[..1], 1)?)
            })?;
            self.note(format!("{what} into all"), 2 * count * size, |turn| {
                let set: Vec<&DeviceBuffer> = sets[turn % sets.len()].iter().collect();
                Ok(stream.reduce(Combine::Sum, dtype, &set, &set, 1)?)
            })?;
        }
        Ok(())
    }

    fn packing(&mut self, size: usize) -> Result<()> {
        let stream = self.stream;
        // As in a network: most of the bytes in few tensors, and as many small ones.
        let mut lengths: Vec<usize> =
            (0..TENSORS).map(|at| if at % 2 == 0 { 2 * size / TENSORS } else { 1024 }).collect();
        lengths.iter_mut().for_each(|length| *length = length.next_multiple_of(16));
        let total: usize = lengths.iter().sum();
        let set = || {
            let tensors = lengths.iter().map(|length| self.filled(*length)).collect::<Result<Vec<_>>>()?;
            Ok((tensors, self.device.allocate(total)?))
        };
        let sets = (0..turns(self.gpus, 2 * total)).map(|_| set()).collect::<Result<Vec<_>>>()?;
        let places: Vec<usize> =
            lengths.iter().scan(0, |end, length| Some(std::mem::replace(end, *end + length))).collect();
        let listed = |turn: usize| {
            let (tensors, bucket) = &sets[turn % sets.len()];
            (tensors.iter().zip(places.iter().copied()).collect::<Vec<_>>(), bucket)
        };
        self.note(format!("packing {TENSORS} tensors, {}", mib(size)), 2 * total, |turn| {
            let (tensors, bucket) = listed(turn);
            Ok(stream.pack(&tensors, bucket)?)
        })?;
        self.note(format!("unpacking {TENSORS} tensors, {}", mib(size)), 2 * total, |turn| {
            let (tensors, bucket) = listed(turn);
            Ok(stream.unpack(bucket, &tensors)?)
        })
    }

    fn steps(&mut self, size: usize) -> Result<()> {
        let stream = self.stream;
        let sgd = FusedStep::Sgd { rate: 1e-9, momentum: 0.0, nesterov: false };
        let momentum = FusedStep::Sgd { rate: 1e-9, momentum: 0.9, nesterov: false };
        let adam = FusedStep::Adam {
            rate: 1e-9,
            scale: 1.0,
            keep: 1.0,
            beta1: 0.9,
            rest1: 0.1,
            beta2: 0.999,
            rest2: 0.001,
            epsilon: 1e-8,
        };
        // Bytes that are read and written per element, as a multiple of the element's size.
        for (name, step, buffers, moved) in
            [("SGD", sgd, 2, 3), ("SGD, momentum", momentum, 3, 5), ("Adam", adam, 4, 7)]
        {
            let sets = self.sets(buffers, size)?;
            self.note(format!("{name} on {} of f32", mib(size)), moved * size, |turn| {
                let set: Vec<&DeviceBuffer> = sets[turn % sets.len()].iter().collect();
                let tensor = StepTensor { parameters: set[0], gradients: set[1], slots: &set[2..] };
                Ok(stream.step(step, &GradientChange::default(), DType::F32, &[tensor])?)
            })?;
        }
        Ok(())
    }

    fn elementwise(&mut self, size: usize) -> Result<()> {
        let stream = self.stream;
        let sets = self.sets(1, size)?;
        for dtype in [DType::F32, DType::BF16] {
            self.note(format!("scaling {} of {dtype}", mib(size)), 2 * size, |turn| {
                Ok(stream.scale(dtype, &sets[turn % sets.len()][0], 1.0)?)
            })?;
        }
        let flag = self.device.allocate(4)?;
        self.note(format!("looking for NaN in {} of f32", mib(size)), size, |turn| {
            Ok(stream.flag_non_finite(DType::F32, &sets[turn % sets.len()][0], &flag)?)
        })?;
        let sets = self.sets(2, size)?;
        self.note(format!("{} of f32 to bf16", mib(size)), size + size / 2, |turn| {
            let set = &sets[turn % sets.len()];
            Ok(stream.cast(DType::F32, &set[0], DType::BF16, &set[1].slice(0..size / 2)?)?)
        })?;
        self.note(format!("{} of bf16 to f32", mib(size / 2)), size + size / 2, |turn| {
            let set = &sets[turn % sets.len()];
            Ok(stream.cast(DType::BF16, &set[0].slice(0..size / 2)?, DType::F32, &set[1])?)
        })
    }
}
