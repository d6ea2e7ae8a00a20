//! Batch normalisation.

use distribute_kernels::Float;
use distribute_kernels::batch_norm::{Batch, Centre, Moments, Rectified, Slope};

use super::*;

/// A batch, and what backward computes with.
struct Case {
    batch: Batch,
    /// The elements without a mean that is common to all, so that the expected results lose no precision.
    near: Vec<f64>,
    mean: f64,
    x: Vec<f64>,
    gradient: Vec<f64>,
    factors: Vec<f64>,
}

impl Case {
    fn new(examples: usize, channels: usize, size: usize, mean: f64) -> Case {
        let count = examples * channels * size;
        let near = numbers(count, 1);
        let x = near.iter().map(|x| x + mean).collect();
        let batch = Batch { examples, channels, size };
        Case { batch, near, mean, x, gradient: numbers(count, 2), factors: numbers(3 * channels, 3) }
    }

    /// Returns the positions of a channel's elements.
    fn of_channel(&self, channel: usize) -> impl Iterator<Item = usize> {
        let Batch { channels, size, .. } = self.batch;
        (0..self.x.len()).filter(move |at| at / size % channels == channel)
    }

    /// Returns each channel's mean, without the common one, and its sum of squared deviations.
    fn moments(&self) -> (Vec<f64>, Vec<f64>) {
        let of = |channel: usize| {
            let elements: Vec<f64> = self.of_channel(channel).map(|at| self.near[at]).collect();
            let mean = elements.iter().sum::<f64>() / elements.len().max(1) as f64;
            (mean, elements.iter().map(|x| (x - mean).powi(2)).sum::<f64>())
        };
        (0..self.batch.channels).map(of).unzip()
    }

    fn check<T: Float>(&self, tolerance: f64) {
        let narrow = |x: &[f64]| x.iter().map(|x| T::from_f64(*x)).collect::<Vec<T>>();
        let (x, gradient, factors) = (narrow(&self.x), narrow(&self.gradient), narrow(&self.factors));
        let (batch, (means, deviations)) = (self.batch, self.moments());

        let moments = batch.moments(&x);
        let got: Vec<f64> = moments.iter().map(|moments| moments.origin + moments.offset).collect();
        let expected: Vec<f64> = means.iter().map(|mean| mean + self.mean).collect();
        assert_close("the mean", &got, &expected, tolerance);
        let got: Vec<f64> = moments.iter().map(|moments| moments.deviations).collect();
        assert_close("the deviations", &got, &deviations, tolerance);

        let part = |at: usize| factors[at * batch.channels..][..batch.channels].to_vec();
        let centres: Vec<Centre<T>> = moments
            .iter()
            .map(|moments| Centre { near: T::from_f64(moments.origin), rest: T::from_f64(moments.offset) })
            .collect();
        let out = batch.forward(&x, &centres, &part(0), &part(1));
        let channel = |at: usize| at / batch.size % batch.channels;
        let centred: Vec<f64> = self.near.iter().enumerate().map(|(at, x)| x - means[channel(at)]).collect();
        let factor = |which: usize, at: usize| self.factors[which * batch.channels + channel(at)];
        let expected: Vec<f64> = centred.iter().enumerate().map(|(at, x)| x * factor(0, at) + factor(1, at)).collect();
        assert_close("the result", &out, &expected, tolerance);
        let out = batch.forward_relu(&x, &centres, &part(0), &part(1), None);
        let rectified: Vec<f64> = expected.iter().map(|x| x.max(0.0)).collect();
        assert_close("the rectified result", &out, &rectified, tolerance);
        let out = batch.forward_relu(&x, &centres, &part(0), &part(1), Some(&gradient));
        let sums = expected.iter().zip(&self.gradient);
        let rectified: Vec<f64> = sums.map(|(x, shortcut)| (x + shortcut).max(0.0)).collect();
        assert_close("the rectified sum", &out, &rectified, tolerance);

        let sums = batch.sums(&x, &centres, &gradient, None);
        let expected = |f: &dyn Fn(usize) -> f64| -> Vec<f64> {
            (0..batch.channels).map(|channel| self.of_channel(channel).map(f).sum()).collect()
        };
        let got = |which: usize| sums.iter().map(|sums| sums[which]).collect::<Vec<f64>>();
        assert_close("the sum of the gradient", &got(0), &expected(&|at| self.gradient[at]), tolerance);
        assert_close("the sum of products", &got(1), &expected(&|at| self.gradient[at] * centred[at]), tolerance);

        let slope = |at: usize| {
            let [of_gradient, of_deviation, constant] = [0, 1, 2].map(|which| factors[which * batch.channels + at]);
            Slope { of_gradient, of_deviation, constant }
        };
        let slopes: Vec<Slope<T>> = (0..batch.channels).map(slope).collect();
        let out = batch.backward(&x, &centres, &gradient, &slopes, None);
        let change = |at: usize| self.gradient[at] * factor(0, at) + centred[at] * factor(1, at) + factor(2, at);
        assert_close("the change", &out, &(0..x.len()).map(change).collect::<Vec<f64>>(), tolerance);

        // What was rectified has the gradient that passes where the result is not 0, bit for bit.
        let (scales, shifts) = (part(0), part(1));
        let y = batch.forward_relu(&x, &centres, &scales, &shifts, None);
        let zero = T::default();
        let passed = y.iter().zip(&gradient).map(|(y, gradient)| if *y == zero { zero } else { *gradient });
        let passed: Vec<T> = passed.collect();
        let rectified = Some(Rectified { scales: &scales, shifts: &shifts });
        let sums = batch.sums(&x, &centres, &gradient, rectified);
        for (got, expected) in sums.iter().zip(batch.sums(&x, &centres, &passed, None)) {
            assert_close("the rectified sums", got, &expected, tolerance);
        }
        let bits = |x: Vec<T>| x.into_iter().map(|x| x.into().to_bits()).collect::<Vec<u64>>();
        let got = batch.backward(&x, &centres, &gradient, &slopes, rectified);
        assert_eq!(bits(got), bits(batch.backward(&x, &centres, &passed, &slopes, None)), "the rectified change");
    }
}

#[test]
fn gradients_pass_where_the_result_is_not_zero() {
    let batch = Batch { examples: 1, channels: 1, size: 5 };
    let (x, centres, gradient) = ([f64::NAN, 0.0, -0.0, 1.0, -1.0], [Centre::default()], [1.0, 2.0, 4.0, 8.0, 16.0]);
    let rectified = Some(Rectified { scales: &[2.0], shifts: &[0.0] });
    let slope = Slope { of_gradient: 1.0, of_deviation: 0.0, constant: 0.0 };
    let change = batch.backward(&x, &centres, &gradient, &[slope], rectified);
    assert!(change[0].is_nan());
    assert_eq!(change[1..], [0.0, 0.0, 8.0, 0.0]);
    assert_eq!(batch.sums(&x, &centres, &gradient, rectified)[0][0], 9.0);
}

proptest! {
    #![proptest_config(settings())]

    #[test]
    fn channels_are_normalised_by_themselves(
        examples in 1usize..9,
        channels in 1usize..7,
        size in 1usize..90,
        // f32 has 24 bits, of which numbers() has 14.
        mean in prop_oneof![Just(0.0), Just(256.0)],
    ) {
        let case = Case::new(examples, channels, size, mean);
        case.check::<f64>(1e-12);
        case.check::<f32>(1e-5);
    }
}

#[test]
fn a_large_mean_loses_no_precision() {
    Case::new(5, 2, 100, 1e9).check::<f64>(1e-12);
}

#[test]
fn nothing_has_no_moments() {
    let batch = Batch { examples: 0, channels: 2, size: 3 };
    assert_eq!(batch.moments::<f32>(&[]), [Moments::default(); 2]);
    assert_eq!(batch.sums::<f32>(&[], &[Centre::default(); 2], &[], None), [[0.0; 2]; 2]);
    assert!(batch.forward::<f32>(&[], &[Centre::default(); 2], &[0.0; 2], &[0.0; 2]).is_empty());
}

#[test]
fn threads_do_not_matter() {
    let case = Case::new(40, 5, 1000, 3.0);
    let x = narrow(&case.x);
    assert_threads_do_not_matter(|| case.batch.moments(&x));
}

#[test]
#[should_panic(expected = "the input has 7 elements; give 8")]
fn lengths_fit_the_shape() {
    Batch { examples: 2, channels: 2, size: 2 }.moments(&[0f32; 7]);
}
