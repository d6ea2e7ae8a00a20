//! Tests of the harness: what it compares, and what it does not let pass.

use burn::tensor::TensorData;

use crate::harness::{Outputs, check, difference};

#[test]
fn an_input_that_is_returned_is_equal_and_has_a_gradient() {
    let x = TensorData::from([[1.0f32, -2.0], [f32::NAN, f32::INFINITY]]);
    let n = TensorData::from([3i64, -4]);
    check("identity", 0.0, &[x, n], |t| Outputs::new().float(t.float::<2>(0)).int(t.int::<1>(1)));
}

#[test]
fn differences_are_found() {
    let found = hlo_evaluator::Tensor::new([2], vec![1.0f32, f32::NAN]);
    let ok = TensorData::from([1.0f32 + 1e-6, f32::NAN]);
    assert_eq!(difference(1e-5, &found, &ok), None);
    assert!(difference(0.0, &found, &ok).is_some());
    assert!(difference(1.0, &found, &TensorData::from([1.0f32, 1.0])).is_some());
    assert!(difference(1.0, &found, &TensorData::from([[1.0f32, f32::NAN]])).is_some());
    assert!(difference(1.0, &found, &TensorData::from([1.0f64, f64::NAN])).is_some());
    let found = hlo_evaluator::Tensor::new([1], vec![f32::INFINITY]);
    assert!(difference(1e-5, &found, &TensorData::from([1e30f32])).is_some());
    assert!(difference(1e-5, &found, &TensorData::from([f32::NEG_INFINITY])).is_some());
    assert_eq!(difference(1e-5, &found, &TensorData::from([f32::INFINITY])), None);
    let found = hlo_evaluator::Tensor::new([1], vec![1i64]);
    assert!(difference(9.0, &found, &TensorData::from([2i64])).is_some());
}
