//! Linear layers, embeddings and normalization.

use burn::tensor::TensorData;
use burn::tensor::module::{batch_norm, batch_norm_train, embedding, layer_norm, linear};
use burn_backend::DType;
use burn_backend::ops::ModuleOps;
use burn_capture::CaptureBackend;
use proptest::prelude::*;

use super::{cases, data, half};
use crate::harness::{Outputs, check, check_forward, check_recorded, refused_recorded};

proptest! {
    #![proptest_config(cases(4))]

    #[test]
    fn linear_layers((rows, inputs, outputs) in (1..4usize, 1..5usize, 1..5usize), seed: u64) {
        let weight = data(seed, &[inputs, outputs]);
        let bias = data(seed ^ 1, &[outputs]);
        check("matrix", 1e-5, &[data(seed ^ 2, &[rows, inputs]), weight.clone(), bias.clone()], |t| {
            Outputs::new().float(linear(t.float::<2>(0), t.float(1), Some(t.float(2))))
        });
        check("batches", 1e-5, &[data(seed ^ 2, &[2, rows, inputs]), weight.clone()], |t| {
            Outputs::new().float(linear(t.float::<3>(0), t.float(1), None))
        });
        check("four dimensions", 1e-5, &[data(seed ^ 2, &[2, 3, rows, inputs]), weight, bias], |t| {
            Outputs::new().float(linear(t.float::<4>(0), t.float(1), Some(t.float(2))))
        });
    }

    #[test]
    fn embeddings((rows, width, batch, length) in (1..5i64, 1..4usize, 1..3usize, 1..5usize), seed: u64) {
        let numbers = data(seed, &[batch, length]);
        let indices: Vec<i64> = numbers.iter::<f32>().map(|x| (x * 8.0) as i64).map(|x| x.rem_euclid(rows)).collect();
        let indices = TensorData::new(indices, [batch, length]);
        check("embedding", 1e-5, &[data(seed ^ 1, &[rows as usize, width]), indices], |t| {
            Outputs::new().float(embedding(t.float(0), t.int(1)))
        });
    }

    #[test]
    fn normalization((batch, channels, length) in (1..4usize, 1..4usize, 1..5usize), seed: u64) {
        let [x, gamma, beta] = [vec![batch, channels, length], vec![channels], vec![channels]];
        let given = [data(seed, &x), data(seed ^ 1, &gamma), data(seed ^ 2, &beta)];
        check("batch norm", 1e-3, &given, |t| {
            let trained = batch_norm_train(t.float::<3>(0), t.float(1), t.float(2), 0.1);
            Outputs::new().float(trained.output).constant(trained.mean).constant(trained.variance)
        });
        let variance = data(seed ^ 4, &gamma).iter::<f32>().map(f32::abs).collect::<Vec<_>>();
        let mut given = given.to_vec();
        given.extend([data(seed ^ 3, &gamma), TensorData::new(variance, gamma)]);
        check("batch norm with statistics", 1e-4, &given, |t| {
            Outputs::new().float(batch_norm(t.float::<3>(0), t.float(1), t.float(2), t.float(3), t.float(4), 0.5))
        });
        let given = [data(seed, &x), data(seed ^ 1, &[length]), data(seed ^ 2, &[length])];
        check("layer norm", 1e-3, &given, |t| {
            Outputs::new().float(layer_norm(t.float::<3>(0), t.float(1), Some(t.float(2)), 0.1))
        });
        check_forward("layer norm, recorded whole", 1e-4, &given, |t| {
            let without = layer_norm(t.float::<3>(0), t.float(1), None, 0.1);
            Outputs::new().float(layer_norm(t.float::<3>(0), t.float(1), Some(t.float(2)), 0.1)).float(without)
        });
    }
}

#[test]
fn numbers_of_16_bits() {
    for (dtype, tolerance) in [(DType::F16, 2e-3), (DType::BF16, 2e-2)] {
        let given = [half(1, &[2, 9], dtype), half(2, &[9, 3], dtype), half(3, &[3], dtype)];
        check("linear", tolerance, &given, |t| {
            Outputs::new().float(linear(t.float::<2>(0), t.float(1), Some(t.float(2))))
        });
        let given = [half(1, &[2, 3, 8], dtype), half(2, &[8], dtype), half(3, &[8], dtype)];
        check_forward("layer norm", tolerance, &given, |t| {
            Outputs::new().float(layer_norm(t.float::<3>(0), t.float(1), Some(t.float(2)), 0.1))
        });
    }
}

#[test]
fn what_has_no_lowering_is_refused_in_words() {
    let given = [data(1, &[2, 3]), data(2, &[1, 3, 4])];
    let error = refused_recorded(&given, |_, mut t| {
        let weight = t.pop().unwrap();
        vec![CaptureBackend::linear(t.pop().unwrap(), weight, None)]
    });
    assert!(error.to_string().contains("pass an input of at least one dimension and a weight of two"), "{error}");
}

/// Operations over nothing.
#[test]
fn empty_results() {
    check_recorded("no rows", 0.0, &[data(1, &[0, 3]), data(2, &[3, 2])], |_, mut t| {
        let weight = t.pop().unwrap();
        vec![CaptureBackend::linear(t.pop().unwrap(), weight, None)]
    });
}

/// Operations that burn's tensors replace by products and sums on some devices, recorded whole.
#[test]
fn recorded_whole() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let tolerance = if dtype == DType::BF16 { 4e-2 } else { 4e-3 };
        let given =
            [half(1, &[2, 3, 4], dtype), half(2, &[4, 5], dtype), half(3, &[5], dtype), half(4, &[2, 3, 5], dtype)];
        check_recorded("linear", tolerance, &given, |_, t| {
            let [x, weight, bias, grad] = t.try_into().unwrap();
            vec![
                CaptureBackend::linear(x.clone(), weight.clone(), Some(bias)),
                CaptureBackend::linear(x.clone(), weight.clone(), None),
                CaptureBackend::linear_x_backward(weight, grad.clone()),
                CaptureBackend::linear_weight_backward(x, grad.clone()),
                CaptureBackend::linear_bias_backward(grad),
            ]
        });
        let indices = TensorData::from([[3i64, 0, 3], [1, 3, 0]]);
        check_recorded(
            "embedding",
            tolerance,
            &[half(1, &[4, 5], dtype), indices, half(4, &[2, 3, 5], dtype)],
            |_, t| {
                let [weights, indices, grad] = t.try_into().unwrap();
                vec![
                    CaptureBackend::embedding(weights.clone(), indices.clone()),
                    CaptureBackend::embedding_backward(weights, grad, indices),
                ]
            },
        );
    }
}
