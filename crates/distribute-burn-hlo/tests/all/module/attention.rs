//! Attention.

use burn::tensor::TensorData;
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn_backend::DType;
use proptest::prelude::*;

use super::{cases, data, half};
use crate::harness::{Outputs, check, check_forward, refused};

proptest! {
    #![proptest_config(cases(5))]

    #[test]
    fn options(
        (batch, heads, queries, keys, features, values) in
            (1..3usize, 1..3usize, 1..4usize, 1..5usize, 1..4usize, 1..4usize),
        (shared, masked, biased, is_causal) in (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>()),
        (scale, softcap) in (proptest::option::of(0.1..2.0f64), proptest::option::of(0.5..5.0f64)),
        seed: u64,
    ) {
        let groups = if shared { 1 } else { heads };
        let mask: Vec<bool> = data(seed ^ 3, &[batch, 1, queries, keys]).iter::<f32>().map(|x| x > 1.0).collect();
        let given = [
            data(seed, &[batch, heads, queries, features]),
            data(seed ^ 1, &[batch, groups, keys, features]),
            data(seed ^ 2, &[batch, groups, keys, values]),
            TensorData::new(mask, [batch, 1, queries, keys]),
            data(seed ^ 4, &[1, heads, queries, keys]),
        ];
        let options = AttentionModuleOptions { scale, softcap, is_causal };
        check_forward("attention", 1e-4, &given, |t| {
            let (mask, bias) = (masked.then(|| t.bool::<4>(3)), biased.then(|| t.float::<4>(4)));
            Outputs::new().float(attention(t.float(0), t.float(1), t.float(2), mask, bias, options))
        });
    }
}

/// A query whose keys are all masked, and gradients through burn's own decomposition.
#[test]
fn masked_rows_and_gradients() {
    let mask = TensorData::new(vec![true, true, false, true, false, false], [1, 1, 3, 2]);
    let given = [data(1, &[1, 2, 3, 2]), data(2, &[1, 2, 2, 2]), data(3, &[1, 2, 2, 3]), mask];
    let options = AttentionModuleOptions { scale: None, softcap: None, is_causal: false };
    check("attention with gradients", 1e-4, &given, |t| {
        Outputs::new().float(attention(t.float(0), t.float(1), t.float(2), Some(t.bool(3)), None, options))
    });
    let causal = AttentionModuleOptions { is_causal: true, ..options };
    for (dtype, tolerance) in [(DType::F16, 4e-3), (DType::BF16, 4e-2)] {
        let given = [half(1, &[1, 2, 3, 2], dtype), half(2, &[1, 2, 3, 2], dtype), half(3, &[1, 2, 3, 3], dtype)];
        check_forward("attention of 16 bits", tolerance, &given, |t| {
            Outputs::new().float(attention(t.float(0), t.float(1), t.float(2), None, None, causal))
        });
    }
}

#[test]
fn wrong_options_are_refused_in_words() {
    let given = [data(1, &[1, 2, 3, 2]), data(2, &[1, 2, 2, 2]), data(3, &[1, 2, 2, 3])];
    let error = refused(&given, |t| {
        let options = AttentionModuleOptions { scale: None, softcap: Some(-1.0), is_causal: false };
        Outputs::new().float(attention(t.float(0), t.float(1), t.float(2), None, None, options))
    });
    assert!(error.to_string().contains("softcap is -1; pass a number above 0"), "{error}");
    let given = [data(1, &[1, 3, 3, 2]), data(2, &[1, 2, 2, 2]), data(3, &[1, 2, 2, 3])];
    let error = refused(&given, |t| {
        let options = AttentionModuleOptions { scale: None, softcap: None, is_causal: false };
        Outputs::new().float(attention(t.float(0), t.float(1), t.float(2), None, None, options))
    });
    assert!(error.to_string().contains("or a multiple of them"), "{error}");
}
