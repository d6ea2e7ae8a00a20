//! Statistics of random numbers.

use burn::tensor::{DType, Distribution, Int, Tensor, TensorData};
use hlo_evaluator::{Data, Tensor as HostTensor};

use crate::harness::{Inputs, Outputs, floats, results};

/// Draws many numbers.
fn drawn(draw: impl Fn(&Inputs) -> Outputs) -> Vec<HostTensor> {
    results(&[TensorData::from([0.0f32])], draw)
}

/// Returns the mean and the standard deviation.
fn moments(values: &[f64]) -> (f64, f64) {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let square = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / values.len() as f64;
    (mean, square.sqrt())
}

#[test]
fn numbers_have_the_distribution_that_was_asked_for() {
    // With 4000 numbers a mean is within 4 standard errors, which are below 0.016 of the deviation.
    let cases = [
        (Distribution::Default, (0.0, 1.0), (0.5, 0.2887)),
        (Distribution::Uniform(-3.0, 5.0), (-3.0, 5.0), (1.0, 2.309)),
        (Distribution::Uniform(-3e38, 3e38), (-3.01e38, 3.01e38), (0.0, 1.732e38)),
        (Distribution::Normal(2.0, 3.0), (-20.0, 24.0), (2.0, 3.0)),
        (Distribution::Bernoulli(0.25), (0.0, 1.0), (0.25, 0.433)),
    ];
    for (distribution, (low, high), (mean, deviation)) in cases {
        for dtype in [DType::F32, DType::BF16] {
            let found =
                drawn(|t| Outputs::new().constant(Tensor::<2>::random([40, 100], distribution, (t.device(), dtype))));
            let found = floats(&found[0]).unwrap();
            assert!(found.iter().all(|x| (low..=high).contains(x)), "{distribution:?}");
            let (found_mean, found_deviation) = moments(&found);
            assert!((found_mean - mean).abs() < 0.07 * deviation, "{distribution:?}: {found_mean}");
            assert!((found_deviation - deviation).abs() < 0.07 * deviation, "{distribution:?}: {found_deviation}");
        }
    }
}

#[test]
fn integers_have_the_distribution_that_was_asked_for() {
    let found = drawn(|t| {
        let draw = |distribution| Tensor::<1, Int>::random([3000], distribution, t.device());
        Outputs::new()
            .int(draw(Distribution::Uniform(-2.0, 3.0)))
            .int(draw(Distribution::Bernoulli(0.5)))
            .int(draw(Distribution::Normal(0.0, 10.0)))
            .int(draw(Distribution::Default))
    });
    let integers = |tensor: &HostTensor| match tensor.data() {
        Data::I64(values) => values.clone(),
        other => panic!("{other:?}"),
    };
    for expected in -2..3 {
        let count = integers(&found[0]).iter().filter(|value| **value == expected).count();
        assert!((500..700).contains(&count), "{expected} occurs {count} times of 3000");
    }
    assert!(integers(&found[0]).iter().all(|value| (-2..3).contains(value)));
    let ones: i64 = integers(&found[1]).iter().sum();
    assert!((1300..1700).contains(&ones), "{ones}");
    let (mean, deviation) = moments(&integers(&found[2]).iter().map(|&value| value as f64).collect::<Vec<_>>());
    assert!(mean.abs() < 1.0 && (8.5..11.0).contains(&deviation), "{mean} {deviation}");
    let negative = integers(&found[3]).iter().filter(|value| **value < 0).count();
    assert!((1300..1700).contains(&negative), "{negative}");
}

#[test]
fn two_draws_differ() {
    let found = drawn(|t| {
        let draw = || Tensor::<1>::random([8], Distribution::Default, t.device());
        Outputs::new().constant(draw()).constant(draw())
    });
    assert_ne!(found[0], found[1]);
}
