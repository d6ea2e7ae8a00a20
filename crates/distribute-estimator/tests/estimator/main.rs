//! Estimators: what they learn, the same under every strategy, after restarts, and as tasks of a cluster.
#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

use std::path::Path;
use std::time::Duration;

use candle_core::{DType, Tensor};
use candle_nn::{Linear, Module, VarBuilder, linear};
use distribute_candle::{
    Adam, Fit, Loss, MeanSquaredError, Model, Optimizer, Sgd, SparseCategoricalCrossentropy, Trainer,
};
use distribute_cluster::TfConfigResolver;
use distribute_estimator::{
    CannedModel, Categorical, DnnClassifier, DnnRegressor, Error, Estimator, EstimatorModel, EstimatorSpec, EvalSpec,
    FeatureColumns, InputLayer, Labels, LayersEstimator, LinearClassifier, LinearRegressor, Mode, Numeric, Result,
    RunConfig, Scores, TrainSpec, Until, train_and_evaluate_as,
};
use distribute_input::{BoxError, Column, Dataset, Element, Features};
use distribute_strategy::{CentralStorageStrategy, MirroredStrategy, MultiWorkerMirroredStrategy, Request, Strategy};
use distribute_train::metrics::{Accuracy, Mean, Metrics, Named, Precision, TopK};
use distribute_train::preemption::TerminationConfig;

mod clusters;

type Examples = Dataset<(Features, Labels)>;

const COUNT: usize = 50;
const TOWNS: [&str; 4] = ["ayr", "bonn", "cork", ""];

/// The rooms and towns of houses.
fn houses() -> Features {
    let rooms: Vec<f32> = (0..COUNT).map(|house| (house * 37 % 11) as f32 / 10.0).collect();
    let towns: Vec<&str> = (0..COUNT).map(|house| TOWNS[house * 13 % 4]).collect();
    Features::new([("rooms", Column::from(rooms)), ("town", Column::from(towns))]).unwrap()
}

fn rooms() -> Vec<f32> {
    let Column::Numbers(rooms) = houses().column("rooms").unwrap().clone() else { panic!("rooms are numbers") };
    rooms.as_slice().to_vec()
}

/// Prices that are linear in the rooms, plus a constant for each town.
fn prices() -> Vec<f32> {
    let town = |house: usize| [0.5, -1.0, 2.0, 0.0][house * 13 % 4];
    rooms().iter().enumerate().map(|(house, rooms)| 3.0 * rooms + town(house) + 1.0).collect()
}

/// Classes of prices: low, medium, high.
fn classes(count: i64) -> Vec<i64> {
    let price = |price: &f32| if *price < 2.0 { 0 } else { i64::from(*price > 3.5 && count > 2) + 1 };
    prices().iter().map(price).collect()
}

/// Batches of 16; the last one has two examples.
fn batches(labels: Column) -> Examples {
    Dataset::from_tensor_slices((houses(), labels)).shuffle(COUNT, 7).batch(16)
}

fn columns() -> FeatureColumns {
    FeatureColumns::new().with(Numeric::new("rooms")).with(Categorical::vocabulary("town", ["ayr", "bonn", "cork"]))
}

fn dense_columns() -> FeatureColumns {
    FeatureColumns::new()
        .with(Numeric::new("rooms"))
        .with(Numeric::new("rooms").bucketized([0.2, 0.5]))
        .with(Categorical::vocabulary("town", ["ayr", "bonn"]).oov_buckets(1).embedding(3))
}

fn adam(rate: f64) -> impl Fn(&Model<CannedModel>) -> distribute_candle::Result<Optimizer> + Send + Sync {
    move |model| Adam::new(rate).build(model)
}

fn mirrored(replicas: usize) -> Strategy {
    let devices: Vec<String> = (0..replicas).map(|index| format!("CPU:{index}")).collect();
    MirroredStrategy::builder().devices(devices).build().unwrap()
}

fn central() -> Strategy {
    CentralStorageStrategy::builder().compute_devices(["CPU:0", "CPU:1"]).build().unwrap()
}

fn forever(labels: &Column) -> impl Fn() -> std::result::Result<Examples, BoxError> + '_ {
    move || Ok(batches(labels.clone()).repeat_forever())
}

fn once(labels: &Column) -> impl Fn() -> std::result::Result<Examples, BoxError> + '_ {
    move || Ok(batches(labels.clone()))
}

fn resolver(json: &str) -> TfConfigResolver {
    TfConfigResolver::from_json(json).unwrap()
}

#[test]
fn a_linear_regressor_finds_the_line() {
    let folder = tempfile::tempdir().unwrap();
    let estimator = LinearRegressor::new(&columns()).build(adam(0.1), RunConfig::new(folder.path())).unwrap();
    let labels = Column::from(prices());
    assert_eq!(estimator.train(forever(&labels), Until::Steps(600)).unwrap(), 600);
    let scores = estimator.evaluate(&EvalSpec::new(once(&labels))).unwrap();
    assert!(scores["loss"] < 1e-4 && scores["average_loss"] == scores["loss"], "{scores:?}");
    let mean = f64::from(prices().iter().sum::<f32>()) / COUNT as f64;
    assert!(
        (scores["label/mean"] - mean).abs() < 1e-5 && (scores["prediction/mean"] - mean).abs() < 0.01,
        "{scores:?}"
    );
    let names = estimator.variable_names().unwrap();
    let weights = "linear.linear_model.rooms.weights";
    assert!(names.contains(&weights.to_owned()) && names.contains(&format!("{weights}/m")), "{names:?}");
    let weight = estimator.variable_value(weights).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert!((weight[0] - 3.0).abs() < 0.1, "{weight:?}");
    let predictions = estimator.predict(|| Ok(Dataset::from_tensor_slices(houses()).batch(7))).unwrap();
    assert_eq!(predictions.keys().collect::<Vec<_>>(), ["predictions"]);
    let predicted = predictions["predictions"].flatten_all().unwrap().to_vec1::<f32>().unwrap();
    assert!(predicted.iter().zip(prices()).all(|(a, b)| (a - b).abs() < 0.1), "{predicted:?}");
}

#[test]
fn classifiers_name_predictions_and_scores_as_tensorflow_does() {
    for count in [2, 3] {
        let folder = tempfile::tempdir().unwrap();
        let estimator = LinearClassifier::new(&columns()).n_classes(count as usize);
        let estimator = estimator.build(adam(0.1), RunConfig::new(folder.path())).unwrap();
        let labels = Column::from(classes(count));
        estimator.train(forever(&labels), Until::Steps(400)).unwrap();
        let scores = estimator.evaluate(&EvalSpec::new(once(&labels))).unwrap();
        assert!(scores["accuracy"] > 0.9 && scores["global_step"] == 400.0, "{scores:?}");
        let names: Vec<&str> = scores.keys().map(String::as_str).collect();
        let shared = ["accuracy", "average_loss", "global_step", "loss"];
        assert!(shared.iter().all(|name| names.contains(name)), "{names:?}");
        let of_two = ["auc", "label/mean", "precision", "prediction/mean", "recall"];
        assert_eq!(of_two.iter().filter(|name| names.contains(name)).count(), if count == 2 { 5 } else { 0 });
        // Predictions are in the data's order, independent of the replicas.
        let config = RunConfig::new(folder.path()).eval_distribute(&mirrored(3));
        let estimator = LinearClassifier::new(&columns()).n_classes(count as usize).build(adam(0.1), config).unwrap();
        let predictions = estimator.predict(|| Ok(Dataset::from_tensor_slices(houses()).batch(8))).unwrap();
        assert_eq!(predictions["probabilities"].dims(), [COUNT, count as usize]);
        assert_eq!(predictions["logits"].dims(), [COUNT, if count == 2 { 1 } else { 3 }]);
        assert_eq!(predictions.contains_key("logistic"), count == 2);
        let ids = predictions["class_ids"].flatten_all().unwrap().to_vec1::<i64>().unwrap();
        let right = ids.iter().zip(classes(count)).filter(|(a, b)| **a == *b).count();
        assert!((right as f64 / COUNT as f64 - scores["accuracy"]).abs() < 1e-9);
        let sums = predictions["probabilities"].sum(1).unwrap().to_vec1::<f32>().unwrap();
        assert!(sums.iter().all(|sum| (sum - 1.0).abs() < 1e-5), "{sums:?}");
    }
}

#[test]
fn hidden_layers_learn_too() {
    let folder = tempfile::tempdir().unwrap();
    let labels =
        Column::from(classes(3).iter().map(|class| ["cheap", "middling", "dear"][*class as usize]).collect::<Vec<_>>());
    let classifier = DnnClassifier::new(&dense_columns(), [16, 8]).n_classes(3).activation(candle_nn::Activation::Gelu);
    let classifier = classifier.label_vocabulary(["cheap", "middling", "dear"]);
    let classifier = classifier.build(adam(0.02), RunConfig::new(folder.path().join("classes"))).unwrap();
    classifier.train(forever(&labels), Until::Steps(300)).unwrap();
    let scores = classifier.evaluate(&EvalSpec::new(once(&labels))).unwrap();
    assert!(scores["accuracy"] > 0.95, "{scores:?}");
    let names = classifier.variable_names().unwrap();
    for name in ["dnn.hiddenlayer_0.weight", "dnn.logits.bias", "dnn.input_layer.town_embedding.embedding_weights"] {
        assert!(names.iter().any(|known| known == name), "{names:?}");
    }
    let labels = Column::from(prices());
    let regressor =
        DnnRegressor::new(&dense_columns(), [16]).build(adam(0.02), RunConfig::new(folder.path().join("prices")));
    let regressor = regressor.unwrap();
    regressor.train(forever(&labels), Until::Steps(300)).unwrap();
    let scores = regressor.evaluate(&EvalSpec::new(once(&labels))).unwrap();
    assert!(scores["average_loss"] < 0.05, "{scores:?}");
}

/// Trains and evaluates under a strategy.
fn under(strategy: &Strategy) -> (Scores, Scores) {
    let folder = tempfile::tempdir().unwrap();
    let config = |name: &str| {
        let config = RunConfig::new(folder.path().join(name)).seed(3);
        config.train_distribute(strategy).eval_distribute(strategy)
    };
    let classes = Column::from(classes(2));
    let classifier = LinearClassifier::new(&columns()).build(adam(0.1), config("linear")).unwrap();
    classifier.train(|| Ok(batches(classes.clone()).repeat(5)), Until::EndOfData).unwrap();
    let prices = Column::from(prices());
    let sgd = |model: &Model<CannedModel>| Sgd::new(0.05).build(model);
    let regressor = DnnRegressor::new(&dense_columns(), [8]).activation(candle_nn::Activation::Gelu);
    let regressor = regressor.build(sgd, config("dnn")).unwrap();
    regressor.train(|| Ok(batches(prices.clone()).repeat(5)), Until::EndOfData).unwrap();
    // Batches of 7, with replicas without examples in the last one.
    let few = |labels: Column| Ok(Dataset::from_tensor_slices((houses(), labels)).batch(7));
    let linear = classifier.evaluate(&EvalSpec::new(|| few(classes.clone()))).unwrap();
    (linear, regressor.evaluate(&EvalSpec::new(|| few(prices.clone()))).unwrap())
}

#[test]
fn scores_are_the_same_under_every_strategy() {
    let (linear, dnn) = under(&Strategy::default_strategy().unwrap());
    assert_eq!(linear["global_step"], 20.0);
    for strategy in [mirrored(2), mirrored(3), central()] {
        let own = under(&strategy);
        for (scores, expected) in [(&own.0, &linear), (&own.1, &dnn)] {
            assert_eq!(scores.len(), expected.len());
            for (name, value) in expected {
                let difference = (scores[name] - value).abs();
                assert!(difference < 1e-4, "{}: {name} {} and {value}", strategy.describe(), scores[name]);
            }
        }
    }
}

#[test]
fn two_calls_are_one_and_data_go_on_where_they_were() {
    let labels = Column::from(prices());
    let regressor = |folder: &Path| {
        let config = RunConfig::new(folder).train_distribute(&mirrored(2)).save_checkpoints_steps(3);
        LinearRegressor::new(&columns()).build(adam(0.05), config).unwrap()
    };
    let values = |folder: &Path| {
        let regressor = regressor(folder);
        let names = regressor.variable_names().unwrap();
        let value =
            |name: &String| regressor.variable_value(name).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        names.iter().map(|name| (name.clone(), value(name))).collect::<Vec<_>>()
    };
    let folder = tempfile::tempdir().unwrap();
    let (one, two, three) = (folder.path().join("one"), folder.path().join("two"), folder.path().join("three"));
    assert_eq!(regressor(&one).train(forever(&labels), Until::MaxSteps(17)).unwrap(), 17);
    assert_eq!(regressor(&two).train(forever(&labels), Until::Steps(6)).unwrap(), 6);
    assert_eq!(regressor(&two).train(forever(&labels), Until::Steps(11)).unwrap(), 17);
    assert_eq!(values(&two), values(&one));
    // There are no steps left.
    assert_eq!(regressor(&two).train(forever(&labels), Until::MaxSteps(17)).unwrap(), 17);
    assert_eq!(values(&two), values(&one));
    // Finite data: passes of 4 steps, the last of them cut short by max_steps.
    for steps in [4, 8, 12, 16, 17] {
        assert_eq!(regressor(&three).train(once(&labels), Until::MaxSteps(17)).unwrap(), steps);
    }
    // A call that ends with the last batch of a pass leaves nothing of it to the next call.
    assert_eq!(regressor(&three).train(once(&labels), Until::Steps(3)).unwrap(), 20);
    assert_eq!(regressor(&three).train(once(&labels), Until::Steps(2)).unwrap(), 22);
    let kept: Vec<String> = std::fs::read_dir(&one)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with("step-"))
        .collect();
    assert_eq!(kept.len(), 5, "{kept:?}");
    assert!(regressor(&one).latest_checkpoint().unwrap().unwrap().ends_with("step-00000017"));
}

#[test]
fn several_evaluations_have_names_and_any_checkpoint_can_be_evaluated() {
    let folder = tempfile::tempdir().unwrap();
    let labels = Column::from(prices());
    let config = RunConfig::new(folder.path()).save_checkpoints_steps(10).save_summary_steps(5);
    let regressor = LinearRegressor::new(&columns()).build(adam(0.05), config).unwrap();
    regressor.train(forever(&labels), Until::Steps(30)).unwrap();
    let newest = regressor.evaluate(&EvalSpec::new(once(&labels)).name("houses")).unwrap();
    let spec = EvalSpec::new(once(&labels)).steps(2);
    let older = regressor.evaluate_checkpoint(&spec, folder.path().join("step-00000010")).unwrap();
    assert_eq!((newest["global_step"], older["global_step"]), (30.0, 10.0));
    assert!(older["loss"] > newest["loss"], "{older:?} {newest:?}");
    for path in ["", "eval", "eval_houses"] {
        let events = std::fs::read_dir(folder.path().join(path))
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with("events.out.tfevents"));
        assert_eq!(events.count(), 1, "{path}");
    }
}

#[test]
fn an_example_that_counts_twice_is_one_that_is_there_twice() {
    let folder = tempfile::tempdir().unwrap();
    let weights: Vec<f32> = (0..COUNT).map(|house| (house % 3) as f32).collect();
    let column = |name: &str| (name.to_owned(), houses().column(name).unwrap().clone());
    let weights = ("weight".to_owned(), Column::from(weights));
    let weighted = Features::new([column("rooms"), column("town"), weights]).unwrap();
    let rows: Vec<usize> = (0..COUNT).flat_map(|house| std::iter::repeat_n(house, house % 3)).collect();
    let labels = Column::from(classes(2));
    let repeated = (houses().gather(&rows).unwrap(), labels.gather(&rows).unwrap());
    let model = || LinearClassifier::new(&columns());
    let config = |name: &str| RunConfig::new(folder.path().join(name)).eval_distribute(&mirrored(2));
    let weigh = model().weight_column("weight").build(adam(0.1), config("weighted")).unwrap();
    let repeat = model().build(adam(0.1), config("repeated")).unwrap();
    // Adam is invariant to a constant factor of the loss.
    let weigh_input = || Ok(Dataset::from_tensor_slices((weighted.clone(), labels.clone())).batch(COUNT));
    let repeat_input = || Ok(Dataset::from_tensor_slices(repeated.clone()).batch(rows.len()));
    weigh.train(|| Ok(weigh_input()?.repeat_forever()), Until::Steps(30)).unwrap();
    repeat.train(|| Ok(repeat_input()?.repeat_forever()), Until::Steps(30)).unwrap();
    let expected = repeat.evaluate(&EvalSpec::new(repeat_input)).unwrap();
    let scores = weigh.evaluate(&EvalSpec::new(weigh_input)).unwrap();
    for (name, value) in &expected {
        assert!((scores[name] - value).abs() < 1e-4, "{name}: {} and {value}", scores[name]);
    }
}

/// A custom model with a penalty; `what` selects a mistake in it.
struct Own {
    input: InputLayer,
    line: Linear,
    what: &'static str,
}

impl Own {
    fn estimator(folder: &Path, what: &'static str) -> Estimator<Own> {
        let model_fn = move |mode: Mode, vb: VarBuilder<'static>| {
            assert!(mode != Mode::Predict || what.is_empty());
            let columns = FeatureColumns::new().with(Numeric::new("rooms"));
            let line = linear(1, 1, vb.pp("line"))?;
            Ok(Own { input: InputLayer::new(&columns, vb)?, line, what })
        };
        let config = RunConfig::new(folder).stop_on(TerminationConfig::default()).log_step_count_steps(2);
        Estimator::new(model_fn, |model| Sgd::new(0.1).build(model), config).unwrap()
    }
}

impl EstimatorModel for Own {
    fn spec(&self, features: &Features, labels: Option<&Labels>, mode: Mode) -> Result<EstimatorSpec> {
        let y = self.line.forward(&self.input.forward(features)?)?;
        let Some(Column::Numbers(labels)) = labels else { return Ok(EstimatorSpec::new().prediction("price", &y)) };
        let right = Tensor::from_slice(labels.as_slice(), y.dims(), y.device())?;
        let losses = MeanSquaredError.per_example(&y, &right)?;
        let squares = (self.line.weight().sqr()?.sum_all()? * 0.1)?;
        Ok(match self.what {
            "16 bits" => {
                EstimatorSpec::new().loss(&losses.to_dtype(DType::F16)?).penalty(&squares.to_dtype(DType::F16)?)
            }
            "no loss" if mode == Mode::Eval => EstimatorSpec::new(),
            "two" => EstimatorSpec::new().loss(&losses).metric("off", Mean, &y, &right).metric("off", Mean, &y, &right),
            "loss" => EstimatorSpec::new().loss(&losses).metric("loss", Mean, &y, &right),
            "mean" => EstimatorSpec::new().loss(&losses.mean_all()?),
            "infinite" => EstimatorSpec::new().loss(&(losses + f64::INFINITY)?),
            _ => EstimatorSpec::new().loss(&losses).penalty(&squares),
        })
    }
}

#[test]
fn a_model_of_ones_own_has_losses_penalties_and_predictions() {
    let folder = tempfile::tempdir().unwrap();
    let labels = Column::from(prices());
    let own = Own::estimator(folder.path(), "");
    own.train(forever(&labels), Until::Steps(300)).unwrap();
    let scores = own.evaluate(&EvalSpec::new(once(&labels))).unwrap();
    let weight = own.variable_value("line.weight").unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()[0];
    let predictions = own.predict(|| Ok(Dataset::from_tensor_slices(houses()).batch(16))).unwrap();
    let predicted = predictions["price"].flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let squares = predicted.iter().zip(prices()).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>() / COUNT as f64;
    assert!((scores["loss"] - squares - 0.1 * f64::from(weight).powi(2)).abs() < 1e-4, "{scores:?} {weight}");
}

#[test]
fn losses_and_penalties_of_16_bits_train() {
    let folder = tempfile::tempdir().unwrap();
    let labels = Column::from(prices());
    Own::estimator(folder.path(), "16 bits").train(forever(&labels), Until::Steps(2)).unwrap();
}

#[test]
fn mistakes_are_answered_by_a_sentence() {
    let folder = tempfile::tempdir().unwrap();
    let labels = Column::from(prices());
    let path = || folder.path().join("model");
    let both = RunConfig::new(path()).save_checkpoints_steps(1).save_checkpoints_every(Duration::ZERO);
    let build = |config| LinearRegressor::new(&columns()).build(adam(0.1), config);
    let said = |error: Option<Error>| error.unwrap().to_string();
    let text = said(build(both).err());
    assert!(text.contains("save_checkpoints_steps and save_checkpoints_every are both given; choose one"), "{text}");
    assert!(said(build(RunConfig::new("")).err()).contains("model_dir is empty"));
    assert!(said(build(RunConfig::new(path()).save_checkpoints_steps(0)).err()).contains("at least 1"));
    let text = said(LinearClassifier::new(&columns()).n_classes(1).build(adam(0.1), RunConfig::new(path())).err());
    assert!(text.contains("LinearClassifier: n_classes is 1; give at least 2"), "{text}");
    let text = said(DnnClassifier::new(&columns(), [4]).build(adam(0.1), RunConfig::new(path())).err());
    assert!(text.contains("\"town\"") && text.contains("call indicator()"), "{text}");
    let text = said(DnnRegressor::new(&dense_columns(), [4, 0]).build(adam(0.1), RunConfig::new(path())).err());
    assert!(text.contains("hidden_units are [4, 0]"), "{text}");

    let regressor = build(RunConfig::new(path())).unwrap();
    let text = said(regressor.evaluate(&EvalSpec::new(once(&labels))).err());
    assert!(text.contains("there is no checkpoint in") && text.contains("call train first"), "{text}");
    assert!(said(regressor.variable_names().err()).contains("call train first"));
    let text = said(regressor.train(|| Err("the disk is full".into()), Until::Steps(1)).err());
    assert_eq!(text, "the input function failed: the disk is full");
    let unbatched = || Ok(Dataset::from_tensor_slices((houses(), labels.clone())));
    assert!(said(regressor.train(unbatched, Until::Steps(1)).err()).contains("not batched"));
    let other = || {
        Ok(Dataset::from_tensor_slices((Features::new([("x", Column::from(vec![1.0]))])?, Column::from(vec![1.0])))
            .batch(1))
    };
    let text = said(regressor.train(other, Until::Steps(1)).err());
    assert!(text.contains("feature \"rooms\": a column of the model wants it, but the data have x"), "{text}");
    regressor.train(once(&labels), Until::EndOfData).unwrap();
    let text = said(regressor.variable_value("nothing").err());
    assert!(text.contains("no variable \"nothing\"; it has linear.linear_model.bias_weights"), "{text}");
    let none = || Ok(batches(labels.clone()).take(0));
    assert!(said(regressor.evaluate(&EvalSpec::new(none)).err()).contains("has no elements"));
    let classifier = LinearClassifier::new(&columns()).build(adam(0.1), RunConfig::new(path().join("c"))).unwrap();
    let text = said(classifier.train(once(&Column::from(classes(3))), Until::Steps(4)).err());
    assert!(text.contains("a label is 2; expected a class from 0 to 1"), "{text}");
    let texts = Column::from(vec!["cheap"; COUNT]);
    assert!(said(classifier.train(once(&texts), Until::Steps(1)).err()).contains("label_vocabulary"));

    for (what, words) in [
        ("mean", "mode TRAIN: its loss has shape []; give one number for each example"),
        ("infinite", "the loss is inf after step 2; lower the learning rate"),
    ] {
        let text = said(Own::estimator(&path().join(what), what).train(forever(&labels), Until::Steps(4)).err());
        assert!(text.contains(words), "{text}");
    }
    let own = Own::estimator(&path().join("own"), "no loss");
    own.train(forever(&labels), Until::Steps(2)).unwrap();
    let text = said(own.evaluate(&EvalSpec::new(once(&labels))).err());
    assert!(text.contains("mode EVAL: it has no loss; call .loss"), "{text}");
}

#[test]
fn scores_of_equal_names_are_refused() {
    let (folder, labels) = (tempfile::tempdir().unwrap(), Column::from(prices()));
    for (what, words) in [
        ("two", "metrics 1 and 2 are both named \"off\"; give each a name of its own"),
        ("loss", "a metric is named \"loss\", as another score is"),
    ] {
        let own = Own::estimator(&folder.path().join(what), what);
        own.train(forever(&labels), Until::Steps(1)).unwrap();
        let text = own.evaluate(&EvalSpec::new(once(&labels))).unwrap_err().to_string();
        assert!(text.contains(words), "{text}");
    }
    let columns = FeatureColumns::new().with(Numeric::new("rooms"));
    let build = |name: &str| {
        LayersEstimator::new(&columns, |vb| linear(1, 1, vb.pp("line")), MeanSquaredError)
            .metric(Precision::default())
            .metric(Named::new(name, Precision { threshold: 0.9 }))
            .build(|model| Sgd::new(0.1).build(model), RunConfig::new(folder.path()))
    };
    let error = build("precision").err().unwrap();
    let text = error.to_string();
    assert!(matches!(error, Error::Configuration { .. }) && text.contains("both named \"precision\""), "{text}");
    build("strict_precision").unwrap();
}

/// A model with two predictions of one name.
struct Twice(Own);

impl EstimatorModel for Twice {
    fn spec(&self, features: &Features, labels: Option<&Labels>, mode: Mode) -> Result<EstimatorSpec> {
        let y = self.0.line.forward(&self.0.input.forward(features)?)?;
        let spec = self.0.spec(features, labels, mode)?;
        Ok(if mode == Mode::Predict { spec.prediction("price", &y) } else { spec })
    }
}

#[test]
fn predictions_of_equal_names_are_refused() {
    let (folder, labels) = (tempfile::tempdir().unwrap(), Column::from(prices()));
    let model_fn = |_, vb: VarBuilder<'static>| {
        let columns = FeatureColumns::new().with(Numeric::new("rooms"));
        let line = linear(1, 1, vb.pp("line"))?;
        Ok(Twice(Own { input: InputLayer::new(&columns, vb)?, line, what: "" }))
    };
    let twice =
        Estimator::new(model_fn, |model| Sgd::new(0.1).build(model), RunConfig::new(folder.path().join("m"))).unwrap();
    twice.train(forever(&labels), Until::Steps(1)).unwrap();
    let text = twice.predict(|| Ok(Dataset::from_tensor_slices(houses()).batch(16))).unwrap_err().to_string();
    assert!(text.contains("predictions 1 and 2 are both named \"price\""), "{text}");
}

#[test]
fn a_loss_that_is_not_finite_is_not_saved_at_the_end_of_the_data() {
    let folder = tempfile::tempdir().unwrap();
    let labels = Column::from(prices());
    let own = Own::estimator(folder.path(), "infinite");
    // The only step is neither logged nor written.
    let error = own.train(|| Ok(batches(labels.clone()).take(1)), Until::EndOfData).unwrap_err();
    assert!(matches!(error, Error::LossNotFinite { step: 1, .. }), "{error}");
    assert_eq!(own.latest_checkpoint().unwrap(), None);
}

#[test]
fn data_without_a_batch_are_refused_and_a_pass_that_was_over_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let labels = Column::from(prices());
    let regressor = |name: &str| {
        let config = RunConfig::new(folder.path().join(name)).save_checkpoints_steps(4);
        LinearRegressor::new(&columns()).build(adam(0.05), config).unwrap()
    };
    let none = || Ok(batches(labels.clone()).take(0));
    let few = || Ok(Dataset::from_tensor_slices((houses(), labels.clone())).take(5).batch_exact(8));
    let is_refused = |result: Result<u64>| matches!(result, Err(Error::NoExamples { what: "train on" }));
    let new = regressor("new");
    for until in [Until::EndOfData, Until::Steps(3), Until::MaxSteps(3)] {
        assert!(is_refused(new.train(none, until)) && is_refused(new.train(few, until)), "{until:?}");
    }
    assert_eq!(new.latest_checkpoint().unwrap(), None);

    // A job that is interrupted after the checkpoint of its last batch has no step left.
    let resumed = regressor("resumed");
    let train = TrainSpec::new(once(&labels));
    let eval = EvalSpec::new(|| Err("the disk is full".into()));
    train_and_evaluate_as(&resolver(""), &resumed, &train, &eval).unwrap_err();
    assert_eq!(resumed.train(once(&labels), Until::EndOfData).unwrap(), 4);
    assert!(is_refused(resumed.train(none, Until::EndOfData)));
    assert!(resumed.latest_checkpoint().unwrap().unwrap().ends_with("step-00000004"));
}

/// A classifier of two numbers, for a trainer or an estimator.
struct Layers(Linear, Linear);

impl Layers {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Layers> {
        Ok(Layers(linear(2, 8, vb.pp("hidden"))?, linear(8, 3, vb.pp("classes"))?))
    }
}

impl Module for Layers {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.1.forward(&self.0.forward(x)?.relu()?)
    }
}

#[test]
fn layers_of_a_trainer_become_an_estimator_with_the_same_steps_and_scores() {
    let folder = tempfile::tempdir().unwrap();
    let columns = FeatureColumns::new().with(Numeric::new("rooms")).with(Numeric::new("area"));
    let area: Vec<f32> = prices().iter().map(|price| price / 2.0 - 1.0).collect();
    let features = Features::new([("rooms", Column::from(rooms())), ("area", Column::from(area.clone()))]).unwrap();
    let labels = classes(3);
    let make = |folder: &Path, strategy: &Strategy| {
        LayersEstimator::new(&columns, Layers::new, SparseCategoricalCrossentropy)
            .metric(Accuracy)
            .metric(TopK(2))
            .build(|model| Adam::new(0.05).build(model), RunConfig::new(folder).train_distribute(strategy))
            .unwrap()
    };
    let batches = || Ok(Dataset::from_tensor_slices((features.clone(), Column::from(labels.clone()))).batch(10));
    let one = Strategy::default_strategy().unwrap();
    let estimator = make(&folder.path().join("one"), &one);
    estimator.train(|| Ok(batches()?.repeat_forever()), Until::MaxSteps(50)).unwrap();
    let scores = estimator.evaluate(&EvalSpec::new(batches)).unwrap();

    // The same by a trainer: ten passes of five batches.
    let x = Tensor::from_iter(rooms().into_iter().zip(area).flat_map(|(a, b)| [a, b]), &candle_core::Device::Cpu);
    let y = Tensor::from_iter(labels.iter().map(|class| *class as u32), &candle_core::Device::Cpu).unwrap();
    let data = Dataset::from_tensor_slices((x.unwrap().reshape((COUNT, 2)).unwrap(), y)).batch(10);
    let adam = |model: &Model<_>| Adam::new(0.05).build(model);
    let metrics = Metrics::new().with(Accuracy).with(TopK(2));
    let mut trainer = Trainer::new(&one, Layers::new, adam, SparseCategoricalCrossentropy, metrics).unwrap();
    trainer.fit(&data, Fit::epochs(10)).unwrap();
    for (name, expected) in trainer.evaluate(&data).unwrap() {
        assert!((scores[&name] - expected).abs() < 1e-6, "{name}: {} and {expected}", scores[&name]);
    }
    assert!(scores["accuracy"] > 0.7, "{scores:?}");
    let weights = estimator.variable_value("hidden.weight").unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
    let same = trainer.model().variables().iter().find(|variable| variable.name() == "hidden.weight").unwrap();
    assert_eq!(weights, same.components()[0].flatten_all().unwrap().to_vec1::<f32>().unwrap());

    let several = make(&folder.path().join("two"), &mirrored(2));
    several.train(|| Ok(batches()?.repeat_forever()), Until::MaxSteps(50)).unwrap();
    let again = several.evaluate(&EvalSpec::new(batches)).unwrap();
    assert!((again["loss"] - scores["loss"]).abs() < 1e-3, "{again:?} {scores:?}");
    let predicted = estimator.predict(|| Ok(Dataset::from_tensor_slices(features.clone()).batch(16))).unwrap();
    assert_eq!(predicted["predictions"].dims(), [COUNT, 3]);
}

#[test]
fn labels_that_are_no_targets_are_refused_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let columns = FeatureColumns::new().with(Numeric::new("rooms"));
    let build = |vb: VarBuilder<'static>| linear(1, 2, vb.pp("line"));
    let estimator = LayersEstimator::new(&columns, build, SparseCategoricalCrossentropy)
        .build(|model| Sgd::new(0.1).build(model), RunConfig::new(folder.path()))
        .unwrap();
    let texts = vec!["low"; COUNT];
    for (labels, told) in [(Column::from(vec![-1i64; COUNT]), "a label is -1"), (Column::from(texts), "they are texts")]
    {
        let error = estimator.train(|| Ok(batches(labels.clone())), Until::EndOfData).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    }
    let categories = FeatureColumns::new().with(Categorical::vocabulary("town", ["ayr"]));
    let refused = LayersEstimator::new(&categories, build, SparseCategoricalCrossentropy)
        .build(|model| Sgd::new(0.1).build(model), RunConfig::new(folder.path()));
    assert!(matches!(refused, Err(Error::FeatureColumn { .. })));
}
