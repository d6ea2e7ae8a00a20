//! Convolution.

use distribute_kernels::Float;
use distribute_kernels::convolution::{Compiled, Convolution, End, Way};

use super::*;

/// Convolutions, with the number of images.
fn convolutions() -> impl Strategy<Value = (Convolution, usize)> {
    let sizes = (1usize..4, 1usize..5, [1usize..12, 1usize..12], [1usize..4, 1usize..4]);
    let steps = (1usize..4, 0usize..3, 1usize..3, 1usize..4);
    (sizes, steps, 0usize..20).prop_filter_map(
        "the kernel is larger than the image",
        |((channels, filters, size, kernel), (stride, padding, dilation, groups), images)| {
            let (channels, filters) = (channels * groups, filters * groups);
            let fits = |axis: usize| dilation * (kernel[axis] - 1) < size[axis] + 2 * padding;
            let convolution = Convolution { channels, filters, size, kernel, stride, padding, dilation, groups };
            (fits(0) && fits(1)).then_some((convolution, images))
        },
    )
}

/// Convolutions that are computed directly, with the number of images.
fn direct_convolutions() -> impl Strategy<Value = (Convolution, usize)> {
    let sizes = (1usize..5, 1usize..20, [1usize..10, 1usize..21], [1usize..5, 1usize..5]);
    (sizes, 0usize..4, 1usize..3, 1usize..4).prop_filter_map(
        "the kernel is larger than the image",
        |((channels, filters, size, kernel), padding, groups, images)| {
            let (channels, filters) = (channels * groups, filters * groups);
            let fits = |axis: usize| kernel[axis] <= size[axis] + 2 * padding;
            let of = Convolution { channels, filters, size, kernel, stride: 1, padding, dilation: 1, groups };
            (fits(0) && fits(1)).then_some((of, images))
        },
    )
}

/// Calls `f` with the places of the elements of input, weight and result that are multiplied and added.
fn each_term(of: &Convolution, images: usize, mut f: impl FnMut(usize, usize, usize)) {
    let [height, width] = of.output_size();
    let depth = of.channels / of.groups;
    for result in 0..images * of.filters * height * width {
        let (column, row) = (result % width, result / width % height);
        let (filter, image) = (result / width / height % of.filters, result / width / height / of.filters);
        let group = filter / (of.filters / of.groups);
        for element in 0..depth * of.kernel[0] * of.kernel[1] {
            let (j, i) = (element % of.kernel[1], element / of.kernel[1] % of.kernel[0]);
            let channel = group * depth + element / of.kernel[1] / of.kernel[0];
            let place = |at: usize, in_kernel: usize, axis: usize| {
                let place = (at * of.stride + in_kernel * of.dilation).checked_sub(of.padding)?;
                (place < of.size[axis]).then_some(place)
            };
            if let (Some(y), Some(x)) = (place(row, i, 0), place(column, j, 1)) {
                let input = ((image * of.channels + channel) * of.size[0] + y) * of.size[1] + x;
                f(input, filter * depth * of.kernel[0] * of.kernel[1] + element, result);
            }
        }
    }
}

/// Returns the result and the gradients of input, weight and bias; the crate chooses a way if there is none.
fn run<T: Float>(
    way: Option<Way>,
    of: &Convolution,
    x: &[T],
    weight: &[T],
    bias: Option<&[T]>,
    gradient: &[T],
) -> [Vec<T>; 4] {
    [
        Compiled::forward(of, way, x, weight, bias, End::Plain).0,
        Compiled::backward_input(of, way, weight, gradient),
        Compiled::backward_weight(of, way, x, gradient),
        of.backward_bias(gradient),
    ]
}

fn compare(of: &Convolution, images: usize, biased: bool) {
    let [height, width] = of.output_size();
    let plane = height * width;
    let x = numbers(images * of.channels * of.size[0] * of.size[1], 1);
    let weight = numbers(of.filters * of.channels / of.groups * of.kernel[0] * of.kernel[1], 2);
    let (bias, gradient) = (numbers(of.filters, 3), numbers(images * of.filters * plane, 4));
    let bias_at = |at: usize| if biased { bias[at / plane % of.filters] } else { 0.0 };
    let mut y: Vec<f64> = (0..gradient.len()).map(bias_at).collect();
    let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; weight.len()], vec![0.0; of.filters]);
    each_term(of, images, |input, element, result| {
        y[result] += x[input] * weight[element];
        dx[input] += gradient[result] * weight[element];
        dw[element] += gradient[result] * x[input];
    });
    gradient.iter().enumerate().for_each(|(at, gradient)| db[at / plane % of.filters] += gradient);
    let expected = [("y", y), ("dx", dx), ("dw", dw), ("db", db)];
    let narrow = [&x, &weight, &bias, &gradient].map(|x| narrow(x));
    let winograd = (of.kernel == [3, 3] && of.stride == 1 && of.dilation == 1).then_some(Some(Way::Winograd));
    for way in [None, Some(Way::Direct), Some(Way::Columns)].into_iter().chain(winograd) {
        let got = run(way, of, &x, &weight, biased.then_some(&bias), &gradient);
        let pairs = got.iter().zip(&expected);
        pairs.for_each(|(got, (what, expected))| assert_close(&format!("{way:?} {what}"), got, expected, 1e-13));
        let [x, weight, bias, gradient] = &narrow;
        let got = run(way, of, x, weight, biased.then_some(bias), gradient);
        let pairs = got.iter().zip(&expected);
        pairs.for_each(|(got, (what, expected))| assert_close(&format!("{way:?} {what}"), got, expected, 1e-5));
    }
}

/// A convolution by kernels of 3 × 3 that keeps height and width.
fn padded(channels: usize, filters: usize, size: [usize; 2]) -> Convolution {
    Convolution { channels, filters, size, kernel: [3, 3], stride: 1, padding: 1, dilation: 1, groups: 1 }
}

proptest! {
    #![proptest_config(settings())]

    #[test]
    fn convolutions_are_those_of_f64((convolution, images) in convolutions(), biased: bool) {
        compare(&convolution, images, biased);
    }

    #[test]
    fn direct_convolutions_are_those_of_f64((convolution, images) in direct_convolutions(), biased: bool) {
        compare(&convolution, images, biased);
    }
}

#[test]
fn images_are_divided_into_tiles() {
    // 90 rows of 90 × 9 × 12 elements are more than a tile holds, as are those of 1 × 1.
    let wide = padded(12, 3, [90, 90]);
    compare(&wide, 1, true);
    compare(&Convolution { kernel: [1, 1], padding: 0, ..wide }, 1, true);
}

#[test]
fn kernels_of_3_by_3_are_transformed() {
    let of = Convolution { groups: 2, ..padded(34, 36, [11, 19]) };
    for (size, padding) in [([11, 19], 1), ([12, 13], 0), ([17, 8], 2)] {
        compare(&Convolution { size, padding, ..of }, 5, true);
    }
}

#[test]
fn small_images_are_summed_up_together() {
    // Parts of a batch are longer than what is summed up at once, 64 images or 21, which does not divide them.
    compare(&Convolution { groups: 2, ..padded(8, 6, [3, 2]) }, 1100, true);
    compare(&padded(5, 20, [4, 4]), 200, true);
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let of = Convolution { groups: 2, ..padded(8, 12, [15, 17]) };
    for images in [1, 2, 33] {
        let plane = 15 * 17;
        let (x, weight) = (narrow(&numbers(images * 8 * plane, 1)), narrow(&numbers(12 * 4 * 9, 2)));
        let gradient = narrow(&numbers(images * 12 * plane, 3));
        for way in [Way::Winograd, Way::Direct, Way::Columns] {
            assert_threads_do_not_matter(|| run(Some(way), &of, &x, &weight, Some(&gradient[..12]), &gradient));
        }
    }
}

#[test]
fn a_rectified_convolution_is_that_of_its_result() {
    let of = padded(16, 18, [13, 21]);
    // Winograd's way, the direct one, and that by columns.
    for of in [of, Convolution { stride: 2, size: [31, 32], ..of }, Convolution { kernel: [1, 1], ..of }] {
        let mut x = narrow(&numbers(3 * 16 * of.size[0] * of.size[1], 1));
        x[100] = f32::NAN;
        let (weight, bias) = (narrow(&numbers(18 * 16 * of.kernel[0] * of.kernel[1], 2)), narrow(&numbers(18, 3)));
        let (y, rectified) = (of.forward(&x, &weight, Some(&bias)), of.forward_relu(&x, &weight, Some(&bias)));
        let of_nan = y.iter().filter(|y| y.is_nan()).count();
        assert!(of_nan > 0 && y.iter().any(|y| *y < 0.0), "{of:?}");
        for (y, rectified) in y.iter().zip(&rectified) {
            let expected = if *y < 0.0 { 0.0 } else { *y };
            assert_eq!(rectified.to_bits(), expected.to_bits(), "{of:?}");
        }
    }
}
