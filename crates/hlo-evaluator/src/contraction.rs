//! Products and convolutions.

use distribute_hlo::{Convolution, DotDimensions, TensorType};

use crate::Tensor;
use crate::number::Num;
use crate::tensor::indices;

/// Adds a product to a sum.
fn add_product(sum: Num, x: Num, y: Num) -> Num {
    match (sum, x, y) {
        (Num::Float(sum), x, y) => Num::Float(sum + x.float() * y.float()),
        (sum, x, y) => Num::Int(sum.int().wrapping_add(x.int().wrapping_mul(y.int()))),
    }
}

/// Returns 0 of a type.
fn zero(ty: &TensorType) -> Num {
    if ty.element.is_float() { Num::Float(0.0) } else { Num::Int(0) }
}

pub(crate) fn dot_general(x: &Tensor, y: &Tensor, dims: &DotDimensions, ty: &TensorType) -> Tensor {
    let free = |ndim: usize, batching: &[usize], contracting: &[usize]| -> Vec<usize> {
        (0..ndim).filter(|dim| !batching.contains(dim) && !contracting.contains(dim)).collect()
    };
    let left = free(x.dims().len(), &dims.lhs_batching, &dims.lhs_contracting);
    let right = free(y.dims().len(), &dims.rhs_batching, &dims.rhs_contracting);
    let sizes: Vec<usize> = dims.lhs_contracting.iter().map(|&dim| x.dims()[dim]).collect();
    Tensor::generate(ty.clone(), |index| {
        let (batch, rest) = index.split_at(dims.lhs_batching.len());
        let (in_left, in_right) = rest.split_at(left.len());
        indices(&sizes).fold(zero(ty), |sum, inner| {
            let place = |ndim: usize, lists: [(&[usize], &[usize]); 3]| {
                let mut place = vec![0; ndim];
                for (dims, entries) in lists {
                    for (&dim, &i) in dims.iter().zip(entries) {
                        place[dim] = i;
                    }
                }
                place
            };
            let in_x = [(&dims.lhs_batching[..], batch), (&left, in_left), (&dims.lhs_contracting, &inner)];
            let in_y = [(&dims.rhs_batching[..], batch), (&right, in_right), (&dims.rhs_contracting, &inner)];
            add_product(sum, x.at(&place(x.dims().len(), in_x)), y.at(&place(y.dims().len(), in_y)))
        })
    })
}

pub(crate) fn convolution(x: &Tensor, kernel: &Tensor, conv: &Convolution, ty: &TensorType) -> Tensor {
    let features = kernel.dims()[conv.kernel_output_feature_dimension];
    let channels = kernel.dims()[conv.kernel_input_feature_dimension];
    let taps: Vec<usize> = conv.kernel_spatial_dimensions.iter().map(|&dim| kernel.dims()[dim]).collect();
    let examples = x.dims()[conv.input_batch_dimension] / conv.batch_group_count;
    Tensor::generate(ty.clone(), |index| {
        let (example, feature) = (index[conv.output_batch_dimension], index[conv.output_feature_dimension]);
        let channel_group = feature / (features / conv.feature_group_count);
        let example_group = feature / (features / conv.batch_group_count);
        let mut sum = zero(ty);
        for tap in indices(&taps) {
            let mut in_x = vec![0; index.len()];
            let mut in_kernel = vec![0; index.len()];
            in_x[conv.input_batch_dimension] = example_group * examples + example;
            in_kernel[conv.kernel_output_feature_dimension] = feature;
            let mut inside = true;
            for (dim, &tap) in tap.iter().enumerate() {
                let window = index[conv.output_spatial_dimensions[dim]] * conv.strides[dim];
                let place = (window + tap * conv.rhs_dilation[dim]) as i64 - conv.padding[dim].0;
                let gap = conv.lhs_dilation[dim] as i64;
                let size = x.dims()[conv.input_spatial_dimensions[dim]] as i64;
                inside &= place >= 0 && place % gap == 0 && place / gap < size;
                in_x[conv.input_spatial_dimensions[dim]] = (place / gap).max(0) as usize;
                let tap = if conv.reversal[dim] { taps[dim] - 1 - tap } else { tap };
                in_kernel[conv.kernel_spatial_dimensions[dim]] = tap;
            }
            for channel in (0..channels).take_while(|_| inside) {
                in_x[conv.input_feature_dimension] = channel_group * channels + channel;
                in_kernel[conv.kernel_input_feature_dimension] = channel;
                sum = add_product(sum, x.at(&in_x), kernel.at(&in_kernel));
            }
        }
        sum
    })
}
