//! Collectives between threads: the arithmetic of reductions, short messages, schedules, compression and fusion.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed benchmark")]

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use distribute_benches::Ranks;
use distribute_collectives::schedule::Link;
use distribute_collectives::{
    Algorithm, BufferMut, Compression, CrossDeviceOps, DType, FusedAllReduce, FusedTensor, FusionOptions, ReduceOp,
    ReductionToOneDevice,
};

/// Two buffers of 4 KiB, 1 MiB and 64 MiB: in the caches of a core, in those of the processor, and in memory.
const SIZES: [usize; 3] = [4 << 10, 1 << 20, 64 << 20];

/// Sums of two buffers, of which both get the result: one pass that adds, and one that copies. `plain` is the same by
/// loops of the standard library, which the compiler vectorises: the bound of the f32 kernel.
fn kernels(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("sum of 2 buffers");
    for bytes in SIZES {
        group.throughput(Throughput::Bytes(bytes as u64)).sample_size(if bytes > 16 << 20 { 20 } else { 50 });
        // Zeros remain zeros however often they are added.
        let (mut a, mut b) = (vec![0.0f32; bytes / 4], vec![0.0f32; bytes / 4]);
        group.bench_function(BenchmarkId::new("plain f32", size(bytes)), |bencher| {
            bencher.iter(|| {
                a.iter_mut().zip(&b).for_each(|(a, b)| *a += *b);
                b.copy_from_slice(&a);
                black_box(&mut b);
            });
        });
        let ops = ReductionToOneDevice::new();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            // Aligned for every type.
            let (mut a, mut b) = (vec![0u64; bytes / 8], vec![0u64; bytes / 8]);
            let mut buffers = [&mut a, &mut b]
                .map(|memory| BufferMut::from_bytes(dtype, bytemuck::cast_slice_mut(memory.as_mut_slice())).unwrap());
            group.bench_function(BenchmarkId::new(dtype.to_string(), size(bytes)), |bencher| {
                bencher.iter(|| ops.all_reduce(ReduceOp::Sum, black_box(&mut buffers)));
            });
        }
    }
}

fn all_reduce(criterion: &mut Criterion) {
    for ranks in [2, 4] {
        let threads = Ranks::new(ranks).unwrap();
        let mut group = criterion.benchmark_group(format!("all-reduce of {ranks} threads"));
        for bytes in [4, 64, 1 << 10, 16 << 10, 64 << 10] {
            group.throughput(Throughput::Bytes(bytes as u64));
            group.bench_function(size(bytes), |bencher| {
                let values = || vec![0.0f32; bytes / 4];
                bencher.iter_custom(|iterations| {
                    threads.time(iterations, values, |group, values| group.all_reduce(values, ReduceOp::Sum)).unwrap()
                });
            });
        }
    }
}

fn schedules(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("schedule of an all-reduce");
    for algorithm in [Algorithm::Ring, Algorithm::HalvingDoubling, Algorithm::DoubleTree] {
        for ranks in [8, 64] {
            group.bench_function(BenchmarkId::new(algorithm.name(), ranks), |bencher| {
                bencher.iter(|| algorithm.schedule(black_box(3), ranks, 1 << 20));
            });
        }
    }
    group.bench_function("choice", |bencher| {
        bencher.iter(|| Algorithm::Auto.choose(black_box(1 << 20), black_box(24), &Link::TCP));
    });
}

/// One rank compresses 1 MiB, and decodes it again: no other rank's values have to be waited for.
fn compression(criterion: &mut Criterion) {
    let tensors = [FusedTensor::new(DType::F32, [512, 512])];
    let mut group = criterion.benchmark_group("compression");
    group.throughput(Throughput::Bytes(1 << 20));
    let ranks = Ranks::new(1).unwrap();
    let all = [Compression::F16, Compression::Bf16, Compression::TopK(0.01), Compression::PowerSgd(2)];
    for compression in all {
        let name = compression.name().to_owned();
        let fused = FusedAllReduce::new(&tensors, &FusionOptions::default().compression(compression)).unwrap();
        group.bench_function(name, |bencher| {
            let gradient = || (0..1 << 18).map(|at| ((at * 7919) % 1009) as f32 / 1009.0 - 0.5).collect::<Vec<_>>();
            bencher.iter_custom(|iterations| {
                let step = |group: &_, gradient: &mut Vec<f32>| {
                    let mut step = fused.begin();
                    step.push(group, 0, std::mem::take(gradient))?;
                    *gradient = step.finish(group)?.swap_remove(0);
                    Ok(())
                };
                ranks.time(iterations, gradient, step).unwrap()
            });
        });
    }
}

/// A step of 256 tensors of 1 KiB on two threads: in buckets, and each by itself.
fn fusion(criterion: &mut Criterion) {
    const TENSORS: usize = 256;
    let ranks = Ranks::new(2).unwrap();
    let mut group = criterion.benchmark_group("256 tensors of 1 KiB");
    group.throughput(Throughput::Bytes(TENSORS as u64 * 1024));
    let values = || vec![vec![0.0f32; 256]; TENSORS];
    group.bench_function("fused", |bencher| {
        let tensors: Vec<FusedTensor> = (0..TENSORS).map(|_| FusedTensor::new(DType::F32, [256])).collect();
        bencher.iter_custom(|iterations| {
            let rank = || (FusedAllReduce::new(&tensors, &FusionOptions::default()).unwrap(), values());
            let step = |group: &_, (fused, values): &mut (FusedAllReduce, Vec<Vec<f32>>)| {
                let mut step = fused.begin();
                for (index, tensor) in values.drain(..).enumerate().rev() {
                    step.push(group, index, tensor)?;
                }
                *values = step.finish(group)?;
                Ok(())
            };
            ranks.time(iterations, rank, step).unwrap()
        });
    });
    group.bench_function("one by one", |bencher| {
        bencher.iter_custom(|iterations| {
            let step = |group: &distribute_collectives::ProcessGroup, values: &mut Vec<Vec<f32>>| {
                values.iter_mut().try_for_each(|tensor| group.all_reduce(tensor, ReduceOp::Sum))
            };
            ranks.time(iterations, values, step).unwrap()
        });
    });
}

fn size(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1048576 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}

distribute_benches::benchmarks!(kernels, all_reduce, schedules, compression, fusion);
