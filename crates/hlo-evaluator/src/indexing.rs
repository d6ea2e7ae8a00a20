//! Gather and scatter, by the definitions of the specification.

use distribute_hlo::{BinaryOp, GatherDimensions, Reducer, ScatterDimensions, TensorType};

use crate::Tensor;
use crate::elementwise::combine;
use crate::tensor::indices;

/// Returns the components of the index at a place of the batch.
fn components(table: &Tensor, batch: &[usize], index_vector_dim: usize) -> Vec<i128> {
    if index_vector_dim == table.dims().len() {
        return vec![table.at(batch).int()];
    }
    (0..table.dims()[index_vector_dim])
        .map(|component| {
            let mut place = batch.to_vec();
            place.insert(index_vector_dim, component);
            table.at(&place).int()
        })
        .collect()
}

/// Returns the entries of an index at these dimensions, and those at all others.
fn divided(index: &[usize], dims: &[usize]) -> (Vec<usize>, Vec<usize>) {
    let inside = dims.iter().map(|&dim| index[dim]).collect();
    let outside = (0..index.len()).filter(|dim| !dims.contains(dim)).map(|dim| index[dim]).collect();
    (inside, outside)
}

/// Adds the entries of a batch at batching dimensions to a place.
fn add_batching(place: &mut [i128], batch: &[usize], operand: &[usize], table: &[usize], index_vector_dim: usize) {
    for (&dim, &start) in operand.iter().zip(table) {
        place[dim] += batch[start - usize::from(start > index_vector_dim)] as i128;
    }
}

/// Adds the entries of a slice to a place, in the dimensions that slices have.
fn add_offset(place: &mut [i128], offset: &[usize], lacking: &[usize]) {
    let mut offset = offset.iter();
    for (dim, entry) in place.iter_mut().enumerate() {
        if !lacking.contains(&dim) {
            *entry += offset.next().map_or(0, |&i| i as i128);
        }
    }
}

pub(crate) fn gather(x: &Tensor, table: &Tensor, dims: &GatherDimensions, ty: &TensorType) -> Tensor {
    let lacking: Vec<usize> = dims.collapsed_slice_dims.iter().chain(&dims.operand_batching_dims).copied().collect();
    Tensor::generate(ty.clone(), |index| {
        let (offset, batch) = divided(index, &dims.offset_dims);
        let start = components(table, &batch, dims.index_vector_dim);
        let mut place = vec![0i128; x.dims().len()];
        for (&dim, start) in dims.start_index_map.iter().zip(start) {
            place[dim] = start.clamp(0, (x.dims()[dim] - dims.slice_sizes[dim]) as i128);
        }
        let (operand, start) = (&dims.operand_batching_dims, &dims.start_indices_batching_dims);
        add_batching(&mut place, &batch, operand, start, dims.index_vector_dim);
        add_offset(&mut place, &offset, &lacking);
        let place: Vec<usize> = place.into_iter().map(|i| i as usize).collect();
        x.at(&place)
    })
}

pub(crate) fn scatter(
    x: &Tensor,
    table: &Tensor,
    updates: &Tensor,
    dims: &ScatterDimensions,
    combiner: Option<Reducer>,
) -> Tensor {
    let element = x.ty().element;
    let mut result: Vec<_> = (0..x.ty().elements().unwrap_or(0)).map(|place| x.number(place)).collect();
    let lacking: Vec<usize> = dims.inserted_window_dims.iter().chain(&dims.input_batching_dims).copied().collect();
    for index in indices(updates.dims()) {
        let (offset, batch) = divided(&index, &dims.update_window_dims);
        let start = components(table, &batch, dims.index_vector_dim);
        let mut place = vec![0i128; x.dims().len()];
        for (&dim, start) in dims.scatter_dims_to_operand_dims.iter().zip(start) {
            place[dim] = start;
        }
        let (operand, start) = (&dims.input_batching_dims, &dims.scatter_indices_batching_dims);
        add_batching(&mut place, &batch, operand, start, dims.index_vector_dim);
        add_offset(&mut place, &offset, &lacking);
        if place.iter().zip(x.dims()).any(|(&i, &size)| i < 0 || i >= size as i128) {
            continue;
        }
        let flat = place.iter().zip(x.dims()).fold(0, |flat, (&i, &size)| flat * size + i as usize);
        let update = updates.at(&index);
        let op: Option<BinaryOp> = combiner.map(Reducer::binary);
        result[flat] = op.map_or(update, |op| combine(op, element, result[flat], update)).rounded(element);
    }
    Tensor::from_numbers(x.ty().clone(), result)
}
