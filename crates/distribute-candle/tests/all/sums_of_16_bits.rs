//! Sums over many elements of 16 bits: weights of softmax and attention, and the gradients of parameters that many rows
//! use. candle rounds to 16 bits after each addition, so that 1024 equal numbers in bf16 add up to 256 of them.

use candle_core::{D, DType, Device, Module, Result, Tensor, Var};
use candle_nn::{Conv2dConfig, VarBuilder, VarMap};
use distribute_candle::{
    AttentionMask, Conv2d, Linear, RowParallelOptions, attention, embedding, layer_norm, row_parallel_linear,
    self_attention, softmax, vocab_parallel_embedding,
};

const TYPES: [DType; 2] = [DType::BF16, DType::F16];

/// As many rows as have the sum 1.
const ROWS: usize = 4096;

fn zeros(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::zeros(shape, dtype, &Device::Cpu).unwrap()
}

fn ones(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::ones(shape, dtype, &Device::Cpu).unwrap()
}

fn flat(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

#[track_caller]
fn assert_near(x: &Tensor, expected: f32, dtype: DType) {
    let all = flat(x);
    assert!(x.dtype() == dtype && !all.is_empty(), "{:?} {:?}", x.dtype(), x.dims());
    let wrong = all.iter().find(|x| (**x - expected).abs() > 0.01 * expected.abs());
    assert!(wrong.is_none(), "{wrong:?} instead of {expected}, {dtype:?}");
}

/// Returns the gradients of the mean, over `rows`, of the sum of a row's elements.
fn gradients(y: &Tensor, rows: usize) -> candle_core::backprop::GradStore {
    let loss = (y.to_dtype(DType::F32).unwrap() * (1.0 / rows as f64)).unwrap().sum_all().unwrap();
    loss.backward().unwrap()
}

#[test]
fn weights_of_a_softmax_have_the_sum_1() {
    for dtype in TYPES {
        let weights = softmax(&zeros(&[3, 1024], dtype)).unwrap();
        assert_eq!(weights.dtype(), dtype);
        for row in weights.to_dtype(DType::F32).unwrap().sum(1).unwrap().to_vec1::<f32>().unwrap() {
            assert!((row - 1.0).abs() < 1e-2, "{row} {dtype:?}");
        }
        // Backward has the sums over a row too.
        let x = Var::from_tensor(&zeros(&[1024], dtype)).unwrap();
        let change = gradients(&softmax(&x).unwrap(), 1).get(&x).unwrap().clone();
        assert!(change.dtype() == dtype && flat(&change).iter().all(|change| change.abs() < 1e-4), "{dtype:?}");
    }
}

#[test]
fn attention_to_many_equal_keys_is_their_mean() {
    let (queries, keys, width) = (2, 1024, 8);
    for dtype in TYPES {
        let q = Var::from_tensor(&zeros(&[1, 2, queries, width], dtype)).unwrap();
        let [k, v] = [zeros(&[1, 1, keys, width], dtype), ones(&[1, 1, keys, width], dtype)];
        let [k, v] = [k, v].map(|x| Var::from_tensor(&x).unwrap());
        let mask = zeros(&[queries, keys], dtype);
        for mask in [AttentionMask::None, AttentionMask::Causal, AttentionMask::Additive(&mask)] {
            let y = attention(&q, &k, &v, mask).unwrap();
            assert_near(&y, 1.0, dtype);
            // Each value has this part of the means of two queries of two heads.
            let change = gradients(&y, 1).get(&v).unwrap().clone();
            assert_near(&change.narrow(2, 0, keys - 2).unwrap(), 4.0 / keys as f32, dtype);
        }
        let qkv = Tensor::cat(&[zeros(&[1, keys, 2 * width], dtype), ones(&[1, keys, width], dtype)], D::Minus1);
        let (qkv, mask) = (qkv.unwrap(), zeros(&[keys], dtype));
        for mask in [AttentionMask::None, AttentionMask::Causal, AttentionMask::Additive(&mask)] {
            assert_near(&self_attention(&qkv, 2, mask).unwrap(), 1.0, dtype);
        }
        // Without keys there are no scores to normalise.
        let none = zeros(&[1, 1, 0, width], dtype);
        let y = attention(&q, &none, &none, AttentionMask::None);
        assert!(y.is_err() || y.unwrap().dtype() == dtype);
    }
}

#[test]
fn weights_and_biases_of_many_rows_get_all_of_their_gradient() {
    for dtype in TYPES {
        let [weight, bias] = [zeros(&[3, 2], dtype), zeros(&[3], dtype)].map(|x| Var::from_tensor(&x).unwrap());
        let layer = Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
        let x = ones(&[ROWS, 2], dtype);
        let batches = x.reshape((ROWS / 4, 4, 2)).unwrap();
        let apart = ones(&[4, ROWS / 4, 2], dtype).transpose(0, 1).unwrap();
        let images = x.reshape((ROWS / 16, 4, 4, 2)).unwrap();
        for x in [x, batches, apart, images] {
            for y in [layer.forward(&x).unwrap(), layer.forward_gelu(&x).unwrap()] {
                let gradients = gradients(&y, ROWS);
                let scale = flat(gradients.get(&bias).unwrap())[0];
                assert!((scale - 1.0).abs() < 0.01 || (scale - 0.5).abs() < 0.01, "{scale} {dtype:?} {:?}", x.dims());
                assert_near(gradients.get(&bias).unwrap(), scale, dtype);
                assert_near(gradients.get(&weight).unwrap(), scale, dtype);
            }
        }
    }
}

#[test]
fn convolutions_of_many_places_get_all_of_their_gradient() {
    // candle has no convolution of bf16 in host memory.
    let dtype = DType::F16;
    let bias = Var::from_tensor(&zeros(&[3], dtype)).unwrap();
    let weight = Var::from_tensor(&zeros(&[3, 2, 1, 1], dtype)).unwrap();
    let layer = Conv2d::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()), Conv2dConfig::default());
    let x = ones(&[4, 2, 32, 32], dtype);
    let gradients = gradients(&layer.forward(&x).unwrap(), ROWS);
    assert_near(gradients.get(&bias).unwrap(), 1.0, dtype);
    assert_near(gradients.get(&weight).unwrap(), 1.0, dtype);
    // Layers add their bias to each place.
    let set = |to: f64| bias.set(&(bias.ones_like().unwrap() * to).unwrap()).unwrap();
    set(2.0);
    assert_near(&layer.forward(&x).unwrap(), 2.0, dtype);
    assert!(flat(&layer.forward_relu(&x).unwrap()).iter().all(|x| *x == 2.0));
    set(0.0);
    assert_eq!(layer.forward(&zeros(&[0, 2, 4, 4], dtype)).unwrap().dims(), [0, 3, 4, 4]);
}

#[test]
fn layers_of_many_rows_get_all_of_their_gradient() {
    for dtype in TYPES {
        let variables = VarMap::new();
        let vb = VarBuilder::from_varmap(&variables, dtype, &Device::Cpu);
        let of = |y: Result<Tensor>, name: &str| {
            let gradients = gradients(&y.unwrap(), ROWS);
            gradients.get(&variables.data().lock().unwrap()[name]).unwrap().clone()
        };
        let split = row_parallel_linear(2, 3, RowParallelOptions::default(), vb.pp("split")).unwrap();
        assert_near(&of(split.forward(&ones(&[ROWS, 2], dtype)), "split.bias"), 1.0, dtype);
        let norm = layer_norm(2, 1e-5, vb.pp("norm")).unwrap();
        assert_near(&of(norm.forward(&ones(&[ROWS, 2], dtype)), "norm.bias"), 1.0, dtype);

        // A word that all rows have.
        let words = Tensor::ones((ROWS / 8, 8), DType::U32, &Device::Cpu).unwrap();
        let whole = embedding(4, 3, vb.pp("whole")).unwrap();
        let split = vocab_parallel_embedding(4, 3, vb.pp("vocabulary")).unwrap();
        for (layer, name) in [(&whole as &dyn Module, "whole.weight"), (&split, "vocabulary.weight")] {
            let y = layer.forward(&words).unwrap();
            let table = variables.data().lock().unwrap()[name].as_tensor().clone();
            assert_eq!(flat(&y.get(0).unwrap().get(0).unwrap()), flat(&table.get(1).unwrap()));
            let change = of(Ok(y), name);
            assert_near(&change.get(1).unwrap(), 1.0, dtype);
            assert!([0, 2, 3].iter().all(|row| flat(&change.get(*row).unwrap()).iter().all(|x| *x == 0.0)));
            let bytes = words.to_dtype(DType::U8).unwrap();
            assert_eq!(layer.forward(&bytes).unwrap().dims(), [ROWS / 8, 8, 3]);
            assert_eq!(layer.forward(&words.narrow(0, 0, 0).unwrap()).unwrap().dims(), [0, 8, 3]);
        }
    }
}
