//! Parameters that share an id, and models that `TrainStep::optimize` changes: the values of burn's own strategy.

use burn::module::{Lora, Module, Param};
use burn::nn::loss::{MseLoss, Reduction};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::activation::tanh;
use burn::tensor::{Device, Int, Tensor};
use burn::train::metric::LossMetric;
use burn::train::{
    ExecutionStrategy, InferenceStep, Learner, RegressionOutput, SupervisedTraining, TrainOutput, TrainStep,
    TrainingStrategy,
};
use distribute_burn::learner::{DataParallel, DistributedTraining};
use distribute_strategy::Strategy;

use crate::common::*;

const BATCH: usize = 8;

/// The way in which the second layer's weight is a clone of the first layer's.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Both are trained.
    Tied,
    /// Both are trained, but no loss depends on the second.
    Spare,
    /// The first is frozen.
    FirstFrozen,
    /// The second is frozen: it teaches the first.
    Teacher,
    /// The second teaches the first, which it follows after each step, as do a field and a count of steps.
    Following,
    /// Both layers have clones of one batch normalization.
    TiedNorm,
    /// Both layers have a batch normalization of their own.
    TwoNorms,
}

#[derive(Module, Debug)]
struct Two {
    first: Linear,
    norm: Option<BatchNorm>,
    second: Linear,
    second_norm: Option<BatchNorm>,
    head: Linear,
    count: Param<Tensor<1, Int>>,
    scale: f32,
    #[module(skip)]
    kind: Kind,
}

impl Two {
    fn new(kind: Kind) -> Two {
        let device = Device::flex().autodiff();
        let linear = |outputs: usize, salt: usize| {
            let value = |at: usize| (((at + salt) * 7919 % 211) as f32 / 105.5 - 1.0) * 0.5;
            let values: Vec<f32> = (0..INPUTS * outputs).map(value).collect();
            let weight = Tensor::<1>::from_floats(&values[..], &device).reshape([INPUTS, outputs]).require_grad();
            let layer = LinearConfig::new(INPUTS, outputs).with_bias(false).init(&device);
            Linear { weight: Param::from_tensor(weight), ..layer }
        };
        let (first, head) = (linear(INPUTS, 1), linear(1, 5));
        let second = match kind {
            Kind::Teacher | Kind::Following => first.clone().no_grad(),
            _ => first.clone(),
        };
        let new_norm = || BatchNormConfig::new(INPUTS).init(&device);
        let norm = matches!(kind, Kind::TiedNorm | Kind::TwoNorms).then(new_norm);
        Two {
            first: if kind == Kind::FirstFrozen { first.no_grad() } else { first },
            second_norm: if kind == Kind::TwoNorms { Some(new_norm()) } else { norm.clone() },
            norm,
            second,
            head,
            count: Param::initialized(burn::module::ParamId::new(), Tensor::from_ints([0], &device)),
            scale: 1.0,
            kind,
        }
    }

    fn outcome(&self, (x, targets): (Tensor<2>, Tensor<2>)) -> RegressionOutput {
        let normed = |x: Tensor<2>, norm: &Option<BatchNorm>| norm.as_ref().map_or(x.clone(), |norm| norm.forward(x));
        let mse = |a: Tensor<2>, b: Tensor<2>| MseLoss::new().forward(a, b, Reduction::Mean);
        let hidden = normed(self.first.forward(x.clone()), &self.norm);
        let (input, distance) = match self.kind {
            Kind::Spare => (hidden, None),
            Kind::Tied | Kind::FirstFrozen | Kind::TiedNorm | Kind::TwoNorms => {
                (normed(self.second.forward(tanh(hidden)), &self.second_norm), None)
            }
            Kind::Teacher | Kind::Following => {
                let taught = self.second.forward(x).detach() + 0.1;
                let distance = mse(hidden.clone(), taught).mul_scalar(self.scale);
                (hidden, Some(distance * (self.count.val().float() * 0.25 + 1.0)))
            }
        };
        let output = self.head.forward(tanh(input));
        let loss = mse(output.clone(), targets.clone());
        RegressionOutput::new(distance.map_or(loss.clone(), |distance| loss + distance), output, targets)
    }
}

impl TrainStep for Two {
    type Input = (Tensor<2>, Tensor<2>);
    type Output = RegressionOutput;

    fn step(&self, batch: Self::Input) -> TrainOutput<RegressionOutput> {
        let output = self.outcome(batch);
        TrainOutput::new(self, output.loss.backward(), output)
    }

    fn optimize(self, optimizer: &mut ModuleOptimizer, rate: ModuleLearningRate, gradients: GradientsParams) -> Two {
        let mut two = optimizer.step(rate, self, gradients);
        if two.kind == Kind::Following {
            let student = two.first.weight.val().detach();
            two.second.weight = two.second.weight.map(|teacher| (teacher + student.set_require_grad(false)) * 0.5);
            two.count = two.count.map(|count| count + 1);
            two.scale *= 0.9;
        }
        two
    }
}

impl InferenceStep for Two {
    type Input = (Tensor<2>, Tensor<2>);
    type Output = RegressionOutput;

    fn step(&self, batch: Self::Input) -> RegressionOutput {
        self.outcome(batch)
    }
}

/// Trains under a strategy, or by burn's own if there is none. Returns the error, the losses of validation, and the
/// values of the model.
fn launched(model: Two, all: Vec<Row>, batch: usize, parallel: Option<DataParallel>) -> (String, Vec<f64>, Vec<f32>) {
    let (folder, log) = (tempfile::tempdir().unwrap(), Log::default());
    let training = SupervisedTraining::new(folder.path(), loader(all, batch), loader(rows(20), BATCH))
        .with_application_logger(None)
        .with_metric_logger(log.clone())
        .metrics((LossMetric::new(),))
        .num_epochs(2);
    let training = match parallel {
        Some(parallel) => training.distributed_with(parallel),
        None => {
            let single = ExecutionStrategy::SingleDevice(Device::flex());
            training.with_training_strategy(TrainingStrategy::Default(single))
        }
    };
    let result = training.launch(Learner::new(model, AdamWConfig::new().init(), 0.03));
    let error = result.error.as_ref().map_or_else(String::new, ToString::to_string);
    (error, log.of("valid"), values(&result.model))
}

/// Trains by burn's own strategy with the global batches of some replicas.
fn alone(kind: Kind, replicas: usize) -> (Vec<f64>, Vec<f32>) {
    let all = in_order_of_steps(&rows(50), replicas, BATCH);
    let (error, losses, values) = launched(Two::new(kind), all, replicas * BATCH, None);
    assert_eq!(error, "");
    (losses, values)
}

fn on(strategy: &Strategy, kind: Kind, is_after: bool) -> (Vec<f64>, Vec<f32>) {
    let parallel = DataParallel::new(strategy);
    let parallel = if is_after { parallel.reduce_after_backward() } else { parallel };
    let (error, losses, values) = launched(Two::new(kind), rows(50), BATCH, Some(parallel));
    assert_eq!(error, "", "{kind:?}");
    (losses, values)
}

fn refused(strategy: &Strategy, kind: Kind) -> String {
    launched(Two::new(kind), rows(50), BATCH, Some(DataParallel::new(strategy))).0
}

/// Returns the first layer's weight and the second's.
fn weights(values: &[f32]) -> (&[f32], &[f32]) {
    let len = INPUTS * INPUTS;
    (&values[..len], &values[len..2 * len])
}

fn assert_alike((losses, values): &(Vec<f64>, Vec<f32>), (expected_losses, expected): &(Vec<f64>, Vec<f32>)) {
    assert_all_close(losses, expected_losses, 1e-4);
    assert_close(values, expected, 1e-3);
}

/// Known behaviour of burn 0.22: its optimizer applies one gradient for each id, to the parameter that is visited
/// first. `TrainOutput::new` leaves that of the last visited one.
#[test]
fn burn_alone_lets_parameters_that_share_an_id_drift_apart() {
    let batch = || {
        let x = Tensor::<1>::from_floats(&[0.3, -0.5, 0.2, 0.9, -0.1, 0.4][..], &Device::flex().autodiff());
        (x.reshape([1, INPUTS]), Tensor::from_floats([[0.5]], &Device::flex().autodiff()))
    };
    let (mut two, mut optimizer) = (Two::new(Kind::Tied), SgdConfig::new().init());
    for _ in 0..3 {
        let gradients = TrainStep::step(&two, batch()).grads;
        two = optimizer.step(0.1, two, gradients);
    }
    let before = values(&Two::new(Kind::Tied));
    for after in [values(&two), alone(Kind::Tied, 1).1] {
        assert_eq!(weights(&after).1, weights(&before).1);
        assert_ne!(weights(&after).0, weights(&before).0);
    }
}

#[test]
fn parameters_that_share_an_id_are_trained_as_by_burn() {
    for kind in [Kind::Tied, Kind::Spare, Kind::FirstFrozen, Kind::Teacher] {
        assert_eq!(on(&mirrored(1), kind, false), alone(kind, 1), "{kind:?}");
        for replicas in [2, 3] {
            let expected = alone(kind, replicas);
            assert_alike(&on(&mirrored(replicas), kind, false), &expected);
            assert_alike(&on(&mirrored(replicas), kind, true), &expected);
            assert_alike(&on(&sharded(replicas, replicas), kind, false), &expected);
        }
        for (workers, replicas) in [(2, 1), (2, 2)] {
            let results = on_workers(workers, replicas, |strategy, _| on(&strategy, kind, false));
            assert_alike(&results[0], &alone(kind, workers as usize * replicas));
            assert_eq!(results[0].1, results[1].1, "{kind:?}");
        }
        let results = on_sharded_workers(2, |strategy, _| on(&strategy, kind, false));
        assert_alike(&results[0], &alone(kind, 2));
        assert_eq!(results[0].1, results[1].1, "{kind:?}");
    }
}

/// Frozen parameters, integers, and fields that are neither.
#[test]
fn all_that_optimize_changes_reaches_the_next_step() {
    let kind = Kind::Following;
    assert_eq!(on(&mirrored(1), kind, false), alone(kind, 1));
    for is_after in [false, true] {
        assert_alike(&on(&mirrored(2), kind, is_after), &alone(kind, 2));
        for (workers, replicas) in [(2, 1), (2, 2)] {
            let results = on_workers(workers, replicas, |strategy, _| on(&strategy, kind, is_after));
            assert_alike(&results[0], &alone(kind, workers as usize * replicas));
            assert_eq!(results[0].1, results[1].1);
        }
    }
}

/// The bases are frozen clones, and each has an adapter of its own.
#[test]
fn adapters_of_clones_are_trained_as_by_burn() {
    let two = Two::new(Kind::Tied).apply_lora(Lora::new(2, 2.0));
    let _ = two.clone().into_record();
    let all = in_order_of_steps(&rows(50), 2, BATCH);
    let (error, losses, expected) = launched(two.clone(), all, 2 * BATCH, None);
    assert_eq!(error, "");
    assert_ne!(expected, values(&two));
    let on = |strategy: &Strategy| {
        let (error, losses, values) = launched(two.clone(), rows(50), BATCH, Some(DataParallel::new(strategy)));
        assert_eq!(error, "");
        (losses, values)
    };
    assert_alike(&on(&mirrored(2)), &(losses.clone(), expected.clone()));
    assert_alike(&on(&sharded(2, 2)), &(losses.clone(), expected.clone()));
    let results = on_workers(2, 1, |strategy, _| on(&strategy));
    assert_alike(&results[0], &(losses, expected));
    assert_eq!(results[0].1, results[1].1);
}

#[test]
fn integers_are_the_chiefs() {
    let results = on_workers(2, 1, |strategy, rank| {
        let two = Two::new(Kind::Following);
        let two = Two { count: two.count.map(|count| count + 7 * i64::from(rank)), ..two };
        launched(two, rows(50), BATCH, Some(DataParallel::new(&strategy)))
    });
    assert_alike(&(results[0].1.clone(), results[0].2.clone()), &alone(Kind::Following, 2));
    assert_eq!(results[0].2, results[1].2);
}

/// A replica that does not own the first layer would have the second follow its old value.
#[test]
fn what_optimize_computes_from_parameters_of_other_owners_is_refused() {
    let told = refused(&sharded(2, 2), Kind::Following);
    assert!(told.contains("TrainStep::optimize has changed parameter second.weight"), "{told}");
    let told = on_sharded_workers(2, |strategy, _| refused(&strategy, Kind::Following));
    assert!(told.iter().all(|told| told.contains("has changed parameter second.weight")), "{told:?}");
}

/// burn's clones of a normalization have one statistic. Replicas of one process cannot have one each of that kind.
#[test]
fn clones_of_a_normalization_need_a_process_for_each_replica() {
    assert_eq!(on(&mirrored(1), Kind::TiedNorm, false), alone(Kind::TiedNorm, 1));
    let told = refused(&mirrored(2), Kind::TiedNorm);
    assert!(told.contains("norm.running_mean and second_norm.running_mean are one running statistic"), "{told}");
    let results = on_workers(2, 1, |strategy, _| on(&strategy, Kind::TiedNorm, false));
    assert_eq!(results[0].1, results[1].1);
    let told =
        on_workers(2, 1, |strategy, rank| refused(&strategy, if rank == 0 { Kind::TiedNorm } else { Kind::TwoNorms }));
    assert!(told.iter().all(|told| told.contains("a clone of norm.gamma")), "{told:?}");
}
