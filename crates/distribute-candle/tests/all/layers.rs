//! Layers in host memory against candle's own in f64: values, and gradients of all arguments.

use candle_core::{D, DType, Device, Module, Result, Tensor, Var};
use candle_nn::Conv2dConfig;
use distribute_candle::{
    AttentionMask, Conv2d, Linear, attention, gelu, max_pool2d, max_pool2d_with_stride, relu, self_attention,
};
use distribute_testkit::apart;

/// Numbers in no order, none of which are equal.
fn numbers(shape: &[usize], seed: usize) -> Tensor {
    let count = shape.iter().product::<usize>();
    let of = |at: usize| ((at * 7919 + seed * 31) % 10_007) as f64 / 2000.0 - 2.5;
    Tensor::from_vec((0..count).map(of).collect::<Vec<f64>>(), shape, &Device::Cpu).unwrap()
}

/// Returns the result of `f`, and the gradients of its sum by weights that differ.
fn value_and_gradients(given: &[Tensor], f: impl Fn(&[Tensor]) -> Result<Tensor>) -> Vec<Tensor> {
    let given: Vec<Var> = given.iter().map(|x| Var::from_tensor(x).unwrap()).collect();
    let y = f(&given.iter().map(|x| x.as_tensor().clone()).collect::<Vec<_>>()).unwrap();
    let weights = numbers(y.dims(), 77).to_dtype(y.dtype()).unwrap();
    let gradients = (&y * weights).unwrap().sum_all().unwrap().backward().unwrap();
    [y].into_iter().chain(given.iter().map(|x| gradients.get(x).unwrap().clone())).collect()
}

#[track_caller]
fn assert_close(got: &[Tensor], expected: &[Tensor], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.dims(), expected.dims());
        let [got, expected] =
            [got, expected].map(|x| x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap());
        let largest = expected.iter().fold(1.0, |largest, x| f64::max(largest, x.abs()));
        let apart = apart(&got, &expected);
        assert!(apart <= tolerance * largest, "tensor {at} is {apart} apart");
    }
}

/// Compares in f64, in f32, and for elements that are not one after another.
#[track_caller]
fn compare(given: &[Tensor], ours: impl Fn(&[Tensor]) -> Result<Tensor>, theirs: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let expected = value_and_gradients(given, theirs);
    assert_close(&value_and_gradients(given, &ours), &expected, 1e-11);
    let narrow: Vec<Tensor> = given.iter().map(|x| x.to_dtype(DType::F32).unwrap()).collect();
    assert_close(&value_and_gradients(&narrow, &ours), &expected, 1e-4);
    // The last axis comes first in memory.
    let last = |x: &Tensor| x.rank() - 1;
    let apart: Vec<Tensor> = given.iter().map(|x| x.transpose(0, last(x)).unwrap().contiguous().unwrap()).collect();
    let back = |x: &Tensor| x.transpose(0, last(x)).unwrap();
    let got = value_and_gradients(&apart, |given| ours(&given.iter().map(back).collect::<Vec<_>>()));
    let got: Vec<Tensor> = [got[0].clone()].into_iter().chain(got[1..].iter().map(back)).collect();
    assert_close(&got, &expected, 1e-11);
}

#[test]
fn linear_layers_are_candles() {
    for shape in [vec![6, 5], vec![2, 3, 5], vec![2, 3, 4, 5]] {
        let given = [numbers(&shape, 1), numbers(&[7, 5], 2), numbers(&[7], 3)];
        compare(
            &given,
            |x| Linear::new(x[1].clone(), Some(x[2].clone())).forward(&x[0]),
            |x| candle_nn::Linear::new(x[1].clone(), Some(x[2].clone())).forward(&x[0]),
        );
        compare(
            &given[..2],
            |x| Linear::new(x[1].clone(), None).forward(&x[0]),
            |x| candle_nn::Linear::new(x[1].clone(), None).forward(&x[0]),
        );
        // The constants of candle's backward of GELU have six digits.
        compare(
            &given,
            |x| Linear::new(x[1].clone(), Some(x[2].clone())).forward_gelu(&x[0]),
            |x| gelu(&candle_nn::Linear::new(x[1].clone(), Some(x[2].clone())).forward(&x[0])?),
        );
        compare(
            &given[..2],
            |x| Linear::new(x[1].clone(), None).forward_gelu(&x[0]),
            |x| gelu(&candle_nn::Linear::new(x[1].clone(), None).forward(&x[0])?),
        );
    }
    let wrong = Linear::new(numbers(&[7, 5], 1), None).forward(&numbers(&[2, 6], 2)).unwrap_err().to_string();
    assert!(wrong.contains("has shape [2, 6]; give (…, 5)"), "{wrong}");
}

#[test]
fn a_bias_of_another_length_is_candles_too() {
    let (x, weight) = (numbers(&[6, 5], 1), numbers(&[7, 5], 2));
    let given = [x.clone(), weight.clone(), numbers(&[1], 3)];
    compare(
        &given,
        |x| Linear::new(x[1].clone(), Some(x[2].clone())).forward(&x[0]),
        |x| candle_nn::Linear::new(x[1].clone(), Some(x[2].clone())).forward(&x[0]),
    );
    for length in [3, 8] {
        let layer = Linear::new(weight.clone(), Some(numbers(&[length], 3)));
        assert!(layer.forward(&x).is_err() && layer.forward_gelu(&x).is_err(), "{length}");
    }
}

#[test]
fn convolutions_are_candles() {
    let cases = [
        (Conv2dConfig::default(), 3, 4, [3, 2]),
        (Conv2dConfig { padding: 1, ..Default::default() }, 3, 4, [3, 3]),
        (Conv2dConfig { stride: 2, padding: 1, ..Default::default() }, 2, 3, [3, 3]),
        (Conv2dConfig { dilation: 2, padding: 2, ..Default::default() }, 2, 3, [2, 3]),
        (Conv2dConfig { groups: 2, padding: 1, ..Default::default() }, 4, 6, [3, 3]),
        (Conv2dConfig::default(), 5, 3, [1, 1]),
    ];
    for (config, channels, filters, kernel) in cases {
        let given = [
            numbers(&[3, channels, 9, 9], 1),
            numbers(&[filters, channels / config.groups, kernel[0], kernel[1]], 2),
            numbers(&[filters], 3),
        ];
        let ours = |x: &[Tensor]| Conv2d::new(x[1].clone(), x.get(2).cloned(), config).forward(&x[0]);
        let theirs = |x: &[Tensor]| candle_nn::Conv2d::new(x[1].clone(), x.get(2).cloned(), config).forward(&x[0]);
        compare(&given, ours, theirs);
        compare(&given[..2], ours, theirs);
        let rectified = |x: &[Tensor]| Conv2d::new(x[1].clone(), x.get(2).cloned(), config).forward_relu(&x[0]);
        compare(&given, rectified, |x| theirs(x)?.relu());
        compare(&given[..2], rectified, |x| theirs(x)?.relu());
        for window in [2, 3] {
            let ours = |x: &[Tensor]| {
                Conv2d::new(x[1].clone(), x.get(2).cloned(), config).forward_relu_max_pool(&x[0], window)
            };
            compare(&given, ours, |x| pooled(&theirs(x)?.relu()?, window));
            compare(&given[..2], ours, |x| pooled(&theirs(x)?.relu()?, window));
        }
    }
}

#[test]
fn a_convolution_that_is_pooled_is_the_three_layers() {
    for dtype in [DType::F32, DType::F16] {
        // Some windows have nothing above 0, and some NaN.
        let x = Var::from_tensor(
            &Tensor::new(&[[[[-1f32, -2.0, 3.0, 3.0, 1.0], [0.0, -0.5, 3.0, f32::NAN, 1.0]]]], &Device::Cpu)
                .unwrap()
                .to_dtype(dtype)
                .unwrap(),
        )
        .unwrap();
        let layer =
            Conv2d::new(Tensor::ones((1, 1, 1, 1), dtype, &Device::Cpu).unwrap(), None, Conv2dConfig::default());
        let bits = |y: &Tensor| {
            let gradient = y.sum_all().unwrap().backward().unwrap().get(&x).unwrap().clone();
            [y, &gradient].map(|x| {
                let numbers = x.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
                numbers.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            })
        };
        for window in [(2, 1), (2, 2)] {
            let one = layer.forward_relu_max_pool(&x, window).unwrap();
            let three = max_pool2d(&layer.forward_relu(&x).unwrap(), window).unwrap();
            assert_eq!(bits(&one), bits(&three), "{dtype:?}, {window:?}");
        }
        let large = layer.forward_relu_max_pool(&x, 3).unwrap_err().to_string();
        assert!(large.contains("windows of (3, 3) by (3, 3) do not fit images of (2, 5)"), "{large}");
    }
}

#[test]
fn layers_that_do_not_fit_are_errors() {
    let of = |weight: &[usize], x: &[usize]| {
        Conv2d::new(numbers(weight, 1), None, Conv2dConfig::default()).forward(&numbers(x, 2))
    };
    assert!(of(&[2, 3, 3, 3], &[1, 4, 8, 8]).is_err());
    assert_eq!(of(&[2, 3, 3, 3], &[0, 3, 8, 8]).unwrap().dims(), [0, 2, 6, 6]);
    let small = max_pool2d(&numbers(&[1, 1, 2, 2], 1), 3).unwrap_err().to_string();
    assert!(small.contains("windows of (3, 3) by (3, 3) do not fit images of (2, 2)"), "{small}");
    let x = numbers(&[1, 3, 4, 8], 1);
    let heads = attention(&x, &x.narrow(1, 0, 2).unwrap(), &x, AttentionMask::None).unwrap_err().to_string();
    assert!(heads.contains("F64 [1, 2, 4, 8]"), "{heads}");
    assert!(self_attention(&numbers(&[1, 4, 20], 1), 3, AttentionMask::None).is_err());
}

/// Returns each window's largest element, of windows that do not overlap, by operations whose gradients are right.
fn pooled(x: &Tensor, window: usize) -> Result<Tensor> {
    let (images, channels, height, width) = x.dims4()?;
    let rows: Vec<Tensor> = (0..height / window)
        .flat_map(|row| (0..width / window).map(move |column| (row, column)))
        .map(|(row, column)| {
            let window_of = x.narrow(2, row * window, window)?.narrow(3, column * window, window)?;
            window_of.contiguous()?.flatten_from(2)?.max_keepdim(D::Minus1)
        })
        .collect::<Result<_>>()?;
    Tensor::cat(&rows, 2)?.reshape((images, channels, height / window, width / window))
}

#[test]
fn the_largest_element_of_a_window_gets_its_gradient() {
    for window in [2, 3] {
        for size in [[6, 6], [7, 8]] {
            let given = [numbers(&[2, 3, size[0], size[1]], 1)];
            compare(&given, |x| max_pool2d(&x[0], window), |x| pooled(&x[0], window));
        }
    }
    // In 16 bits these are operations of candle, whose own gradient would be a quarter.
    let x = Var::from_tensor(&numbers(&[2, 2, 5, 6], 1).to_dtype(DType::BF16).unwrap()).unwrap();
    let sum = max_pool2d(&x, 2).unwrap().to_dtype(DType::F32).unwrap().sum_all().unwrap();
    let gradient = sum.backward().unwrap().get(&x).unwrap().to_dtype(DType::F32).unwrap();
    assert_eq!(gradient.sum_all().unwrap().to_scalar::<f32>().unwrap(), 2.0 * 2.0 * 2.0 * 3.0);
    let x = [numbers(&[1, 1, 4, 4], 1)];
    let of = |gradients: &[Tensor]| gradients[1].abs().unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
    let ours = of(&value_and_gradients(&x, |x| max_pool2d(&x[0], 2)));
    let of_candle = of(&value_and_gradients(&x, |x| x[0].max_pool2d(2)));
    assert!((ours - 4.0 * of_candle).abs() < 1e-12, "candle's gradient is another now: {of_candle} of {ours}");
    // Of elements that are equally large, the first gets the gradient, in 16 bits as in 32.
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let x = Var::from_tensor(&Tensor::ones((1, 1, 4, 4), dtype, &Device::Cpu).unwrap()).unwrap();
        let gradients = max_pool2d(&x, 2).unwrap().sum_all().unwrap().backward().unwrap();
        let gradient = gradients.get(&x).unwrap().to_dtype(DType::F32).unwrap().flatten_all().unwrap();
        let row = [1.0f32, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        assert_eq!(gradient.to_vec1::<f32>().unwrap(), [row, row].concat(), "{dtype:?}");
        for window in [[[1f32, f32::NAN], [2.0, 3.0]], [[f32::INFINITY, 1.0], [f32::NAN, 2.0]]] {
            let x = Tensor::new(&[[window]], &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let largest = max_pool2d(&x, 2).unwrap().to_dtype(DType::F32).unwrap().flatten_all().unwrap();
            assert!(largest.to_vec1::<f32>().unwrap()[0].is_nan(), "{dtype:?}, {window:?}");
        }
    }
    // Windows that overlap have candle's values.
    let x = numbers(&[2, 2, 7, 6], 1);
    let ours = max_pool2d_with_stride(&x, (3, 2), (2, 1)).unwrap();
    assert_close(&[ours], &[x.max_pool2d_with_stride((3, 2), (2, 1)).unwrap()], 0.0);
}

#[test]
fn windows_may_have_gaps() {
    // Bf16 has eight bits: these numbers are the same in both types.
    let x = Tensor::from_vec((0..84).map(|at| (at * 37 % 84) as f32).collect(), (1, 2, 6, 7), &Device::Cpu).unwrap();
    for (window, stride) in [((1, 1), (2, 2)), ((2, 1), (3, 4)), ((2, 2), (5, 3))] {
        let of = |dtype: DType| {
            let x = Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap();
            let y = max_pool2d_with_stride(&x, window, stride).unwrap();
            let gradients = (&y * &y).unwrap().sum_all().unwrap().backward().unwrap();
            [y, gradients.get(&x).unwrap().clone()].map(|tensor| tensor.to_dtype(DType::F32).unwrap())
        };
        let (short, long) = (of(DType::BF16), of(DType::F32));
        assert_close(&short, &long, 0.0);
        let changed = long[1].ne(0.0).unwrap().to_dtype(DType::F32).unwrap().sum_all().unwrap();
        assert!(changed.to_scalar::<f32>().unwrap() >= long[0].elem_count() as f32 - 1.0);
    }
}

#[test]
fn rectified_units_are_candles() {
    compare(&[numbers(&[40, 50], 1)], |x| relu(&x[0]), |x| x[0].relu());
    // But NaN stays, and 0 has no gradient, in 16 bits as in 32.
    for dtype in [DType::F64, DType::F32, DType::BF16, DType::F16] {
        let given = Tensor::new(&[f32::NAN, 0.0, -1.0, 2.0], &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let x = Var::from_tensor(&given).unwrap();
        let y = relu(&x).unwrap();
        let gradients = y.sum_all().unwrap().backward().unwrap();
        let of = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap();
        let (y, gradient) = (of(&y), of(gradients.get(&x).unwrap()));
        assert!(y[0].is_nan() && y[1..] == [0.0, 0.0, 2.0], "{dtype:?} {y:?}");
        assert_eq!(gradient[1..], [0.0, 0.0, 1.0], "{dtype:?}");
    }
}

/// Attention with a matrix of scores.
fn composed(x: &[Tensor], mask: Option<&Tensor>) -> Result<Tensor> {
    let repeated = |of: &Tensor| {
        let (batch, heads, tokens, width) = of.dims4()?;
        let group = x[0].dim(1)? / heads;
        of.unsqueeze(2)?.broadcast_as((batch, heads, group, tokens, width))?.reshape((batch, (), tokens, width))
    };
    let scores = (x[0].contiguous()?.matmul(&repeated(&x[1])?.t()?)? / (x[0].dim(3)? as f64).sqrt())?;
    let scores = mask.map_or(Ok(scores.clone()), |mask| scores.broadcast_add(&mask.to_dtype(scores.dtype())?))?;
    candle_nn::ops::softmax(&scores, 3)?.matmul(&repeated(&x[2])?)
}

fn causal(tokens: usize) -> Tensor {
    let hidden = |at: usize| if at % tokens > at / tokens { f64::NEG_INFINITY } else { 0.0 };
    let mask = (0..tokens * tokens).map(hidden).collect::<Vec<_>>();
    Tensor::from_vec(mask, (tokens, tokens), &Device::Cpu).unwrap()
}

#[test]
fn attention_is_that_of_products_and_softmax() {
    for key_heads in [4, 2] {
        let key = [2, key_heads, 9, 6];
        let given = [numbers(&[2, 4, 9, 6], 1), numbers(&key, 2), numbers(&key, 3)];
        compare(&given, |x| attention(&x[0], &x[1], &x[2], AttentionMask::None), |x| composed(x, None));
        compare(&given, |x| attention(&x[0], &x[1], &x[2], AttentionMask::Causal), |x| composed(x, Some(&causal(9))));
        for shape in [vec![9, 9], vec![2, 1, 9, 9], vec![4, 9, 9], vec![2, 1, 1, 9], vec![9, 1]] {
            let mask = numbers(&shape, 4);
            compare(
                &given,
                |x| attention(&x[0], &x[1], &x[2], AttentionMask::Additive(&mask.to_dtype(x[0].dtype())?)),
                |x| composed(x, Some(&mask)),
            );
        }
    }
    // In 16 bits these are operations of candle.
    let [q, k, v] = [1, 2, 3].map(|seed| numbers(&[2, 4, 9, 6], seed));
    let [short_q, short_k, short_v] = [&q, &k, &v].map(|x| x.to_dtype(DType::BF16).unwrap());
    for (mask, expected) in [(AttentionMask::None, None), (AttentionMask::Causal, Some(causal(9)))] {
        let short = attention(&short_q, &short_k, &short_v, mask).unwrap();
        let expected = composed(&[q.clone(), k.clone(), v.clone()], expected.as_ref()).unwrap();
        assert_close(&[short], &[expected], 3e-2);
    }
}

#[test]
fn self_attention_is_attention_of_the_parts_of_a_tensor() {
    let (batch, tokens, heads, width) = (3, 7, 2, 5);
    let apart = |x: &Tensor, mask: Option<&Tensor>| {
        let parts = x.reshape((batch, tokens, 3, heads, width))?;
        let part = |at: usize| parts.narrow(2, at, 1)?.squeeze(2)?.transpose(1, 2)?.contiguous();
        composed(&[part(0)?, part(1)?, part(2)?], mask)?.transpose(1, 2)?.flatten_from(2)
    };
    let given = [numbers(&[batch, tokens, 3 * heads * width], 1)];
    let mask = causal(tokens);
    compare(&given, |x| self_attention(&x[0], heads, AttentionMask::None), |x| apart(&x[0], None));
    compare(&given, |x| self_attention(&x[0], heads, AttentionMask::Causal), |x| apart(&x[0], Some(&mask)));
    let short = self_attention(&given[0].to_dtype(DType::BF16).unwrap(), heads, AttentionMask::Causal).unwrap();
    assert_close(&[short], &[apart(&given[0], Some(&mask)).unwrap()], 3e-2);
}
