//! Fused operations on rows against candle's own in f64: values, and gradients of all arguments.

use candle_core::{D, DType, Device, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use distribute_candle::{cross_entropy_per_example, gelu, layer_norm, rms_norm, softmax};
use distribute_testkit::apart;

/// Numbers of either sign, some of them large.
fn numbers(shape: (usize, usize), seed: usize) -> Result<Tensor> {
    let of = |at: usize| {
        let number = ((at * 37 + seed * 11) % 101) as f64 / 10.0 - 5.0;
        if at.is_multiple_of(17) { number * 8.0 } else { number }
    };
    Tensor::from_vec((0..shape.0 * shape.1).map(of).collect::<Vec<f64>>(), shape, &Device::Cpu)
}

/// Returns the result of `f`, and the gradient of its sum by weights that differ.
fn value_and_gradient(x: &Tensor, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<[Tensor; 2]> {
    let x = Var::from_tensor(x)?;
    let y = f(&x)?;
    let weights = Tensor::arange(0f64, y.elem_count() as f64, &Device::Cpu)?.reshape(y.shape())?;
    let loss = (y.to_dtype(DType::F64)? * (weights / 10.0)?.cos()?)?.sum_all()?;
    let gradient = loss.backward()?.get(&x).unwrap().clone();
    Ok([y, gradient])
}

#[track_caller]
fn assert_close(got: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(got.dims(), expected.dims());
    let [got, expected] =
        [got, expected].map(|x| x.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap());
    let largest = expected.iter().fold(1.0, |largest, x| f64::max(largest, x.abs()));
    let apart = apart(&got, &expected);
    assert!(apart <= tolerance * largest, "{apart} apart");
}

/// Compares in f64, in f32, and for elements that are not one after another.
#[track_caller]
fn compare(x: &Tensor, ours: impl Fn(&Tensor) -> Result<Tensor>, theirs: impl Fn(&Tensor) -> Result<Tensor>) {
    let [y, gradient] = value_and_gradient(x, theirs).unwrap();
    let narrow = x.to_dtype(DType::F32).unwrap();
    let apart = x.t().unwrap().contiguous().unwrap();
    for (ours, tolerance) in [
        (value_and_gradient(x, &ours).unwrap(), 1e-9),
        (value_and_gradient(&narrow, &ours).unwrap(), 1e-5),
        (value_and_gradient(&apart, |x| ours(&x.t()?)).map(|[y, gradient]| [y, gradient.t().unwrap()]).unwrap(), 1e-9),
    ] {
        assert_close(&ours[0], &y, tolerance);
        assert_close(&ours[1], &gradient, tolerance);
    }
}

#[test]
fn softmax_and_gelu_are_candles() {
    // More than one thread gets.
    for shape in [(3, 7), (600, 64)] {
        let x = numbers(shape, 1).unwrap();
        compare(&x, softmax, |x| candle_nn::ops::softmax(x, D::Minus1));
        compare(&x, gelu, |x| {
            let inner = ((x + (x.powf(3.0)? * 0.044715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
            ((x * 0.5)? * (inner.tanh()? + 1.0)?)?.contiguous()
        });
    }
    // Of any number of axes, and none.
    let x = numbers((6, 8), 2).unwrap().reshape((2, 3, 8)).unwrap();
    assert_close(&softmax(&x).unwrap(), &candle_nn::ops::softmax(&x, D::Minus1).unwrap(), 1e-12);
    assert_eq!(softmax(&Tensor::zeros((0, 4), DType::F32, &Device::Cpu).unwrap()).unwrap().dims(), [0, 4]);
    assert!(softmax(&Tensor::new(1f32, &Device::Cpu).unwrap()).is_err());
}

#[test]
fn cross_entropy_is_the_logarithm_of_softmax() {
    for (rows, classes) in [(5, 3), (400, 65)] {
        let targets: Vec<u32> = (0..rows as u32).map(|row| (row * 7) % classes as u32).collect();
        let targets = Tensor::new(targets, &Device::Cpu).unwrap();
        let theirs = |x: &Tensor| {
            let logs = candle_nn::ops::log_softmax(x, D::Minus1)?;
            logs.gather(&targets.unsqueeze(1)?, 1)?.squeeze(1)?.neg()
        };
        for dtype in [DType::U32, DType::I64, DType::U8] {
            let targets = targets.to_dtype(dtype).unwrap();
            compare(&numbers((rows, classes), 3).unwrap(), |x| cross_entropy_per_example(x, &targets), theirs);
        }
    }
}

#[test]
fn norms_and_the_gradients_of_their_weights_are_those_of_single_operations() {
    let x = numbers((300, 48), 4).unwrap();
    let weights = Tensor::arange(0f64, x.elem_count() as f64, &Device::Cpu).unwrap();
    let weights = (weights / 10.0).unwrap().cos().unwrap().reshape(x.shape()).unwrap();
    let composed = |x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, remove_mean: bool| {
        let x = if remove_mean { x.broadcast_sub(&x.mean_keepdim(1)?)? } else { x.clone() };
        let deviation = (x.sqr()?.mean_keepdim(1)? + 1e-5)?.sqrt()?;
        let normed = x.broadcast_div(&deviation)?.broadcast_mul(weight)?;
        bias.map_or(Ok(normed.clone()), |bias| normed.broadcast_add(bias))
    };
    for remove_mean in [true, false] {
        let map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu);
        let layer: Box<dyn Module> = match remove_mean {
            true => Box::new(layer_norm(48, 1e-5, vb).unwrap()),
            false => Box::new(rms_norm(48, 1e-5, vb).unwrap()),
        };
        let norm = |x: &Tensor| layer.forward(x);
        let held = map.data().lock().unwrap().clone();
        let (weight, bias) = (held["weight"].clone(), held.get("bias").cloned());
        weight.set(&numbers((1, 48), 5).unwrap().squeeze(0).unwrap()).unwrap();
        let theirs = |x: &Tensor| composed(x, &weight, bias.as_ref().map(Var::as_tensor), remove_mean);
        compare_values(&x, &norm, &theirs);
        let of = |f: &dyn Fn(&Tensor) -> Result<Tensor>| {
            (f(&x).unwrap() * &weights).unwrap().sum_all().unwrap().backward().unwrap()
        };
        let (ours, expected) = (of(&norm), of(&theirs));
        for variable in [Some(&weight), bias.as_ref()].into_iter().flatten() {
            assert_close(ours.get(variable).unwrap(), expected.get(variable).unwrap(), 1e-10);
        }
    }
}

/// Like [`compare`], for layers whose variables are f64.
#[track_caller]
fn compare_values(x: &Tensor, ours: &dyn Fn(&Tensor) -> Result<Tensor>, theirs: &dyn Fn(&Tensor) -> Result<Tensor>) {
    let ([y, change], [expected, slope]) =
        (value_and_gradient(x, ours).unwrap(), value_and_gradient(x, theirs).unwrap());
    assert_close(&y, &expected, 1e-10);
    assert_close(&change, &slope, 1e-10);
}
