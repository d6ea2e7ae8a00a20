//! Comparison with plain f64 arithmetic and with differences of finite steps.

use std::panic::AssertUnwindSafe;

use distribute_rows::normalise::Normalise;
use distribute_rows::{Blocks, Float, cross_entropy, gelu, pairs, relu, softmax};
use proptest::prelude::*;

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
        let wide = softmax::forward(&x, size);
        let wide_change = softmax::backward(&wide, size, &gradient);
        prop_assert!(wide.iter().zip(&expected).all(|(got, expected)| (got - expected).abs() < 1e-14));
        let slopes = differences(&x, &gradient, |x| naive_softmax(x, size));
        prop_assert!(wide_change.iter().zip(&slopes).all(|(got, slope)| (got - slope).abs() < 1e-7));

        let y = softmax::forward(&narrow(&x), size);
        // The inputs are rounded: 80 is 4e-6 off.
        assert_close(&y, &expected, 1e-5);
        assert_close(&softmax::backward(&y, size, &narrow(&gradient)), &wide_change, 2e-5);
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
        let (losses, sums) = cross_entropy::forward(&x, size, &classes);
        let wide_change = cross_entropy::backward(&x, size, &classes, &sums, &gradient);
        prop_assert!(losses.iter().zip(&expected).all(|(got, expected)| (got - expected).abs() < 1e-12));
        let slopes = differences(&x, &gradient, naive);
        prop_assert!(wide_change.iter().zip(&slopes).all(|(got, slope)| (got - slope).abs() < 1e-6));

        let (losses, sums) = cross_entropy::forward(&narrow(&x), size, &classes);
        assert_close(&losses, &expected, 2e-6);
        let change = cross_entropy::backward(&narrow(&x), size, &classes, &sums, &narrow(&gradient));
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
        let wide = norm.forward(&x, &weight, Some(&bias));
        prop_assert!(wide.iter().zip(naive(&x)).all(|(got, expected)| (got - expected).abs() < 1e-8));
        let wide_change = norm.backward(&x, &weight, &gradient);
        let steep = if offset == 0.0 { 2e-4 } else { 2e-3 };
        for (got, slope) in wide_change.input.iter().zip(differences(&x, &gradient, naive)) {
            prop_assert!((got - slope).abs() < steep * slope.abs().max(1.0), "{got}, not {slope}");
        }
        let of_weight = differences(&weight, &gradient, |weight| naive_norm(&x, weight, &bias, norm));
        let of_bias = differences(&bias, &gradient, |bias| naive_norm(&x, &weight, bias, norm));
        for (got, slope) in wide_change.weight.iter().zip(&of_weight).chain(wide_change.bias.iter().zip(&of_bias)) {
            prop_assert!((got - slope).abs() < 1e-5 * slope.abs().max(1.0), "{got}, not {slope}");
        }

        assert_close(&norm.forward(&narrow(&x), &narrow(&weight), Some(&narrow(&bias))), &wide, 3e-6);
        let change = norm.backward(&narrow(&x), &narrow(&weight), &narrow(&gradient));
        assert_close(&change.input, &wide_change.input, 1e-5);
        assert_close(&change.weight, &wide_change.weight, 1e-5);
        assert_close(&change.bias, &wide_change.bias, 1e-5);
    }

    #[test]
    fn gelu_is_that_of_f64((_, x) in rows()) {
        let expected = naive_gelu(&x);
        let gradient = gradient_of(x.len());
        let (wide, wide_change) = (gelu::forward(&x), gelu::backward(&x, &gradient));
        prop_assert!(wide.iter().zip(&expected).all(|(got, expected)| (got - expected).abs() < 1e-12));
        for (at, x) in x.iter().enumerate() {
            let slope = differences(&[*x], &gradient[at..=at], naive_gelu)[0];
            prop_assert!((wide_change[at] - slope).abs() < 1e-6, "{x}: {}, not {slope}", wide_change[at]);
        }
        let (y, change) = (gelu::forward(&narrow(&x)), gelu::backward(&narrow(&x), &narrow(&gradient)));
        for ((y, change), (expected, slope)) in y.iter().zip(&change).zip(expected.iter().zip(&wide_change)) {
            prop_assert!((f64::from(*y) - expected).abs() < 2e-6 * expected.abs().max(1.0));
            prop_assert!((f64::from(*change) - slope).abs() < 1e-5);
        }
    }
}

#[test]
fn extreme_elements_give_what_their_limits_are() {
    assert_eq!(softmax::forward(&[f32::NEG_INFINITY, 3e38, -3e38], 3), [0.0, 1.0, 0.0]);
    let logits = [f32::NEG_INFINITY, 1.0, 1e30, -1e30];
    let (losses, sums) = cross_entropy::forward(&logits, 2, &[0, 1]);
    assert_eq!(losses, [f32::INFINITY, 2e30]);
    let change = cross_entropy::backward(&logits, 2, &[0, 1], &sums, &[1.0, 1.0]);
    assert_eq!(change, [-1.0, 1.0, 1.0, -1.0]);
    let large = [-1e30f32, -100.0, 100.0, 1e30];
    assert_eq!(gelu::forward(&large), [0.0, 0.0, 100.0, 1e30]);
    assert_eq!(gelu::backward(&large, &[1.0; 4]), [0.0, 0.0, 1.0, 1.0]);
}

#[test]
fn differences_between_large_logits_count() {
    let logits = [10_000f32, 10_000.0, 10_000.0, 10_000.0, -3e7, -3e7 + 2.0, -3e7, -3e7];
    let (losses, sums) = cross_entropy::forward(&logits, 4, &[1, 1]);
    assert_close(&losses, &[4f64.ln(), (1.0 + 3.0 * (-2f64).exp()).ln()], 1e-7);
    let change = cross_entropy::backward(&logits, 4, &[1, 1], &sums, &[1.0, 1.0]);
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
    let (y, z) = (softmax::forward(&x, 20), norm.forward(&x, &[1.0; 20], None));
    let (losses, _) = cross_entropy::forward(&x, 20, &[0, 0]);
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
            let y = norm.forward(&x, &weight, None);
            let change = norm.backward(&x, &weight, &y);
            let soft = softmax::forward(&x, size);
            let soft_change = softmax::backward(&soft, size, &x);
            (y, change, soft, soft_change, gelu::forward(&x))
        })
    };
    assert!(of(1) == of(3));
}

#[test]
fn rectified_elements_pass_gradients_where_they_are_above_0() {
    let x: Vec<f32> = (0..5000).map(|at| (at % 5) as f32 - 2.0).collect();
    let y = relu::forward(&x);
    let change = relu::backward(&y, &x);
    for ((x, y), change) in x.iter().zip(&y).zip(&change) {
        assert_eq!((*y, *change), (x.max(0.0), x.max(0.0)));
    }
    assert!(relu::forward(&[f32::NAN; 3]).iter().all(|y| y.is_nan()));
}

#[test]
fn pairs_are_added_and_multiplied() {
    let x: Vec<f64> = (0..5001).map(f64::from).collect();
    let y: Vec<f64> = x.iter().map(|x| 0.5 - x).collect();
    let (sums, products) = (pairs::add(&x, &y), pairs::multiply(&x, &y));
    assert!(sums.iter().all(|sum| *sum == 0.5));
    assert!(products.iter().zip(&x).all(|(product, x)| *product == x * (0.5 - x)));
}

#[test]
fn blocks_are_in_order_whatever_their_size_and_the_threads() {
    for threads in [1, 3] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        for (count, size) in [(0, 0), (5, 7), (100_001, 1000), (700_001, 300_000)] {
            let write = |block: usize, room: &mut [f64]| {
                room.iter_mut().enumerate().for_each(|(at, x)| *x = (block * size + at) as f64);
            };
            let got: Vec<f64> = pool.install(|| Blocks { count, size, cost: size }.results(write));
            assert!(got.len() == count && got.iter().enumerate().all(|(at, x)| *x == at as f64));
        }
    }
}

#[test]
fn elements_that_are_not_written_are_nan_where_assertions_are_checked() {
    let got: Vec<f32> = Blocks { count: 9, size: 3, cost: 3 }.results(|_, room| room[0] = 1.0);
    assert!(!cfg!(debug_assertions) || got.iter().enumerate().all(|(at, x)| x.is_nan() == (at % 3 > 0)));
}

#[test]
fn a_panic_in_a_block_ends_the_computation() {
    for (threads, count) in [(1, 100), (3, 100), (3, 1_000_000)] {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let write = |block: usize, room: &mut [f32]| {
            room.fill(0.0);
            assert!(block < 3, "block 3");
        };
        let blocks = Blocks { count, size: count / 10, cost: 1 << 20 };
        let run = AssertUnwindSafe(|| pool.install(|| blocks.results(write)));
        let outcome = std::panic::catch_unwind(run);
        assert_eq!(outcome.unwrap_err().downcast_ref::<&str>(), Some(&"block 3"));
    }
}
