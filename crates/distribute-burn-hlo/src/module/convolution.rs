//! Convolutions, transposed convolutions and their gradients.
//!
//! A convolution of x with W has y[o] = Σ x[o·stride − padding + k·dilation] · W[k]. Its gradient of x is the
//! transposed convolution, so that two functions serve both, and a third one serves the gradients of both kernels.

use burn_ir::{
    Conv1dOptionsIr, Conv2dOptionsIr, Conv3dOptionsIr, ConvTranspose1dOptionsIr, ConvTranspose2dOptionsIr,
    ConvTranspose3dOptionsIr, TensorIr,
};
use distribute_hlo::{Builder, Convolution, Value};

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
