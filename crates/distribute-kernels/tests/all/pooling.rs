//! Max-pooling.

use distribute_kernels::convolution::{Convolution, Pooled};
use distribute_kernels::pooling::Pooling;
use distribute_rows::relu;

use super::*;

/// Compares with the definition. `coarse` numbers are few, so that many are equal.
fn compare(pooling: Pooling, images: usize, coarse: bool) {
    let Pooling { size, window, stride } = pooling;
    let [height, width] = pooling.output_size();
    let x: Vec<f64> = numbers(images * size[0] * size[1], 1);
    let x: Vec<f64> = x.into_iter().map(|x| if coarse { x.round() } else { x }).collect();
    let gradient = numbers(images * height * width, 2);
    let (mut y, mut dx) = (vec![0.0; gradient.len()], vec![0.0; x.len()]);
    for (at, gradient) in gradient.iter().enumerate() {
        let (image, row, column) = (at / height / width, at / width % height, at % width);
        let places = (0..window[0])
            .flat_map(|i| (0..window[1]).map(move |j| (i, j)))
            .map(|(i, j)| (image * size[0] + row * stride[0] + i) * size[1] + column * stride[1] + j);
        let place = places.reduce(|best, place| if x[place] > x[best] { place } else { best }).unwrap();
        y[at] = x[place];
        dx[place] += gradient;
    }
    assert_eq!(pooling.forward(&x), y);
    assert_close("the gradient", &pooling.backward(&x, &gradient), &dx, 1e-15);
}

proptest! {
    #![proptest_config(settings())]

    #[test]
    fn the_largest_element_gets_the_gradient(
        images in 0usize..40,
        size in [2usize..12, 2usize..12],
        window in [1usize..3, 1usize..3],
        stride in [1usize..4, 1usize..4],
        pairs: bool,
        coarse: bool,
    ) {
        let (window, stride) = if pairs { ([2, 2], [2, 2]) } else { (window, stride) };
        compare(Pooling { size, window, stride }, images, coarse);
    }
}

#[test]
fn large_images_are_divided_into_bands() {
    for size in [[6, 4100], [7, 2049], [51, 100], [83, 51]] {
        compare(Pooling { size, window: [2, 2], stride: [2, 2] }, 2, true);
    }
}

#[test]
fn nan_is_the_largest() {
    for (window, size) in [([2, 2], [2, 4]), ([2, 2], [2, 5])] {
        for stride in [[2, 2], [1, 2]] {
            let pooling = Pooling { size, window, stride };
            let mut x = vec![1f32; size[0] * size[1]];
            x[size[1] + 1] = f32::NAN;
            let y = pooling.forward(&x);
            assert!(y[0].is_nan() && y[1..] == [1.0]);
            let change = pooling.backward(&x, &[3.0, 4.0]);
            assert_eq!((change[size[1] + 1], change[2]), (3.0, 4.0));
        }
    }
}

#[test]
#[should_panic(expected = "windows of [3, 1] by [1, 1] do not fit images of [2, 2]")]
fn windows_are_inside_of_the_image() {
    Pooling { size: [2, 2], window: [3, 1], stride: [1, 1] }.forward(&[0f32; 4]);
}

#[test]
fn a_pooled_convolution_has_the_gradients_of_the_three_operations() {
    let numbers = |count: usize, factor: usize| -> Vec<f32> {
        (0..count).map(|at| (at * factor % 101) as f32 / 50.0 - 1.0).collect()
    };
    for size in [[9, 11], [28, 28], [14, 15], [2, 3]] {
        for (channels, filters) in [(1, 8), (3, 5), (16, 16)] {
            let convolution =
                Convolution { channels, filters, size, kernel: [3, 3], stride: 1, padding: 1, dilation: 1, groups: 1 };
            let (x, weight) = (numbers(5 * channels * size[0] * size[1], 37), numbers(filters * channels * 9, 53));
            let bias = numbers(filters, 11);
            let of = Pooled::new(convolution);
            let (y, places) = of.forward(&x, &weight, Some(&bias));
            let pooling = Pooling { size, window: [2, 2], stride: [2, 2] };
            let rectified = convolution.forward_relu(&x, &weight, Some(&bias));
            assert_eq!(y, pooling.forward(&rectified), "{convolution:?}");
            assert!(y.contains(&0.0) || y.len() < 100, "{convolution:?}: no window is below 0");
            let gradient = numbers(y.len(), 29);
            let expected = relu::backward(&rectified, &pooling.backward(&rectified, &gradient));
            let change = of.backward(&places, &y, &gradient);
            assert_eq!(change.convolved, expected, "{convolution:?}");
            let bias = convolution.backward_bias(&expected);
            assert!(change.bias.iter().zip(&bias).all(|(a, b)| (a - b).abs() < 1e-3), "{:?} {bias:?}", change.bias);
        }
    }
}
