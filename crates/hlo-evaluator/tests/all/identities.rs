//! Properties of the evaluator that need no plugin.

use distribute_hlo::{
    Builder, Convolution, DotDimensions, ElementType, Literal, Reducer, Result, SortOrder, TensorType, Value, Window,
};
use fastrand::Rng;
use hlo_evaluator::{Data, Tensor, evaluate};
use proptest::prelude::*;

use crate::case::{Tolerance, difference, random};

/// Evaluates a program of one input and returns its outputs.
fn outputs(input: &Tensor, build: impl FnOnce(&mut Builder, Value) -> Result<Vec<Value>>) -> Vec<Tensor> {
    let mut b = Builder::new("identity");
    let x = b.parameter(input.ty().clone());
    let outputs = build(&mut b, x).unwrap();
    evaluate(&b.finish(&outputs).unwrap(), &[vec![input.clone()]]).unwrap().remove(0)
}

/// Checks that two outputs are the same.
fn same(outputs: &[Tensor]) {
    assert_eq!(outputs[0].ty(), outputs[1].ty());
    assert_eq!(difference(&outputs[0], &outputs[1], Tolerance::Exact), None);
}

/// Returns small whole numbers, whose sums and products are exact.
fn whole(seed: u64, dims: &[usize]) -> Tensor {
    let mut rng = Rng::with_seed(seed);
    Tensor::new(dims, (0..dims.iter().product()).map(|_| f32::from(rng.i8(-8..=8))).collect::<Vec<_>>())
}

/// Returns the elements of a tensor of f32.
fn f32s(tensor: &Tensor) -> &[f32] {
    let Data::F32(values) = tensor.data() else { panic!("{:?}", tensor.ty()) };
    values
}

fn element() -> impl Strategy<Value = ElementType> {
    prop::sample::select(ElementType::ALL.to_vec())
}

fn sizes() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0usize..5, 1..4)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn two_transpositions_and_two_reversals_are_none(element in element(), dims in sizes(), seed: u64) {
        let mut rng = Rng::with_seed(seed);
        let x = random(&mut rng, &TensorType::new(element, dims.clone()));
        let mut order: Vec<usize> = (0..dims.len()).collect();
        rng.shuffle(&mut order);
        let inverse: Vec<usize> = (0..dims.len()).map(|dim| order.iter().position(|&o| o == dim).unwrap()).collect();
        let found = outputs(&x, |b, x| {
            let there = b.transpose(x, &order)?;
            let turned = b.reverse(x, &order)?;
            Ok(vec![x, b.transpose(there, &inverse)?, b.reverse(turned, &inverse)?])
        });
        same(&found[..2]);
        same(&[found[0].clone(), found[2].clone()]);
    }

    #[test]
    fn take_reads_rows_as_slices_do(element in element(), rows in 1usize..5, columns in 1usize..5, seed: u64) {
        let mut rng = Rng::with_seed(seed);
        let x = random(&mut rng, &TensorType::new(element, [rows, columns]));
        let place = rng.usize(0..rows);
        same(&outputs(&x, |b, x| {
            let index = b.scalar(place as i32)?;
            let row = b.slice_in_dim(x, 0, place, place + 1)?;
            Ok(vec![b.take(x, index, 0)?, b.reshape(row, &[columns])?])
        }));
    }

    #[test]
    fn padding_and_slicing_is_nothing(element in element(), dims in sizes(), seed: u64) {
        let mut rng = Rng::with_seed(seed);
        let x = random(&mut rng, &TensorType::new(element, dims.clone()));
        let start: Vec<usize> = dims.iter().map(|_| rng.usize(0..3)).collect();
        let gaps: Vec<usize> = dims.iter().map(|_| rng.usize(0..3)).collect();
        same(&outputs(&x, |b, x| {
            let low: Vec<i64> = start.iter().map(|&n| n as i64).collect();
            let value = b.constant(Literal::from_bytes(TensorType::scalar(element), vec![1; element.size_bytes()])?)?;
            let padded = b.pad(x, value, &low, &vec![1; dims.len()], &gaps)?;
            let limit: Vec<usize> = b.type_of(padded)?.dims.iter().map(|size| size - 1).collect();
            let strides: Vec<usize> = gaps.iter().map(|gap| gap + 1).collect();
            let start: Vec<usize> = start.iter().zip(&limit).map(|(&from, &to)| from.min(to)).collect();
            Ok(vec![x, b.slice(padded, &start, &limit, &strides)?])
        }));
    }

    #[test]
    fn reductions_are_loops(rows in 0usize..5, columns in 1usize..5, seed: u64) {
        let x = whole(seed, &[rows, columns]);
        let found = outputs(&x, |b, x| Ok(vec![b.reduce(x, Reducer::Sum, &[0])?, b.reduce(x, Reducer::Max, &[0])?]));
        for column in 0..columns {
            let numbers = || f32s(&x).iter().skip(column).step_by(columns);
            assert_eq!(f32s(&found[0])[column], numbers().sum::<f32>());
            assert_eq!(f32s(&found[1])[column], numbers().copied().fold(f32::NEG_INFINITY, f32::max));
        }
    }

    #[test]
    fn a_convolution_with_one_tap_is_a_product(examples in 1usize..4, size in 1usize..5, seed: u64) {
        let x = whole(seed, &[examples, 3, size]);
        let weight = whole(seed ^ 1, &[2, 3, 1]);
        same(&outputs(&x, |b, x| {
            let weight = b.dense(f32s(&weight), &[2, 3, 1])?;
            let convolved = b.convolution(x, weight, &Convolution::channels_first(1))?;
            let matrix = b.reshape(weight, &[2, 3])?;
            let dimensions =
                DotDimensions { lhs_contracting: vec![1], rhs_contracting: vec![1], ..DotDimensions::default() };
            let product = b.dot_general(matrix, x, &dimensions)?;
            Ok(vec![convolved, b.transpose(product, &[1, 0, 2])?])
        }));
    }

    #[test]
    fn a_scatter_undoes_a_gather(rows in 1usize..6, columns in 1usize..4, seed: u64) {
        let mut rng = Rng::with_seed(seed);
        let x = random(&mut rng, &TensorType::new(ElementType::F32, [rows, columns]));
        let mut order: Vec<i32> = (0..rows as i32).collect();
        rng.shuffle(&mut order);
        same(&outputs(&x, |b, x| {
            let indices = b.dense(&order, &[rows])?;
            let taken = b.take(x, indices, 0)?;
            let zeros = b.full(TensorType::new(ElementType::F32, [rows, columns]), 0)?;
            let dimensions = distribute_hlo::ScatterDimensions {
                update_window_dims: vec![1],
                inserted_window_dims: vec![0],
                scatter_dims_to_operand_dims: vec![0],
                index_vector_dim: 1,
                ..distribute_hlo::ScatterDimensions::default()
            };
            Ok(vec![x, b.scatter(zeros, indices, taken, &dimensions, None)?])
        }));
    }

    #[test]
    fn the_gradient_of_a_maximum_goes_to_its_first_place(size in 2usize..8, window in 1usize..4, seed: u64) {
        let x = whole(seed, &[size]);
        let window = window.min(size);
        let count = size - window + 1;
        let source: Vec<f32> = (1..=count).map(|n| n as f32).collect();
        let found = outputs(&x, |b, x| {
            let source = b.dense(&source, &[count])?;
            Ok(vec![b.select_and_scatter(x, source, &Window::new([window]))?])
        });
        let mut expected = vec![0.0; size];
        for (start, gradient) in source.iter().enumerate() {
            let part = &f32s(&x)[start..start + window];
            let most = part.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            expected[start + part.iter().position(|&number| number == most).unwrap()] += gradient;
        }
        assert_eq!(f32s(&found[0]), expected);
    }

    #[test]
    fn the_first_of_a_sort_is_the_minimum(rows in 1usize..4, columns in 1usize..6, seed: u64) {
        let x = whole(seed, &[rows, columns]);
        let found = outputs(&x, |b, x| {
            let places = b.iota(TensorType::new(ElementType::I32, [rows, columns]), 1)?;
            let sorted = b.sort(&[x, places], 1, SortOrder::Ascending)?;
            let (value, place) = b.argmin(x, 1, ElementType::I32)?;
            let first = b.slice_in_dim(sorted[0], 1, 0, 1)?;
            let at = b.slice_in_dim(sorted[1], 1, 0, 1)?;
            Ok(vec![value, b.reshape(first, &[rows])?, place, b.reshape(at, &[rows])?])
        });
        same(&found[..2]);
        same(&found[2..]);
    }

    #[test]
    fn the_last_cumulative_sum_is_the_sum(rows in 1usize..4, columns in 1usize..6, seed: u64) {
        let x = whole(seed, &[rows, columns]);
        same(&outputs(&x, |b, x| {
            let sums = b.cumsum(x, 1)?;
            let last = b.slice_in_dim(sums, 1, columns - 1, columns)?;
            Ok(vec![b.reduce(x, Reducer::Sum, &[1])?, b.reshape(last, &[rows])?])
        }));
    }
}

#[test]
fn bits_of_three_fry_are_those_of_its_authors() {
    // Vectors of Random123's `kat_vectors` for threefry2x32 with 20 rounds.
    let known: [([u32; 2], [u32; 2], [u32; 2]); 3] = [
        ([0, 0], [0, 0], [0x6b20_0159, 0x99ba_4efe]),
        ([u32::MAX; 2], [u32::MAX; 2], [0x1cb9_96fc, 0xbb00_2be7]),
        ([0x243f_6a88, 0x85a3_08d3], [0x1319_8a2e, 0x0370_7344], [0xc492_3a9c, 0x483d_f7a0]),
    ];
    for (counter, key, expected) in known {
        let join = |halves: [u32; 2]| u64::from(halves[0]) | u64::from(halves[1]) << 32;
        let state = Tensor::new([2], vec![join(key), join(counter)]);
        let found = outputs(&state, |b, state| {
            let ty = TensorType::new(ElementType::U64, [1]);
            let (next, bits) = b.rng_bit_generator(distribute_hlo::RngAlgorithm::ThreeFry, state, ty)?;
            Ok(vec![next, bits])
        });
        assert_eq!(found[1], Tensor::new([1], vec![join(expected)]));
        assert_eq!(found[0], Tensor::new([2], vec![join(key), join(counter).wrapping_add(1)]));
    }
}

#[test]
fn uniform_and_normal_numbers_are_distributed_so() {
    let state = Tensor::new([2], vec![7u64, 0]);
    for element in [ElementType::F32, ElementType::F64, ElementType::F16, ElementType::BF16] {
        let found = outputs(&state, |b, state| {
            let (next, uniform) = b.uniform(state, TensorType::new(element, [4096]), -1.0, 3.0)?;
            let (_, normal) = b.normal(next, TensorType::new(element, [4096]))?;
            Ok(vec![b.convert(uniform, ElementType::F32)?, b.convert(normal, ElementType::F32)?])
        });
        let moments = |numbers: &[f32]| {
            let mean = numbers.iter().sum::<f32>() / numbers.len() as f32;
            (mean, numbers.iter().map(|number| (number - mean).powi(2)).sum::<f32>() / numbers.len() as f32)
        };
        assert!(f32s(&found[0]).iter().all(|number| (-1.0..3.0).contains(number)), "{element}");
        let (mean, variance) = moments(f32s(&found[0]));
        assert!((mean - 1.0).abs() < 0.06 && (variance - 4.0 / 3.0).abs() < 0.06, "{element}: {mean}, {variance}");
        let (mean, variance) = moments(f32s(&found[1]));
        assert!(mean.abs() < 0.05 && (variance - 1.0).abs() < 0.07, "{element}: {mean}, {variance}");
    }
}

/// The difference of the limits is beyond the largest number of the type.
#[test]
fn uniform_numbers_may_range_over_the_whole_type() {
    let state = Tensor::new([2], vec![7u64, 0]);
    for (element, most) in [
        (ElementType::F16, 40_000.0),
        (ElementType::F16, 65_504.0),
        (ElementType::BF16, 3e38),
        (ElementType::F32, 3e38),
        (ElementType::F64, 1.5e308),
    ] {
        let found = outputs(&state, |b, state| {
            let (_, uniform) = b.uniform(state, TensorType::new(element, [4096]), -most, most)?;
            let uniform = b.convert(uniform, ElementType::F64)?;
            let most = b.full(TensorType::new(ElementType::F64, [4096]), most)?;
            Ok(vec![b.divide(uniform, most)?])
        });
        let Data::F64(numbers) = found[0].data() else { panic!("{:?}", found[0].ty()) };
        // Limits are rounded to the type.
        assert!(numbers.iter().all(|number| number.abs() < 1.01), "{element}");
        let mean = numbers.iter().sum::<f64>() / 4096.0;
        let variance = numbers.iter().map(|number| (number - mean).powi(2)).sum::<f64>() / 4096.0;
        assert!(mean.abs() < 0.04 && (variance - 1.0 / 3.0).abs() < 0.03, "{element}: {mean}, {variance}");
    }
}

#[test]
fn extremes_prefer_nan_and_then_the_first_place() {
    let x = Tensor::new([3, 4], vec![1.0, 5.0, 5.0, 0.0, 2.0, f32::NAN, 9.0, f32::NAN, -0.0, 0.0, -0.0, 0.0f32]);
    let found = outputs(&x, |b, x| {
        let (largest, least) = (b.argmax(x, 1, ElementType::I64)?, b.argmin(x, 1, ElementType::U8)?);
        Ok(vec![largest.1, least.1])
    });
    assert_eq!(found[0], Tensor::new([3], vec![1i64, 1, 0]));
    assert_eq!(found[1], Tensor::new([3], vec![3u8, 1, 0]));
}
