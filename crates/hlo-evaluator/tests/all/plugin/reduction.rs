//! Reductions, windows and sorting.

use distribute_hlo::{ElementType, Reducer, SortOrder, Window};
use hlo_evaluator::Tensor;

use super::agree;
use crate::case::Tolerance;

#[test]
fn reductions() {
    agree(1, 2, |case| {
        for element in ElementType::ALL {
            let dims = case.dims(1, 3);
            let x = case.random(element, &dims);
            let dimension = case.rng.usize(0..dims.len());
            let all: Vec<usize> = (0..dims.len()).collect();
            for reducer in Reducer::ALL {
                if case.b.reduce(x, reducer, &all).is_err() {
                    continue;
                }
                let value = case.b.reduce(x, reducer, &[dimension]);
                case.close(format!("reduce {reducer:?}"), value);
                let value = case.b.reduce(x, reducer, &all);
                case.close(format!("reduce all {reducer:?}"), value);
                let value = case.b.cumulative(x, reducer, dimension, case.rng.bool());
                case.close(format!("cumulative {reducer:?}"), value);
            }
            for largest in [true, false] {
                let found = match largest {
                    true => case.b.argmax(x, dimension, ElementType::I32).unwrap(),
                    false => case.b.argmin(x, dimension, ElementType::I32).unwrap(),
                };
                // −0 and 0 are equal, so that the first one is found.
                case.output(format!("extreme {largest}"), Ok(found.0), Tolerance::Exact);
                case.exact(format!("its index {largest} {element}"), Ok(found.1));
            }
        }
        let empty = case.random(ElementType::F32, &[0, 3]);
        let value = case.b.reduce(empty, Reducer::Max, &[0]);
        case.exact("reduce of nothing", value);
    });
}

#[test]
fn extremes_of_equal_values_and_nan() {
    agree(1, 2, |case| {
        let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 0.0, 1.0, 2.0];
        for (kinds, columns) in [(7, 5), (7, 300), (1, 20), (2, 4)] {
            let from = case.rng.usize(0..=7 - kinds);
            let numbers = (0..6 * columns).map(|_| values[from + case.rng.usize(0..kinds)]).collect::<Vec<_>>();
            let x = case.given(Tensor::new([6, columns], numbers));
            for element in [ElementType::F32, ElementType::F64, ElementType::BF16, ElementType::F16] {
                let x = case.b.convert(x, element).unwrap();
                for dimension in [0, 1] {
                    let (value, place) = case.b.argmax(x, dimension, ElementType::I64).unwrap();
                    case.exact(format!("argmax {dimension}"), Ok(value));
                    case.exact(format!("argmax {dimension} {element}"), Ok(place));
                    let (value, place) = case.b.argmin(x, dimension, ElementType::U32).unwrap();
                    case.exact(format!("argmin {dimension}"), Ok(value));
                    case.exact(format!("argmin {dimension} {element}"), Ok(place));
                }
            }
        }
    });
}

#[test]
fn windows() {
    agree(1, 12, |case| {
        for element in [ElementType::F32, ElementType::I32, ElementType::F16, ElementType::U8] {
            let dims = case.dims(1, 3);
            let x = case.random(element, &dims);
            let mut window = Window::new(dims.iter().map(|_| case.rng.usize(1..=3)).collect::<Vec<_>>());
            for dim in 0..dims.len() {
                window.strides[dim] = case.rng.usize(1..=2);
                window.padding[dim] = (case.rng.i64(0..=2), case.rng.i64(-1..=2));
                window.base_dilations[dim] = case.rng.usize(1..=2);
                window.window_dilations[dim] = case.rng.usize(1..=2);
            }
            for reducer in [Reducer::Sum, Reducer::Prod, Reducer::Max, Reducer::Min] {
                let value = case.b.reduce_window(x, reducer, &window);
                case.close(format!("reduce_window {reducer:?} {window:?}"), value);
            }
        }
    });
}

#[test]
fn gradients_of_windows() {
    agree(1, 8, |case| {
        let dims = [case.rng.usize(3..=6), case.rng.usize(3..=6)];
        // Numbers that differ: NaN depends on the device.
        let mut numbers: Vec<f32> = (0..dims[0] * dims[1]).map(|n| n as f32).collect();
        case.rng.shuffle(&mut numbers);
        let x = case.given(Tensor::new(dims, numbers));
        let mut window = Window::new([case.rng.usize(1..=3), case.rng.usize(1..=3)]);
        window.strides = vec![case.rng.usize(1..=2), case.rng.usize(1..=2)];
        window.padding = vec![(0, 1), (1, 0)];
        for (dim, padding) in window.padding.iter_mut().enumerate() {
            if window.dims[dim] == 1 {
                *padding = (0, 0);
            }
        }
        let pooled = case.b.reduce_window(x, Reducer::Max, &window).unwrap();
        let sizes = case.b.type_of(pooled).unwrap().dims.clone();
        let numbers: Vec<f32> = (0..sizes[0] * sizes[1]).map(|n| n as f32 + 1.0).collect();
        let source = case.given(Tensor::new(sizes, numbers));
        let value = case.b.select_and_scatter(x, source, &window);
        case.close(format!("select_and_scatter {window:?}"), value);
    });
}

#[test]
fn sorts() {
    agree(1, 8, |case| {
        for element in ElementType::ALL {
            let dims = case.dims(1, 3);
            let x = case.random(element, &dims);
            // It tells elements that compare as equal apart.
            let places = Tensor::new(dims.clone(), (0..dims.iter().product::<usize>() as i32).collect::<Vec<_>>());
            let places = case.given(places);
            let dimension = case.rng.usize(0..dims.len());
            for order in [SortOrder::Ascending, SortOrder::Descending] {
                let sorted = case.b.sort(&[x, places], dimension, order).unwrap();
                case.exact(format!("sort {order:?}"), Ok(sorted[0]));
                case.exact(format!("sort {order:?} {element}, places"), Ok(sorted[1]));
            }
        }
    });
}
