//! Comparison with plain f64 arithmetic and with differences of finite steps.

use proptest::prelude::*;

use crate::cross_entropy::LogSum;
use crate::normalise::Normalise;
use crate::{Float, cross_entropy, gelu, pairs, relu, softmax, zeros};

/// Rows of numbers of any size, of which there may be more than one thread gets.
fn rows() -> impl Strategy<Value = (usize, Vec<f64>)> {
    (1usize..70, 0usize..40).prop_flat_map(|(size, rows)| {
        let numbers = prop_oneof![4 => -4.0..4.0, 1 => -80.0..80.0];
        (Just(size), prop::collection::vec(numbers, size * rows))
    })
}

fn narrow(x: &[f64]) -> Vec<f32> {
    x.iter().map(|x| *x as f32).collect()
}

#[track_caller]
fn assert_close(got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    let largest = expected.iter().fold(1.0, |largest: f64, x| largest.max(x.abs()));
    for (at, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert!((f64::from(*got) - expected).abs() <= tolerance * largest, "element {at}: {got}, not {expected}");
    }
}

/// Returns the gradient of the sum of `weights · f(x)`, by differences.
fn differences(x: &[f64], weights: &[f64], f: impl Fn(&[f64]) -> Vec<f64>) -> Vec<f64> {
    let step = 1e-6;
    let moved = |at: usize, by: f64| {
        let mut moved = x.to_vec();
        moved[at] += by;
        f(&moved)
    };
    let slope = |at: usize| {
        let (above, below) = (moved(at, step), moved(at, -step));
        above.iter().zip(&below).zip(weights).map(|((above, below), w)| (above - below) * w).sum::<f64>() / (2.0 * step)
    };
    (0..x.len()).map(slope).collect()
}

/// Gradients of results that differ from each other.
fn gradient_of(len: usize) -> Vec<f64> {
    (0..len).map(|at| ((at * 7 + 3) % 11) as f64 / 5.0 - 1.0).collect()
}

#[test]
fn exponentials_are_those_of_f64() {
    for at in -1_050_000..=890_000 {
        let x = at as f32 / 10_000.0;
        let (got, expected) = (f64::from(Float::exp(x)), f64::from(x).exp());
        let error = (got - expected).abs() / expected.max(f64::from(f32::MIN_POSITIVE));
        assert!(error < 2e-7 || (got.is_infinite() && expected > f64::from(f32::MAX)), "{x}: {got}, not {expected}");
    }
    assert_eq!(Float::exp(0f32), 1.0);
    assert_eq!(Float::exp(f32::NEG_INFINITY), 0.0);
    assert_eq!(Float::exp(-1e30f32), 0.0);
    assert_eq!(Float::exp(f32::INFINITY), f32::INFINITY);
    assert!(Float::exp(f32::NAN).is_nan());
}

fn naive_softmax(x: &[f64], size: usize) -> Vec<f64> {
    let of_row = |x: &[f64]| {
        let top = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = x.iter().map(|x| (x - top).exp()).sum();
        x.iter().map(|x| (x - top).exp() / sum).collect::<Vec<_>>()
    };
    x.chunks(size).flat_map(of_row).collect()
}

fn naive_norm(x: &[f64], weight: &[f64], bias: &[f64], norm: Normalise) -> Vec<f64> {
    let of_row = |x: &[f64]| {
        let size = x.len() as f64;
        let mean = if norm.remove_mean { x.iter().sum::<f64>() / size } else { 0.0 };
        let square = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / size;
        let deviation = (square + norm.epsilon).sqrt();
        x.iter().zip(weight).zip(bias).map(|((x, w), b)| (x - mean) / deviation * w + b).collect::<Vec<_>>()
    };
    x.chunks(weight.len()).flat_map(of_row).collect()
}

fn naive_gelu(x: &[f64]) -> Vec<f64> {
    x.iter()
        .map(|x| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh()))
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn softmax_is_that_of_f64((size, x) in rows()) {
        let expected = naive_softmax(&x, size);
        let gradient = gradient_of(x.len());
        let (mut wide, mut wide_change) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        softmax::forward(&x, size, &mut wide);
        softmax::backward(&wide, size, &gradient, &mut wide_change);
        prop_assert!(wide.iter().zip(&expected).all(|(got, expected)| (got - expected).abs() < 1e-14));
        let slopes = differences(&x, &gradient, |x| naive_softmax(x, size));
        prop_assert!(wide_change.iter().zip(&slopes).all(|(got, slope)| (got - slope).abs() < 1e-7));

        let (mut y, mut change) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        softmax::forward(&narrow(&x), size, &mut y);
        // The inputs are rounded: 80 is 4e-6 off.
        assert_close(&y, &expected, 1e-5);
        softmax::backward(&y, size, &narrow(&gradient), &mut change);
        assert_close(&change, &wide_change, 2e-5);
    }

    #[test]
    fn cross_entropy_is_that_of_f64((size, x) in rows()) {
        let classes: Vec<usize> = (0..x.len() / size).map(|row| (row * 5 + 1) % size).collect();
        let naive = |x: &[f64]| {
            let log = |(row, class): (&[f64], &usize)| {
                let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                top + row.iter().map(|x| (x - top).exp()).sum::<f64>().ln() - row[*class]
            };
            x.chunks(size).zip(&classes).map(log).collect::<Vec<_>>()
        };
        let expected = naive(&x);
        let gradient = gradient_of(classes.len());
        let (mut losses, mut sums) = (vec![0.0; classes.len()], vec![LogSum::default(); classes.len()]);
        let mut wide_change = vec![0.0; x.len()];
        cross_entropy::forward(&x, size, &classes, &mut losses, &mut sums);
        cross_entropy::backward(&x, size, &classes, &sums, &gradient, &mut wide_change);
        prop_assert!(losses.iter().zip(&expected).all(|(got, expected)| (got - expected).abs() < 1e-12));
        let slopes = differences(&x, &gradient, naive);
        prop_assert!(wide_change.iter().zip(&slopes).all(|(got, slope)| (got - slope).abs() < 1e-6));

        let (mut losses, mut sums) = (vec![0.0; classes.len()], vec![LogSum::default(); classes.len()]);
        let mut change = vec![0.0; x.len()];
        cross_entropy::forward(&narrow(&x), size, &classes, &mut losses, &mut sums);
        assert_close(&losses, &expected, 2e-6);
        cross_entropy::backward(&narrow(&x), size, &classes, &sums, &narrow(&gradient), &mut change);
        assert_close(&change, &wide_change, 3e-5);
    }

    #[test]
    fn norms_are_those_of_f64((size, x) in rows(), remove_mean: bool, offset in prop_oneof![Just(0.0), Just(1000.0)]) {
        // Multiples of 2^-12 have no error in f32, also far from 0.
        let x: Vec<f64> = x.iter().map(|x| offset + (x * 4096.0).round() / 4096.0).collect();
        let norm = Normalise { epsilon: 1e-3, remove_mean };
        let weight: Vec<f64> = (0..size).map(|at| (at % 5) as f64 / 2.0 - 0.5).collect();
        let bias: Vec<f64> = (0..size).map(|at| (at % 3) as f64).collect();
        let naive = |x: &[f64]| naive_norm(x, &weight, &bias, norm);
        let gradient = gradient_of(x.len());
        let (mut wide, mut wide_change) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        norm.forward(&x, &weight, Some(&bias), &mut wide);
        prop_assert!(wide.iter().zip(naive(&x)).all(|(got, expected)| (got - expected).abs() < 1e-8));
        let wide_sums = norm.backward(&x, &weight, &gradient, &mut wide_change);
        let steep = if offset == 0.0 { 2e-4 } else { 2e-3 };
        for (got, slope) in wide_change.iter().zip(differences(&x, &gradient, naive)) {
            prop_assert!((got - slope).abs() < steep * slope.abs().max(1.0), "{got}, not {slope}");
        }
        let of_weight = differences(&weight, &gradient, |weight| naive_norm(&x, weight, &bias, norm));
        let of_bias = differences(&bias, &gradient, |bias| naive_norm(&x, &weight, bias, norm));
        for (got, slope) in wide_sums.weight.iter().zip(&of_weight).chain(wide_sums.bias.iter().zip(&of_bias)) {
            prop_assert!((got - slope).abs() < 1e-5 * slope.abs().max(1.0), "{got}, not {slope}");
        }

        let (mut y, mut change) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        norm.forward(&narrow(&x), &narrow(&weight), Some(&narrow(&bias)), &mut y);
        assert_close(&y, &wide, 3e-6);
        let sums = norm.backward(&narrow(&x), &narrow(&weight), &narrow(&gradient), &mut change);
        assert_close(&change, &wide_change, 1e-5);
        assert_close(&sums.weight, &wide_sums.weight, 1e-5);
        assert_close(&sums.bias, &wide_sums.bias, 1e-5);
    }

    #[test]
    fn gelu_is_that_of_f64((_, x) in rows()) {
        let expected = naive_gelu(&x);
        let gradient = gradient_of(x.len());
        let (mut wide, mut wide_change) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        gelu::forward(&x, &mut wide);
        gelu::backward(&x, &gradient, &mut wide_change);
        prop_assert!(wide.iter().zip(&expected).all(|(got, expected)| (got - expected).abs() < 1e-12));
        for (at, x) in x.iter().enumerate() {
            let slope = differences(&[*x], &gradient[at..=at], naive_gelu)[0];
            prop_assert!((wide_change[at] - slope).abs() < 1e-6, "{x}: {}, not {slope}", wide_change[at]);
        }
        let (mut y, mut change) = (vec![0.0; x.len()], vec![0.0; x.len()]);
        gelu::forward(&narrow(&x), &mut y);
        gelu::backward(&narrow(&x), &narrow(&gradient), &mut change);
        for ((y, change), (expected, slope)) in y.iter().zip(&change).zip(expected.iter().zip(&wide_change)) {
            prop_assert!((f64::from(*y) - expected).abs() < 2e-6 * expected.abs().max(1.0));
            prop_assert!((f64::from(*change) - slope).abs() < 1e-5);
        }
    }
}

#[test]
fn extreme_elements_give_what_their_limits_are() {
    let mut y = [0f32; 3];
    softmax::forward(&[f32::NEG_INFINITY, 3e38, -3e38], 3, &mut y);
    assert_eq!(y, [0.0, 1.0, 0.0]);
    let (mut losses, mut sums) = ([0f32; 2], [LogSum::default(); 2]);
    let logits = [f32::NEG_INFINITY, 1.0, 1e30, -1e30];
    cross_entropy::forward(&logits, 2, &[0, 1], &mut losses, &mut sums);
    assert_eq!(losses, [f32::INFINITY, 2e30]);
    let mut change = [0f32; 4];
    cross_entropy::backward(&logits, 2, &[0, 1], &sums, &[1.0, 1.0], &mut change);
    assert_eq!(change, [-1.0, 1.0, 1.0, -1.0]);
    let large = [-1e30f32, -100.0, 100.0, 1e30];
    let (mut y, mut change) = ([0f32; 4], [0f32; 4]);
    gelu::forward(&large, &mut y);
    gelu::backward(&large, &[1.0; 4], &mut change);
    assert_eq!((y, change), ([0.0, 0.0, 100.0, 1e30], [0.0, 0.0, 1.0, 1.0]));
}

#[test]
fn differences_between_large_logits_count() {
    let logits = [10_000f32, 10_000.0, 10_000.0, 10_000.0, -3e7, -3e7 + 2.0, -3e7, -3e7];
    let (mut losses, mut sums) = ([0f32; 2], [LogSum::default(); 2]);
    cross_entropy::forward(&logits, 4, &[1, 1], &mut losses, &mut sums);
    assert_close(&losses, &[4f64.ln(), (1.0 + 3.0 * (-2f64).exp()).ln()], 1e-7);
    let mut change = [0f32; 8];
    cross_entropy::backward(&logits, 4, &[1, 1], &sums, &[1.0, 1.0], &mut change);
    let rest = 1.0 + 3.0 * (-2f64).exp();
    let second = [(-2f64).exp() / rest, 1.0 / rest - 1.0, (-2f64).exp() / rest, (-2f64).exp() / rest];
    let expected: Vec<f64> = [0.25, -0.75, 0.25, 0.25].into_iter().chain(second).collect();
    assert_close(&change, &expected, 1e-6);
}

#[test]
fn nan_stays_in_its_row() {
    let mut x = [1f32; 40];
    x[3] = f32::NAN;
    let norm = Normalise { epsilon: 1e-5, remove_mean: true };
    let (mut y, mut z) = ([0f32; 40], [0f32; 40]);
    softmax::forward(&x, 20, &mut y);
    norm.forward(&x, &[1.0; 20], None, &mut z);
    let (mut losses, mut sums) = ([0f32; 2], [LogSum::default(); 2]);
    cross_entropy::forward(&x, 20, &[0, 0], &mut losses, &mut sums);
    for (first, second) in [(&y[..20], &y[20..]), (&z[..20], &z[20..]), (&losses[..1], &losses[1..])] {
        assert!(first.iter().all(|x| x.is_nan()) && second.iter().all(|x| x.is_finite()), "{first:?} {second:?}");
    }
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let (size, rows) = (96, 1000);
    let x: Vec<f32> = (0..size * rows).map(|at| ((at * 31) % 97) as f32 / 20.0 - 2.0).collect();
    let weight: Vec<f32> = (0..size).map(|at| 0.5 + at as f32 / 100.0).collect();
    let of = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let norm = Normalise { epsilon: 1e-5, remove_mean: true };
            let mut results = [(); 5].map(|()| vec![0f32; x.len()]);
            let [y, change, soft, soft_change, curve] = &mut results;
            norm.forward(&x, &weight, None, y);
            let sums = norm.backward(&x, &weight, y, change);
            softmax::forward(&x, size, soft);
            softmax::backward(soft, size, &x, soft_change);
            gelu::forward(&x, curve);
            (results, sums)
        })
    };
    assert!(of(1) == of(3));
}

#[test]
fn rectified_elements_pass_gradients_where_they_are_above_0() {
    let x: Vec<f32> = (0..5000).map(|at| (at % 5) as f32 - 2.0).collect();
    let (mut y, mut change) = (vec![7f32; 5000], vec![7f32; 5000]);
    relu::forward(&x, &mut y);
    relu::backward(&y, &x, &mut change);
    for ((x, y), change) in x.iter().zip(&y).zip(&change) {
        assert_eq!((*y, *change), (x.max(0.0), x.max(0.0)));
    }
    relu::forward(&[f32::NAN; 3], &mut y[..3]);
    assert!(y[..3].iter().all(|y| y.is_nan()));
}

#[test]
fn pairs_are_added_and_multiplied() {
    let x: Vec<f64> = (0..5001).map(f64::from).collect();
    let y: Vec<f64> = x.iter().map(|x| 0.5 - x).collect();
    let (mut sums, mut products) = (vec![7.0; 5001], vec![7.0; 5001]);
    pairs::add(&x, &y, &mut sums);
    pairs::multiply(&x, &y, &mut products);
    assert!(sums.iter().all(|sum| *sum == 0.5));
    assert!(products.iter().zip(&x).all(|(product, x)| *product == x * (0.5 - x)));
}

#[test]
fn zeros_of_many_threads_are_as_many() {
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        for count in [0, 5, 300_001] {
            let zeros: Vec<f32> = pool.install(|| zeros(count));
            assert!(zeros.len() == count && zeros.iter().all(|zero| zero.to_bits() == 0));
        }
    }
}
