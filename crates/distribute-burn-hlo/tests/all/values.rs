//! Random shapes and values.

use burn::tensor::TensorData;
use burn_backend::DType;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Runs a property for a few random cases.
pub(crate) fn property<S: Strategy>(cases: u32, strategy: S, test: impl Fn(S::Value)) {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&strategy, |value| {
        test(value);
        Ok(())
    });
    outcome.unwrap_or_else(|error| panic!("{error}"));
}

/// Shapes of a number of dimensions.
pub(crate) fn shape(ndim: usize) -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(1usize..4, ndim)
}

/// Numbers from `low` to `high`, in steps that a sum of a few keeps.
pub(crate) fn floats(shape: &[usize], low: f32, high: f32) -> impl Strategy<Value = TensorData> + use<> {
    let shape = shape.to_vec();
    let count = shape.iter().product::<usize>();
    proptest::collection::vec(0..=1024u16, count).prop_map(move |places| {
        let values: Vec<f32> = places.iter().map(|&place| low + (high - low) * f32::from(place) / 1024.0).collect();
        TensorData::new(values, shape.clone())
    })
}

/// Integers, of which many are equal.
pub(crate) fn ints(shape: &[usize], low: i64, high: i64) -> impl Strategy<Value = TensorData> + use<> {
    let shape = shape.to_vec();
    let count = shape.iter().product::<usize>();
    proptest::collection::vec(low..=high, count).prop_map(move |values| TensorData::new(values, shape.clone()))
}

/// Truth values.
pub(crate) fn bools(shape: &[usize]) -> impl Strategy<Value = TensorData> + use<> {
    let shape = shape.to_vec();
    let count = shape.iter().product::<usize>();
    proptest::collection::vec(any::<bool>(), count).prop_map(move |values| TensorData::new(values, shape.clone()))
}

/// Every kind of special number, and ordinary ones.
pub(crate) fn special() -> TensorData {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let values = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 2.5, -2.5, 1e-20, -1e20, 1e30, inf, -inf, nan];
    TensorData::new(values.to_vec(), [4, 4])
}

/// Returns data in another type.
pub(crate) fn cast(data: &TensorData, dtype: DType) -> TensorData {
    data.clone().convert_dtype(dtype)
}
