//! Lowering of operations that compare elements along a dimension: extremes with their places, and sorts.

use burn_ir::TensorIr;
use distribute_hlo::{ElementType, SortOrder, Value};

use crate::{Lowering, Result};

/// Sets the largest or smallest element along a dimension and its place: the first of equal ones, and the first NaN if
/// there is any.
pub(crate) fn extreme(
    l: &mut Lowering<'_>,
    input: &TensorIr,
    dim: usize,
    largest: bool,
    out: Option<&TensorIr>,
    indices: Option<&TensorIr>,
) -> Result<()> {
    let operand = l.operand(input)?;
    if input.shape.as_slice().get(dim) == Some(&0) {
        return Err(l.unsupported("no elements have neither a largest nor a smallest one; give at least one"));
    }
    let index = index_type(l, indices)?;
    let (value, place) =
        l.build(|b| if largest { b.argmax(operand, dim, index) } else { b.argmin(operand, dim, index) })?;
    out.map_or(Ok(()), |out| l.set_reshaped(out, value))?;
    indices.map_or(Ok(()), |indices| l.set_reshaped(indices, place))
}

/// Sets elements in order along a dimension, and their places before. Equal elements stay in order. Floating-point
/// numbers are in IEEE 754's total order, as in Flex: -0 is below 0, a NaN is above all numbers if its sign is
/// positive, and below all if it is negative, as that of 0/0 is on x86.
pub(crate) fn sort(
    l: &mut Lowering<'_>,
    input: &TensorIr,
    (dim, descending): (usize, bool),
    out: Option<&TensorIr>,
    indices: Option<&TensorIr>,
) -> Result<()> {
    let (values, places) = sorted(l, input, (dim, descending), indices)?;
    out.map_or(Ok(()), |out| l.set(out, values))?;
    match (indices, places) {
        (Some(indices), Some(places)) => l.set(indices, places),
        _ => Ok(()),
    }
}

/// Sets the `count` largest elements along a dimension, the largest first, and their places.
pub(crate) fn first(
    l: &mut Lowering<'_>,
    input: &TensorIr,
    (dim, count): (usize, usize),
    out: Option<&TensorIr>,
    indices: Option<&TensorIr>,
) -> Result<()> {
    let size = input.shape.as_slice().get(dim).copied().unwrap_or(0);
    if count > size {
        return Err(l.unsupported(&format!("{count} of {size} elements are asked for; ask for at most {size}")));
    }
    let (values, places) = sorted(l, input, (dim, true), indices)?;
    if let Some(out) = out {
        let values = l.build(|b| b.slice_in_dim(values, dim, 0, count))?;
        l.set(out, values)?;
    }
    if let (Some(indices), Some(places)) = (indices, places) {
        let places = l.build(|b| b.slice_in_dim(places, dim, 0, count))?;
        l.set(indices, places)?;
    }
    Ok(())
}

/// Returns sorted elements, and their places if these are asked for.
fn sorted(
    l: &mut Lowering<'_>,
    input: &TensorIr,
    (dim, descending): (usize, bool),
    indices: Option<&TensorIr>,
) -> Result<(Value, Option<Value>)> {
    let operand = l.operand(input)?;
    let index = index_type(l, indices)?;
    let ty = l.type_of(input)?;
    let order = if descending { SortOrder::Descending } else { SortOrder::Ascending };
    let results = l.build(|b| {
        let mut operands = vec![operand];
        if indices.is_some() {
            operands.push(b.iota(ty.with_element(index), dim)?);
        }
        b.sort(&operands, dim, order)
    })?;
    let values = results.first().copied().ok_or_else(|| l.unsupported("a sort has no result"))?;
    Ok((values, results.get(1).copied()))
}

/// Returns the type of places.
fn index_type(l: &Lowering<'_>, indices: Option<&TensorIr>) -> Result<ElementType> {
    indices.map_or(Ok(ElementType::I32), |indices| l.element(indices))
}
