//! Linear layers and embeddings.

use burn_ir::TensorIr;
use distribute_hlo::{Builder, DotDimensions, Reducer, ScatterDimensions, Value};

use super::numbers::{all_but, narrow, sum_element, widen};
use crate::{Lowering, Result};

/// x · weight + bias, for a weight of `[inputs, outputs]`.
pub(super) fn linear(
    l: &mut Lowering<'_>,
    [x, weight]: [&TensorIr; 2],
    bias: Option<&TensorIr>,
    out: &TensorIr,
) -> Result<()> {
    let last = last_dimension(l, x, weight)?;
    let (x, weight) = (l.operand(x)?, l.operand(weight)?);
    let bias = bias.map(|bias| l.operand(bias)).transpose()?;
    product(l, [x, weight], [vec![last], vec![0]], bias, out)
}

/// output_grad · weightᵀ.
pub(super) fn linear_x_backward(
    l: &mut Lowering<'_>,
    [weight, output_grad]: [&TensorIr; 2],
    out: &TensorIr,
) -> Result<()> {
    let last = last_dimension(l, output_grad, weight)?;
    let (weight, grad) = (l.operand(weight)?, l.operand(output_grad)?);
    product(l, [grad, weight], [vec![last], vec![1]], None, out)
}

/// xᵀ · output_grad over all dimensions but the last.
pub(super) fn linear_weight_backward(
    l: &mut Lowering<'_>,
    [x, output_grad]: [&TensorIr; 2],
    out: &TensorIr,
) -> Result<()> {
    let leading: Vec<usize> = (0..x.shape.num_dims().saturating_sub(1)).collect();
    let (x, grad) = (l.operand(x)?, l.operand(output_grad)?);
    product(l, [x, grad], [leading.clone(), leading], None, out)
}

/// The sum over all dimensions but `kept`, in the sizes of `out`: the gradient of a bias.
pub(super) fn bias_backward(l: &mut Lowering<'_>, output_grad: &TensorIr, kept: usize, out: &TensorIr) -> Result<()> {
    let grad = l.operand(output_grad)?;
    let ty = l.type_of(out)?;
    let summed = all_but(output_grad.shape.num_dims(), &[kept]);
    let value = l.build(|b| {
        let grad = widen(b, grad)?;
        let sum = b.reduce(grad, Reducer::Sum, &summed)?;
        let sum = narrow(b, sum, ty.element)?;
        b.reshape(sum, &ty.dims)
    })?;
    l.set(out, value)
}

/// The rows of a table that indices name. An index out of range, which burn does not define, reads the nearest row.
pub(super) fn embedding(l: &mut Lowering<'_>, [weights, indices]: [&TensorIr; 2], out: &TensorIr) -> Result<()> {
    let (weights, indices) = (l.operand(weights)?, l.operand(indices)?);
    let value = l.build(|b| b.take(weights, indices, 0))?;
    l.set(out, value)
}

/// Adds each row of a gradient to the row of a table of zeros that its index names.
pub(super) fn embedding_backward(
    l: &mut Lowering<'_>,
    [output_grad, indices]: [&TensorIr; 2],
    out: &TensorIr,
) -> Result<()> {
    let count = indices.shape.num_dims();
    let (grad, indices) = (l.operand(output_grad)?, l.operand(indices)?);
    let ty = l.type_of(out)?;
    let value = l.build(|b| {
        let zeros = b.full(ty.with_element(sum_element(ty.element)), 0)?;
        let grad = widen(b, grad)?;
        let dimensions = ScatterDimensions {
            update_window_dims: vec![count],
            inserted_window_dims: vec![0],
            scatter_dims_to_operand_dims: vec![0],
            index_vector_dim: count,
            ..ScatterDimensions::default()
        };
        let sums = b.scatter(zeros, indices, grad, &dimensions, Some(Reducer::Sum))?;
        narrow(b, sums, ty.element)
    })?;
    l.set(out, value)
}

/// Sets a result to the product of two tensors over these dimensions, and a bias of the last dimension. Sums are
/// rounded once.
fn product(
    l: &mut Lowering<'_>,
    [lhs, rhs]: [Value; 2],
    [lhs_contracting, rhs_contracting]: [Vec<usize>; 2],
    bias: Option<Value>,
    out: &TensorIr,
) -> Result<()> {
    let ty = l.type_of(out)?;
    let wide = sum_element(ty.element);
    let dimensions =
        DotDimensions { lhs_contracting, rhs_contracting, element: Some(wide), ..DotDimensions::default() };
    let value = l.build(|b: &mut Builder| {
        let mut sums = b.dot_general(lhs, rhs, &dimensions)?;
        if let Some(bias) = bias {
            let bias = widen(b, bias)?;
            let bias = b.broadcast(bias, &ty.dims)?;
            sums = b.add(sums, bias)?;
        }
        narrow(b, sums, ty.element)
    })?;
    l.set(out, value)
}

/// Returns the last dimension of the tensor that is multiplied by a weight of two dimensions.
fn last_dimension(l: &Lowering<'_>, x: &TensorIr, weight: &TensorIr) -> Result<usize> {
    match (x.shape.num_dims().checked_sub(1), weight.shape.num_dims()) {
        (Some(last), 2) => Ok(last),
        _ => Err(l.unsupported(&format!(
            "the input has sizes {:?} and the weight {:?}; pass an input of at least one dimension and a weight of two",
            x.shape.as_slice(),
            weight.shape.as_slice()
        ))),
    }
}
