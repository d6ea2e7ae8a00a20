//! Movement, slices, and reading and writing at computed places.

use burn::tensor::{DType, IndexingUpdateOp, Slice, TensorData};
use burn_backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps, PadMode};
use burn_capture::CaptureBackend as B;
use proptest::prelude::*;

use crate::harness::{Outputs, check, check_forward, check_recorded};
use crate::values::{bools, floats, ints, property, shape};

#[test]
fn elements_are_moved() {
    let given = shape(3).prop_flat_map(|shape| (floats(&shape, -2.0, 2.0), ints(&shape, -5, 5), bools(&shape)));
    property(3, given, |(x, n, p)| {
        check("movement", 0.0, &[x, n, p], |t| {
            let (x, n, p) = (t.float::<3>(0), t.int::<3>(1), t.bool::<3>(2));
            let [a, b, c] = x.dims();
            Outputs::new()
                .float(x.clone().reshape([c, a * b]))
                .float(x.clone().swap_dims(0, 2))
                .float(x.clone().permute([1, 2, 0]))
                .float(x.clone().flip([0, 2]))
                .float(x.clone().unsqueeze::<4>().expand([2, a, b, c]))
                .float(x.clone().repeat_dim(1, 3))
                .float(burn::tensor::Tensor::cat(vec![x.clone(), x.clone() * 2.0], 1))
                .float(x.slice([0..1, 0..b]))
                .int(n.clone().permute([2, 0, 1]))
                .int(n.clone().repeat_dim(0, 2))
                .int(n.flip([1]))
                .bool(p.clone().swap_dims(0, 1))
                .bool(p.clone().repeat_dim(2, 2))
                .bool(burn::tensor::Tensor::cat(vec![p.clone(), p], 0))
        });
    });
}

/// Slices with every kind of limit and step, for a dimension of 7.
fn slices() -> impl Strategy<Value = Slice> {
    let step = prop_oneof![Just(1isize), Just(2), Just(3), Just(-1), Just(-2), Just(-3)];
    (-7isize..7, proptest::option::of(-7isize..8), step).prop_map(|(start, end, step)| Slice { start, end, step })
}

#[test]
fn slices_have_steps_and_count_from_the_end() {
    property(24, (floats(&[7, 7], -2.0, 2.0), slices(), slices()), |(x, rows, columns)| {
        let dims: Vec<usize> = [rows, columns].iter().map(|slice| slice.output_size(7)).collect();
        if dims.contains(&0) {
            return;
        }
        let value = TensorData::new((0..dims[0] * dims[1]).map(|i| i as f32).collect::<Vec<_>>(), dims);
        check(&format!("{rows:?} {columns:?}"), 0.0, &[x.clone(), value.clone()], |t| {
            let slices = [rows, columns];
            Outputs::new()
                .float(t.float::<2>(0).slice(slices))
                .float(t.float::<2>(0).slice_assign(slices, t.float::<2>(1)))
        });
    });
}

#[test]
fn an_empty_slice_has_no_elements_and_assigns_nothing() {
    let x = TensorData::new(vec![1.0f32, 2.0, 3.0], [3]);
    let none = TensorData::new(Vec::<f32>::new(), [0]);
    check_recorded("empty", 0.0, &[x, none], |_, t| {
        let slice = [Slice { start: 2, end: Some(2), step: 1 }];
        vec![
            B::float_slice(t[0].clone(), &slice),
            B::float_slice_assign(t[0].clone(), &slice, t[1].clone()),
            B::float_exp(t[1].clone()),
        ]
    });
}

#[test]
fn windows_are_unfolded() {
    property(3, (floats(&[2, 7, 3], -2.0, 2.0), 1usize..4, 1usize..4), |(x, size, step)| {
        check("unfold", 0.0, &[x], |t| Outputs::new().float(t.float::<3>(0).unfold::<4, _>(1, size, step)));
    });
}

const UPDATES: [IndexingUpdateOp; 5] = [
    IndexingUpdateOp::Assign,
    IndexingUpdateOp::Add,
    IndexingUpdateOp::Mul,
    IndexingUpdateOp::Min,
    IndexingUpdateOp::Max,
];

/// Indices of a dimension of 4, each once: where two assign to one place, any may win.
fn distinct() -> impl Strategy<Value = TensorData> {
    Just(vec![0i64, 1, 2, 3]).prop_shuffle().prop_map(|places| TensorData::new(places[..3].to_vec(), [3]))
}

#[test]
fn slices_are_selected_and_combined() {
    let given = (floats(&[4, 2], -2.0, 2.0), floats(&[3, 2], -2.0, 2.0), ints(&[3], 0, 3), distinct());
    property(4, given, |(x, value, indices, once)| {
        check("select", 1e-6, &[x.clone(), value.clone(), indices.clone()], |t| {
            let (x, value, indices) = (t.float::<2>(0), t.float::<2>(1), t.int::<1>(2));
            Outputs::new().float(x.clone().select(0, indices.clone())).float(x.swap_dims(0, 1).select_assign(
                1,
                indices,
                value.swap_dims(0, 1),
                IndexingUpdateOp::Add,
            ))
        });
        for update in UPDATES {
            let indices = if update == IndexingUpdateOp::Assign { &once } else { &indices };
            let given = [x.clone(), value.clone(), indices.clone()];
            check_recorded(&format!("{update:?}"), 1e-6, &given, |_, t| {
                let (x, value, indices) = (t[0].clone(), t[1].clone(), t[2].clone());
                vec![B::float_select_assign(x, 0, indices, value, update)]
            });
        }
    });
}

#[test]
fn elements_are_gathered_and_scattered() {
    let given = (floats(&[4, 3], -2.0, 2.0), floats(&[3, 2], -2.0, 2.0), ints(&[3, 2], 0, 3), distinct());
    property(4, given, |(x, value, indices, once)| {
        check("gather", 1e-6, &[x.clone(), value.clone(), indices.clone()], |t| {
            let (x, value, indices) = (t.float::<2>(0), t.float::<2>(1), t.int::<2>(2));
            Outputs::new()
                .float(x.clone().slice([0..4, 0..2]).gather(0, indices.clone()))
                .float(x.slice([0..4, 0..2]).scatter(0, indices, value, IndexingUpdateOp::Add))
        });
        let columns = TensorData::new(once.iter::<i64>().flat_map(|i| [i, (i + 1) % 4]).collect::<Vec<_>>(), [3, 2]);
        for update in UPDATES {
            let indices = if update == IndexingUpdateOp::Assign { &columns } else { &indices };
            let x = TensorData::new(x.iter::<f32>().take(8).collect::<Vec<_>>(), [4, 2]);
            let given = [x, value.clone(), indices.clone()];
            check_recorded(&format!("{update:?}"), 1e-6, &given, |_, t| {
                let (x, value, indices) = (t[0].clone(), t[1].clone(), t[2].clone());
                vec![B::float_scatter(0, x, indices, value, update)]
            });
        }
    });
}

#[test]
fn places_of_several_dimensions_are_read_and_written() {
    let places = TensorData::new(vec![0i64, 1, 3, 0, 2, 2], [3, 2]);
    property(3, (floats(&[4, 3, 2], -2.0, 2.0), floats(&[3, 2], -2.0, 2.0)), |(x, value)| {
        for update in UPDATES {
            let given = [x.clone(), value.clone(), places.clone()];
            check_recorded(&format!("{update:?}"), 1e-6, &given, |_, t| {
                let (x, value, places) = (t[0].clone(), t[1].clone(), t[2].clone());
                vec![B::float_gather_nd(x.clone(), places.clone()), B::float_scatter_nd(x, places, value, update)]
            });
        }
    });
}

#[test]
fn an_extreme_ignores_a_value_that_is_nan() {
    let x = TensorData::new(vec![1.0f32, f32::NAN, 3.0], [3]);
    let value = TensorData::new(vec![f32::NAN, 2.0, 9.0], [3]);
    let indices = TensorData::new(vec![0i64, 1, 2], [3]);
    for update in [IndexingUpdateOp::Min, IndexingUpdateOp::Max] {
        check_recorded("nan", 0.0, &[x.clone(), value.clone(), indices.clone()], |_, t| {
            let (x, value, indices) = (t[0].clone(), t[1].clone(), t[2].clone());
            vec![
                B::float_select_assign(x.clone(), 0, indices.clone(), value.clone(), update),
                B::float_scatter(0, x, indices, value, update),
            ]
        });
    }
}

#[test]
fn integers_and_truth_values_are_read_and_written() {
    let given = (ints(&[4, 2], -9, 9), bools(&[4, 2]), ints(&[3], 0, 3), ints(&[3, 2], 0, 3), bools(&[3, 2]));
    property(3, given, |(n, p, rows, places, q)| {
        // Indices of few bits do not hold the places of other dimensions.
        for dtype in [DType::I64, DType::I32, DType::U8] {
            let (rows, places) = (crate::values::cast(&rows, dtype), crate::values::cast(&places, dtype));
            check_recorded("indices", 0.0, &[n.clone(), p.clone(), rows, places, q.clone()], |_, t| {
                let [n, p, rows, places, q] = [0, 1, 2, 3, 4].map(|place| t[place].clone());
                vec![
                    B::int_select(n.clone(), 0, rows.clone()),
                    B::int_gather(0, n.clone(), places.clone()),
                    B::bool_select(p.clone(), 0, rows.clone()),
                    B::bool_gather(0, p.clone(), places.clone()),
                    B::int_scatter(
                        0,
                        n,
                        places.clone(),
                        B::bool_into_int(q.clone(), DType::I64.into()),
                        IndexingUpdateOp::Add,
                    ),
                    B::bool_select_or(p.clone(), 0, rows, q.clone()),
                    B::bool_scatter_or(0, p, places, q),
                ]
            });
        }
    });
}

#[test]
fn edges_are_padded() {
    property(4, (floats(&[3, 4], -2.0, 2.0), 0usize..3, 0usize..3, 0usize..3), |(x, a, b, c)| {
        let n = TensorData::new(x.iter::<f32>().map(|x| x as i64).collect::<Vec<_>>(), [3, 4]);
        for mode in [PadMode::Constant(1.5), PadMode::Reflect, PadMode::Edge] {
            let integers = if mode == PadMode::Constant(1.5) { PadMode::Constant(2.0) } else { mode };
            check("pad", 0.0, &[x.clone(), n.clone()], |t| {
                Outputs::new()
                    .float(t.float::<2>(0).pad([(a, b), (c, a)], mode))
                    .int(t.int::<2>(1).pad([(c, a), (b, b)], integers))
            });
        }
    });
}

#[test]
fn integers_are_sliced_and_assigned() {
    property(2, (ints(&[5], -9, 9), ints(&[2], -9, 9), bools(&[5]), bools(&[2])), |(n, value, p, q)| {
        check_forward("slices", 0.0, &[n, value, p, q], |t| {
            let slice = Slice { start: 1, end: Some(5), step: -2 };
            Outputs::new()
                .int(t.int::<1>(0).slice_assign([slice], t.int(1)))
                .int(t.int::<1>(0).slice_assign(1..3, t.int(1)))
                .bool(t.bool::<1>(2).slice_assign([slice], t.bool(3)))
        });
    });
}
