//! Lowering of `NumericOperationIr`.

use burn_ir::{BinaryOpIr, ClampOpIr, NumericOperationIr, PadOpIr, ScalarOpIr};
use distribute_hlo::{Builder, CompareOp, ElementType, Reducer, Value};

use crate::{Lowering, Result, base, math, order, random, reduction};

pub(crate) fn lower(l: &mut Lowering<'_>, operation: &NumericOperationIr) -> Result<()> {
    use NumericOperationIr as Op;
    match operation {
        Op::Add(op) => l.binary((&op.lhs, &op.rhs), &op.out, |b, [x, y]| b.add(x, y)),
        Op::Sub(op) => l.binary((&op.lhs, &op.rhs), &op.out, |b, [x, y]| b.subtract(x, y)),
        Op::Mul(op) => l.binary((&op.lhs, &op.rhs), &op.out, |b, [x, y]| b.multiply(x, y)),
        Op::Div(op) => l.binary((&op.lhs, &op.rhs), &op.out, |b, [x, y]| b.divide(x, y)),
        Op::Rem(op) => l.binary((&op.lhs, &op.rhs), &op.out, |b, [x, y]| math::remainder(b, x, y)),
        Op::AddScalar(op) => l.with_scalar(op, |b, [x, y]| b.add(x, y)),
        Op::SubScalar(op) => l.with_scalar(op, |b, [x, y]| b.subtract(x, y)),
        Op::MulScalar(op) => l.with_scalar(op, |b, [x, y]| b.multiply(x, y)),
        Op::DivScalar(op) => {
            divisor(l, op)?;
            l.with_scalar(op, |b, [x, y]| b.divide(x, y))
        }
        Op::RemScalar(op) => {
            divisor(l, op)?;
            l.with_scalar(op, |b, [x, y]| math::remainder(b, x, y))
        }
        Op::Abs(op) => l.unary(&op.input, &op.out, abs),
        Op::Neg(op) => l.unary(&op.input, &op.out, |b, x| b.negate(x)),
        Op::Sign(op) => l.unary(&op.input, &op.out, math::sign),
        Op::Full(op) => {
            let value = l.full(op.value, l.type_of(&op.out)?)?;
            l.set(&op.out, value)
        }
        Op::Greater(op) => compare(l, op, CompareOp::Gt),
        Op::GreaterEqual(op) => compare(l, op, CompareOp::Ge),
        Op::Lower(op) => compare(l, op, CompareOp::Lt),
        Op::LowerEqual(op) => compare(l, op, CompareOp::Le),
        Op::GreaterElem(op) => l.with_scalar(op, |b, [x, y]| b.compare(CompareOp::Gt, x, y)),
        Op::GreaterEqualElem(op) => l.with_scalar(op, |b, [x, y]| b.compare(CompareOp::Ge, x, y)),
        Op::LowerElem(op) => l.with_scalar(op, |b, [x, y]| b.compare(CompareOp::Lt, x, y)),
        Op::LowerEqualElem(op) => l.with_scalar(op, |b, [x, y]| b.compare(CompareOp::Le, x, y)),
        Op::Mean(op) => reduction::mean(l, &op.input, &op.out, None),
        Op::MeanDim(op) => reduction::mean(l, &op.input, &op.out, Some(op.axis)),
        Op::Sum(op) => reduction::all(l, op, Reducer::Sum),
        Op::Prod(op) => reduction::all(l, op, Reducer::Prod),
        Op::Max(op) => reduction::all(l, op, Reducer::Max),
        Op::Min(op) => reduction::all(l, op, Reducer::Min),
        Op::SumDim(op) => reduction::along(l, &op.input, &op.out, &[op.axis], Reducer::Sum),
        Op::SumDims(op) => reduction::along(l, &op.input, &op.out, &op.axes, Reducer::Sum),
        Op::ProdDim(op) => reduction::along(l, &op.input, &op.out, &[op.axis], Reducer::Prod),
        Op::MaxDim(op) => reduction::along(l, &op.input, &op.out, &[op.axis], Reducer::Max),
        Op::MinDim(op) => reduction::along(l, &op.input, &op.out, &[op.axis], Reducer::Min),
        Op::MaxAbs(op) => reduction::max_abs(l, &op.input, &op.out, None),
        Op::MaxAbsDim(op) => reduction::max_abs(l, &op.input, &op.out, Some(op.axis)),
        Op::ArgMax(op) => order::extreme(l, &op.input, op.axis, true, None, Some(&op.out)),
        Op::ArgMin(op) => order::extreme(l, &op.input, op.axis, false, None, Some(&op.out)),
        Op::MaxDimWithIndices(op) => order::extreme(l, &op.tensor, op.dim, true, Some(&op.out), Some(&op.out_indices)),
        Op::MinDimWithIndices(op) => order::extreme(l, &op.tensor, op.dim, false, Some(&op.out), Some(&op.out_indices)),
        Op::TopK(op) => order::first(l, &op.input, (op.axis, op.accumulator_len), Some(&op.out), None),
        Op::ArgTopK(op) => order::first(l, &op.input, (op.axis, op.accumulator_len), None, Some(&op.out)),
        Op::TopKWithIndices(op) => order::first(l, &op.tensor, (op.dim, op.k), Some(&op.out), Some(&op.out_indices)),
        Op::Sort(op) => order::sort(l, &op.input, (op.dim, op.descending), Some(&op.out), None),
        Op::ArgSort(op) => order::sort(l, &op.input, (op.dim, op.descending), None, Some(&op.out)),
        Op::SortWithIndices(op) => {
            order::sort(l, &op.input, (op.dim, op.descending), Some(&op.out), Some(&op.out_indices))
        }
        Op::Clamp(op) => clamp(l, op),
        Op::ClampMin(op) => l.with_scalar(op, |b, [x, low]| at_least(b, x, low)),
        Op::ClampMax(op) => l.with_scalar(op, |b, [x, high]| at_most(b, x, high)),
        Op::CumSum(op) => reduction::cumulative(l, op, Reducer::Sum),
        Op::CumProd(op) => reduction::cumulative(l, op, Reducer::Prod),
        Op::CumMin(op) => reduction::cumulative(l, op, Reducer::Min),
        Op::CumMax(op) => reduction::cumulative(l, op, Reducer::Max),
        Op::Powi(op) => powi(l, op),
        Op::PowiScalar(op) => powi_scalar(l, op),
        Op::IntRandom(op) => random::lower(l, op),
        Op::Pad(op) => pad(l, op),
    }
}

/// Returns absolute values; unsigned integers are their own.
pub(crate) fn abs(b: &mut Builder, x: Value) -> distribute_hlo::Result<Value> {
    if math::element_of(b, x)?.is_unsigned_integer() { Ok(x) } else { b.abs(x) }
}

fn compare(l: &mut Lowering<'_>, op: &BinaryOpIr, relation: CompareOp) -> Result<()> {
    l.binary((&op.lhs, &op.rhs), &op.out, |b, [x, y]| b.compare(relation, x, y))
}

/// Refuses division of integers by 0, which no device defines.
fn divisor(l: &Lowering<'_>, op: &ScalarOpIr) -> Result<()> {
    if l.element(&op.lhs)?.is_integer() && op.rhs.elem::<f64>().trunc() == 0.0 {
        return Err(l.unsupported("integers are divided by 0; give another divisor, or convert them to f32 first"));
    }
    Ok(())
}

/// Returns the elements from `low` on, and `low` for others. NaN remains.
fn at_least(b: &mut Builder, x: Value, low: Value) -> distribute_hlo::Result<Value> {
    let (above, nan) = (b.compare(CompareOp::Gt, x, low)?, math::is_nan(b, x)?);
    let keep = b.or(above, nan)?;
    b.select(keep, x, low)
}

/// Returns the elements up to `high`, and `high` for others. NaN remains.
fn at_most(b: &mut Builder, x: Value, high: Value) -> distribute_hlo::Result<Value> {
    let (below, nan) = (b.compare(CompareOp::Lt, x, high)?, math::is_nan(b, x)?);
    let keep = b.or(below, nan)?;
    b.select(keep, x, high)
}

/// A limit that is NaN makes all elements NaN, as in burn.
fn clamp(l: &mut Lowering<'_>, op: &ClampOpIr) -> Result<()> {
    let ty = l.type_of(&op.tensor)?;
    let (min, max): (f64, f64) = (op.min.elem(), op.max.elem());
    if ty.element.is_float() && (min.is_nan() || max.is_nan()) {
        l.operand(&op.tensor)?;
        let nan = l.build(|b| b.full(ty, f64::NAN))?;
        return l.set(&op.out, nan);
    }
    if min > max {
        return Err(l.unsupported(&format!("the lower limit {min} is above the upper limit {max}; swap them")));
    }
    let (low, high) = (l.full(op.min, ty.clone())?, l.full(op.max, ty)?);
    l.unary(&op.tensor, &op.out, |b, x| {
        let below = b.compare(CompareOp::Lt, x, low)?;
        let raised = b.select(below, low, x)?;
        let above = b.compare(CompareOp::Gt, raised, high)?;
        b.select(above, high, raised)
    })
}

/// Integer exponents of floating-point numbers become such numbers. Integers to the power of negative ones are not
/// defined.
fn powi(l: &mut Lowering<'_>, op: &BinaryOpIr) -> Result<()> {
    let element = l.element(&op.lhs)?;
    l.binary((&op.lhs, &op.rhs), &op.out, |b, [x, y]| {
        let y = math::convert(b, y, element)?;
        b.power(x, y)
    })
}

fn powi_scalar(l: &mut Lowering<'_>, op: &ScalarOpIr) -> Result<()> {
    // burn cuts off a fraction here.
    let exponent = op.rhs.elem::<f64>().trunc();
    if !l.element(&op.lhs)?.is_integer() {
        return l.unary(&op.lhs, &op.out, |b, x| math::in_f32(b, [x], |b, [x]| math::power_scalar(b, x, exponent)));
    }
    if exponent < 0.0 {
        return Err(
            l.unsupported("integers to the power of a negative number are fractions; convert them to f32 first")
        );
    }
    l.with_scalar(op, |b, [x, y]| b.power(x, y))
}

/// Adds elements at the edges of each dimension.
fn pad(l: &mut Lowering<'_>, op: &PadOpIr) -> Result<()> {
    use burn_ir::PadModeIr as Mode;
    let mut value = l.operand(&op.input)?;
    let dims = op.input.shape.as_slice();
    if let Mode::Constant(number) = op.mode {
        let ty = l.type_of(&op.input)?.with_dims([]);
        let number = l.full(number, ty)?;
        let size = |size: usize| i64::try_from(size).unwrap_or(i64::MAX);
        let low: Vec<i64> = op.padding.iter().map(|&(low, _)| size(low)).collect();
        let high: Vec<i64> = op.padding.iter().map(|&(_, high)| size(high)).collect();
        let result = l.build(|b| b.pad(value, number, &low, &high, &vec![0; dims.len()]))?;
        return l.set(&op.out, result);
    }
    for (dim, (&(low, high), &size)) in op.padding.iter().zip(dims).enumerate() {
        let reflect = op.mode == Mode::Reflect;
        if low == 0 && high == 0 {
            continue;
        }
        if size == 0 || (reflect && low.max(high) >= size) {
            return Err(l.unsupported(&format!(
                "dimension {dim} of size {size} cannot be extended by ({low}, {high}) copies of its own elements; pad \
                 with a constant"
            )));
        }
        value = l.build(|b| {
            let edges = [(low, 1, 0), (high, size - 1 - if reflect { high } else { 0 }, size - 1)];
            let mut parts = Vec::with_capacity(3);
            for (place, (count, start, edge)) in edges.into_iter().enumerate() {
                if count > 0 && reflect {
                    let part = b.slice_in_dim(value, dim, start, start + count)?;
                    parts.push(b.reverse(part, &[dim])?);
                } else if count > 0 {
                    let part = b.slice_in_dim(value, dim, edge, edge + 1)?;
                    parts.push(base::repeat(b, part, dim, count)?);
                }
                if place == 0 {
                    parts.push(value);
                }
            }
            b.concatenate(&parts, dim)
        })?;
    }
    l.set(&op.out, value)
}

/// Returns the type in which sums of integers are divided.
pub(crate) fn wide_integer(element: ElementType) -> ElementType {
    if element.is_unsigned_integer() { ElementType::U64 } else { ElementType::I64 }
}
