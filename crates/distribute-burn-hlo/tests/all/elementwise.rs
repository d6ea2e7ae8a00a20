//! Functions of elements.

use burn::tensor::{DType, Int, Tensor, TensorData, activation};
use burn_backend::Scalar;
use burn_backend::ops::{ActivationOps, FloatTensorOps, IntTensorOps};
use burn_capture::CaptureBackend as B;
use proptest::prelude::*;

use crate::harness::{Outputs, check, check_forward, check_recorded};
use crate::values::{bools, cast, floats, ints, property, shape, special};

/// A function of one tensor, by its name, with the limits of its operands.
type Unary = (&'static str, (f32, f32), fn(Tensor<2>) -> Tensor<2>);

const UNARY: &[Unary] = &[
    ("exp", (-3.0, 3.0), |x| x.exp()),
    ("log", (0.1, 9.0), |x| x.log()),
    ("log1p", (-0.5, 9.0), |x| x.log1p()),
    ("erf", (-4.5, 4.5), |x| x.erf()),
    ("sqrt", (0.1, 9.0), |x| x.sqrt()),
    ("cos", (-4.0, 4.0), |x| x.cos()),
    ("cosh", (-4.0, 4.0), |x| x.cosh()),
    ("sin", (-4.0, 4.0), |x| x.sin()),
    ("sinh", (-4.0, 4.0), |x| x.sinh()),
    ("tan", (-1.2, 1.2), |x| x.tan()),
    ("tanh", (-4.0, 4.0), |x| x.tanh()),
    ("acos", (-0.9, 0.9), |x| x.acos()),
    ("acosh", (1.1, 9.0), |x| x.acosh()),
    ("asin", (-0.9, 0.9), |x| x.asin()),
    ("asinh", (-9.0, 9.0), |x| x.asinh()),
    ("atan", (-9.0, 9.0), |x| x.atan()),
    ("atanh", (-0.9, 0.9), |x| x.atanh()),
    ("round", (-4.0, 4.0), |x| x.round()),
    ("floor", (-4.0, 4.0), |x| x.floor()),
    ("ceil", (-4.0, 4.0), |x| x.ceil()),
    ("trunc", (-4.0, 4.0), |x| x.trunc()),
    ("recip", (0.2, 4.0), |x| x.recip()),
    ("abs", (-4.0, 4.0), |x| x.abs()),
    ("neg", (-4.0, 4.0), |x| x.neg()),
    ("sign", (-4.0, 4.0), |x| x.sign()),
    ("powf_scalar 1.5", (0.1, 4.0), |x| x.powf_scalar(1.5)),
    ("powf_scalar 3", (-2.0, 2.0), |x| x.powf_scalar(3.0)),
    ("powf_scalar 2", (-2.0, 2.0), |x| x.powf_scalar(2.0)),
    ("powf_scalar -1", (0.5, 2.0), |x| x.powf_scalar(-1.0)),
    ("powf_scalar -2", (0.5, 2.0), |x| x.powf_scalar(-2.0)),
    ("powf_scalar 0", (-2.0, 2.0), |x| x.powf_scalar(0.0)),
    ("add_scalar", (-4.0, 4.0), |x| x + 0.3),
    ("sub_scalar", (-4.0, 4.0), |x| x - 0.3),
    ("mul_scalar", (-4.0, 4.0), |x| x * 0.3),
    ("div_scalar", (-4.0, 4.0), |x| x / 0.3),
    ("remainder_scalar", (-4.0, 4.0), |x| x.remainder_scalar(0.75)),
    ("remainder by a negative one", (-4.0, 4.0), |x| x.remainder_scalar(-0.75)),
    ("clamp", (-4.0, 4.0), |x| x.clamp(-1.0, 2.0)),
    ("clamp_min", (-4.0, 4.0), |x| x.clamp_min(-1.0)),
    ("clamp_max", (-4.0, 4.0), |x| x.clamp_max(1.0)),
    ("relu", (-4.0, 4.0), activation::relu),
    ("gelu", (-4.0, 4.0), activation::gelu),
    ("sigmoid", (-4.0, 4.0), activation::sigmoid),
    ("log_sigmoid", (-30.0, 30.0), activation::log_sigmoid),
    ("leaky_relu", (-4.0, 4.0), |x| activation::leaky_relu(x, 0.1)),
    ("hard_sigmoid", (-4.0, 4.0), |x| activation::hard_sigmoid(x, 0.2, 0.5)),
    ("softplus", (-4.0, 4.0), |x| activation::softplus(x, 1.0)),
    ("silu", (-4.0, 4.0), activation::silu),
    ("mish", (-4.0, 4.0), activation::mish),
    ("tanh activation", (-4.0, 4.0), activation::tanh),
    ("softmax", (-4.0, 4.0), |x| activation::softmax(x, 1)),
    ("softmax of columns", (-40.0, 40.0), |x| activation::softmax(x, 0)),
    ("log_softmax", (-40.0, 40.0), |x| activation::log_softmax(x, 1)),
    ("softmin", (-4.0, 4.0), |x| activation::softmin(x, 1)),
    ("quiet_softmax", (-4.0, 4.0), |x| activation::quiet_softmax(x, 1)),
];

#[test]
fn functions_of_one_tensor_and_their_gradients() {
    for (name, (low, high), function) in UNARY {
        property(2, shape(2).prop_flat_map(|shape| floats(&shape, *low, *high)), |x| {
            check(name, 3e-5, &[x], |t| Outputs::new().float(function(t.float(0))));
        });
    }
}

#[test]
fn functions_of_special_numbers() {
    for (name, _, function) in UNARY {
        // Angles of 1e30 have no digits in f32.
        if !matches!(*name, "sin" | "cos" | "tan") {
            check_forward(name, 1e-5, &[special()], |t| Outputs::new().float(function(t.float(0))));
        }
    }
}

#[test]
fn functions_of_other_types() {
    let x = TensorData::new(vec![0.25f32, 0.3, 0.7, 0.875], [2, 2]);
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F16, 4e-3), (DType::BF16, 3e-2)] {
        for (name, (low, _), function) in UNARY {
            // The scale keeps operands where functions are defined.
            let x = if *low >= 1.0 { TensorData::new(vec![1.25f32, 1.5, 3.0, 4.0], [2, 2]) } else { x.clone() };
            let name = format!("{name} of {dtype:?}");
            check_forward(&name, tolerance, &[cast(&x, dtype)], |t| Outputs::new().float(function(t.float(0))));
        }
    }
}

#[test]
fn functions_of_two_tensors_repeat_sizes_of_one() {
    let shapes = (shape(2), 0usize..3).prop_map(|(left, repeated)| {
        let mut right = left.clone();
        if repeated < 2 {
            right[repeated] = 1;
        }
        (left, right)
    });
    let pairs = shapes.prop_flat_map(|(left, right)| (floats(&left, 0.5, 4.0), floats(&right, 0.6, 3.0)));
    property(4, pairs, |(x, y)| {
        check("pairs", 3e-5, &[x, y], |t| {
            let (x, y) = (t.float::<2>(0), t.float::<2>(1));
            let (negative, dims) = (y.clone().neg(), x.dims());
            Outputs::new()
                .float(x.clone() + y.clone())
                .float(x.clone() - y.clone())
                .float(x.clone() * y.clone())
                .float(x.clone() / y.clone())
                .float(y.clone().powf(x.clone().expand(dims)))
                .float(x.clone().atan2(y.clone()))
                .float(x.clone().hypot(y.clone()))
                .constant(x.clone().remainder(y.clone()))
                .constant(x.clone().remainder(negative))
                .bool(x.clone().greater(y.clone()))
                .bool(x.clone().greater_equal(y.clone()))
                .bool(x.clone().lower(y.clone()))
                .bool(x.clone().lower_equal(y.clone()))
                .bool(x.clone().equal(y.clone()))
                .bool(x.clone().not_equal(y))
        });
    });
}

#[test]
fn comparisons_and_choices_of_special_numbers() {
    let mut reversed: Vec<f32> = special().iter().collect();
    reversed.reverse();
    let (x, y) = (special(), TensorData::new(reversed, [4, 4]));
    check_forward("special", 1e-6, &[x, y], |t| {
        let (x, y) = (t.float::<2>(0), t.float::<2>(1));
        Outputs::new()
            .bool(x.clone().greater(y.clone()))
            .bool(x.clone().lower_equal(y.clone()))
            .bool(x.clone().equal(y.clone()))
            .bool(x.clone().not_equal(y.clone()))
            .bool(x.clone().greater_elem(0.5))
            .bool(x.clone().greater_equal_elem(0.5))
            .bool(x.clone().lower_elem(0.5))
            .bool(x.clone().lower_equal_elem(0.5))
            .bool(x.clone().equal_elem(0.5))
            .bool(x.clone().not_equal_elem(0.5))
            .bool(x.clone().is_nan())
            .bool(x.clone().is_inf())
            .constant(x.clone().hypot(y.clone()))
            .constant(x.clone().remainder(y.clone()))
            .constant(x.clone().atan2(y.clone()))
            .constant(x.clone().max_pair(y.clone()))
            .constant(x.clone().min_pair(y.clone()))
            .constant(activation::relu(x.clone()))
            .constant(x.clone().clamp(f32::NAN, 1.0))
            .constant(x.sign())
    });
}

#[test]
fn gradients_of_activations() {
    property(3, (floats(&[3, 4], -3.0, 3.0), floats(&[4], 0.1, 0.9)), |(x, alpha)| {
        check("prelu", 1e-5, &[x.clone(), alpha], |t| {
            Outputs::new().float(activation::prelu(t.float::<2>(0), t.float::<1>(1)))
        });
        // Methods of the backend that burn's own differentiation does not call.
        check_recorded("backward", 1e-5, &[x.clone(), x], |_, t| {
            let (x, grad) = (t[0].clone(), t[1].clone());
            vec![
                B::relu_backward(x.clone(), grad.clone()),
                B::gelu_backward(x.clone(), grad.clone()),
                B::sigmoid_backward(x.clone(), grad.clone()),
                B::log_sigmoid_backward(x.clone(), grad.clone()),
                B::hard_sigmoid(x.clone(), Scalar::Float(0.2), Scalar::Float(0.5)),
                B::leaky_relu(x, Scalar::Float(0.1)),
            ]
        });
    });
}

#[test]
fn arithmetic_of_integers() {
    let pairs = shape(2).prop_flat_map(|shape| (ints(&shape, -9, 9), ints(&shape, 1, 5)));
    property(3, pairs, |(x, y)| {
        for dtype in [DType::I64, DType::I32, DType::I8] {
            check_forward("integers", 0.0, &[cast(&x, dtype), cast(&y, dtype)], |t| {
                let (x, y) = (t.int::<2>(0), t.int::<2>(1));
                let negative = y.clone().neg();
                Outputs::new()
                    .int(x.clone() + y.clone())
                    .int(x.clone() - y.clone())
                    .int(x.clone() * y.clone())
                    .int(x.clone() / y.clone())
                    .int(x.clone() / negative.clone())
                    .int(x.clone().remainder(y.clone()))
                    .int(x.clone().remainder(negative))
                    .int(x.clone() + 3)
                    .int(x.clone() - 3)
                    .int(x.clone() * 3)
                    .int(x.clone() / 3)
                    .int(x.clone().remainder_scalar(3))
                    .int(x.clone().remainder_scalar(-3))
                    .int(x.clone().powi(y.clone()))
                    .int(x.clone().powi_scalar(3))
                    .int(x.clone().abs())
                    .int(x.clone().neg())
                    .int(x.clone().sign())
                    .int(x.clone().clamp(-3, 4))
                    .int(x.clone().clamp_min(-3))
                    .int(x.clone().clamp_max(3))
                    .bool(x.clone().greater(y.clone()))
                    .bool(x.clone().lower_equal_elem(2))
                    .bool(x.clone().equal_elem(2))
            });
        }
    });
}

#[test]
fn bits_of_integers() {
    let pairs = (ints(&[3, 4], -100, 100), ints(&[3, 4], 0, 70));
    property(2, pairs, |(x, y)| {
        for dtype in [DType::I64, DType::I32, DType::U32, DType::U8] {
            let x = if matches!(dtype, DType::U32 | DType::U8) {
                TensorData::new(x.iter::<i64>().map(|x| x.abs()).collect::<Vec<_>>(), [3, 4])
            } else {
                x.clone()
            };
            check_recorded("bits", 0.0, &[cast(&x, dtype), cast(&y, dtype)], |_, t| {
                let (x, y) = (t[0].clone(), t[1].clone());
                vec![
                    B::bitwise_and(x.clone(), y.clone()),
                    B::bitwise_or(x.clone(), y.clone()),
                    B::bitwise_xor(x.clone(), y.clone()),
                    B::bitwise_not(x.clone()),
                    B::bitwise_left_shift(x.clone(), y.clone()),
                    B::bitwise_right_shift(x.clone(), y.clone()),
                    B::bitwise_and_scalar(x.clone(), Scalar::Int(12)),
                    B::bitwise_or_scalar(x.clone(), Scalar::Int(12)),
                    B::bitwise_xor_scalar(x.clone(), Scalar::Int(12)),
                    B::bitwise_left_shift_scalar(x.clone(), Scalar::Int(33)),
                    B::bitwise_right_shift_scalar(x, Scalar::Int(2)),
                ]
            });
        }
    });
}

#[test]
fn truth_values() {
    property(3, (bools(&[2, 3]), bools(&[2, 3]), floats(&[2, 3], -1.0, 1.0)), |(p, q, x)| {
        check("truth values", 0.0, &[p, q, x], |t| {
            let (p, q, x) = (t.bool::<2>(0), t.bool::<2>(1), t.float::<2>(2));
            Outputs::new()
                .bool(p.clone().bool_and(q.clone()))
                .bool(p.clone().bool_or(q.clone()))
                .bool(p.clone().bool_xor(q.clone()))
                .bool(p.clone().bool_not())
                .bool(p.clone().equal(q.clone()))
                .bool(p.clone().not_equal(q.clone()))
                .bool(p.clone().equal_elem(true))
                .bool(p.clone().not_equal_elem(true))
                .int(p.clone().int())
                .constant(p.clone().float())
                .float(x.clone().mask_where(p.clone(), x.clone() * 2.0))
                .float(x.mask_fill(q.clone(), 7.0))
                .int(q.clone().int().mask_fill(p.clone(), 7))
                .bool(p.clone().any())
                .bool(p.clone().all())
                .bool(p.clone().any_dim(1))
                .bool(p.all_dim(0))
        });
    });
}

#[test]
fn conversions_cut_off_and_keep_to_limits() {
    let values = vec![0.0f32, -0.9, 0.9, 1.5, -1.5, 300.0, -300.0, 1e10, -1e10, 1e30, f32::INFINITY, f32::NEG_INFINITY];
    let x = TensorData::new([values, vec![f32::NAN, 127.5, -128.5, 65504.0]].concat(), [16]);
    for dtype in [DType::I64, DType::I32, DType::I16, DType::I8, DType::U32, DType::U8] {
        check_recorded(&format!("into {dtype:?}"), 0.0, std::slice::from_ref(&x), |_, t| {
            vec![B::float_into_int(t[0].clone(), dtype.into())]
        });
    }
    for dtype in [DType::F64, DType::F16, DType::BF16] {
        check_recorded(&format!("as {dtype:?}"), 0.0, std::slice::from_ref(&x), |_, t| {
            vec![B::float_cast(t[0].clone(), dtype.into())]
        });
    }
    let n = TensorData::new(vec![0i64, 1, -1, 127, 128, 300, -300, 1 << 40], [8]);
    for dtype in [DType::I32, DType::I8, DType::U8, DType::U64] {
        check_forward(&format!("int as {dtype:?}"), 0.0, std::slice::from_ref(&n), |t| {
            Outputs::new().int(t.int::<1>(0).cast(dtype)).constant(t.int::<1>(0).float())
        });
    }
}

#[test]
fn powers_of_whole_exponents() {
    let x = TensorData::new(vec![-1.5f32, -1.0, 0.5, 2.0], [4]);
    check_recorded("powi", 1e-6, &[x], |_, t| {
        (-3..4).map(|exponent| B::float_powi_scalar(t[0].clone(), Scalar::Int(exponent))).collect()
    });
}

#[test]
fn constants_have_the_type_that_was_asked_for() {
    check_forward("constants", 0.0, &[TensorData::from([1.0f32])], |t| {
        let device = t.device();
        Outputs::new()
            .constant(Tensor::<2>::zeros([2, 3], device))
            .constant(Tensor::<2>::ones([2, 3], (device, DType::BF16)))
            .constant(Tensor::<1>::full([3], 2.5, device))
            .int(Tensor::<1, Int>::full([3], -7, (device, DType::I32)))
            .int(Tensor::<1, Int>::arange(2..7, device))
            .constant(Tensor::<2>::zeros([0, 3], device))
    });
}
