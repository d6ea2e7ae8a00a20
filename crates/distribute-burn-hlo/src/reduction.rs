//! Lowering of reductions.

use burn_ir::{DimOpIr, ReduceOpIr, TensorIr};
use distribute_hlo::{CompareOp, Reducer};

use crate::numeric::{abs, wide_integer};
use crate::{Lowering, Result, contraction, math};

/// Combines all elements to one.
pub(crate) fn all(l: &mut Lowering<'_>, op: &ReduceOpIr, reducer: Reducer) -> Result<()> {
    let axes: Vec<usize> = (0..op.input.shape.as_slice().len()).collect();
    along(l, &op.input, &op.out, &axes, reducer)
}

/// Combines elements along dimensions, which the result has with size 1.
pub(crate) fn along(
    l: &mut Lowering<'_>,
    input: &TensorIr,
    out: &TensorIr,
    axes: &[usize],
    reducer: Reducer,
) -> Result<()> {
    if let (Reducer::Sum, [axis]) = (reducer, axes)
        && contraction::sum_of_products(l, input, out, *axis)?
    {
        return Ok(());
    }
    let operand = l.operand(input)?;
    if matches!(reducer, Reducer::Max | Reducer::Min) {
        some(l, input, axes)?;
    }
    let result = l.build(|b| math::reduce(b, operand, reducer, axes))?;
    l.set_reshaped(out, result)
}

/// Refuses an extreme of no elements.
fn some(l: &Lowering<'_>, input: &TensorIr, axes: &[usize]) -> Result<()> {
    match axes.iter().any(|&axis| input.shape.as_slice().get(axis) == Some(&0)) {
        true => Err(l.unsupported("no elements have neither a largest nor a smallest one; give at least one")),
        false => Ok(()),
    }
}

/// Returns the mean of all elements, or along a dimension. Sums of 16 bits are f32. Those of integers wrap around in
/// their own type, as in burn, and are divided in 64 bits, which hold every number of elements.
pub(crate) fn mean(l: &mut Lowering<'_>, input: &TensorIr, out: &TensorIr, axis: Option<usize>) -> Result<()> {
    let operand = l.operand(input)?;
    let dims = input.shape.as_slice();
    let axes = axis.map_or_else(|| (0..dims.len()).collect(), |axis| vec![axis]);
    let count: usize = axes.iter().filter_map(|&axis| dims.get(axis)).product();
    let element = l.element(input)?;
    if count == 0 && element.is_integer() {
        return Err(l.unsupported("no integers have no mean; give at least one, or convert them to f32 first"));
    }
    let count = i128::try_from(count).unwrap_or(i128::MAX);
    let result = l.build(|b| {
        let mean = math::in_f32(b, [operand], |b, [x]| {
            let sum = b.reduce(x, Reducer::Sum, &axes)?;
            let sum = if element.is_integer() { b.convert(sum, wide_integer(element))? } else { sum };
            let count = math::like(b, sum, distribute_hlo::Number::Integer(count))?;
            b.divide(sum, count)
        })?;
        math::convert(b, mean, element)
    })?;
    l.set_reshaped(out, result)
}

/// Returns the largest absolute value of all elements, or along a dimension.
pub(crate) fn max_abs(l: &mut Lowering<'_>, input: &TensorIr, out: &TensorIr, axis: Option<usize>) -> Result<()> {
    let operand = l.operand(input)?;
    let axes = axis.map_or_else(|| (0..input.shape.as_slice().len()).collect(), |axis| vec![axis]);
    some(l, input, &axes)?;
    let result = l.build(|b| {
        let sizes = abs(b, operand)?;
        b.reduce(sizes, Reducer::Max, &axes)
    })?;
    l.set_reshaped(out, result)
}

/// Combines each element with all before it; sums and products of 16 bits in f32.
pub(crate) fn cumulative(l: &mut Lowering<'_>, op: &DimOpIr, reducer: Reducer) -> Result<()> {
    l.unary(&op.input, &op.out, |b, x| math::in_f32(b, [x], |b, [x]| b.cumulative(x, reducer, op.axis, false)))
}

/// Returns whether all (`And`) or any (`Or`) elements, of all or along a dimension, are not 0. NaN is not 0.
pub(crate) fn truth(
    l: &mut Lowering<'_>,
    input: &TensorIr,
    out: &TensorIr,
    axis: Option<usize>,
    reducer: Reducer,
) -> Result<()> {
    let operand = l.operand(input)?;
    let axes = axis.map_or_else(|| (0..input.shape.as_slice().len()).collect::<Vec<_>>(), |axis| vec![axis]);
    let result = l.build(|b| {
        let truth = match math::element_of(b, operand)? {
            distribute_hlo::ElementType::Bool => operand,
            _ => math::compare_with(b, CompareOp::Ne, operand, 0)?,
        };
        b.reduce(truth, reducer, &axes)
    })?;
    l.set_reshaped(out, result)
}
