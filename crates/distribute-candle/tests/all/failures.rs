//! After a failed run all replicas have the same state between two steps, bit for bit, and training continues from it
//! as if the failure had not occurred: for every optimizer, under every strategy, and for every kind of failure.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Tensor};
use candle_nn::{BatchNorm, BatchNormConfig, Linear, ModuleT, VarBuilder, batch_norm, linear};
use distribute_candle::{
    Adadelta, Adagrad, Adam, AdamW, Adamax, CandleContext, CandleStrategy, Clip, Error, Ftrl, Lamb, LossScale, Model,
    Nadam, Optimizer, RmsProp, ScopeOptions, Sgd, SyncBatchNorm, cross_entropy_per_example, sync_batch_norm,
};
use distribute_collectives::Compression;
use distribute_strategy::{
    CentralStorageStrategy, CommunicationOptions, MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy,
    RandomState, ReplicaContext, ReplicaRandom, Strategy,
};
use distribute_testkit::short_or_long;
use distribute_values::{Aggregation, Assignment, DistributedVariable, HostTensor, TensorStorage, VariableOptions};
use rand_chacha::rand_core::Rng;

/// A model with every kind of layer that keeps state: candle's normalisation, this crate's, and statistics over all
/// replicas.
struct Net {
    first: Linear,
    own: BatchNorm,
    second: Linear,
    synchronised: SyncBatchNorm,
    third: Linear,
}

impl Net {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Net> {
        Ok(Net {
            first: linear(4, 6, vb.pp("first"))?,
            own: batch_norm(6, BatchNormConfig::default(), vb.pp("own"))?,
            second: linear(6, 5, vb.pp("second"))?,
            synchronised: sync_batch_norm(5, BatchNormConfig::default(), vb.pp("synchronised"))?,
            third: linear(5, 3, vb.pp("third"))?,
        })
    }

    fn forward(&self, x: &Tensor, synchronised: bool) -> candle_core::Result<Tensor> {
        let x = self.own.forward_t(&x.apply(&self.first)?, true)?.tanh()?.apply(&self.second)?;
        let x = if synchronised { self.synchronised.forward_t(&x, true)? } else { x };
        x.tanh()?.apply(&self.third)
    }
}

type Build = fn(&Model<Net>) -> distribute_candle::Result<Optimizer>;

/// Every optimizer, and every setting of one that keeps state.
const OPTIMIZERS: &[(&str, DType, Build)] = &[
    ("sgd", DType::F32, |model| Sgd::new(0.1).build(model)),
    ("momentum", DType::F32, |model| Sgd::new(0.1).momentum(0.9).build(model)),
    ("nesterov", DType::F32, |model| Sgd::new(0.1).momentum(0.9).nesterov().build(model)),
    ("adam", DType::F32, |model| Adam::new(0.01).build(model)),
    ("adam of 64 bits", DType::F64, |model| Adam::new(0.01).build(model)),
    ("adamw", DType::F32, |model| AdamW::new(0.01, 0.1).build(model)),
    ("adagrad", DType::F32, |model| Adagrad::new(0.1).build(model)),
    ("rmsprop", DType::F32, |model| RmsProp::new(0.01).build(model)),
    ("rmsprop with all", DType::F32, |model| RmsProp::new(0.01).momentum(0.9).centered().build(model)),
    ("lamb", DType::F32, |model| Lamb::new(0.01).build(model)),
    ("adadelta", DType::F32, |model| Adadelta::new(1.0).build(model)),
    ("adamax", DType::F32, |model| Adamax::new(0.01).build(model)),
    ("nadam", DType::F32, |model| Nadam::new(0.01).build(model)),
    ("ftrl", DType::F32, |model| Ftrl::new(0.1).build(model)),
    ("clipped", DType::F32, |model| Adam::new(0.01).build(model)?.clip(Clip::GlobalNorm(0.1))),
    ("scaled", DType::F32, |model| Adam::new(0.01).build(model)?.scale_losses(LossScale::dynamic().interval(2))),
    ("sharded", DType::F32, |model| Adam::new(0.01).build(model)?.zero1()),
    ("sharded and scaled", DType::F32, |model| {
        Adam::new(0.01)
            .build(model)?
            .scale_losses(LossScale::dynamic().interval(2))?
            .clip(Clip::GlobalNorm(0.1))?
            .zero1()
    }),
    ("top-k", DType::F32, |model| Adam::new(0.01).build(model)?.compress(Compression::TopK(0.3))),
    ("power-sgd", DType::F32, |model| Adam::new(0.01).build(model)?.compress(Compression::PowerSgd(1))),
];

/// A deadline long enough for regular calls, and short enough for a test to end.
fn communication() -> CommunicationOptions {
    CommunicationOptions::default().timeout(Duration::from_secs(20))
}

fn devices(count: usize) -> Vec<String> {
    (0..count).map(|index| format!("CPU:{index}")).collect()
}

fn mirrored(replicas: usize) -> Strategy {
    MirroredStrategy::builder().devices(devices(replicas)).communication(communication()).build().unwrap()
}

fn strategies() -> Vec<Strategy> {
    vec![
        mirrored(2),
        CentralStorageStrategy::builder().compute_devices(devices(3)).communication(communication()).build().unwrap(),
        MultiWorkerMirroredStrategy::builder().devices(devices(2)).communication(communication()).build().unwrap(),
        Strategy::default_strategy().unwrap(),
        OneDeviceStrategy::builder("CPU:0").build().unwrap(),
    ]
}

/// The behaviour of one replica while the others make a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    Panics,
    Errs,
    /// Fails after the first half of its gradients was accumulated.
    ErrsHalfWay,
    ReturnsEarly,
    CallsBarrier,
    /// Ignores the error of the barrier.
    CallsBarrierAndGoesOn,
    MinimizesTwice,
    PanicsAfterTheStep,
    ErrsAfterTheStep,
}

impl Failure {
    const ALL: [Failure; 9] = [
        Failure::Panics,
        Failure::Errs,
        Failure::ErrsHalfWay,
        Failure::ReturnsEarly,
        Failure::CallsBarrier,
        Failure::CallsBarrierAndGoesOn,
        Failure::MinimizesTwice,
        Failure::PanicsAfterTheStep,
        Failure::ErrsAfterTheStep,
    ];

    /// Returns whether all replicas have made the step before it.
    fn comes_after_the_step(self) -> bool {
        matches!(self, Failure::MinimizesTwice | Failure::PanicsAfterTheStep | Failure::ErrsAfterTheStep)
    }

    /// Returns whether the others make other calls of the group meanwhile. With a layer that calls another group the
    /// two would wait for each other until the deadline.
    fn calls_others(self) -> bool {
        matches!(self, Failure::CallsBarrier | Failure::CallsBarrierAndGoesOn)
    }

    /// Returns whether a replica can fail this way without others.
    fn needs_others(self) -> bool {
        !matches!(
            self,
            Failure::Panics
                | Failure::Errs
                | Failure::ErrsHalfWay
                | Failure::PanicsAfterTheStep
                | Failure::ErrsAfterTheStep
        )
    }
}

/// A training with everything that keeps state.
struct Training {
    strategy: Strategy,
    model: Model<Net>,
    optimizer: Optimizer,
    random: ReplicaRandom,
    seen: DistributedVariable<HostTensor>,
    total: DistributedVariable<HostTensor>,
    /// Whether the model uses the normalisation over all replicas.
    synchronised: bool,
}

impl Training {
    fn new(strategy: Strategy, dtype: DType, build: Build) -> Option<Training> {
        let model = strategy.scope_with(ScopeOptions::default().dtype(dtype), Net::new).unwrap();
        let optimizer = match build(&model) {
            Ok(optimizer) => optimizer,
            // For example sharded state under a strategy with one copy of all variables.
            Err(Error::Optim(distribute_optim::Error::Combination { .. })) => return None,
            Err(error) => panic!("{error}"),
        };
        let variable = |name, options| strategy.variable(name, &HostTensor::scalar(0.0), options).unwrap();
        let seen = variable("seen", VariableOptions::on_read(Aggregation::Sum));
        let total = variable("total", VariableOptions::on_write(Aggregation::Sum));
        let random = strategy.random(3);
        Some(Training { strategy, model, optimizer, random, seen, total, synchronised: true })
    }

    /// Makes one step, in which a replica may fail.
    fn step(&self, step: usize, failing: Option<(usize, Failure)>) -> Result<(), Error> {
        let run = || {
            self.strategy.run_with((&self.model, &self.optimizer), |context, (model, optimizer)| {
                let local = context.local_replica_id();
                let failure = failing.filter(|(replica, _)| *replica == local).map(|(_, failure)| failure);
                let planned = || Error::Candle(candle_core::Error::Msg("as planned".to_owned()));
                self.seen.assign(context.call_context(), Assignment::Add, &HostTensor::scalar(8.0))?;
                self.total.assign(context.call_context(), Assignment::Add, &HostTensor::scalar(1.0))?;
                let loss = |half| self.loss(context, model, step, half);
                optimizer.accumulate(context, &loss(0)?)?;
                if failure == Some(Failure::ErrsHalfWay) {
                    return Err(planned());
                }
                let second = loss(1)?;
                match failure {
                    Some(Failure::Panics) => panic!("as planned"),
                    Some(Failure::Errs) => return Err(planned()),
                    Some(Failure::ReturnsEarly) => return Ok(()),
                    Some(Failure::CallsBarrier) => context.barrier()?,
                    Some(Failure::CallsBarrierAndGoesOn) => {
                        assert!(context.barrier().is_err());
                        return Ok(());
                    }
                    _ => {}
                }
                let outcome = optimizer.minimize(context, &second);
                if failing.is_some_and(|(_, failure)| failure == Failure::CallsBarrierAndGoesOn) {
                    return Ok(());
                }
                outcome?;
                match failure {
                    Some(Failure::MinimizesTwice) => optimizer.minimize(context, &second),
                    Some(Failure::PanicsAfterTheStep) => panic!("as planned"),
                    Some(Failure::ErrsAfterTheStep) => Err(planned()),
                    _ => Ok(()),
                }
            })
        };
        run().map(drop)
    }

    /// Computes this replica's share of the loss of half a batch.
    fn loss(&self, context: &ReplicaContext, net: &Net, step: usize, half: usize) -> Result<Tensor, Error> {
        let mut random = self.random.next(context);
        let at = (step * 2 + half) * 7 + context.replica_id() * 3;
        // Dropout, with a random stream that must continue after a failure.
        let x: Vec<f64> = (0..16)
            .map(|i| if random.next_u32().is_multiple_of(4) { 0.0 } else { ((i + at) * 37 % 101) as f64 / 50.0 - 1.0 })
            .collect();
        let dtype = self.model.variables()[0].components()[0].dtype();
        let x = Tensor::from_vec(x, (4, 4), &Device::Cpu)?.to_dtype(dtype)?;
        let y = Tensor::from_vec((0..4).map(|i| ((i + at) % 3) as u32).collect(), 4, &Device::Cpu)?;
        let per_example = cross_entropy_per_example(&net.forward(&x, self.synchronised)?, &y)?;
        context.average_loss(&per_example, 8 * context.num_replicas_in_sync())
    }

    /// Returns the whole state, bit for bit: by variable or slot, for each replica.
    fn state(&self) -> State {
        let tensors: Vec<(String, bool, Vec<Vec<u8>>)> = self
            .model
            .variables()
            .iter()
            .map(|variable| (variable.name().to_owned(), variable.is_trainable(), bits(variable.components())))
            .chain(self.optimizer.slots().map(|slot| (slot.name().to_owned(), true, bits(slot.components()))))
            .collect();
        let numbers = |variable: &DistributedVariable<HostTensor>| -> Vec<f64> {
            variable.components().iter().map(|component| component.to_elements::<f64>().unwrap()[0]).collect()
        };
        State {
            tensors,
            random: self.random.state(),
            seen: numbers(&self.seen),
            total: numbers(&self.total),
            loss_scale: self.optimizer.loss_scale(),
            gradient_norm: self.optimizer.gradient_norm(),
        }
    }
}

#[derive(Debug, PartialEq)]
struct State {
    /// Name, whether it is equal on all replicas, and the bytes of each.
    tensors: Vec<(String, bool, Vec<Vec<u8>>)>,
    random: RandomState,
    seen: Vec<f64>,
    total: Vec<f64>,
    loss_scale: f64,
    gradient_norm: Option<f64>,
}

impl State {
    fn check(&self, expected: &State, when: &str) {
        for ((name, same, got), (_, _, expected)) in self.tensors.iter().zip(&expected.tensors) {
            if *same {
                assert!(got.iter().all(|replica| *replica == got[0]), "{when}: {name} differs between replicas");
            }
            assert!(got == expected, "{when}: {name} is not what it is without a failure");
        }
        assert_eq!(self, expected, "{when}");
    }
}

fn bits(components: &[Tensor]) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for component in components {
        let mut bytes = Vec::new();
        TensorStorage::read(component, &mut |buffer| bytes.extend_from_slice(buffer.as_bytes())).unwrap();
        all.push(bytes);
    }
    all
}

/// Fails in the third step in each of the ways, each time in a new training.
fn fail_in_every_way(name: &str, make: impl Fn() -> Option<Training>, failures: &[Failure]) {
    let (others, own): (Vec<Failure>, Vec<Failure>) = failures.iter().partition(|failure| failure.calls_others());
    fail_in(name, &make, &own);
    if !others.is_empty() {
        fail_in(name, || make().map(|training| Training { synchronised: false, ..training }), &others);
    }
}

fn fail_in(name: &str, make: impl Fn() -> Option<Training>, failures: &[Failure]) {
    let Some(undisturbed) = make() else { return };
    let mut expected = Vec::new();
    for step in 0..5 {
        undisturbed.step(step, None).unwrap();
        expected.push(undisturbed.state());
    }
    let replicas = undisturbed.strategy.num_local_replicas();
    for failure in failures.iter().filter(|failure| replicas > 1 || !failure.needs_others()) {
        let culprits = match name {
            "adam" if replicas > 1 => vec![0, replicas - 1],
            _ => vec![if (*failure as usize).is_multiple_of(2) { 0 } else { replicas - 1 }],
        };
        for replica in culprits {
            let when = format!("{name} under {}, replica {replica} {failure:?}", undisturbed.strategy.describe());
            let training = make().unwrap();
            for step in 0..2 {
                training.step(step, None).unwrap();
            }
            let began = Instant::now();
            let error = training.step(2, Some((replica, *failure))).expect_err(&when);
            assert!(began.elapsed() < Duration::from_secs(10), "{when}: took {:?}: {error}", began.elapsed());
            let done = if failure.comes_after_the_step() { 3 } else { 2 };
            training.state().check(&expected[done - 1], &when);
            for (step, expected) in expected.iter().enumerate().skip(done) {
                training.step(step, None).unwrap_or_else(|error| panic!("{when}: step {step}: {error}"));
                training.state().check(expected, &format!("{when}, after step {step}"));
            }
        }
    }
}

/// Silences the messages of intended panics, except those of assertions.
fn quiet() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if info.payload().downcast_ref::<&str>() != Some(&"as planned") {
                loud(info);
            }
        }));
    });
}

#[test]
fn every_optimizer_goes_on_after_failures_of_three_replicas() {
    quiet();
    for (at, (name, dtype, build)) in OPTIMIZERS.iter().enumerate() {
        // All failures of optimizers that keep the most, and three of each other: each failure with a third of those.
        let some: Vec<Failure> = (0..3).map(|third| Failure::ALL[(at + 3 * third) % Failure::ALL.len()]).collect();
        let keeps_most = ["adam", "sharded and scaled", "power-sgd"].contains(name);
        let failures = if keeps_most { &Failure::ALL[..] } else { &some };
        fail_in_every_way(name, || Training::new(mirrored(3), *dtype, *build), failures);
    }
}

#[test]
fn every_strategy_goes_on_after_failures() {
    quiet();
    for place in 0..strategies().len() {
        for (at, (name, dtype, build)) in OPTIMIZERS.iter().enumerate() {
            // In the short form each optimizer fails under every second strategy.
            let (turn, turns) = (at + place, short_or_long(2, 1));
            let failures: &[Failure] = match *name {
                "adam" => &Failure::ALL,
                _ if !turn.is_multiple_of(turns) => continue,
                _ if (turn / turns).is_multiple_of(2) => &[Failure::Errs],
                _ => &[Failure::MinimizesTwice],
            };
            let make = || Training::new(strategies().swap_remove(place), *dtype, *build);
            fail_in_every_way(name, make, failures);
        }
    }
}

#[test]
fn the_first_step_may_fail_too() {
    quiet();
    for failure in Failure::ALL {
        let build: Build = |model| Adam::new(0.01).build(model);
        let make = |_| Training {
            synchronised: !failure.calls_others(),
            ..Training::new(mirrored(3), DType::F32, build).unwrap()
        };
        let [undisturbed, training] = [0, 1].map(make);
        training.step(0, Some((1, failure))).unwrap_err();
        for step in 0..3 {
            undisturbed.step(step, None).unwrap();
            if step > 0 || !failure.comes_after_the_step() {
                training.step(step, None).unwrap();
            }
            training.state().check(&undisturbed.state(), &format!("{failure:?} in the first step, after step {step}"));
        }
    }
}

#[test]
fn a_replica_that_ends_early_is_named_at_once() {
    let training = Training::new(mirrored(3), DType::F32, |model| Adam::new(0.01).build(model)).unwrap();
    let began = Instant::now();
    let error = training.step(0, Some((1, Failure::ReturnsEarly))).unwrap_err().to_string();
    assert!(error.contains("rank 1") && error.contains("has ended its part without"), "{error}");
    // The group's own timeout is twenty seconds.
    assert!(began.elapsed() < Duration::from_secs(10));
}

#[test]
fn an_error_that_a_closure_takes_for_no_matter_is_the_runs_error() {
    let strategy = mirrored(2);
    let outcome = strategy.run_with((), |context, ()| {
        if context.replica_id() == 0 {
            // No other replica calls it.
            assert!(context.barrier().is_err());
        }
        Ok::<(), Error>(())
    });
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("rank 1") && error.contains("barrier"), "{error}");
    strategy.run_with((), |context, ()| Ok::<_, Error>(context.barrier()?)).unwrap();
}
