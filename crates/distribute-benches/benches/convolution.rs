//! Convolutions of 64 images in one thread, forward and backward.
#![expect(clippy::unwrap_used, reason = "a pool that is not made is a failed benchmark")]

use criterion::{Criterion, Throughput};
use distribute_kernels::convolution::Convolution;

const IMAGES: usize = 64;

/// Channels, filters, height and width, and stride: layers of the CNN and the ResNet-20 of `cargo xtask bench train`.
const LAYERS: [[usize; 4]; 7] = [
    [1, 16, 28, 1],
    [16, 32, 14, 1],
    [16, 16, 32, 1],
    [32, 32, 16, 1],
    [64, 64, 8, 1],
    [16, 32, 32, 2],
    [32, 64, 14, 1],
];

fn convolution(criterion: &mut Criterion) {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    for [channels, filters, size, stride] in LAYERS {
        let (size, kernel) = ([size; 2], [3; 2]);
        let of = Convolution { channels, filters, size, kernel, stride, padding: 1, dilation: 1, groups: 1 };
        let [height, width] = of.output_size();
        let numbers = |count: usize| -> Vec<f32> { (0..count).map(|at| (at % 17) as f32 / 8.0 - 1.0).collect() };
        let x = numbers(IMAGES * channels * size[0] * size[1]);
        let (weight, gradient) = (numbers(filters * channels * 9), numbers(IMAGES * filters * height * width));

        let name =
            format!("convolution, {channels} to {filters} channels of {} × {}, stride {stride}", size[0], size[1]);
        let mut group = criterion.benchmark_group(name);
        // Operations of the definition, whatever the way of computing it.
        group.throughput(Throughput::Elements(2 * (gradient.len() * channels * 9) as u64));
        group.bench_function("forward", |bencher| {
            bencher.iter(|| pool.install(|| of.forward(&x, &weight, None)));
        });
        group.bench_function("gradient of the input", |bencher| {
            bencher.iter(|| pool.install(|| of.backward_input(&weight, &gradient)));
        });
        group.bench_function("gradient of the weight", |bencher| {
            bencher.iter(|| pool.install(|| of.backward_weight(&x, &gradient)));
        });
    }
}

distribute_benches::benchmarks!(convolution);
