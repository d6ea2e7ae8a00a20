//! Metrics compared with their definitions, and with themselves under other numbers of replicas.

use proptest::prelude::*;

use super::*;

fn one(metric: impl Metric, predictions: &Predictions<'_>) -> f64 {
    let mut sums = vec![0.0; metric.len()];
    metric.update(&mut sums, predictions);
    metric.result(&sums)
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() < 1e-9 * b.abs().max(1.0)
}

#[test]
fn metrics_tell_whether_they_should_rise_under_any_name() {
    let metrics = Metrics::new().with(Named::new("rmse", MeanSquaredError)).with(F1::default()).with(Mean);
    assert_eq!(["rmse", "f1", "mean", "other"].map(|name| metrics.rises(name)), [Some(false), Some(true), None, None]);
}

#[test]
fn classes_by_hand() {
    let scores = [0.1, 0.7, 0.2, 0.5, 0.3, 0.2, f32::NAN, 0.0, 0.0];
    let predictions = Predictions::new(&scores, 3, Targets::Classes(&[1, 1, 1])).unwrap();
    assert_eq!(one(Accuracy, &predictions), 1.0 / 3.0);
    assert_eq!(one(TopK(2), &predictions), 2.0 / 3.0);
    let weighted = predictions.weighted(&[1.0, 3.0, 0.0]).unwrap();
    assert_eq!(one(Accuracy, &weighted), 0.25);
    let matrix = ConfusionMatrix { classes: 3 };
    let mut sums = vec![0.0; matrix.len()];
    matrix.update(&mut sums, &predictions);
    assert_eq!(matrix.matrix(&sums), [[0.0; 3], [1.0, 1.0, 0.0], [0.0; 3]]);
    assert_eq!(matrix.result(&sums), 1.0 / 3.0);
    // Equal logits of four classes.
    let uniform = Predictions::new(&[2.0; 8], 4, Targets::Classes(&[0, 3])).unwrap();
    assert!(close(one(CrossEntropy, &uniform), 4f64.ln()) && close(one(Perplexity, &uniform), 4.0));
    let certain = Predictions::new(&[1000.0, -1000.0], 2, Targets::Classes(&[1])).unwrap();
    assert!(close(one(CrossEntropy, &certain), 2000.0));
}

#[test]
fn classes_may_be_ones_among_zeros_and_other_values_are_refused() {
    let scores = [0.1, 0.9, 0.8, 0.2, 0.3, 0.7];
    let rows = [0.0, 1.0, 1.0, 0.0, 1.0, 0.0];
    let (values, classes) = (Targets::Values(&rows), Targets::Classes(&[1, 0, 0]));
    let metrics = || Metrics::new().with(Accuracy).with(CrossEntropy).with(TopK(1)).with(Perplexity);
    let of = |targets| {
        let mut sums = metrics().zeros();
        metrics().update(&mut sums, &Predictions::new(&scores, 2, targets).unwrap()).unwrap();
        metrics().results(&sums)
    };
    assert_eq!(of(values), of(classes));
    assert!(close(of(values)[0].1, 2.0 / 3.0));
    for metrics in [
        Metrics::new().with(Accuracy),
        Metrics::new().with(TopK(1)),
        Metrics::new().with(CrossEntropy),
        Metrics::new().with(Perplexity),
        Metrics::new().with(ConfusionMatrix { classes: 2 }),
    ] {
        let mut sums = metrics.zeros();
        // Several labels, none, and probabilities.
        for row in [[1.0, 1.0], [0.0, 0.0], [0.5, 0.5], [f32::NAN, 1.0]] {
            let predictions = Predictions::new(&[0.1, 0.9], 2, Targets::Values(&row)).unwrap();
            let told = metrics.update(&mut sums, &predictions).unwrap_err().to_string();
            assert!(told.contains("the targets of example 0 are not one 1 among zeros"), "{told}");
        }
        let predictions = Predictions::new(&[0.1, 0.9], 1, Targets::Classes(&[0, 1])).unwrap();
        let told = metrics.update(&mut sums, &predictions).unwrap_err().to_string();
        assert!(told.contains("one output for each example; use BinaryAccuracy"), "{told}");
    }
}

#[test]
fn what_has_no_place_in_a_matrix_is_not_right() {
    // Class 2 of two, NaN, and one that is right.
    let predictions = Predictions::new(&[0.1, 0.9, f32::NAN, 0.0, 0.2, 0.8], 2, Targets::Classes(&[2, 1, 1])).unwrap();
    let matrix = ConfusionMatrix { classes: 2 };
    assert_eq!(one(matrix, &predictions), 1.0 / 3.0);
    let mut sums = vec![0.0; ConfusionMatrix { classes: 1 }.len()];
    ConfusionMatrix { classes: 1 }.update(&mut sums, &predictions);
    assert_eq!(ConfusionMatrix { classes: 1 }.matrix(&sums), [[0.0]]);
}

#[test]
fn outputs_that_are_no_numbers_show() {
    let (nan, infinite) = (f32::NAN, f32::INFINITY);
    // All would count as negative, which three of four are.
    let all = [nan; 4];
    let targets = Targets::Classes(&[0, 0, 1, 0]);
    let none = Predictions::new(&all, 1, targets).unwrap();
    let one_of_four = [0.1, nan, 0.9, 0.2];
    let some = Predictions::new(&one_of_four, 1, targets).unwrap();
    for predictions in [none, some] {
        assert!(one(BinaryAccuracy::default(), &predictions).is_nan());
        assert!(one(Precision::default(), &predictions).is_nan());
        assert!(one(Recall::default(), &predictions).is_nan());
        assert!(one(F1::default(), &predictions).is_nan());
        assert!(one(Auc::default(), &predictions).is_nan());
        assert!(one(Mean, &predictions).is_nan() && one(MeanSquaredError, &predictions).is_nan());
        // An example with weight 0 is ignored.
        let without = some.weighted(&[1.0, 0.0, 1.0, 1.0]).unwrap();
        assert_eq!((one(BinaryAccuracy::default(), &without), one(Auc::default(), &without)), (1.0, 1.0));
    }
    let of_any_size = [-3.0, 2.0, infinite, 0.5];
    let logits = Predictions::new(&of_any_size, 1, targets).unwrap();
    assert!(one(Auc::default(), &logits).is_nan());
    let half = [nan, 1.0, 0.0, nan];
    let scores = Predictions::new(&half, 2, Targets::Classes(&[1, 0])).unwrap();
    assert_eq!((one(Accuracy, &scores), one(TopK(2), &scores)), (0.0, 0.0));
    assert!(one(CrossEntropy, &scores).is_nan());
    // Logits whose differences exceed the precision of f32.
    let wide = [0.0, 3e38, -3e38, 0.0];
    let large = Predictions::new(&wide, 2, Targets::Classes(&[1, 0])).unwrap();
    assert!(close(one(CrossEntropy, &large), f64::from(3e38f32) / 2.0), "{}", one(CrossEntropy, &large));
}

#[test]
fn thresholds_by_hand() {
    // Predicted positive: 0.9 and 0.6, of which the first is correct.
    let outputs = [0.9, 0.6, 0.4, 0.1];
    let predictions = Predictions::new(&outputs, 1, Targets::Classes(&[1, 0, 1, 0])).unwrap();
    assert_eq!(one(BinaryAccuracy::default(), &predictions), 0.5);
    assert_eq!(one(Precision::default(), &predictions), 0.5);
    assert_eq!(one(Recall::default(), &predictions), 0.5);
    assert_eq!(one(F1::default(), &predictions), 0.5);
    // Of four pairs of a positive and a negative, three are in order.
    assert_eq!(one(Auc::default(), &predictions), 0.75);
    assert_eq!(one(Recall { threshold: 0.3 }, &predictions), 1.0);
}

#[test]
fn values_by_hand() {
    let predictions = Predictions::new(&[1.0, 2.0, 3.0, 4.0], 2, Targets::Values(&[1.0, 0.0, 0.0, 4.0])).unwrap();
    assert_eq!(one(Mean, &predictions), 2.5);
    assert_eq!(one(MeanSquaredError, &predictions), 13.0 / 4.0);
    assert_eq!(one(MeanAbsoluteError, &predictions), 5.0 / 4.0);
    assert_eq!(one(MeanAbsoluteError, &predictions.weighted(&[1.0, 0.0]).unwrap()), 1.0);
}

#[test]
fn what_does_not_fit_is_a_sentence_and_nothing_is_nothing() {
    let text = Predictions::new(&[0.0; 5], 2, Targets::Classes(&[0, 0])).unwrap_err().to_string();
    assert!(text.contains("5 outputs of width 2") && text.contains("2 targets"), "{text}");
    let predictions = Predictions::new(&[0.0; 4], 2, Targets::Classes(&[0, 0])).unwrap();
    assert!(predictions.weighted(&[1.0]).unwrap_err().to_string().contains("1 weights"));
    assert!(Predictions::new(&[0.0; 4], 0, Targets::Classes(&[])).is_err());
    let metrics = Metrics::new().with(Accuracy).with(Auc::default()).with(Perplexity).with(F1::default()).with(Mean);
    assert!(metrics.results(&metrics.zeros()).iter().all(|(_, value)| *value == 0.0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn replicas_together_have_the_value_of_one(
        examples in prop::collection::vec((prop::collection::vec(0.0_f32..1.0, 4), 0_u32..4, 0.0_f32..2.0), 0..30),
        cuts in prop::collection::vec(0_usize..30, 3),
    ) {
        let metrics = || {
            let classes = Metrics::new().with(Accuracy).with(TopK(2)).with(CrossEntropy);
            let classes = classes.with(ConfusionMatrix { classes: 4 });
            classes.with(Auc::default()).with(Precision::default()).with(Recall::default()).with(MeanSquaredError)
        };
        let metrics = metrics();
        let update = |sums: &mut Vec<f64>, part: &[(Vec<f32>, u32, f32)]| {
            let outputs: Vec<f32> = part.iter().flat_map(|(outputs, ..)| outputs.clone()).collect();
            let classes: Vec<u32> = part.iter().map(|(_, class, _)| *class).collect();
            let weights: Vec<f32> = part.iter().map(|(.., weight)| *weight).collect();
            let predictions = Predictions::new(&outputs, 4, Targets::Classes(&classes)).unwrap();
            metrics.update(sums, &predictions.weighted(&weights).unwrap()).unwrap();
        };
        let mut whole = metrics.zeros();
        update(&mut whole, &examples);
        // Four replicas with parts of any length.
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(examples.len())).collect();
        cuts.sort_unstable();
        let bounds = [vec![0], cuts, vec![examples.len()]].concat();
        let mut sum = metrics.zeros();
        for part in bounds.windows(2) {
            let mut own = metrics.zeros();
            update(&mut own, &examples[part[0]..part[1]]);
            sum.iter_mut().zip(own).for_each(|(all, own)| *all += own);
        }
        for ((name, together), (_, alone)) in metrics.results(&sum).into_iter().zip(metrics.results(&whole)) {
            prop_assert!(close(together, alone), "{}: {} and {}", name, together, alone);
        }
    }

    #[test]
    fn the_area_is_the_share_of_pairs_in_order(outputs in prop::collection::vec((0_u32..=50, any::<bool>()), 2..40)) {
        let scores: Vec<f32> = outputs.iter().map(|(score, _)| *score as f32 / 50.0).collect();
        let classes: Vec<u32> = outputs.iter().map(|(_, yes)| u32::from(*yes)).collect();
        let predictions = Predictions::new(&scores, 1, Targets::Classes(&classes)).unwrap();
        let (mut ordered, mut pairs) = (0.0, 0.0);
        for (yes, _) in outputs.iter().filter(|(_, yes)| *yes) {
            for (no, _) in outputs.iter().filter(|(_, yes)| !yes) {
                pairs += 1.0;
                ordered += match yes.cmp(no) {
                    std::cmp::Ordering::Greater => 1.0,
                    std::cmp::Ordering::Equal => 0.5,
                    std::cmp::Ordering::Less => 0.0,
                };
            }
        }
        let expected = if pairs == 0.0 { 0.0 } else { ordered / pairs };
        let area = one(Auc { thresholds: 50 }, &predictions);
        prop_assert!(close(area, expected), "{} and {}", area, expected);
    }
}

#[test]
fn an_example_of_weight_0_needs_no_class() {
    let metrics = Metrics::new().with(Accuracy);
    // The second example is padding.
    let predictions = Predictions::new(&[0.1, 0.9, 0.3, 0.7], 2, Targets::Values(&[0.0, 1.0, 0.0, 0.0])).unwrap();
    let mut sums = metrics.zeros();
    metrics.update(&mut sums, &predictions.weighted(&[1.0, 0.0]).unwrap()).unwrap();
    assert_eq!(sums, [1.0, 1.0]);
    let error = metrics.update(&mut sums, &predictions.weighted(&[0.0, 1.0]).unwrap()).unwrap_err();
    assert!(error.to_string().contains("example 1"), "{error}");
}
