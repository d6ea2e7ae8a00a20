//! Convolutions, transposed convolutions and their gradients.
//!
//! A convolution of x with W has y[o] = Σ x[o·stride − padding + k·dilation] · W[k]. Its gradient of x is the
//! transposed convolution, so that two functions serve both, and a third one serves the gradients of both kernels.

use burn_ir::{
    Conv1dOptionsIr, Conv2dOptionsIr, Conv3dOptionsIr, ConvTranspose1dOptionsIr, ConvTranspose2dOptionsIr,
    ConvTranspose3dOptionsIr, TensorIr,
};
use distribute_hlo::{Builder, Convolution, DotDimensions, Value};

use super::numbers::{narrow, signed, sum_element, widen};
use crate::{Lowering, Result};

/// The options of a convolution: one entry for each spatial dimension.
pub(super) struct Geometry {
    strides: Vec<usize>,
    padding: Vec<(usize, usize)>,
    dilation: Vec<usize>,
    groups: usize,
}

impl Geometry {
    /// Returns the windows of a convolution of channels first.
    fn convolution(&self) -> Convolution {
        let mut convolution = Convolution::channels_first(self.strides.len());
        convolution.feature_group_count = self.groups;
        convolution
    }

    /// Returns padding before and after, such that a window of `reach` elements fits as often as needed.
    fn padding(&self, after: impl Fn(usize, i64) -> i64) -> Vec<(i64, i64)> {
        let pad = |(dim, &(low, _)): (usize, &(usize, usize))| (signed(low), after(dim, signed(low)));
        self.padding.iter().enumerate().map(pad).collect()
    }
}

macro_rules! geometry {
    ($($options:ty: |$padding:ident| $both:expr;)*) => {$(
        impl From<&$options> for Geometry {
            fn from(options: &$options) -> Geometry {
                let both = |$padding| $both;
                Geometry {
                    strides: options.stride.to_vec(),
                    padding: options.padding.iter().copied().map(both).collect(),
                    dilation: options.dilation.to_vec(),
                    groups: options.groups,
                }
            }
        }
    )*};
}

// The sizes of results account for the padding of transposed convolutions' outputs.
geometry! {
    Conv1dOptionsIr: |padding| padding;
    Conv2dOptionsIr: |padding| padding;
    Conv3dOptionsIr: |padding| (padding, padding);
    ConvTranspose1dOptionsIr: |padding| (padding, padding);
    ConvTranspose2dOptionsIr: |padding| (padding, padding);
    ConvTranspose3dOptionsIr: |padding| (padding, padding);
}

/// A convolution of `[examples, channels, …]` with a kernel of `[output channels, channels of a group, …]`.
pub(super) fn forward(
    l: &mut Lowering<'_>,
    [x, weight]: [&TensorIr; 2],
    bias: Option<&TensorIr>,
    geometry: &Geometry,
    out: &TensorIr,
) -> Result<()> {
    let mut convolution = geometry.convolution();
    convolution.strides.clone_from(&geometry.strides);
    convolution.rhs_dilation.clone_from(&geometry.dilation);
    convolution.padding = geometry.padding.iter().map(|&(low, high)| (signed(low), signed(high))).collect();
    convolve(l, [x, weight], convolution, bias, out, |_, weight| Ok(weight))
}

/// A transposed convolution: the gradient of a convolution's input. The kernel is that of the convolution: `[channels
/// of x, channels of a group of the result, …]`.
pub(super) fn transposed(
    l: &mut Lowering<'_>,
    [x, weight]: [&TensorIr; 2],
    bias: Option<&TensorIr>,
    geometry: &Geometry,
    out: &TensorIr,
) -> Result<()> {
    let mut convolution = geometry.convolution();
    convolution.lhs_dilation.clone_from(&geometry.strides);
    convolution.rhs_dilation.clone_from(&geometry.dilation);
    (convolution.kernel_input_feature_dimension, convolution.kernel_output_feature_dimension) = (0, 1);
    for (dim, &(low, _)) in geometry.padding.iter().enumerate() {
        let reach = signed(geometry.dilation[dim]) * (signed(weight.shape[dim + 2]) - 1);
        let extent = (signed(x.shape[dim + 2]) - 1) * signed(geometry.strides[dim]) + 1;
        let before = reach - signed(low);
        convolution.padding[dim] = (before, signed(out.shape[dim + 2]) + reach - extent - before);
    }
    let groups = geometry.groups;
    let dims = weight.shape.to_vec();
    convolve(l, [x, weight], convolution, bias, out, |b, weight| {
        // A window that is reversed by the convolution itself is slow on XLA's CPUs.
        let spatial: Vec<usize> = (2..dims.len()).collect();
        let weight = b.reverse(weight, &spatial)?;
        if groups == 1 {
            return Ok(weight);
        }
        // [groups · inputs, outputs, …] becomes [inputs, groups · outputs, …].
        let mut split = vec![groups, dims[0] / groups];
        split.extend(&dims[1..]);
        let split = b.reshape(weight, &split)?;
        let order: Vec<usize> = [1, 0].into_iter().chain(2..=dims.len()).collect();
        let swapped = b.transpose(split, &order)?;
        let mut joined = vec![dims[0] / groups, groups * dims[1]];
        joined.extend(&dims[2..]);
        b.reshape(swapped, &joined)
    })
}

/// The gradient of a convolution's kernel. For a transposed convolution pass its gradient as `x`, and its input as
/// `output_grad`.
pub(super) fn weight_backward(
    l: &mut Lowering<'_>,
    [x, output_grad]: [&TensorIr; 2],
    geometry: &Geometry,
    out: &TensorIr,
) -> Result<()> {
    let positions: usize = out.shape[2..].iter().product();
    if geometry.groups == 1 && positions <= PRODUCTS && positions < output_grad.shape[2..].iter().product() {
        return weight_by_products(l, [x, output_grad], geometry, out);
    }
    let mut convolution = geometry.convolution();
    (convolution.feature_group_count, convolution.batch_group_count) = (1, geometry.groups);
    // Channels of the input count as examples, and examples as channels.
    (convolution.input_batch_dimension, convolution.input_feature_dimension) = (1, 0);
    (convolution.kernel_input_feature_dimension, convolution.kernel_output_feature_dimension) = (0, 1);
    (convolution.output_batch_dimension, convolution.output_feature_dimension) = (1, 0);
    convolution.strides.clone_from(&geometry.dilation);
    convolution.rhs_dilation.clone_from(&geometry.strides);
    convolution.padding = geometry.padding(|dim, low| {
        let windows = signed(geometry.dilation[dim]) * (signed(out.shape[dim + 2]) - 1);
        let extent = signed(geometry.strides[dim]) * (signed(output_grad.shape[dim + 2]) - 1) + 1;
        windows + extent - signed(x.shape[dim + 2]) - low
    });
    convolve(l, [x, output_grad], convolution, None, out, |_, kernel| Ok(kernel))
}

/// The largest number of a kernel's elements whose gradients are a product of matrices, for which the inputs are
/// repeated as often. At the precision of f32, libtpu 0.0.51 does not come to an end with convolutions of large
/// windows, as gradients of kernels are.
const PRODUCTS: usize = 64;

/// The gradient of a convolution's kernel: the product of the inputs that each element was multiplied with, and of the
/// gradients.
fn weight_by_products(
    l: &mut Lowering<'_>,
    [x, output_grad]: [&TensorIr; 2],
    geometry: &Geometry,
    out: &TensorIr,
) -> Result<()> {
    let (input, grad, ty) = (l.operand(x)?, l.operand(output_grad)?, l.type_of(out)?);
    let (kernel, counts, spatial) = (&ty.dims[2..], &output_grad.shape[2..], ty.ndim() - 2);
    let rows = output_grad.shape[0] * counts.iter().product::<usize>();
    let value = l.build(|b| {
        // Channels last, so that there are two matrices with a row for each place.
        let last: Vec<usize> = [0].into_iter().chain(2..ty.ndim()).chain([1]).collect();
        let grad = b.transpose(grad, &last)?;
        let grad = b.reshape(grad, &[rows, ty.dims[0]])?;
        let input = b.transpose(input, &last)?;
        let (mut low, mut high) = (vec![0; ty.ndim()], vec![0; ty.ndim()]);
        for dim in 0..spatial {
            low[dim + 1] = signed(geometry.padding[dim].0);
            let reach = (kernel[dim] - 1) * geometry.dilation[dim] + (counts[dim] - 1) * geometry.strides[dim] + 1;
            high[dim + 1] = signed(reach) - signed(x.shape[dim + 2]) - low[dim + 1];
        }
        let zero = b.full(b.type_of(input)?.with_dims([]), 0)?;
        let padded = b.pad(input, zero, &low, &high, &vec![0; ty.ndim()])?;
        let dimensions = DotDimensions {
            lhs_contracting: vec![0],
            rhs_contracting: vec![0],
            element: Some(sum_element(ty.element)),
            ..DotDimensions::default()
        };
        let mut parts = Vec::with_capacity(kernel.iter().product());
        for element in 0..kernel.iter().product() {
            let (mut start, mut limit, mut strides) =
                (vec![0; ty.ndim()], b.type_of(padded)?.dims.clone(), vec![1; ty.ndim()]);
            let mut rest = element;
            for dim in (0..spatial).rev() {
                let stride = geometry.strides[dim];
                start[dim + 1] = rest % kernel[dim] * geometry.dilation[dim];
                limit[dim + 1] = start[dim + 1] + (counts[dim] - 1) * stride + 1;
                strides[dim + 1] = stride;
                rest /= kernel[dim];
            }
            let used = b.slice(padded, &start, &limit, &strides)?;
            parts.push(b.reshape(used, &[rows, ty.dims[1]])?);
        }
        let used = b.concatenate(&parts, 1)?;
        let all = b.dot_general(grad, used, &dimensions)?;
        // [output channels, elements of the kernel, input channels]
        let all = b.reshape(all, &[ty.dims[0], parts.len(), ty.dims[1]])?;
        let all = b.transpose(all, &[0, 2, 1])?;
        let all = b.reshape(all, &ty.dims)?;
        narrow(b, all, ty.element)
    })?;
    l.set(out, value)
}

/// Sets a result to a convolution with a bias of its channels. Sums are rounded once.
fn convolve(
    l: &mut Lowering<'_>,
    [x, kernel]: [&TensorIr; 2],
    mut convolution: Convolution,
    bias: Option<&TensorIr>,
    out: &TensorIr,
    arrange: impl FnOnce(&mut Builder, Value) -> distribute_hlo::Result<Value>,
) -> Result<()> {
    let (x, kernel) = (l.operand(x)?, l.operand(kernel)?);
    let bias = bias.map(|bias| l.operand(bias)).transpose()?;
    let ty = l.type_of(out)?;
    convolution.element = Some(sum_element(ty.element));
    let value = l.build(|b| {
        let kernel = arrange(b, kernel)?;
        let mut sums = b.convolution(x, kernel, &convolution)?;
        if let Some(bias) = bias {
            let bias = widen(b, bias)?;
            let bias = b.broadcast_in_dim(bias, &ty.dims, &[1])?;
            sums = b.add(sums, bias)?;
        }
        narrow(b, sums, ty.element)
    })?;
    l.set(out, value)
}
