//! Losses and metrics of batches whose examples differ in length, and of targets that are not classes.

use distribute_candle::Hinge;
use distribute_train::metrics::{BinaryAccuracy, CrossEntropy};

use super::*;

/// Returns two batches of two sequences, of each of these lengths.
fn of_lengths(lengths: [usize; 2]) -> Dataset<(Tensor, Tensor)> {
    let [short, long] = lengths.map(|length| {
        let x = Tensor::arange(0f32, (2 * length * 8) as f32, &Device::Cpu).unwrap().reshape((2, length, 8)).unwrap();
        let y = Tensor::zeros((2, length), DType::U32, &Device::Cpu).unwrap();
        Dataset::from_tensor_slices(((x / 50.0).unwrap().cos().unwrap(), y)).batch(2)
    });
    short.concatenate(long)
}

#[test]
fn a_position_of_a_short_sequence_counts_more_than_one_of_a_long_sequence() {
    let build = |vb: VarBuilder<'_>| Ok(Positions(linear(8, 3, vb.pp("out"))?));
    let sgd = |model: &_| Sgd::new(0.0).build(model);
    let metrics = Metrics::new().with(CrossEntropy);
    let mut trainer = Trainer::new(&mirrored(1), build, sgd, SparseCategoricalCrossentropy, metrics).unwrap();
    let data = of_lengths([2, 40]);
    let (mut of_examples, mut of_positions) = (Vec::new(), Vec::new());
    for batch in data.iter() {
        let (x, y) = batch.unwrap();
        let logits = trainer.model().first().forward(&x).unwrap();
        let losses = SparseCategoricalCrossentropy.per_example(&logits, &y).unwrap().to_vec2::<f32>().unwrap();
        of_examples.extend(losses.iter().map(|row| f64::from(row.iter().sum::<f32>()) / row.len() as f64));
        of_positions.extend(losses.concat().into_iter().map(f64::from));
    }
    let mean = |values: &[f64]| values.iter().sum::<f64>() / values.len() as f64;
    let (expected, of_positions) = (mean(&of_examples), mean(&of_positions));
    assert!((expected - of_positions).abs() > 1e-3, "{expected} {of_positions}");
    let reported = trainer.fit(&data, Fit::epochs(1).validation(&data)).unwrap();
    for (name, expected) in [("loss", expected), ("val_loss", expected), ("cross_entropy", of_positions)] {
        let got = reported.last(name).unwrap();
        assert!((got - expected).abs() < 1e-5, "{name}: {got} instead of {expected}");
    }
}

#[test]
fn integers_that_are_no_classes_are_an_error_or_values() {
    let strategy = mirrored(2);
    let x = examples().0.narrow(0, 0, 4).unwrap();
    // A loss of the program's own ignores positions that are marked so, and metrics do not.
    let ignoring = |logits: &Tensor, targets: &Tensor| {
        let kept = targets.ge(0i64)?.to_dtype(DType::F32)?;
        SparseCategoricalCrossentropy.per_example(logits, &targets.clamp(0i64, 2i64)?)? * kept
    };
    let trainer = |metrics| Trainer::new(&strategy, Mlp::new, |m| Sgd::new(0.1).build(m), ignoring, metrics).unwrap();
    for class in [-100, 1 << 32] {
        let padded = (x.clone(), Tensor::new(&[1i64, class, 2, 0], &Device::Cpu).unwrap());
        trainer(Metrics::new()).fit(&padded, Fit::epochs(1)).unwrap();
        let mut with_metric = trainer(Metrics::new().with(Accuracy));
        let class_weights = Fit::epochs(1).class_weights([0.5, 2.0]);
        let errors = [
            with_metric.fit(&padded, Fit::epochs(1)).unwrap_err(),
            with_metric.evaluate(&padded).unwrap_err(),
            trainer(Metrics::new()).fit(&padded, class_weights).unwrap_err(),
        ];
        for error in errors {
            let told = error.to_string();
            assert!(matches!(error, Error::NotClass { class: given, .. } if given == class), "{told}");
            assert!(told.contains("give every position a class"), "{told}");
        }
    }
    // One output has a side, and a target of -1 is on the other one.
    let signs = Tensor::new(&[[1i64], [-1], [-1], [1]], &Device::Cpu).unwrap();
    let of = |targets: Tensor| {
        let metrics = Metrics::new().with(BinaryAccuracy { threshold: 0.0 });
        let build = |vb: VarBuilder<'_>| linear(8, 1, vb.pp("out"));
        let mut trainer = Trainer::new(&strategy, build, |m| Sgd::new(0.5).build(m), Hinge, metrics).unwrap();
        trainer.fit(&(x.clone(), targets), Fit::epochs(3)).unwrap()
    };
    assert_eq!(of(signs.clone()), of(signs.to_dtype(DType::F32).unwrap()));
}
