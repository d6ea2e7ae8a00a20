//! What is compiled in this crate, for both types of elements.

use distribute_rows::compiled;

use crate::attention::{Arguments, Attention, Gradients};
use crate::batch_norm::{Batch, Centre, Moments, Slope};
use crate::convolution::Convolution;
use crate::linear::Linear;
use crate::pooling::Pooling;

/// A type of elements: `f32` or `f64`.
pub trait Float: distribute_rows::Float + Compiled {}
impl Float for f32 {}
impl Float for f64 {}

compiled! {
    fn linear_forward(
        of: &Linear,
        x: &[Self],
        weight: &[Self],
        bias: Option<&[Self]>,
        out: &mut [Self],
    ) = Linear::forward_generic;
    fn linear_backward_input(
        of: &Linear,
        weight: &[Self],
        gradient: &[Self],
        out: &mut [Self],
    ) = Linear::backward_input_generic;
    fn linear_backward_weight(
        of: &Linear,
        x: &[Self],
        gradient: &[Self],
        out: &mut [Self],
    ) = Linear::backward_weight_generic;
    fn linear_backward_bias(of: &Linear, gradient: &[Self], out: &mut [Self]) = Linear::backward_bias_generic;
    fn convolution_forward(
        of: &Convolution,
        x: &[Self],
        weight: &[Self],
        bias: Option<&[Self]>,
        out: &mut [Self],
    ) = Convolution::forward_generic;
    fn convolution_backward_input(
        of: &Convolution,
        weight: &[Self],
        gradient: &[Self],
        out: &mut [Self],
    ) = Convolution::backward_input_generic;
    fn convolution_backward_weight(
        of: &Convolution,
        x: &[Self],
        gradient: &[Self],
        out: &mut [Self],
    ) = Convolution::backward_weight_generic;
    fn convolution_backward_bias(
        of: &Convolution,
        gradient: &[Self],
        out: &mut [Self],
    ) = Convolution::backward_bias_generic;
    fn pooling_forward(of: &Pooling, x: &[Self], out: &mut [Self]) = Pooling::forward_generic;
    fn pooling_backward(of: &Pooling, x: &[Self], gradient: &[Self], out: &mut [Self]) = Pooling::backward_generic;
    fn batch_norm_moments(of: &Batch, x: &[Self]) -> Vec<Moments> = Batch::moments_generic;
    fn batch_norm_forward(
        of: &Batch,
        x: &[Self],
        centres: &[Centre<Self>],
        scales: &[Self],
        shifts: &[Self],
        out: &mut [Self],
    ) = Batch::forward_generic;
    fn batch_norm_sums(
        of: &Batch,
        x: &[Self],
        centres: &[Centre<Self>],
        gradient: &[Self],
    ) -> Vec<[f64; 2]> = Batch::sums_generic;
    fn batch_norm_backward(
        of: &Batch,
        x: &[Self],
        centres: &[Centre<Self>],
        gradient: &[Self],
        slopes: &[Slope<Self>],
        out: &mut [Self],
    ) = Batch::backward_generic;
    fn attention_forward(
        of: &Attention,
        arguments: &Arguments<'_, Self>,
        out: &mut [Self],
        sums: &mut [Self],
    ) = Attention::forward_generic;
    fn attention_backward(
        of: &Attention,
        arguments: &Arguments<'_, Self>,
        out: &[Self],
        sums: &[Self],
        gradient: &[Self],
        gradients: Gradients<'_, Self>,
    ) = Attention::backward_generic;
}
