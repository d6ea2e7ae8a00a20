//! Products of matrices and of vectors.

use burn_ir::{CrossOpIr, MatmulOpIr};
use distribute_hlo::DotDimensions;

use crate::{Lowering, Result, math};

/// Multiplies the matrices of the last two dimensions. Leading dimensions of size 1 are repeated.
pub(crate) fn matmul(l: &mut Lowering<'_>, op: &MatmulOpIr) -> Result<()> {
    let (lhs, rhs) = (l.operand(&op.lhs)?, l.operand(&op.rhs)?);
    let (left, right, out) = (op.lhs.shape.as_slice(), op.rhs.shape.as_slice(), op.out.shape.as_slice());
    let (Some(batching), true, true) = (out.len().checked_sub(2), left.len() > 1, right.len() > 1) else {
        return Err(l.unsupported("factors must have at least two dimensions; reshape vectors to matrices"));
    };
    let leading = |dims: &[usize]| [&out[..batching], &dims[dims.len() - 2..]].concat();
    let (left, right) = (leading(left), leading(right));
    let result = l.build(|b| {
        let (lhs, rhs) = (b.broadcast(lhs, &left)?, b.broadcast(rhs, &right)?);
        b.dot_general(lhs, rhs, &DotDimensions::matmul(batching))
    })?;
    l.set(&op.out, result)
}

/// Multiplies vectors of three elements along a dimension: each element of the result is x₁y₂ − x₂y₁ of the two that
/// follow it, in a circle.
pub(crate) fn cross(l: &mut Lowering<'_>, op: &CrossOpIr) -> Result<()> {
    let dim = op.dim;
    l.binary((&op.lhs, &op.rhs), &op.out, |b, operands| {
        math::in_f32(b, operands, |b, [x, y]| {
            let mut turned = |value, places: usize| {
                let head = b.slice_in_dim(value, dim, 0, places)?;
                let tail = b.slice_in_dim(value, dim, places, 3)?;
                b.concatenate(&[tail, head], dim)
            };
            let (x1, x2, y1, y2) = (turned(x, 1)?, turned(x, 2)?, turned(y, 1)?, turned(y, 2)?);
            let (left, right) = (b.multiply(x1, y2)?, b.multiply(x2, y1)?);
            b.subtract(left, right)
        })
    })
}
