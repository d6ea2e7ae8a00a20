//! Parameters that share an id, as clones have, and those that are loaded from one record.

use burn::module::{Module, ModuleMapper, Param, ParamId};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::{GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::activation::tanh;
use burn::tensor::{Device, Tensor};
use distribute_burn::{BurnContext, BurnStrategy, Error, Model, Sgd};
use distribute_strategy::Strategy;
use distribute_train::checkpoint::{Checkpointed, MODEL, Snapshot};
use distribute_values::PerReplica;

use crate::common::*;

const STEPS: usize = 5;
const ROWS: usize = 12;
const RATE: f64 = 0.1;

/// The relation of the second layer, which has the ids of the first.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// A clone: both are trained as one.
    Tied,
    /// A frozen clone, which teaches the first.
    Teacher,
    /// The first is frozen, and the second trained.
    FirstFrozen,
    /// Both are trained, from values of their own.
    Apart,
}

#[derive(Module, Debug)]
struct Two {
    first: Linear,
    second: Linear,
    head: Linear,
    #[module(skip)]
    kind: Kind,
}

impl Two {
    fn new(kind: Kind, device: &Device) -> Two {
        seeded(device, |device| {
            let first = LinearConfig::new(INPUTS, INPUTS).init(device);
            // A clone of a parameter without a value would be frozen with it.
            let _ = (first.weight.val(), first.bias.as_ref().map(Param::val));
            let second = first.clone();
            let head = LinearConfig::new(INPUTS, CLASSES).init(device);
            let (first, second) = match kind {
                Kind::Tied => (first, second),
                Kind::Teacher => (first, second.no_grad()),
                Kind::FirstFrozen => (first.no_grad(), second),
                Kind::Apart => (first, second.map(&mut Add1)),
            };
            Two { first, second, head, kind }
        })
    }

    /// Returns the loss of each example. The frozen layer is also between trained ones.
    fn losses(&self, x: Tensor<2>) -> Tensor<1> {
        let rows = x.dims()[0];
        let hidden = self.first.forward(x.clone());
        let outputs = self.head.forward(tanh(self.second.forward(tanh(hidden.clone()))));
        let losses = (outputs - 1.0).square().mean_dim(1).reshape([rows]);
        match self.kind {
            Kind::Teacher => losses + (hidden - self.second.forward(x) - 0.5).square().mean_dim(1).reshape([rows]),
            _ => losses,
        }
    }

    /// Gives the second layer ids of its own, as burn's optimizers need them.
    fn with_own_ids(mut self) -> Two {
        self.second.weight.id = ParamId::new();
        self.second.bias.iter_mut().for_each(|bias| bias.id = ParamId::new());
        self
    }

    /// Returns the weights of both layers, and their biases.
    fn values(&self) -> [Vec<f32>; 4] {
        let bias = |layer: &Linear| numbers(layer.bias.as_ref().unwrap());
        [numbers(&self.first.weight), numbers(&self.second.weight), bias(&self.first), bias(&self.second)]
    }
}

fn numbers<const D: usize>(param: &Param<Tensor<D>>) -> Vec<f32> {
    param.val().into_data().try_to_vec().unwrap()
}

/// Trains by burn alone, and returns the losses and the module.
fn alone(kind: Kind) -> (Vec<f32>, Two) {
    let device = Device::flex().autodiff();
    let mut two = Two::new(kind, &device).with_own_ids();
    let mut optimizer: ModuleOptimizer = SgdConfig::new().init();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let (x, _) = cut(&batch(step, ROWS), 1, &device).swap_remove(0);
        let loss = two.losses(x).mean();
        losses.push(loss.clone().into_scalar::<f32>());
        let gradients = GradientsParams::from_grads(loss.backward(), &two);
        two = optimizer.step(RATE, two, gradients);
    }
    (losses, two)
}

/// Trains under a strategy, and returns the losses and the module.
fn trained(strategy: &Strategy, model: &Model<Two>) -> (Vec<f32>, Two) {
    let optimizer = Sgd::new(RATE).build(model).unwrap();
    let device = Device::flex().autodiff();
    let step = |step: usize| {
        let parts = cut(&batch(step, ROWS), strategy.num_replicas_in_sync(), &device);
        let losses =
            strategy.run_with((model, &optimizer, PerReplica::new(parts)), |context, (model, optimizer, of)| {
                let loss = context.average_loss(model.losses(of.0), ROWS);
                optimizer.minimize(context, &loss)?;
                Ok::<_, Error>(loss.into_scalar::<f32>())
            });
        losses.unwrap().values().iter().sum()
    };
    ((0..STEPS).map(step).collect(), model.to_module(strategy).unwrap())
}

#[test]
fn parameters_of_one_id_that_are_not_tied_train_as_by_burn_alone() {
    for kind in [Kind::Teacher, Kind::FirstFrozen, Kind::Apart] {
        let (losses, expected) = alone(kind);
        let before = Two::new(kind, &Device::flex().autodiff()).values();
        for strategy in [one(), mirrored(2), sharded(2)] {
            let what = format!("{kind:?} under {}", strategy.name());
            let model = strategy.scope(|device| Two::new(kind, device)).unwrap();
            let (of_strategy, module) = trained(&strategy, &model);
            assert_close(&losses, &of_strategy, 1e-4, &what);
            let after = module.values();
            for (at, (after, expected)) in after.iter().zip(&expected.values()).enumerate() {
                assert_close(after, expected, 1e-4, &what);
                // The weights of both layers, and then the biases.
                let is_frozen = match kind {
                    Kind::Teacher => at % 2 == 1,
                    Kind::FirstFrozen => at % 2 == 0,
                    _ => false,
                };
                assert_eq!(*after == before[at], is_frozen, "{what}: {at}");
            }
        }
    }
}

#[test]
fn a_teacher_is_saved_and_restored_apart_from_its_student() {
    for strategy in [one(), mirrored(2), sharded(2)] {
        let model = strategy.scope(|device| Two::new(Kind::Teacher, device)).unwrap();
        let (_, module) = trained(&strategy, &model);
        let mut snapshot = Snapshot::new(1);
        model.save(&strategy, &mut snapshot).unwrap();
        let again = strategy.scope(|device| Two::new(Kind::Teacher, device)).unwrap();
        again.load(&strategy, &snapshot).unwrap();
        assert_eq!(again.to_module(&strategy).unwrap().values(), module.values());
        let loaded = strategy.scope(|device| Two::new(Kind::Teacher, device)).unwrap();
        loaded.load_module(&module).unwrap();
        assert_eq!(loaded.to_module(&strategy).unwrap().values(), module.values());
    }
}

#[test]
fn a_clone_that_is_trained_alike_is_saved_once() {
    for strategy in [one(), mirrored(2), sharded(2)] {
        let model = strategy.scope(|device| Two::new(Kind::Tied, device)).unwrap();
        let (_, module) = trained(&strategy, &model);
        let [first, second, ..] = module.values();
        assert_eq!(first, second);
        let mut snapshot = Snapshot::new(1);
        model.save(&strategy, &mut snapshot).unwrap();
        assert_eq!(snapshot.names(MODEL), ["first.bias", "first.weight", "head.bias", "head.weight"]);
    }
}

/// Two normalizations with equal ids, as two loaded records of one layer have, and values of their own.
#[derive(Module, Debug)]
struct Norms {
    first: BatchNorm,
    second: BatchNorm,
    head: Linear,
}

/// Adds 1 to everything.
struct Add1;

impl ModuleMapper for Add1 {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.map(|value| {
            let is_trained = value.is_require_grad();
            Tensor::from_inner(value.without_autodiff() + 1.0).set_require_grad(is_trained)
        })
    }
}

impl Classifier for Norms {
    fn new(device: &Device) -> Norms {
        seeded(device, |device| {
            let first = BatchNormConfig::new(INPUTS).init(device);
            // Validation has statistics of its own.
            let second = first.valid().train().map(&mut Add1);
            Norms { first, second, head: LinearConfig::new(INPUTS, CLASSES).init(device) }
        })
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.head.forward(self.first.forward(x.clone()) + tanh(self.second.forward(x * 3.0 + 1.0)))
    }
}

impl Norms {
    fn means(&self) -> [Vec<f32>; 2] {
        [&self.first, &self.second].map(|norm| norm.running_mean.value().into_data().try_to_vec().unwrap())
    }
}

#[test]
fn statistics_of_one_id_that_layers_do_not_share_are_apart() {
    for strategy in [one(), mirrored(2)] {
        let model = scope::<Norms>(&strategy);
        assert_eq!(model.to_module(&strategy).unwrap().means(), [vec![0.0; INPUTS], vec![1.0; INPUTS]]);
        let optimizer = Sgd::new(0.1).build(&model).unwrap();
        train(&strategy, &model, &optimizer, 3);
        // The second layer sees three times the first one's input, and 1 more.
        let [first, second] = model.to_module(&strategy).unwrap().means();
        let expected: Vec<f32> = first.iter().map(|mean| 3.0 * mean + 1.0).collect();
        assert_close(&second, &expected, 1e-4, "the second layer's mean");
        let mut snapshot = Snapshot::new(1);
        model.save(&strategy, &mut snapshot).unwrap();
        let again = scope::<Norms>(&strategy);
        again.load(&strategy, &snapshot).unwrap();
        let saved = ["first.running_mean", "second.running_mean"]
            .map(|name| snapshot.numbers(MODEL, name).unwrap().into_iter().map(|x| x as f32).collect::<Vec<_>>());
        assert_eq!(again.to_module(&strategy).unwrap().means(), saved);
    }
}
