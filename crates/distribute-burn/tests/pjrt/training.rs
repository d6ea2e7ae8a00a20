//! Models train as they do under `MirroredStrategy`.

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};
use distribute_burn::{
    Adadelta, Adagrad, Adam, AdamW, Adamax, BurnTensor, Clip, Error, Fit, FromElement, Ftrl, Inputs, Lamb, Loss,
    LossScale, Model, Nadam, Optimizer, RmsProp, Sgd, SparseCategoricalCrossentropy, Targets, Trainer, TrainingData,
    cross_entropy_per_example,
};
use distribute_collectives::Compression;
use distribute_input::{Array, Dataset};
use distribute_strategy::{Strategy, TpuStrategy};
use distribute_train::callbacks::{BackupAndRestore, Callback, Training};
use distribute_train::history::History;
use distribute_train::metrics::{Accuracy, Metrics};
use distribute_values::TensorStorage;

use crate::models::{Cnn, Dropping, Mlp, Transformer};
use crate::{mirrored, tpu};

/// Returns numbers between -1 and 1 that look random.
pub(crate) fn numbers(count: usize) -> Vec<f32> {
    (0..count).map(|at| ((at as f32 * 12.9898).sin() * 43758.547).fract()).collect()
}

fn classes(count: usize, of: usize) -> Vec<u32> {
    (0..count).map(|at| ((at * 7 + at / 3) % of) as u32).collect()
}

/// Rows of `width` numbers and their classes, in batches.
pub(crate) fn rows(examples: usize, width: usize, batch: usize) -> Dataset<(Array<f32>, Array<u32>)> {
    let x = Array::new([examples, width], numbers(examples * width)).unwrap();
    Dataset::from_tensor_slices((x, Array::from(classes(examples, 4)))).batch(batch)
}

pub(crate) fn assert_close(given: &[f32], expected: &[f32], tolerance: f32, what: &str) {
    assert_eq!(given.len(), expected.len(), "{what}");
    for (at, (a, b)) in given.iter().zip(expected).enumerate() {
        assert!((a - b).abs() <= tolerance * b.abs().max(1.0), "{what}, element {at}: {a} for {b}");
    }
}

/// Returns the values of all parameters, and checks that those of all replicas are equal bit for bit. Running
/// statistics differ, and show in the evaluation.
pub(crate) fn values<M: Module + Sync + 'static>(model: &Model<M>) -> Values {
    let of = |tensor: &BurnTensor| tensor.to_elements::<f32>().unwrap();
    let variable = |variable: &distribute_burn::Variable| {
        let first = of(&variable.components()[0]);
        for other in variable.components() {
            assert_eq!(of(other), first, "{}", variable.name());
        }
        (variable.name().to_owned(), first)
    };
    model.variables().iter().filter(|variable| !variable.is_statistic()).map(variable).collect()
}

/// Values of variables, by name.
pub(crate) type Values = Vec<(String, Vec<f32>)>;

pub(crate) type MakeOptimizer<M> = fn(&Model<M>) -> distribute_burn::Result<Optimizer>;

/// Returns a function that makes a model with the initial values of a seed. Nothing else may draw meanwhile.
pub(crate) fn seeded<M: Module>(seed: u64, new: fn(&Device) -> M) -> impl Fn(&Device) -> M + Send + Sync {
    move |device| {
        device.seed(seed);
        let model = new(device);
        // Initializes the parameters, which burn does when they are used first.
        let _ = model.clone().into_record();
        model
    }
}

/// Trains under a strategy; returns the losses, the variables and the predictions.
fn trained<M, X, Y, const D: usize>(
    strategy: &Strategy,
    new: fn(&Device) -> M,
    forward: fn(&M, X) -> Tensor<D>,
    optimizer: MakeOptimizer<M>,
    data: &impl TrainingData<X, Y>,
    epochs: u32,
) -> (Vec<f64>, Values, f64)
where
    M: Module + Sync + 'static,
    X: Inputs,
    Y: Targets,
    SparseCategoricalCrossentropy: Loss<D, Y>,
{
    let metrics = Metrics::new().with(Accuracy);
    let loss = SparseCategoricalCrossentropy;
    Device::flex().seed(5);
    let mut trainer = Trainer::new(strategy, seeded(5, new), forward, optimizer, loss, metrics).unwrap();
    let history = trainer.fit(data, Fit::epochs(epochs)).unwrap();
    let evaluated = trainer.evaluate(data).unwrap()[0].1;
    (history.of("loss").to_vec(), values(trainer.model()), evaluated)
}

/// Asserts that a model trains alike on PJRT devices and under `MirroredStrategy`.
fn alike<M, X, Y, const D: usize>(
    replicas: usize,
    new: fn(&Device) -> M,
    forward: fn(&M, X) -> Tensor<D>,
    optimizer: MakeOptimizer<M>,
    data: &impl TrainingData<X, Y>,
    epochs: u32,
) where
    M: Module + Sync + 'static,
    X: Inputs,
    Y: Targets,
    SparseCategoricalCrossentropy: Loss<D, Y>,
{
    let Some((_generator, strategy)) = tpu(replicas) else { return };
    let (losses, variables, evaluated) = trained(&strategy, new, forward, optimizer, data, epochs);
    let (expected, own, expected_evaluated) = trained(&mirrored(replicas), new, forward, optimizer, data, epochs);
    for ((name, given), (own_name, expected)) in variables.iter().zip(&own) {
        assert_eq!(name, own_name);
        assert_close(given, expected, 4e-5, name);
    }
    let floats = |all: &[f64]| all.iter().map(|one| *one as f32).collect::<Vec<_>>();
    assert_close(&floats(&losses), &floats(&expected), 4e-5, "losses");
    assert_close(&[evaluated as f32], &[expected_evaluated as f32], 4e-5, "evaluation");
    assert!(losses.last() < losses.first(), "{losses:?}");
}

#[test]
fn an_mlp_trains_alike_on_one_to_eight_replicas() {
    for replicas in [1, 2, 4, 8] {
        // 50 steps; the last batch of each pass has 8 examples.
        alike(replicas, Mlp::new, Mlp::forward, |model| Adam::new(0.01).build(model), &rows(72, 12, 16), 10);
    }
}

#[test]
fn a_network_with_convolutions_and_batch_normalization_trains_alike() {
    for replicas in [1, 2] {
        alike(replicas, Cnn::new, Cnn::forward, |model| Sgd::new(0.05).build(model), &rows(40, 64, 8), 10);
    }
}

#[test]
fn a_transformer_trains_alike() {
    let tokens: Vec<i64> = classes(12 * 6, 11).into_iter().map(i64::from).collect();
    let targets: Vec<i64> = tokens.iter().map(|token| (token + 1) % 11).collect();
    let array = |all: Vec<i64>| Array::new([12, 6], all).unwrap();
    let data = Dataset::from_tensor_slices((array(tokens), array(targets))).batch(4);
    // The gradients of biases of keys are 0 up to rounding, from which Adam would make steps.
    let sgd: MakeOptimizer<Transformer> = |model| Sgd::new(0.1).momentum(0.9).build(model);
    alike::<_, Tensor<2, Int>, Tensor<2, Int>, 3>(2, Transformer::new, Transformer::forward, sgd, &data, 17);
}

#[test]
fn every_optimizer_trains_alike() {
    let optimizers: [(&str, MakeOptimizer<Mlp>); 13] = [
        ("Sgd", |model| Sgd::new(0.1).build(model)),
        ("Nesterov", |model| Sgd::new(0.1).momentum(0.9).nesterov().build(model)),
        ("AdamW", |model| AdamW::new(0.01, 0.1).build(model)),
        ("Adagrad", |model| Adagrad::new(0.1).build(model)),
        ("RmsProp", |model| RmsProp::new(0.01).momentum(0.5).centered().build(model)),
        ("Lamb", |model| Lamb::new(0.01).build(model)),
        ("Adadelta", |model| Adadelta::new(1.0).build(model)),
        ("Adamax", |model| Adamax::new(0.01).build(model)),
        ("Nadam", |model| Nadam::new(0.01).build(model)),
        ("Ftrl", |model| Ftrl::new(0.1).regularization(0.01, 0.01).build(model)),
        ("Clip::Value", |model| Sgd::new(0.1).build(model)?.clip(Clip::Value(0.01))),
        ("Clip::Norm", |model| Sgd::new(0.1).build(model)?.clip(Clip::Norm(0.05))),
        ("Clip::GlobalNorm", |model| Sgd::new(0.1).build(model)?.clip(Clip::GlobalNorm(0.1))),
    ];
    for (name, optimizer) in optimizers {
        alike(2, Mlp::new, Mlp::forward, optimizer, &rows(32, 12, 8), 4);
        let _ = name;
    }
}

#[test]
fn dropout_draws_other_numbers_in_each_step_and_on_each_replica() {
    let Some((_generator, strategy)) = tpu(2) else { return };
    let train = || {
        Device::flex().seed(9);
        let sgd: MakeOptimizer<Dropping> = |model| Sgd::new(0.0).build(model);
        let metrics = Metrics::new();
        let loss = SparseCategoricalCrossentropy;
        let mut trainer = Trainer::<_, Tensor<2>, Tensor<1, Int>, 2>::new(
            &strategy,
            Dropping::new,
            Dropping::forward,
            sgd,
            loss,
            metrics,
        )
        .unwrap();
        trainer.fit(&rows(8, 12, 8), Fit::epochs(4)).unwrap().of("loss").to_vec()
    };
    let losses = train();
    // Nothing is learned, so only the masks differ.
    assert!(losses.windows(2).all(|pair| pair[0] != pair[1]), "{losses:?}");
    assert_eq!(train(), losses, "a seed repeats");
}

#[test]
fn a_wrong_class_a_read_and_a_model_on_the_host_are_errors() {
    let Some((_generator, strategy)) = tpu(2) else { return };
    let sgd: MakeOptimizer<Mlp> = |model| Sgd::new(0.1).build(model);
    let make = |forward: fn(&Mlp, Tensor<2>) -> Tensor<2>| {
        let loss = SparseCategoricalCrossentropy;
        Trainer::<_, Tensor<2>, Tensor<1, Int>, 2>::new(&strategy, Mlp::new, forward, sgd, loss, Metrics::new())
            .unwrap()
    };
    let x = Array::new([4, 12], numbers(48)).unwrap();
    let data = Dataset::from_tensor_slices((x, Array::from(vec![0u32, 3, 4, 1]))).batch(4);
    let error = make(Mlp::forward).fit(&data, Fit::epochs(1)).unwrap_err();
    assert!(matches!(error, Error::Class { class: 4, classes: 4, .. }), "{error}");
    let reads: fn(&Mlp, Tensor<2>) -> Tensor<2> = |model, x| {
        let sum = x.clone().sum().into_scalar::<f32>();
        model.forward(x.mul_scalar(sum))
    };
    let error = make(reads).fit(&rows(8, 12, 4), Fit::epochs(1)).unwrap_err().to_string();
    assert!(error.contains("cannot be compiled"), "{error}");
    let trainer = make(Mlp::forward);
    let outcome = strategy.run_with(trainer.model(), |_, model| {
        Ok::<_, Error>(model.forward(Tensor::zeros([1, 12], &Device::flex().autodiff())).dims())
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("on the host"), "{error}");
}

pub(crate) type RowTrainer<M> = Trainer<M, Tensor<2>, Tensor<1, Int>, 2>;

fn cnn_trainer(strategy: &Strategy) -> RowTrainer<Cnn> {
    let adam: MakeOptimizer<Cnn> = |model| Adam::new(0.01).build(model);
    let loss = SparseCategoricalCrossentropy;
    Trainer::new(strategy, seeded(3, Cnn::new), Cnn::forward, adam, loss, Metrics::new()).unwrap()
}

fn evaluated(trainer: &RowTrainer<Cnn>) -> f32 {
    trainer.evaluate(&rows(24, 64, 8)).unwrap()[0].1 as f32
}

/// Trains for an epoch and leaves a backup, from which others resume: with slots, statistics and counts.
#[test]
fn backups_move_to_mirrored_strategy_and_back() {
    let Some((_generator, strategy)) = tpu(2) else { return };
    for (first, second) in [(&strategy, &mirrored(2)), (&mirrored(2), &strategy)] {
        let folder = tempfile::tempdir().unwrap();
        let backup = || BackupAndRestore::new(folder.path());
        let data = rows(24, 64, 8);
        cnn_trainer(first).fit(&data, Fit::epochs(2).callback(Ending).callback(backup())).unwrap_err();
        let mut resumed = cnn_trainer(second);
        let history = resumed.fit(&data, Fit::epochs(3).callback(backup())).unwrap();
        let mut expected = cnn_trainer(&mirrored(2));
        let expected_history = expected.fit(&data, Fit::epochs(3)).unwrap();
        let floats = |history: &History| history.of("loss").iter().map(|loss| *loss as f32).collect::<Vec<_>>();
        assert_close(&floats(&history), &floats(&expected_history), 4e-5, "losses");
        assert_close(&[evaluated(&resumed)], &[evaluated(&expected)], 4e-5, "evaluation");
    }
}

/// Fails after the first epoch.
struct Ending;

impl Callback for Ending {
    fn epoch_begin(&mut self, training: &mut Training<'_>) -> distribute_train::Result<()> {
        if training.epoch == 0 { Ok(()) } else { Err(distribute_train::Error::NoExamples { what: "the end" }) }
    }
}

#[test]
fn batches_of_unequal_sizes_are_padded_or_refused() {
    for replicas in [3, 4] {
        // 17, 17 and 7 examples.
        alike(replicas, Mlp::new, Mlp::forward, |model| Sgd::new(0.1).build(model), &rows(41, 12, 17), 3);
    }
    let Some((_generator, strategy)) = tpu(2) else { return };
    let error = cnn_trainer(&strategy).fit(&rows(7, 64, 4), Fit::epochs(1)).unwrap_err().to_string();
    assert!(error.contains("statistics") && error.contains("[2, 1]"), "{error}");
}

#[test]
fn predictions_and_modules_are_those_of_the_trained_model() {
    let Some((_generator, strategy)) = tpu(4) else { return };
    let adam: MakeOptimizer<Mlp> = |model| Adam::new(0.01).build(model);
    let mut trainer: RowTrainer<Mlp> =
        Trainer::new(&strategy, Mlp::new, Mlp::forward, adam, SparseCategoricalCrossentropy, Metrics::new()).unwrap();
    trainer.fit(&rows(32, 12, 8), Fit::epochs(2).steps_per_execution(3)).unwrap();
    // Two of four replicas have no rows in the last batch.
    let x = Array::new([10, 12], numbers(120)).unwrap();
    let predicted = trainer.predict(&Dataset::from_tensor_slices(x.clone()).batch(8)).unwrap();
    let module = trainer.model().to_module(&strategy).unwrap().valid();
    let x: Tensor<2> = FromElement::from_element(&x, &Device::flex()).unwrap();
    let expected = module.forward(x);
    let floats = |tensor: Tensor<2>| tensor.into_data().try_into_vec::<f32>().unwrap();
    assert_close(&floats(predicted), &floats(expected), 4e-5, "predictions");
}

/// All positions of all sequences in one axis.
fn flat(model: &Transformer, tokens: Tensor<2, Int>) -> Tensor<2> {
    model.forward(tokens).flatten(0, 1)
}

#[test]
fn outputs_with_several_rows_for_an_example_lose_those_that_pad_it() {
    let Some((_generator, strategy)) = tpu(2) else { return };
    let array = |all: Vec<i64>| Array::new([7, 6], all).unwrap();
    let tokens: Vec<i64> = classes(7 * 6, 11).into_iter().map(i64::from).collect();
    // The last batch has two sequences on one replica and one on the other.
    let examples = Dataset::from_tensor_slices((array(tokens.clone()), array(tokens.clone()))).batch(4);
    let inputs = Dataset::from_tensor_slices(array(tokens)).batch(4);
    let computed = |strategy: &Strategy| {
        let sgd: MakeOptimizer<Transformer> = |model| Sgd::new(0.1).build(model);
        let per_sequence = |outputs: Tensor<2>, targets: Tensor<2, Int>| {
            let [sequences, length] = targets.dims();
            let losses = cross_entropy_per_example(outputs, targets.flatten::<1>(0, 1)).unwrap();
            losses.reshape([sequences, length]).mean_dim(1).flatten::<1>(0, 1)
        };
        let (new, metrics) = (seeded(5, Transformer::new), Metrics::new().with(Accuracy));
        let mut trainer =
            Trainer::<_, Tensor<2, Int>, Tensor<2, Int>, 2>::new(strategy, new, flat, sgd, per_sequence, metrics)
                .unwrap();
        trainer.fit(&examples, Fit::epochs(1)).unwrap();
        let accuracy = trainer.evaluate(&examples).unwrap()[1].1 as f32;
        let predicted = trainer.predict(&inputs).unwrap();
        let mut values = predicted.into_data().try_into_vec::<f32>().unwrap();
        values.push(accuracy);
        values
    };
    let (given, expected) = (computed(&strategy), computed(&mirrored(2)));
    assert_eq!(expected.len(), 7 * 6 * 11 + 1);
    assert_close(&given, &expected, 4e-5, "predictions and accuracy");
}

#[test]
fn a_model_that_reads_the_clock_is_refused() {
    let Some((_generator, strategy)) = tpu(1) else { return };
    static COUNTER: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let forward: fn(&Mlp, Tensor<2>) -> Tensor<2> = |model, x| {
        let count = COUNTER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        model.forward(x.mul_scalar(f64::from(count)))
    };
    let sgd: MakeOptimizer<Mlp> = |model| Sgd::new(0.1).build(model);
    let mut trainer: RowTrainer<Mlp> =
        Trainer::new(&strategy, Mlp::new, forward, sgd, SparseCategoricalCrossentropy, Metrics::new()).unwrap();
    let error = trainer.fit(&rows(8, 12, 4), Fit::epochs(1)).unwrap_err().to_string();
    assert!(error.contains("recorded again"), "{error}");
}

#[test]
fn programs_are_loaded_from_the_folder_of_an_earlier_run() {
    let Some((_generator, _)) = tpu(1) else { return };
    let folder = tempfile::tempdir().unwrap();
    let run = || {
        let strategy = TpuStrategy::builder().replicas(2).program_cache(folder.path()).build().unwrap();
        let adam: MakeOptimizer<Mlp> = |model| Adam::new(0.01).build(model);
        let (losses, variables, _) = trained(&strategy, Mlp::new, Mlp::forward, adam, &rows(32, 12, 8), 3);
        let mut files: Vec<_> = folder.path().read_dir().unwrap().map(|file| file.unwrap().file_name()).collect();
        files.sort();
        (losses, variables, files)
    };
    let (first, second) = (run(), run());
    // Those of training and of evaluation.
    assert_eq!(first.2.len(), 2, "{:?}", first.2);
    assert_eq!(first, second);
}

#[test]
fn class_weights_of_sequences_are_refused_as_under_mirrored() {
    let Some((_generator, strategy)) = tpu(2) else { return };
    let array = |all: Vec<i64>| Array::new([4, 6], all).unwrap();
    let tokens: Vec<i64> = classes(4 * 6, 11).into_iter().map(i64::from).collect();
    let data = Dataset::from_tensor_slices((array(tokens.clone()), array(tokens))).batch(4);
    for strategy in [&strategy, &mirrored(2)] {
        let sgd: MakeOptimizer<Transformer> = |model| Sgd::new(0.1).build(model);
        let loss = SparseCategoricalCrossentropy;
        let (new, forward) = (Transformer::new, Transformer::forward);
        let mut trainer =
            Trainer::<_, Tensor<2, Int>, Tensor<2, Int>, 3>::new(strategy, new, forward, sgd, loss, Metrics::new())
                .unwrap();
        let error = trainer.fit(&data, Fit::epochs(1).class_weights([0.5, 2.0])).unwrap_err();
        assert!(matches!(error, Error::Weights { given: 12, examples: 2 }), "{error}");
    }
}

#[test]
fn settings_that_programs_do_not_have_are_refused() {
    let Some((_generator, strategy)) = tpu(2) else { return };
    let optimizers: [(&str, MakeOptimizer<Mlp>); 3] = [
        ("compress", |model| Sgd::new(0.1).build(model)?.compress(Compression::Bf16)),
        ("loss scale", |model| Sgd::new(0.1).build(model)?.scale_losses(LossScale::dynamic())),
        ("zero1", |model| Sgd::new(0.1).build(model)?.zero1()),
    ];
    for (what, optimizer) in optimizers {
        let mut trainer: RowTrainer<Mlp> =
            Trainer::new(&strategy, Mlp::new, Mlp::forward, optimizer, SparseCategoricalCrossentropy, Metrics::new())
                .unwrap();
        let error = trainer.fit(&rows(8, 12, 4), Fit::epochs(1)).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    }
}
