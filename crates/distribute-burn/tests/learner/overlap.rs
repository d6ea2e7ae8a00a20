//! Gradients that are reduced while backward runs, and models whose steps change them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::module::Module;
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::tanh;
use burn::tensor::{Device, Tensor};
use burn::train::metric::LossMetric;
use burn::train::{
    InferenceStep, Learner, LearningResult, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
};
use distribute_burn::learner::{DataParallel, DistributedTraining};
use distribute_strategy::{CommunicationOptions, MirroredStrategy, Strategy, get_replica_context};
use parking_lot::Mutex;

use crate::common::{INPUTS, Log, Row, assert_close, loader, rows};

/// The way in which a step treats its gradients.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// It gives them back.
    Plain,
    /// The same, of a model whose activations are computed again.
    Recomputed,
    /// The same, of a layer that is used twice, once more outside the loss, and again after backward.
    Reused,
    /// It halves those of the head.
    Halved,
    /// It leaves those of the hidden layers out.
    HeadOnly,
    /// It adds those of the first layer from another loss, which has a backward of its own.
    TwoLosses,
    /// It halves those of the head from the fourth step on.
    HalvedLater,
}

#[derive(Module, Debug)]
struct Deep {
    hidden: Vec<Linear>,
    head: Linear,
    #[module(skip)]
    observed: Observed,
}

#[derive(Clone, Debug)]
struct Observed {
    kind: Kind,
    steps: Arc<AtomicUsize>,
    /// The number of collectives that each backward has begun on its replica.
    begun: Arc<Mutex<Vec<usize>>>,
}

fn collectives() -> usize {
    let context = get_replica_context().unwrap();
    context.group().flight_record().operations.last().map_or(0, |operation| operation.sequence as usize + 1)
}

impl Deep {
    fn new(kind: Kind) -> Deep {
        let device = Device::flex().autodiff();
        let device = if kind == Kind::Recomputed { device.gradient_checkpointing() } else { device };
        let values = |shape: [usize; 2], salt: usize| {
            let value = |at: usize| (((at + salt) * 7919 % 211) as f32 / 105.5 - 1.0) * 0.4;
            let values: Vec<f32> = (0..shape[0] * shape[1]).map(value).collect();
            Tensor::<1>::from_floats(&values[..], &device).reshape(shape).require_grad()
        };
        let linear = |inputs, outputs, salt| {
            let linear = LinearConfig::new(inputs, outputs).with_bias(false).init(&device);
            Linear { weight: burn::module::Param::from_tensor(values([inputs, outputs], salt)), ..linear }
        };
        Deep {
            hidden: (0..4).map(|layer| linear(INPUTS, INPUTS, layer)).collect(),
            head: linear(INPUTS, 1, 9),
            observed: Observed { kind, steps: Arc::default(), begun: Arc::default() },
        }
    }

    fn features(&self, x: Tensor<2>) -> Tensor<2> {
        self.hidden.iter().fold(x, |x, layer| tanh(layer.forward(x)))
    }

    fn outcome(&self, features: Tensor<2>, targets: Tensor<2>) -> RegressionOutput {
        let output = self.head.forward(features);
        let loss = MseLoss::new().forward(output.clone(), targets.clone(), Reduction::Mean);
        RegressionOutput::new(loss, output, targets)
    }
}

impl TrainStep for Deep {
    type Input = (Tensor<2>, Tensor<2>);
    type Output = RegressionOutput;

    fn step(&self, (x, targets): Self::Input) -> TrainOutput<RegressionOutput> {
        let Observed { kind, steps, begun } = &self.observed;
        let step = steps.fetch_add(1, Ordering::Relaxed);
        let x = if *kind == Kind::Reused { self.hidden[0].forward(x) } else { x };
        let unused = (*kind == Kind::Reused).then(|| self.hidden[1].forward(x.clone()));
        let features = self.features(x.clone());
        let before = collectives();
        if *kind == Kind::TwoLosses {
            let mut first = features.square().mean().backward();
            let first = GradientsParams::from_module(&mut first, self);
            let output = self.outcome(self.features(x), targets);
            let mut given = TrainOutput::new(self, output.loss.backward(), output);
            begun.lock().push(collectives() - before);
            let id = self.hidden[0].weight.id;
            given.grads.register(id, given.grads.get::<2>(id).unwrap() + first.get::<2>(id).unwrap());
            return given;
        }
        let output = self.outcome(features, targets);
        let gradients = output.loss.backward();
        begun.lock().push(collectives() - before);
        if let Some(unused) = unused {
            // The weights are there, whatever their gradients do.
            let weight: f32 = self.hidden[0].weight.val().abs().sum().into_scalar();
            assert!(weight > 0.1 && unused.sum().into_scalar::<f32>().is_finite());
        }
        let mut given = TrainOutput::new(self, gradients, output);
        let id = self.head.weight.id;
        if *kind == Kind::Halved || (*kind == Kind::HalvedLater && step >= 6) {
            let gradient = given.grads.remove::<2>(id).unwrap();
            given.grads.register(id, gradient.mul_scalar(0.5));
        }
        if *kind == Kind::HeadOnly {
            let gradient = given.grads.remove::<2>(id).unwrap();
            given.grads = GradientsParams::new();
            given.grads.register(id, gradient);
        }
        given
    }
}

impl InferenceStep for Deep {
    type Input = (Tensor<2>, Tensor<2>);
    type Output = RegressionOutput;

    fn step(&self, (x, targets): Self::Input) -> RegressionOutput {
        self.outcome(self.features(x), targets)
    }
}

fn mirrored(replicas: usize) -> Strategy {
    // A weight is a bucket.
    let communication = CommunicationOptions::default().bytes_per_pack(64);
    let builder = MirroredStrategy::builder().devices((0..replicas).map(|cpu| format!("CPU:{cpu}")));
    builder.communication(communication).build().unwrap()
}

fn launched(
    replicas: usize,
    model: Deep,
    is_after: bool,
    accumulation: Option<usize>,
) -> (LearningResult<Deep>, Vec<f64>) {
    let (folder, log) = (tempfile::tempdir().unwrap(), Log::default());
    let all: Vec<Row> = rows(50);
    let mut training = SupervisedTraining::new(folder.path(), loader(all, 8), loader(rows(20), 8))
        .with_application_logger(None)
        .with_metric_logger(log.clone())
        .metrics((LossMetric::new(),))
        .num_epochs(2);
    if let Some(steps) = accumulation {
        training = training.grads_accumulation(steps);
    }
    let parallel = DataParallel::new(&mirrored(replicas));
    let parallel = if is_after { parallel.reduce_after_backward() } else { parallel };
    let learner = Learner::new(model, AdamWConfig::new().init(), 0.01);
    let result = training.distributed_with(parallel).launch(learner);
    let losses = log.of("valid");
    (result, losses)
}

/// The losses of validation, the parameters, and the collectives that each backward has begun.
type Trained = (Vec<f64>, Vec<f32>, Vec<usize>);

fn trained(replicas: usize, kind: Kind, is_after: bool, accumulation: Option<usize>) -> Trained {
    let model = Deep::new(kind);
    let begun = model.observed.begun.clone();
    let (result, losses) = launched(replicas, model, is_after, accumulation);
    assert!(result.error.is_none(), "{kind:?}: {}", result.error.unwrap());
    let model = &result.model;
    let weights = model.hidden.iter().chain([&model.head]).map(|layer| layer.weight.val());
    let weights = weights.flat_map(|weight| weight.into_data().try_to_vec::<f32>().unwrap()).collect();
    let begun = begun.lock().clone();
    (losses, weights, begun)
}

#[test]
fn reductions_begin_before_the_end_of_backward() {
    // Before the layer whose last use no loss depends on there are three.
    for (kind, at_least) in [(Kind::Plain, 4), (Kind::Recomputed, 4), (Kind::Reused, 3)] {
        let (losses, weights, begun) = trained(2, kind, false, None);
        let (expected_losses, expected, none) = trained(2, kind, true, None);
        // The sum of two has no order.
        assert_eq!((losses, weights), (expected_losses, expected), "{kind:?}");
        // In the first step nothing is known, and in the second the order of gradients is agreed on.
        assert_eq!(begun.len(), none.len());
        assert!(begun[..4].iter().all(|begun| *begun == 0), "{kind:?}: {begun:?}");
        assert!(begun[4..].iter().all(|begun| *begun >= at_least), "{kind:?}: {begun:?}");
        assert!(none.iter().all(|begun| *begun == 0), "{kind:?}: {none:?}");
    }
}

#[test]
fn accumulated_gradients_and_replicas_without_rows_are_alike() {
    let (losses, weights, begun) = trained(2, Kind::Plain, false, Some(3));
    let (expected_losses, expected, _) = trained(2, Kind::Plain, true, Some(3));
    assert_eq!((losses, weights), (expected_losses, expected));
    assert!(begun.contains(&0) && begun.iter().any(|begun| *begun >= 4), "{begun:?}");
    // The last batches of the three replicas have 0, 1 and 1 rows.
    let (_, weights, begun) = trained(3, Kind::Plain, false, None);
    let (_, expected, _) = trained(3, Kind::Plain, true, None);
    assert_close(&weights, &expected, 1e-5);
    assert!(begun.iter().any(|begun| *begun >= 4), "{begun:?}");
}

#[test]
fn steps_that_change_their_gradients_are_trained_with_those() {
    let (_, plain, _) = trained(2, Kind::Plain, true, None);
    for kind in [Kind::Halved, Kind::HeadOnly, Kind::TwoLosses] {
        let (losses, weights, begun) = trained(2, kind, false, None);
        let (expected_losses, expected, _) = trained(2, kind, true, None);
        assert_eq!((&losses, &weights), (&expected_losses, &expected), "{kind:?}");
        assert_ne!(weights, plain, "{kind:?}");
        assert!(begun.iter().all(|begun| *begun == 0), "{kind:?}: {begun:?}");
    }
}

#[test]
fn a_step_that_changes_its_gradients_later_is_refused() {
    let (result, _) = launched(2, Deep::new(Kind::HalvedLater), false, None);
    let told = result.error.unwrap().to_string();
    assert!(told.contains("it has changed gradients") && told.contains("reduce_after_backward"), "{told}");
    let (_, weights, _) = trained(2, Kind::HalvedLater, true, None);
    assert_ne!(weights, trained(2, Kind::Plain, true, None).1);
}
