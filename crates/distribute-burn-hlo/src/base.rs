//! Lowering of `BaseOperationIr`.

mod indexing;
mod slicing;

use burn_ir::{BaseOperationIr, ScalarIr, TensorIr, UnfoldOpIr};
use distribute_hlo::{Builder, CompareOp, ElementType, Reducer, TensorType, Value};

use crate::{Lowering, Result, math, reduction};

pub(crate) fn lower(l: &mut Lowering<'_>, operation: &BaseOperationIr) -> Result<()> {
    use BaseOperationIr as Op;
    match operation {
        Op::Reshape(op) => l.unary(&op.input, &op.out, |b, x| b.reshape(x, op.out.shape.as_slice())),
        Op::Expand(op) => l.unary(&op.input, &op.out, |b, x| b.broadcast(x, op.out.shape.as_slice())),
        Op::SwapDims(op) => {
            let mut axes: Vec<usize> = (0..op.input.shape.as_slice().len()).collect();
            axes.swap(op.dim1, op.dim2);
            l.unary(&op.input, &op.out, |b, x| b.transpose(x, &axes))
        }
        Op::Permute(op) => l.unary(&op.input, &op.out, |b, x| b.transpose(x, &op.axes)),
        Op::Flip(op) => l.unary(&op.input, &op.out, |b, x| b.reverse(x, &op.axes)),
        Op::Unfold(op) => unfold(l, op),
        Op::Slice(op) => slicing::slice(l, op),
        Op::SliceAssign(op) => slicing::slice_assign(l, op),
        Op::Select(op) => indexing::select(l, op),
        Op::SelectAssign(op) => indexing::select_assign(l, op),
        Op::Gather(op) => indexing::gather(l, op),
        Op::Scatter(op) => indexing::scatter(l, op),
        Op::GatherNd(op) => indexing::gather_nd(l, op),
        Op::ScatterNd(op) => indexing::scatter_nd(l, op),
        Op::MaskWhere(op) => {
            let mask = l.operand(&op.mask)?;
            let dims = op.out.shape.as_slice();
            l.binary((&op.tensor, &op.value), &op.out, |b, [tensor, value]| {
                let mask = b.broadcast(mask, dims)?;
                b.select(mask, value, tensor)
            })
        }
        Op::MaskFill(op) => {
            let mask = l.operand(&op.mask)?;
            let ty = l.type_of(&op.out)?;
            let value = l.full(op.value, ty.clone())?;
            l.unary(&op.tensor, &op.out, |b, x| {
                let (x, mask) = (b.broadcast(x, &ty.dims)?, b.broadcast(mask, &ty.dims)?);
                b.select(mask, value, x)
            })
        }
        Op::Equal(op) => l.binary((&op.lhs, &op.rhs), &op.out, |b, [x, y]| b.compare(CompareOp::Eq, x, y)),
        Op::NotEqual(op) => l.binary((&op.lhs, &op.rhs), &op.out, |b, [x, y]| b.compare(CompareOp::Ne, x, y)),
        Op::EqualElem(op) => l.with_scalar(op, |b, [x, y]| b.compare(CompareOp::Eq, x, y)),
        Op::NotEqualElem(op) => l.with_scalar(op, |b, [x, y]| b.compare(CompareOp::Ne, x, y)),
        Op::RepeatDim(op) => l.unary(&op.tensor, &op.out, |b, x| repeat(b, x, op.dim, op.times)),
        Op::Cat(op) => {
            let parts = op.tensors.iter().map(|tensor| l.operand(tensor)).collect::<Result<Vec<_>>>()?;
            let result = l.build(|b| b.concatenate(&parts, op.dim))?;
            l.set(&op.out, result)
        }
        Op::Cast(op) => {
            let element = l.element(&op.out)?;
            l.unary(&op.input, &op.out, |b, x| math::convert(b, x, element))
        }
        // The elements of an empty tensor are any; zeros make programs repeatable.
        Op::Empty(op) | Op::Zeros(op) => filled(l, &op.out, false),
        Op::Ones(op) => filled(l, &op.out, true),
        Op::All(op) => reduction::truth(l, &op.input, &op.out, None, Reducer::And),
        Op::Any(op) => reduction::truth(l, &op.input, &op.out, None, Reducer::Or),
        Op::AllDim(op) => reduction::truth(l, &op.input, &op.out, Some(op.axis), Reducer::And),
        Op::AnyDim(op) => reduction::truth(l, &op.input, &op.out, Some(op.axis), Reducer::Or),
    }
}

/// Sets a tensor of zeros, or of ones.
fn filled(l: &mut Lowering<'_>, out: &TensorIr, ones: bool) -> Result<()> {
    let value = l.full(ScalarIr::Bool(ones), l.type_of(out)?)?;
    l.set(out, value)
}

/// Puts copies of a tensor one after another along a dimension.
pub(crate) fn repeat(b: &mut Builder, x: Value, dim: usize, times: usize) -> distribute_hlo::Result<Value> {
    let mut dims = b.type_of(x)?.dims.clone();
    let places: Vec<usize> = (0..dims.len()).map(|place| if place < dim { place } else { place + 1 }).collect();
    dims.insert(dim, times);
    let repeated = b.broadcast_in_dim(x, &dims, &places)?;
    let size = dims.remove(dim);
    dims[dim] *= size;
    b.reshape(repeated, &dims)
}

/// Takes windows along a dimension, `step` apart. Their elements lie along a new last dimension.
fn unfold(l: &mut Lowering<'_>, op: &UnfoldOpIr) -> Result<()> {
    let ndim = op.input.shape.as_slice().len();
    let (dim, windows) = (op.dim, op.out.shape.as_slice().get(op.dim).copied().unwrap_or(0));
    let step = i64::try_from(op.step).unwrap_or(i64::MAX);
    let places: Vec<usize> = (0..=dim).chain(dim + 2..=ndim).chain([dim + 1]).collect();
    l.unary(&op.input, &op.out, |b, x| {
        let ty = TensorType::new(ElementType::I64, [windows, op.size]);
        let (window, element) = (b.iota(ty.clone(), 0)?, b.iota(ty.clone(), 1)?);
        let step = b.full(ty, step)?;
        let start = b.multiply(window, step)?;
        let indices = b.add(start, element)?;
        let taken = b.take(x, indices, dim)?;
        b.transpose(taken, &places)
    })
}
