//! Slices at computed places, gather and scatter.

use distribute_hlo::{ElementType, GatherDimensions, Reducer, ScatterDimensions};
use hlo_evaluator::Tensor;

use super::agree;

#[test]
fn slices_at_computed_places() {
    agree(1, 8, |case| {
        for _ in 0..4 {
            let element = case.element();
            let dims = case.dims(1, 3);
            let x = case.random(element, &dims);
            let sizes: Vec<usize> = dims.iter().map(|&dim| case.rng.usize(1..=dim)).collect();
            // Some lie outside.
            let starts: Vec<_> = dims
                .iter()
                .map(|_| {
                    let start = case.rng.i32(-3..=7);
                    case.given(Tensor::new([], vec![start]))
                })
                .collect();
            let value = case.b.dynamic_slice(x, &starts, &sizes);
            case.exact("dynamic_slice", value);
            let update = case.random(element, &sizes);
            let value = case.b.dynamic_update_slice(x, update, &starts);
            case.exact("dynamic_update_slice", value);
        }
    });
}

#[test]
fn gathers() {
    agree(1, 8, |case| {
        for element in [ElementType::F32, ElementType::I64, ElementType::Bool, ElementType::BF16] {
            let dims = case.dims(2, 3);
            let x = case.random(element, &dims);
            let count = case.rng.usize(1..=6);
            let places: Vec<i32> = (0..count).map(|_| case.rng.i32(-2..=6)).collect();
            let indices = case.given(Tensor::new([count], places.clone()));
            let dimension = case.rng.usize(0..dims.len());
            let value = case.b.take(x, indices, dimension);
            case.exact(format!("take {dimension} of {dims:?}"), value);

            // Slices of two dimensions at places of two components, the second one first.
            let table: Vec<i64> = (0..2 * count).map(|_| case.rng.i64(-1..=4)).collect();
            let table = case.given(Tensor::new([2, count], table));
            let mut slice_sizes: Vec<usize> = dims.iter().map(|&dim| case.rng.usize(1..=dim)).collect();
            slice_sizes[0] = 1;
            let dimensions = GatherDimensions {
                offset_dims: (1..dims.len()).collect(),
                collapsed_slice_dims: vec![0],
                start_index_map: vec![1, 0],
                index_vector_dim: 0,
                slice_sizes,
                ..GatherDimensions::default()
            };
            let value = case.b.gather(x, table, &dimensions);
            case.exact(format!("gather {dimensions:?} of {dims:?}"), value);

            // The same row of operand and indices.
            let table: Vec<i64> = (0..count * dims[0]).map(|_| case.rng.i64(-1..=4)).collect();
            let table = case.given(Tensor::new([count, dims[0]], table));
            let mut slice_sizes = dims.clone();
            (slice_sizes[0], slice_sizes[1]) = (1, 1);
            let dimensions = GatherDimensions {
                offset_dims: (2..dims.len()).collect(),
                collapsed_slice_dims: vec![1],
                operand_batching_dims: vec![0],
                start_indices_batching_dims: vec![1],
                start_index_map: vec![1],
                index_vector_dim: 2,
                slice_sizes,
            };
            let value = case.b.gather(x, table, &dimensions);
            case.exact(format!("gather {dimensions:?} of {dims:?}"), value);
        }
    });
}

#[test]
fn scatters() {
    agree(1, 8, |case| {
        for element in [ElementType::F32, ElementType::I32, ElementType::U8, ElementType::F64] {
            let dims = case.dims(2, 3);
            let x = case.random(element, &dims);
            // Each place once, so that replacement is defined; some lie outside.
            let mut places: Vec<i32> = (-1..dims[0] as i32 + 2).collect();
            case.rng.shuffle(&mut places);
            let indices = case.given(Tensor::new([places.len(), 1], places.clone()));
            let mut update_dims = dims.clone();
            update_dims[0] = places.len();
            let updates = case.random(element, &update_dims);
            let dimensions = ScatterDimensions {
                update_window_dims: (1..dims.len()).collect(),
                inserted_window_dims: vec![0],
                scatter_dims_to_operand_dims: vec![0],
                index_vector_dim: 1,
                ..ScatterDimensions::default()
            };
            for combiner in [None, Some(Reducer::Sum), Some(Reducer::Prod), Some(Reducer::Max), Some(Reducer::Min)] {
                let value = case.b.scatter(x, indices, updates, &dimensions, combiner);
                case.close(format!("scatter {combiner:?}"), value);
            }
            let value = case.b.scatter_unique(x, indices, updates, &dimensions, None);
            case.exact("scatter_unique", value);

            // Places that repeat, in the same row of operand, indices and updates.
            let count = case.rng.usize(1..=6);
            let table: Vec<i64> = (0..count * dims[0]).map(|_| case.rng.i64(-1..=4)).collect();
            let table = case.given(Tensor::new([dims[0], count], table));
            let mut update_dims = vec![dims[0], count];
            update_dims.extend(&dims[2..]);
            let updates = case.random(element, &update_dims);
            let dimensions = ScatterDimensions {
                update_window_dims: (2..dims.len()).collect(),
                inserted_window_dims: vec![1],
                input_batching_dims: vec![0],
                scatter_indices_batching_dims: vec![0],
                scatter_dims_to_operand_dims: vec![1],
                index_vector_dim: 2,
            };
            let value = case.b.scatter(x, table, updates, &dimensions, Some(Reducer::Sum));
            case.close("scatter that repeats", value);
        }
    });
}
