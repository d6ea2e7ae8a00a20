//! Products of matrices and of vectors.

use burn_ir::{CrossOpIr, MatmulOpIr, TensorIr};
use distribute_hlo::DotDimensions;

use crate::module::sum_element;
use crate::{Lowering, Result, math};

/// Multiplies the matrices of the last two dimensions. Leading dimensions of size 1 are repeated.
pub(crate) fn matmul(l: &mut Lowering<'_>, op: &MatmulOpIr) -> Result<()> {
    let (lhs, rhs) = (l.operand(&op.lhs)?, l.operand(&op.rhs)?);
    let (left, right, out) = (op.lhs.shape.as_slice(), op.rhs.shape.as_slice(), op.out.shape.as_slice());
    let (Some(batching), true, true) = (out.len().checked_sub(2), left.len() > 1, right.len() > 1) else {
        return Err(l.unsupported("factors must have at least two dimensions; reshape vectors to matrices"));
    };
    let leading = |dims: &[usize]| [&out[..batching], &dims[dims.len() - 2..]].concat();
    let (wide_left, wide_right) = (leading(left), leading(right));
    // One matrix for all of a batch, as a layer's weights are: one product of more rows.
    let is_shared = batching > 0 && right[..right.len() - 2].iter().all(|size| *size == 1) && left == wide_left;
    let mut factors = None;
    let result = l.build(|b| {
        if is_shared {
            let lhs = b.reshape(lhs, &[left[..left.len() - 1].iter().product(), left[left.len() - 1]])?;
            let rhs = b.reshape(rhs, &right[right.len() - 2..])?;
            let product = b.dot_general(lhs, rhs, &DotDimensions::matmul(0))?;
            return b.reshape(product, out);
        }
        let (lhs, rhs) = (b.broadcast(lhs, &wide_left)?, b.broadcast(rhs, &wide_right)?);
        factors = Some([lhs, rhs]);
        b.dot_general(lhs, rhs, &DotDimensions::matmul(batching))
    })?;
    if let (true, Some(factors)) = (batching > 0, factors) {
        l.products.insert(op.out.id, factors);
    }
    l.set(&op.out, result)
}

/// Sums products of a batch of matrices over a dimension of the batch, as gradients of weights are: one product of more
/// columns and rows, whose terms are rounded once. Returns whether the input is such a product.
pub(crate) fn sum_of_products(l: &mut Lowering<'_>, input: &TensorIr, out: &TensorIr, axis: usize) -> Result<bool> {
    let Some([lhs, rhs]) = l.products.get(&input.id).copied() else { return Ok(false) };
    let batching = input.shape.num_dims() - 2;
    if axis >= batching {
        return Ok(false);
    }
    let ty = l.type_of(out)?;
    let rest: Vec<usize> = (0..batching).filter(|dim| *dim != axis).collect();
    let dimensions = DotDimensions {
        lhs_batching: rest.clone(),
        rhs_batching: rest,
        lhs_contracting: vec![axis, batching + 1],
        rhs_contracting: vec![axis, batching],
        element: Some(sum_element(ty.element)),
    };
    let result = l.build(|b| {
        let sums = b.dot_general(lhs, rhs, &dimensions)?;
        let sums = b.convert(sums, ty.element)?;
        b.reshape(sums, &ty.dims)
    })?;
    l.set(out, result)?;
    Ok(true)
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
