//! Operations of modules, forward and backward.

mod attention;
mod convolution;
mod interpolate;
mod linear;
mod pooling;

use burn::tensor::TensorData;
use burn_backend::DType;
use proptest::test_runner::Config;

/// Returns the configuration of a few cases: each compiles programs.
pub(crate) fn cases(count: u32) -> Config {
    Config { cases: count, failure_persistence: None, ..Config::default() }
}

/// Returns numbers from −4 to 4 in steps of 1/8: products and short sums of them are exact in f32, and some are equal.
pub(crate) fn data(seed: u64, dims: &[usize]) -> TensorData {
    let mut state = seed;
    let number = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 33) % 65) as f32 / 8.0 - 4.0
    };
    TensorData::new((0..dims.iter().product()).map(number).collect::<Vec<f32>>(), dims.to_vec())
}

/// Returns numbers with few distinct values, NaN and infinities.
pub(crate) fn special(seed: u64, dims: &[usize]) -> TensorData {
    let values: Vec<f32> = data(seed, dims)
        .iter::<f32>()
        .map(|x| match x {
            x if x > 3.5 => f32::NAN,
            x if x < -3.5 => f32::NEG_INFINITY,
            x => x.round(),
        })
        .collect();
    TensorData::new(values, dims.to_vec())
}

/// Returns numbers of 16 bits.
pub(crate) fn half(seed: u64, dims: &[usize], dtype: DType) -> TensorData {
    data(seed, dims).convert_dtype(dtype)
}
