//! Reductions, order and products.

use burn::tensor::{DType, TensorData};
use burn_backend::ops::{FloatTensorOps, IntTensorOps};
use burn_capture::CaptureBackend as B;
use proptest::prelude::*;

use crate::harness::{Outputs, check, check_forward, check_recorded, program};
use crate::values::{cast, floats, ints, property, shape, special};

#[test]
fn reductions_and_their_gradients() {
    let given = shape(3).prop_flat_map(|shape| floats(&shape, 0.5, 2.0));
    property(4, (given, 0usize..3), |(x, dim)| {
        check("reductions", 1e-5, &[x], |t| {
            let x = t.float::<3>(0);
            Outputs::new()
                .float(x.clone().sum())
                .float(x.clone().mean())
                .float(x.clone().prod())
                .float(x.clone().sum_dim(dim))
                .float(x.clone().mean_dim(dim))
                .float(x.clone().prod_dim(dim))
                .float(x.clone().sum_dims(&[0, 2]))
                .float(x.clone().var(dim))
                .float(x.clone().cumsum(dim))
                .float(x.clone().cumprod(dim))
                .constant(x.clone().max_abs())
                .constant((x.clone() - 1.0).max_abs_dim(dim))
                .bool(x.clone().any())
                .bool(x.clone().all_dim(dim))
        });
    });
}

#[test]
fn extremes_and_their_gradients() {
    // Equal elements share no gradient in burn: the first gets all of it.
    let given = shape(3).prop_flat_map(|shape| floats(&shape, -2.0, 2.0));
    property(4, (given, 0usize..3), |(x, dim)| {
        check("extremes", 1e-6, &[x], |t| {
            let x = t.float::<3>(0);
            let (largest, place) = x.clone().max_dim_with_indices(dim);
            let (smallest, other) = x.clone().min_dim_with_indices(dim);
            Outputs::new()
                .float(x.clone().max())
                .float(x.clone().min())
                .float(x.clone().max_dim(dim))
                .float(x.clone().min_dim(dim))
                .float(largest)
                .int(place)
                .float(smallest)
                .int(other)
                .int(x.clone().argmax(dim))
                .int(x.clone().argmin(dim))
                .float(x.clone().cummax(dim))
                .float(x.cummin(dim))
        });
    });
}

#[test]
fn extremes_of_nan_and_of_equal_elements() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let equal = [1.0, 1.0, -1.0, -1.0, 0.0, -0.0, 0.0, -0.0, nan, nan, 1.0, 2.0, -inf, -inf, -inf, -inf];
    for x in [special(), TensorData::new(equal.to_vec(), [4, 4])] {
        check_forward("nan", 0.0, &[x], |t| {
            let x = t.float::<2>(0);
            let mut outputs = Outputs::new().constant(x.clone().max()).constant(x.clone().min());
            for dim in [0, 1] {
                outputs = outputs
                    .constant(x.clone().max_dim(dim))
                    .constant(x.clone().min_dim(dim))
                    .int(x.clone().argmax(dim))
                    .int(x.clone().argmin(dim))
                    .constant(x.clone().cummax(dim))
                    .constant(x.clone().cummin(dim))
                    .bool(x.clone().any_dim(dim))
                    .bool(x.clone().all_dim(dim));
            }
            outputs
        });
    }
}

#[test]
fn order() {
    let shapes = shape(2).prop_map(|shape| shape.iter().map(|size| size + 2).collect::<Vec<_>>());
    let given = shapes.prop_flat_map(|shape| (floats(&shape, -2.0, 2.0), ints(&shape, -3, 3)));
    property(4, (given, 0usize..2), |((x, n), dim)| {
        let count = 2;
        check("order", 0.0, &[x, n], |t| {
            let (x, n) = (t.float::<2>(0), t.int::<2>(1));
            let (sorted, places) = x.clone().sort_with_indices(dim);
            let (top, top_places) = x.clone().topk_with_indices(count, dim);
            Outputs::new()
                .float(x.clone().sort(dim))
                .float(x.clone().sort_descending(dim))
                .float(sorted)
                .int(places)
                .int(x.clone().argsort(dim))
                .int(x.clone().argsort_descending(dim))
                .float(top)
                .int(top_places)
                .constant(x.clone().topk(count, dim))
                .int(x.argtopk(count, dim))
                .int(n.clone().sort(dim))
                .int(n.clone().sort_descending(dim))
                .int(n.topk(count, dim))
        });
    });
    check_forward("order of special numbers", 0.0, &[special()], |t| {
        Outputs::new().constant(t.float::<2>(0).sort(1)).constant(t.float::<2>(0).topk(3, 0))
    });
}

#[test]
fn reductions_of_integers() {
    let given = shape(2).prop_flat_map(|shape| ints(&shape, -30, 30));
    property(3, (given, 0usize..2), |(n, dim)| {
        for dtype in [DType::I64, DType::I32] {
            check_forward("integers", 0.0, &[cast(&n, dtype)], |t| {
                let n = t.int::<2>(0);
                Outputs::new()
                    .int(n.clone().sum())
                    .int(n.clone().prod())
                    .int(n.clone().mean())
                    .int(n.clone().sum_dim(dim))
                    .int(n.clone().prod_dim(dim))
                    .int(n.clone().mean_dim(dim))
                    .int(n.clone().max())
                    .int(n.clone().min())
                    .int(n.clone().max_dim(dim))
                    .int(n.clone().min_dim(dim))
                    .int(n.clone().argmax(dim))
                    .int(n.clone().argmin(dim))
                    .int(n.clone().cumsum(dim))
                    .int(n.clone().cumprod(dim))
                    .int(n.clone().cummax(dim))
                    .int(n.clone().cummin(dim))
                    .int(n.clone().max_abs())
                    .bool(n.clone().any())
                    .bool(n.all_dim(dim))
            });
        }
    });
    // The sum wraps around in 8 bits; the number of elements must not.
    let n = cast(&TensorData::new([vec![100i64; 3], vec![0; 200]].concat(), [1, 203]), DType::I8);
    check_recorded("mean of i8", 0.0, &[n], |_, t| vec![B::int_mean_dim(t[0].clone(), 1)]);
}

#[test]
fn sums_of_16_bits_are_f32() {
    // In 16 bits 2048 + 1 is 2048, and 65504 + 65504 is infinite.
    let x = TensorData::new([vec![2048.0f32], vec![1.0; 15]].concat(), [16]);
    let large = TensorData::new(vec![60000.0f32; 16], [16]);
    for dtype in [DType::F16, DType::BF16] {
        check_recorded(&format!("{dtype:?}"), 0.0, &[cast(&x, dtype), cast(&large, dtype)], |_, t| {
            let (x, large) = (t[0].clone(), t[1].clone());
            vec![
                B::float_sum(x.clone()),
                B::float_sum_dim(x.clone(), 0),
                B::float_mean(large.clone()),
                B::float_mean_dim(large, 0),
                B::float_cumsum(x, 0),
            ]
        });
        // The evaluator rounds sums of every type once; devices do not.
        let program = program(&[cast(&x, dtype)], |t| {
            let x = t.float::<1>(0);
            Outputs::new().constant(x.clone().sum()).constant(x.clone().mean()).constant(x.cumsum(0))
        });
        assert_eq!(program.count("convert"), 6, "{}", program.text());
    }
}

#[test]
fn products_of_matrices_and_their_gradients() {
    let sizes = (1usize..4, 1usize..4, 1usize..4, 1usize..3);
    let given = sizes.prop_flat_map(|(rows, inner, columns, batch)| {
        (floats(&[batch, rows, inner], -2.0, 2.0), floats(&[1, inner, columns], -2.0, 2.0))
    });
    property(4, given, |(x, y)| {
        check("matmul", 1e-5, &[x, y], |t| Outputs::new().float(t.float::<3>(0).matmul(t.float(1))));
    });
    property(2, (ints(&[2, 3], -9, 9), ints(&[3, 2], -9, 9)), |(x, y)| {
        check_forward("int matmul", 0.0, &[x, y], |t| Outputs::new().int(t.int::<2>(0).matmul(t.int(1))));
    });
}

#[test]
fn products_of_vectors_and_their_gradients() {
    property(3, (floats(&[2, 3], -2.0, 2.0), floats(&[2, 3], -2.0, 2.0)), |(x, y)| {
        check("cross", 1e-5, &[x, y], |t| Outputs::new().float(t.float::<2>(0).cross(t.float(1), 1)));
    });
}
