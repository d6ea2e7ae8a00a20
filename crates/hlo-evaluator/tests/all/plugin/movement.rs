//! Movement of elements: all of it is exact.

use distribute_hlo::TensorType;

use super::agree;
use crate::case::random;

#[test]
fn movements() {
    agree(1, 12, |case| {
        for _ in 0..4 {
            let element = case.element();
            let dims = case.dims(1, 4);
            let ndim = dims.len();
            let x = case.random(element, &dims);
            let mut order: Vec<usize> = (0..ndim).collect();
            case.rng.shuffle(&mut order);
            let value = case.b.transpose(x, &order);
            case.exact("transpose", value);
            let value = case.b.reverse(x, &order[..ndim.div_ceil(2)]);
            case.exact("reverse", value);
            let value = case.b.reshape(x, &[1, dims.iter().product(), 1]);
            case.exact("reshape", value);
            let wide: Vec<usize> = [2].into_iter().chain(dims.iter().copied()).collect();
            let value = case.b.broadcast(x, &wide);
            case.exact("broadcast", value);
            let (mut start, mut limit, mut strides) = (Vec::new(), Vec::new(), Vec::new());
            for &dim in &dims {
                start.push(case.rng.usize(0..=dim));
                limit.push(case.rng.usize(*start.last().unwrap()..=dim));
                strides.push(case.rng.usize(1..=3));
            }
            let value = case.b.slice(x, &start, &limit, &strides);
            case.exact("slice", value);
            let low: Vec<i64> = dims.iter().map(|_| case.rng.i64(-1..=2)).collect();
            let high: Vec<i64> = dims.iter().map(|&dim| case.rng.i64(if dim > 1 { -1 } else { 1 }..=2)).collect();
            let interior: Vec<usize> = dims.iter().map(|_| case.rng.usize(0..=2)).collect();
            let padding = case.random(element, &[]);
            let value = case.b.pad(x, padding, &low, &high, &interior);
            case.exact("pad", value);
            let dimension = case.rng.usize(0..ndim);
            let mut other = dims.clone();
            other[dimension] = 2;
            let y = case.random(element, &other);
            let value = case.b.concatenate(&[x, y, x], dimension);
            case.exact("concatenate", value);
            let literal = random(&mut case.rng, &TensorType::new(element, dims.clone()));
            let literal = distribute_hlo::Literal::from_bytes(literal.ty().clone(), literal.to_bytes()).unwrap();
            let value = case.b.constant(literal);
            case.exact("constant", value);
            if element != distribute_hlo::ElementType::Bool {
                let value = case.b.iota(TensorType::new(element, dims.clone()), dimension);
                case.exact("iota", value);
            }
            let empty = case.b.slice(x, &vec![0; ndim], &vec![0; ndim], &vec![1; ndim]);
            case.exact("an empty slice", empty);
        }
    });
}
