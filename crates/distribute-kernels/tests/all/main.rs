//! Comparison with plain f64 arithmetic.

#![expect(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;

mod attention;
mod batch_norm;
mod convolution;
mod linear;
mod pooling;

fn settings() -> ProptestConfig {
    ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() }
}

/// Numbers without an order that a wrong index would preserve.
fn numbers(len: usize, seed: usize) -> Vec<f64> {
    let mut state = seed as u64 * 2 + 1;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        // 14 bits are exact in f32.
        (state >> 50) as f64 / 4096.0 - 2.0
    };
    (0..len).map(next).collect()
}

fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|x| *x as f32).collect()
}

#[track_caller]
fn assert_close<T: Copy + Into<f64>>(what: &str, got: &[T], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1.0, |largest: f64, x| largest.max(x.abs()));
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        let got: f64 = (*got).into();
        assert!((got - expected).abs() <= tolerance * largest, "{what}, element {at}: {got}, not {expected}");
    }
}

/// Runs a function with one and with three threads, and asserts that its results are the same bit for bit.
#[track_caller]
fn assert_threads_do_not_matter<R: PartialEq + Send>(f: impl Fn() -> R + Sync) {
    let with = |threads: usize| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(&f);
    assert!(with(1) == with(3));
}
