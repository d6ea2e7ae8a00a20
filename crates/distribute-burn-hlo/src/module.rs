//! Lowering of `ModuleOperationIr`.

mod attention;
mod convolution;
mod interpolate;
mod linear;
mod normalization;
mod numbers;
mod pooling;
mod ranges;

pub(crate) use numbers::sum_element;

use burn_ir::{ModuleOperationIr, OperationIr};

use crate::{Lowering, Result};
use pooling::Windows;

pub(crate) fn lower(l: &mut Lowering<'_>, operation: &ModuleOperationIr) -> Result<()> {
    use ModuleOperationIr as Op;
    if empty_results(l, operation)? {
        return Ok(());
    }
    match operation {
        Op::BatchNorm(op) => normalization::batch_norm(l, op),
        Op::LayerNorm(op) => normalization::layer_norm(l, op),
        Op::Embedding(op) => linear::embedding(l, [&op.weights, &op.indices], &op.out),
        Op::EmbeddingBackward(op) => linear::embedding_backward(l, [&op.out_grad, &op.indices], &op.out),
        Op::Linear(op) => linear::linear(l, [&op.x, &op.weight], op.bias.as_ref(), &op.out),
        Op::LinearXBackward(op) => linear::linear_x_backward(l, [&op.weight, &op.output_grad], &op.out),
        Op::LinearWeightBackward(op) => linear::linear_weight_backward(l, [&op.x, &op.output_grad], &op.out),
        Op::LinearBiasBackward(op) => {
            let last = op.output_grad.shape.num_dims().saturating_sub(1);
            linear::bias_backward(l, &op.output_grad, last, &op.out)
        }
        Op::Conv1d(op) => {
            convolution::forward(l, [&op.x, &op.weight], op.bias.as_ref(), &(&op.options).into(), &op.out)
        }
        Op::Conv2d(op) => {
            convolution::forward(l, [&op.x, &op.weight], op.bias.as_ref(), &(&op.options).into(), &op.out)
        }
        Op::Conv3d(op) => {
            convolution::forward(l, [&op.x, &op.weight], op.bias.as_ref(), &(&op.options).into(), &op.out)
        }
        Op::Conv1dXBackward(op) => {
            convolution::transposed(l, [&op.output_grad, &op.weight], None, &(&op.options).into(), &op.out)
        }
        Op::Conv2dXBackward(op) => {
            convolution::transposed(l, [&op.output_grad, &op.weight], None, &(&op.options).into(), &op.out)
        }
        Op::Conv3dXBackward(op) => {
            convolution::transposed(l, [&op.output_grad, &op.weight], None, &(&op.options).into(), &op.out)
        }
        Op::Conv1dWeightBackward(op) => {
            convolution::weight_backward(l, [&op.x, &op.output_grad], &(&op.options).into(), &op.out)
        }
        Op::Conv2dWeightBackward(op) => {
            convolution::weight_backward(l, [&op.x, &op.output_grad], &(&op.options).into(), &op.out)
        }
        Op::Conv3dWeightBackward(op) => {
            convolution::weight_backward(l, [&op.x, &op.output_grad], &(&op.options).into(), &op.out)
        }
        Op::Conv1dBiasBackward(op) => linear::bias_backward(l, &op.output_grad, 1, &op.out),
        Op::Conv2dBiasBackward(op) => linear::bias_backward(l, &op.output_grad, 1, &op.out),
        Op::Conv3dBiasBackward(op) => linear::bias_backward(l, &op.output_grad, 1, &op.out),
        Op::ConvTranspose1d(op) => {
            convolution::transposed(l, [&op.x, &op.weight], op.bias.as_ref(), &(&op.options).into(), &op.out)
        }
        Op::ConvTranspose2d(op) => {
            convolution::transposed(l, [&op.x, &op.weight], op.bias.as_ref(), &(&op.options).into(), &op.out)
        }
        Op::ConvTranspose3d(op) => {
            convolution::transposed(l, [&op.x, &op.weight], op.bias.as_ref(), &(&op.options).into(), &op.out)
        }
        Op::ConvTranspose1dWeightBackward(op) => {
            convolution::weight_backward(l, [&op.output_grad, &op.x], &(&op.options).into(), &op.out)
        }
        Op::ConvTranspose2dWeightBackward(op) => {
            convolution::weight_backward(l, [&op.output_grad, &op.x], &(&op.options).into(), &op.out)
        }
        Op::ConvTranspose3dWeightBackward(op) => {
            convolution::weight_backward(l, [&op.output_grad, &op.x], &(&op.options).into(), &op.out)
        }
        Op::ConvTranspose1dBiasBackward(op) => linear::bias_backward(l, &op.output_grad, 1, &op.out),
        Op::ConvTranspose2dBiasBackward(op) => linear::bias_backward(l, &op.output_grad, 1, &op.out),
        Op::ConvTranspose3dBiasBackward(op) => linear::bias_backward(l, &op.output_grad, 1, &op.out),
        Op::AvgPool1d(op) => {
            let windows = Windows::of([op.kernel_size], [op.stride], [op.padding], [1]);
            pooling::average(l, &op.x, &windows, op.count_include_pad, &op.out)
        }
        Op::AvgPool2d(op) => {
            let windows = Windows::of(op.kernel_size, op.stride, op.padding, [1; 2]);
            pooling::average(l, &op.x, &windows, op.count_include_pad, &op.out)
        }
        Op::AvgPool1dBackward(op) => {
            let windows = Windows::of([op.kernel_size], [op.stride], [op.padding], [1]);
            pooling::average_backward(l, &op.grad, &windows, op.count_include_pad, &op.out)
        }
        Op::AvgPool2dBackward(op) => {
            let windows = Windows::of(op.kernel_size, op.stride, op.padding, [1; 2]);
            pooling::average_backward(l, &op.grad, &windows, op.count_include_pad, &op.out)
        }
        Op::AdaptiveAvgPool1d(op) => pooling::adaptive(l, &op.x, &op.out),
        Op::AdaptiveAvgPool2d(op) => pooling::adaptive(l, &op.x, &op.out),
        Op::AdaptiveAvgPool3d(op) => pooling::adaptive(l, &op.x, &op.out),
        Op::AdaptiveAvgPool1dBackward(op) => pooling::adaptive_backward(l, &op.grad, &op.out),
        Op::AdaptiveAvgPool2dBackward(op) => pooling::adaptive_backward(l, &op.grad, &op.out),
        Op::AdaptiveAvgPool3dBackward(op) => pooling::adaptive_backward(l, &op.grad, &op.out),
        Op::MaxPool1d(op) => {
            pooling::max(l, &op.x, &Windows::of([op.kernel_size], [op.stride], [op.padding], [op.dilation]), &op.out)
        }
        Op::MaxPool2d(op) => {
            pooling::max(l, &op.x, &Windows::of(op.kernel_size, op.stride, op.padding, op.dilation), &op.out)
        }
        Op::MaxPool1dWithIndices(op) => {
            let windows = Windows::of([op.kernel_size], [op.stride], [op.padding], [op.dilation]);
            pooling::max_with_indices(l, &op.x, &windows, [&op.out, &op.out_indices])
        }
        Op::MaxPool2dWithIndices(op) => {
            let windows = Windows::of(op.kernel_size, op.stride, op.padding, op.dilation);
            pooling::max_with_indices(l, &op.x, &windows, [&op.out, &op.out_indices])
        }
        Op::MaxPool1dWithIndicesBackward(op) => {
            let windows = Windows::of([op.kernel_size], [op.stride], [op.padding], [op.dilation]);
            pooling::max_backward(l, [&op.grad, &op.indices], &windows, &op.out)
        }
        Op::MaxPool2dWithIndicesBackward(op) => {
            let windows = Windows::of(op.kernel_size, op.stride, op.padding, op.dilation);
            pooling::max_backward(l, [&op.grad, &op.indices], &windows, &op.out)
        }
        Op::Interpolate(op) => interpolate::interpolate(l, &op.x, &op.options, &op.out),
        Op::InterpolateBackward(op) => interpolate::interpolate_backward(l, &op.grad, &op.options, &op.out),
        Op::Attention(op) => attention::attention(l, op),
        Op::Unfold4d(op) => {
            let options = &op.options;
            let windows = Windows::of(op.kernel_size, options.stride, options.padding, options.dilation);
            pooling::unfold(l, &op.x, &windows, &op.out)
        }
        Op::DeformableConv2d(_) | Op::DeformableConv2dBackward(_) => {
            Err(l.unsupported("its samples lie between elements; sample by gather and multiply instead"))
        }
        Op::CtcLoss(_) | Op::CtcLossBackward(_) => {
            Err(l.unsupported("it has no lowering; compute the loss from tensor operations, as burn's default does"))
        }
    }
}

/// Sets results without elements. Returns false if one has elements. A compiler need not define windows over nothing.
fn empty_results(l: &mut Lowering<'_>, operation: &ModuleOperationIr) -> Result<bool> {
    let operation = OperationIr::Module(operation.clone());
    if operation.outputs().any(|out| !out.shape.as_slice().contains(&0)) {
        return Ok(false);
    }
    for out in operation.outputs() {
        let ty = l.type_of(out)?;
        let value = l.build(|b| b.full(ty, 0))?;
        l.set(out, value)?;
    }
    Ok(true)
}
