//! Reading and writing at places that are computed.
//!
//! burn does not define an index out of range: a program then reads the nearest element, and writes nothing.

use burn_backend::tensor::IndexingUpdateOp;
use burn_ir::{GatherNdOpIr, GatherOpIr, ScatterNdOpIr, ScatterOpIr, SelectAssignOpIr, SelectOpIr, TensorIr};
use distribute_hlo::{Builder, ElementType, GatherDimensions, Reducer, ScatterDimensions, TensorType, Value};

use crate::{Lowering, Result, math};

/// Takes the slices of one dimension that indices name.
pub(super) fn select(l: &mut Lowering<'_>, op: &SelectOpIr) -> Result<()> {
    readable(l, &op.tensor, &[op.dim])?;
    let indices = l.operand(&op.indices)?;
    l.unary(&op.tensor, &op.out, |b, x| b.take(x, indices, op.dim))
}

/// Combines slices into those of one dimension that indices name.
pub(super) fn select_assign(l: &mut Lowering<'_>, op: &SelectAssignOpIr) -> Result<()> {
    let indices = l.operand(&op.indices)?;
    let dimensions = ScatterDimensions {
        update_window_dims: (0..op.tensor.shape.as_slice().len()).filter(|&dim| dim != op.dim).collect(),
        inserted_window_dims: vec![op.dim],
        scatter_dims_to_operand_dims: vec![op.dim],
        index_vector_dim: 1,
        ..ScatterDimensions::default()
    };
    update(l, (&op.tensor, indices, &op.value), &dimensions, op.update, &op.out)
}

/// Takes for each index the element at its own place, with the index along one dimension.
pub(super) fn gather(l: &mut Lowering<'_>, op: &GatherOpIr) -> Result<()> {
    readable(l, &op.tensor, &[op.dim])?;
    let indices = whole_places(l, &op.indices, op.dim)?;
    let ndim = op.tensor.shape.as_slice().len();
    let dimensions = GatherDimensions {
        collapsed_slice_dims: (0..ndim).collect(),
        start_index_map: (0..ndim).collect(),
        index_vector_dim: ndim,
        slice_sizes: vec![1; ndim],
        ..GatherDimensions::default()
    };
    l.unary(&op.tensor, &op.out, |b, x| b.gather(x, indices, &dimensions))
}

/// Combines each value into the element at its own place, with an index along one dimension.
pub(super) fn scatter(l: &mut Lowering<'_>, op: &ScatterOpIr) -> Result<()> {
    let indices = whole_places(l, &op.indices, op.dim)?;
    let ndim = op.tensor.shape.as_slice().len();
    let dimensions = ScatterDimensions {
        inserted_window_dims: (0..ndim).collect(),
        scatter_dims_to_operand_dims: (0..ndim).collect(),
        index_vector_dim: ndim,
        ..ScatterDimensions::default()
    };
    update(l, (&op.tensor, indices, &op.value), &dimensions, op.update, &op.out)
}

/// Takes slices at places of several dimensions, whose indices lie along the last dimension.
pub(super) fn gather_nd(l: &mut Lowering<'_>, op: &GatherNdOpIr) -> Result<()> {
    let (dims, places) = (op.data.shape.as_slice(), op.indices.shape.as_slice());
    let (leading, depth) = depth(places);
    readable(l, &op.data, &(0..depth).collect::<Vec<_>>())?;
    let indices = l.operand(&op.indices)?;
    let dimensions = GatherDimensions {
        offset_dims: (leading..leading + dims.len() - depth.min(dims.len())).collect(),
        collapsed_slice_dims: (0..depth).collect(),
        start_index_map: (0..depth).collect(),
        index_vector_dim: leading,
        slice_sizes: dims.iter().enumerate().map(|(dim, &size)| if dim < depth { 1 } else { size }).collect(),
        ..GatherDimensions::default()
    };
    l.unary(&op.data, &op.out, |b, x| b.gather(x, indices, &dimensions))
}

/// Combines slices into those at places of several dimensions.
pub(super) fn scatter_nd(l: &mut Lowering<'_>, op: &ScatterNdOpIr) -> Result<()> {
    let (dims, places) = (op.data.shape.as_slice(), op.indices.shape.as_slice());
    let (leading, depth) = depth(places);
    let indices = l.operand(&op.indices)?;
    let dimensions = ScatterDimensions {
        update_window_dims: (leading..leading + dims.len() - depth.min(dims.len())).collect(),
        inserted_window_dims: (0..depth).collect(),
        scatter_dims_to_operand_dims: (0..depth).collect(),
        index_vector_dim: leading,
        ..ScatterDimensions::default()
    };
    update(l, (&op.data, indices, &op.values), &dimensions, op.reduction, &op.out)
}

/// Returns the number of leading dimensions of indices, and the number of their components.
fn depth(places: &[usize]) -> (usize, usize) {
    places.split_last().map_or((0, 1), |(&depth, leading)| (leading.len(), depth))
}

/// Refuses to read where there is nothing.
fn readable(l: &Lowering<'_>, tensor: &TensorIr, axes: &[usize]) -> Result<()> {
    match axes.iter().any(|&axis| tensor.shape.as_slice().get(axis) == Some(&0)) {
        true => Err(l.unsupported("elements are read along a dimension of size 0; give at least one")),
        false => Ok(()),
    }
}

/// Makes whole places of indices along one dimension: the components of a place lie along a new last dimension.
fn whole_places(l: &mut Lowering<'_>, indices: &TensorIr, dim: usize) -> Result<Value> {
    let (given, ty) = (l.operand(indices)?, l.type_of(indices)?);
    // Bytes do not hold all places of other dimensions.
    let wide = if ty.element == ElementType::U64 { ElementType::U64 } else { ElementType::I64 };
    let ty = ty.with_element(wide);
    l.build(|b| {
        let given = math::convert(b, given, wide)?;
        let column = [ty.dims.as_slice(), &[1]].concat();
        let mut parts = Vec::with_capacity(ty.ndim());
        for axis in 0..ty.ndim() {
            let place = if axis == dim { given } else { b.iota(ty.clone(), axis)? };
            parts.push(b.reshape(place, &column)?);
        }
        b.concatenate(&parts, ty.ndim())
    })
}

/// Adds a scatter that combines as burn says.
fn update(
    l: &mut Lowering<'_>,
    (tensor, indices, value): (&TensorIr, Value, &TensorIr),
    dimensions: &ScatterDimensions,
    update: IndexingUpdateOp,
    out: &TensorIr,
) -> Result<()> {
    let (operand, updates) = (l.operand(tensor)?, l.operand(value)?);
    let ty = l.type_of(value)?;
    let combiner = match update {
        // burn adds truth values by a disjunction.
        IndexingUpdateOp::Add if ty.element == ElementType::Bool => Some(Reducer::Or),
        _ if ty.element == ElementType::Bool => {
            return Err(l.unsupported("truth values are combined by Add only; convert them to integers"));
        }
        IndexingUpdateOp::Assign => None,
        IndexingUpdateOp::Add => Some(Reducer::Sum),
        IndexingUpdateOp::Mul => Some(Reducer::Prod),
        IndexingUpdateOp::Min => Some(Reducer::Min),
        IndexingUpdateOp::Max => Some(Reducer::Max),
    };
    let result = l.build(|b| {
        let updates = match combiner {
            Some(Reducer::Min) if ty.element.is_float() => without_nan(b, updates, &ty, f64::INFINITY)?,
            Some(Reducer::Max) if ty.element.is_float() => without_nan(b, updates, &ty, f64::NEG_INFINITY)?,
            _ => updates,
        };
        b.scatter(operand, indices, updates, dimensions, combiner)
    })?;
    l.set(out, result)
}

/// Replaces NaN by a number that has no effect: in burn a value that is NaN is neither smaller nor larger.
fn without_nan(b: &mut Builder, x: Value, ty: &TensorType, neutral: f64) -> distribute_hlo::Result<Value> {
    let (nan, neutral) = (math::is_nan(b, x)?, b.full(ty.clone(), neutral)?);
    b.select(nan, neutral, x)
}
