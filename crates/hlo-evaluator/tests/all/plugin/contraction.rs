//! Products and convolutions.

use distribute_hlo::{Convolution, DotDimensions, ElementType};

use super::agree;

const ELEMENTS: [ElementType; 6] =
    [ElementType::F32, ElementType::F64, ElementType::F16, ElementType::BF16, ElementType::I32, ElementType::U8];

#[test]
fn products() {
    agree(1, 8, |case| {
        for element in ELEMENTS {
            let [batch, m, n, k, l] = [0; 5].map(|_| case.rng.usize(1..=4));
            let x = case.random(element, &[k, batch, m, l]);
            let y = case.random(element, &[batch, l, n, k]);
            let mut dimensions = DotDimensions {
                lhs_batching: vec![1],
                rhs_batching: vec![0],
                lhs_contracting: vec![3, 0],
                rhs_contracting: vec![1, 3],
                element: None,
            };
            let value = case.b.dot_general(x, y, &dimensions);
            case.close(format!("dot_general {element}"), value);
            if element == ElementType::BF16 || element == ElementType::F16 {
                dimensions.element = Some(ElementType::F32);
                let value = case.b.dot_general(x, y, &dimensions);
                case.close(format!("dot_general {element} in f32"), value);
            }
            let outer = case.b.dot_general(x, y, &DotDimensions::default());
            case.close("outer product", outer);
        }
    });
}

#[test]
fn convolutions() {
    agree(1, 12, |case| {
        for element in [ElementType::F32, ElementType::F64, ElementType::I32] {
            let spatial = case.rng.usize(0..=2);
            let groups = case.rng.usize(1..=2);
            let batches = if groups == 1 { case.rng.usize(1..=2) } else { 1 };
            let (channels, features) = (case.rng.usize(1..=2), groups * batches * case.rng.usize(1..=2));
            let mut conv = Convolution::channels_first(spatial);
            conv.feature_group_count = groups;
            conv.batch_group_count = batches;
            let mut input = vec![batches * case.rng.usize(1..=2), groups * channels];
            let mut kernel = vec![features, channels];
            for dim in 0..spatial {
                input.push(case.rng.usize(2..=6));
                kernel.push(case.rng.usize(1..=3));
                conv.strides[dim] = case.rng.usize(1..=2);
                conv.padding[dim] = (case.rng.i64(-1..=2), case.rng.i64(0..=2));
                conv.lhs_dilation[dim] = case.rng.usize(1..=2);
                conv.rhs_dilation[dim] = case.rng.usize(1..=2);
                conv.reversal[dim] = case.rng.bool();
            }
            let (x, y) = (case.random(element, &input), case.random(element, &kernel));
            // NaN and infinities would hide whether padding is read.
            let (zero, one) =
                (case.b.convert(x, ElementType::I8).unwrap(), case.b.convert(y, ElementType::I8).unwrap());
            let (x, y) = (case.b.convert(zero, element).unwrap(), case.b.convert(one, element).unwrap());
            let value = case.b.convolution(x, y, &conv);
            case.close(format!("convolution {conv:?} of {input:?} with {kernel:?}"), value);
            if spatial == 2 {
                // Channels last, by names alone.
                let x = case.b.transpose(x, &[0, 2, 3, 1]).unwrap();
                let y = case.b.transpose(y, &[2, 3, 1, 0]).unwrap();
                conv.input_feature_dimension = 3;
                conv.input_spatial_dimensions = vec![1, 2];
                conv.kernel_input_feature_dimension = 2;
                conv.kernel_output_feature_dimension = 3;
                conv.kernel_spatial_dimensions = vec![0, 1];
                conv.output_feature_dimension = 3;
                conv.output_spatial_dimensions = vec![1, 2];
                let value = case.b.convolution(x, y, &conv);
                case.close("convolution with channels last", value);
            }
        }
    });
}
