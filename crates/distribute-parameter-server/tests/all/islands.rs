//! Islands that train apart, on real connections.
#![allow(clippy::print_stdout, reason = "processes say how far they are")]

mod exchanges;
mod faults;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use distribute_cluster::{ClusterSpec, SimpleResolver, Task, TaskType};
use distribute_optim::{HostError, HostLoss, HostModel, Optimizer, Sgd, Trainable};
use distribute_parameter_server::{
    DecoupledDilocoBuilder, DecoupledDilocoStrategy, Error, OuterExchange, OuterOutcome, OuterServer,
    OuterServerOptions,
};
use distribute_strategy::{MirroredStrategy, OneDeviceStrategy, OuterNesterov, Strategy, Wire};
use distribute_testkit::Ports;
use distribute_train::checkpoint::CheckpointManager;
use distribute_types::{ErrorClass, FailureKind};
use distribute_values::{Host, HostTensor, TensorStorage};

use crate::harness::{SILENCE, SOON};

/// An outer step sets parameters to the mean of the islands'.
const MEAN: OuterNesterov = OuterNesterov { learning_rate: 1.0, momentum: 0.0 };

/// The variables of the model, and their lengths.
const LENS: [(&str, usize); 3] = [("w", 5), ("v", 600), ("b", 1)];

fn cluster(servers: usize, islands: usize) -> ClusterSpec {
    let ports = Ports::reserve(servers + islands).unwrap();
    let addresses = ports.addresses();
    let (of_servers, of_islands) = addresses.split_at(servers);
    let spec = ClusterSpec::new().with_job(TaskType::Ps, of_servers.to_vec()).unwrap();
    spec.with_job(TaskType::Worker, of_islands.to_vec()).unwrap()
}

fn resolver(spec: &ClusterSpec, kind: TaskType, index: usize) -> SimpleResolver {
    let task = Task::new(kind, index as u32);
    SimpleResolver {
        spec: spec.clone(),
        task_type: Some(task.kind),
        task_id: Some(task.index),
        ..SimpleResolver::default()
    }
}

fn server(spec: &ClusterSpec, index: usize) -> OuterServer {
    let options = OuterServerOptions::default().silence(SILENCE).island_timeout(SOON);
    OuterServer::start_with(&resolver(spec, TaskType::Ps, index), options).unwrap()
}

fn builder(spec: &ClusterSpec, index: usize) -> DecoupledDilocoBuilder {
    let builder = DecoupledDilocoStrategy::builder(&resolver(spec, TaskType::Worker, index)).unwrap();
    // Islands of a test start at different times.
    builder.silence(SILENCE).connect_timeout(SOON).message_timeout(SOON).server_timeout(SOON).grace(SOON)
}

fn one_device() -> Strategy {
    OneDeviceStrategy::builder("CPU:0").build().unwrap()
}

/// A model whose loss is half the squared distance to a point.
struct Quadratic {
    strategy: Strategy,
    model: HostModel,
    optimizer: Optimizer<Host>,
}

impl Quadratic {
    fn new(strategy: Strategy, rate: f64) -> Quadratic {
        let variable = |(name, len): (&'static str, usize)| (name, HostTensor::new(&[len], vec![1.0; len]).unwrap());
        Quadratic::of(strategy, rate, LENS.map(variable))
    }

    fn of<const N: usize>(strategy: Strategy, rate: f64, variables: [(&str, HostTensor<f32>); N]) -> Quadratic {
        let model = HostModel::new(&strategy, variables).unwrap();
        let optimizer = Sgd::new(rate).build(&model).unwrap();
        Quadratic { strategy, model, optimizer }
    }

    /// Makes a step towards the points that `target` returns for each variable and element.
    fn step(&self, target: impl Fn(usize, usize) -> f32 + Sync) -> Result<(), HostError> {
        let run = self.strategy.run_with(&self.optimizer, |context, optimizer| {
            let share = 1.0 / context.num_replicas_in_sync() as f32;
            let variables = self.model.parameters().variables();
            let gradient = |(number, variable): (usize, &distribute_optim::backend::Variable<Host>)| {
                let values = variable.components()[context.replica_id()].to_elements::<f32>()?;
                let of = values.iter().enumerate().map(|(at, value)| share * (value - target(number, at)));
                Ok(Some(HostTensor::new(&[values.len()], of.collect())?))
            };
            let gradients = variables.iter().enumerate().map(gradient).collect::<Result<_, HostError>>()?;
            optimizer.minimize(context, &HostLoss(gradients))
        });
        run.map(drop)
    }

    fn values(&self) -> Vec<f32> {
        self.model.values().unwrap().concat()
    }
}

/// Keeps the exchanges of an island.
fn watched(builder: DecoupledDilocoBuilder) -> (DecoupledDilocoBuilder, Arc<Mutex<Vec<OuterExchange>>>) {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let keep = seen.clone();
    (builder.on_exchange(move |exchange| keep.lock().unwrap().push(exchange.clone())), seen)
}

/// Runs each island on a thread of its own, and returns what they return.
fn islands<T: Send>(count: usize, run: impl Fn(usize) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let run = &run;
        let threads: Vec<_> = (0..count).map(|index| scope.spawn(move || run(index))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// The point of an island: multiples of 1/4.
fn point(island: usize, variable: usize, at: usize) -> f32 {
    ((island * 7 + variable * 3 + at * 5) % 17) as f32 / 4.0 - 2.0
}

#[test]
fn all_islands_after_every_step_are_the_mean_of_their_parameters() {
    let spec = cluster(2, 4);
    let servers = [server(&spec, 0), server(&spec, 1)];
    let (steps, rate) = (4, 0.5f32);
    let results = islands(4, |index| {
        let (builder, seen) = watched(builder(&spec, index).inner_steps(1).outer(MEAN).quorum(4));
        let island = Quadratic::new(builder.over(one_device()).unwrap(), rate.into());
        for _ in 0..steps {
            island.step(|variable, at| point(index, variable, at)).unwrap();
        }
        (island.values(), seen.lock().unwrap().clone())
    });
    // The same in one place. With rate 1/2 the numbers are multiples of 2^-9 at most, and below 4: neither differences
    // nor the mean of four are rounded, so all bits are equal.
    let mut expected = vec![1.0f32; 606];
    for _ in 0..steps {
        let mut at_all = 0;
        for (variable, (_, len)) in LENS.into_iter().enumerate() {
            for at in 0..len {
                let moved = (0..4).map(|island| {
                    let value = expected[at_all];
                    value - rate * (value - point(island, variable, at))
                });
                expected[at_all] = moved.sum::<f32>() / 4.0;
                at_all += 1;
            }
        }
    }
    for (values, seen) in results {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&values), bits(&expected));
        let outcomes: Vec<_> = seen.iter().map(|exchange| (exchange.outcome.clone(), exchange.outer_steps)).collect();
        let counted = (1..=steps).map(|step| (OuterOutcome::Counted { late: 0 }, step));
        assert_eq!(outcomes, [(OuterOutcome::Joined, 0)].into_iter().chain(counted).collect::<Vec<_>>());
        // Of a join, one of four islands sends, and the others receive.
        assert!(seen[1..].iter().all(|exchange| exchange.sent_bytes == 4 * 606 && exchange.received_bytes == 4 * 606));
    }
    servers.into_iter().for_each(|server| server.join().unwrap());
}

#[test]
fn islands_of_different_speeds_converge_in_eight_bits() {
    let spec = cluster(2, 3);
    let servers = [server(&spec, 0), server(&spec, 1)];
    // Noise that each island has of its own, and that its learning rate of 0.02 reduces to 0.02 in a step.
    let noise = |island: usize, step: usize| if (step / (island + 1)).is_multiple_of(2) { 1.0 } else { -1.0 };
    let results = islands(3, |index| {
        // One exchanges every 2 steps, one every 4, and one, whose steps are slow, every 6.
        let inner_steps = [2, 4, 6][index];
        let outer = OuterNesterov { learning_rate: 0.7, momentum: 0.3 };
        let builder = builder(&spec, index).inner_steps(inner_steps).fragments(2).outer(outer).quorum(2);
        let builder = builder.wire(Wire::Int8).grace(Duration::from_millis(20)).staleness(50);
        let (builder, seen) = watched(builder.examples_per_step(32));
        let island = Quadratic::new(builder.over(one_device()).unwrap(), 0.02);
        let joined = || seen.lock().unwrap().iter().map(|exchange| exchange.outer_steps).max().unwrap_or(0);
        let mut steps = 0;
        // Until there were many outer steps, however fast this machine is.
        while joined() < 60 {
            island.step(|variable, at| point(0, variable, at) + noise(index, steps)).unwrap();
            std::thread::sleep(Duration::from_millis([1, 2, 5][index]));
            steps += 1;
            assert!(steps < 20_000, "there are no outer steps");
        }
        (island.values(), seen.lock().unwrap().clone())
    });
    for (values, seen) in results {
        let points = LENS.into_iter().enumerate().flat_map(|(of, (_, len))| (0..len).map(move |at| point(0, of, at)));
        for (value, point) in values.iter().zip(points) {
            // From 1, as far as 3 away.
            assert!((value - point).abs() < 0.2, "{value}, not {point}");
        }
        // 606 values in two fragments, of which one has a block of 5 more than the other; with the scales.
        let sent: Vec<u64> =
            seen.iter().filter(|seen| seen.outcome != OuterOutcome::Joined).map(|seen| seen.sent_bytes).collect();
        assert!(sent.iter().all(|bytes| *bytes <= 606 + 4 * 5), "{sent:?}");
    }
    servers.into_iter().for_each(|server| server.join().unwrap());
}

#[test]
fn replicas_of_an_island_are_one_and_stay_equal() {
    let spec = cluster(1, 2);
    let server = server(&spec, 0);
    let results = islands(2, |index| {
        let over = match index {
            0 => MirroredStrategy::builder().num_replicas(3).build().unwrap(),
            _ => one_device(),
        };
        let builder = builder(&spec, index).inner_steps(3).outer(MEAN).quorum(2).wire(Wire::Int8);
        let strategy = builder.over(over).unwrap();
        assert!(strategy.describe().starts_with(&format!("DecoupledDiloco, island {} of 2", index + 1)));
        let island = Quadratic::new(strategy, 0.25);
        for step in 1..=6 {
            // Both have one point, so that their parameters are equal, up to the sum of three replicas.
            island.step(|variable, at| point(1, variable, at)).unwrap();
            island.model.parameters().check_equal().unwrap();
            assert_eq!(island.optimizer.memory().local_slot_bytes % (4 * 606), 0, "step {step}");
        }
        island.values()
    });
    for (one, other) in results[0].iter().zip(&results[1]) {
        assert_eq!(one.to_bits(), other.to_bits(), "both have the outer parameters");
    }
    server.join().unwrap();
}

#[test]
fn an_island_that_joins_continues_from_the_outer_parameters() {
    let spec = cluster(1, 2);
    let server = server(&spec, 0);
    let options = |index| builder(&spec, index).inner_steps(2).outer(MEAN).quorum(1).grace(Duration::ZERO);
    let first = Quadratic::new(options(0).over(one_device()).unwrap(), 0.5);
    for _ in 0..20 {
        first.step(|_, _| 3.0).unwrap();
    }
    let (builder, seen) = watched(options(1));
    let strategy = builder.over(one_device()).unwrap();
    // It begins elsewhere, and its first step is added to what it gets.
    let second = Quadratic::new(strategy, 0.5);
    second.step(|_, _| 2.0).unwrap();
    let seen = seen.lock().unwrap().clone();
    let [OuterExchange { outcome: OuterOutcome::Joined, outer_steps: 10, is_newer: true, .. }] = seen[..] else {
        panic!("{seen:?}");
    };
    // From 1 half of the way to 2, which is as far from 3.
    assert!(second.values().iter().all(|value| (value - 3.5).abs() < 1e-3), "{:?}", second.values());
    drop((first, second));
    server.join().unwrap();
}

#[test]
fn an_island_that_resumes_sends_nothing_a_second_time() {
    let (spec, folder) = (cluster(1, 2), tempfile::tempdir().unwrap());
    let server = server(&spec, 0);
    let options = |index| builder(&spec, index).inner_steps(4).outer(MEAN).quorum(1).grace(Duration::ZERO);
    let other = options(1).over(one_device()).unwrap();
    let mut checkpoints = CheckpointManager::new(folder.path());
    // The checkpoint has changes of two steps that are sent after it.
    let saved = {
        let island = Quadratic::new(options(0).over(one_device()).unwrap(), 0.5);
        (0..6).for_each(|_| island.step(|_, _| 3.0).unwrap());
        checkpoints.save(&island.strategy, 6, &[&island.optimizer], &()).unwrap();
        checkpoints.finish().unwrap();
        let saved = island.model.values().unwrap();
        (0..2).for_each(|_| island.step(|_, _| 3.0).unwrap());
        saved
    };
    let (builder, seen) = watched(options(0));
    let restored = LENS.iter().zip(saved);
    let restored: Vec<(&str, HostTensor<f32>)> =
        restored.map(|((name, len), values)| (*name, HostTensor::new(&[*len], values).unwrap())).collect();
    let island = Quadratic::of::<3>(builder.over(one_device()).unwrap(), 0.5, restored.try_into().unwrap());
    checkpoints.restore::<()>(&island.strategy, &[&island.optimizer]).unwrap().unwrap();
    island.step(|_, _| 3.0).unwrap();
    assert_eq!(seen.lock().unwrap()[0].outcome, OuterOutcome::Joined);
    // Those after eight steps, half of the way from 1 to 3 in each.
    let expected = 3.0 - 2.0 * 0.5f32.powi(8);
    assert!(island.values().iter().all(|value| *value == expected), "{:?}, not {expected}", island.values());
    // What it does from here on counts.
    (0..1).for_each(|_| island.step(|_, _| 3.0).unwrap());
    let expected = 3.0 - 2.0 * 0.5f32.powi(9);
    assert!(island.values().iter().all(|value| *value == expected), "{:?}, not {expected}", island.values());
    drop((island, other));
    server.join().unwrap();
}

#[test]
fn what_does_not_belong_together_is_refused_in_words() {
    let spec = cluster(1, 2);
    let server = server(&spec, 0);
    let options = |index| builder(&spec, index).inner_steps(1).quorum(1).grace(Duration::ZERO);
    let first = Quadratic::new(options(0).over(one_device()).unwrap(), 0.5);
    first.step(|_, _| 0.0).unwrap();

    let told = |error: Error, words: &str| assert!(error.to_string().contains(words), "{error}");
    told(options(1).quorum(2).over(one_device()).unwrap_err(), "worker:0, which came first");
    let other_outer = options(1).outer(MEAN).over(one_device()).unwrap_err();
    told(other_outer, "give every island the same");
    // Another job, with the same server.
    let mut other = spec.to_json();
    other["worker"] = serde_json::json!(["127.0.0.1:1", "127.0.0.1:2"]);
    let other = builder(&ClusterSpec::from_json(&other).unwrap(), 1);
    told(other.over(one_device()).unwrap_err(), "belongs to job");

    // Other names and shapes.
    let tensor = |len: usize| HostTensor::new(&[len], vec![0.0; len]).unwrap();
    let second = Quadratic::of(options(1).over(one_device()).unwrap(), 0.5, [("w", tensor(5)), ("u", tensor(600))]);
    let error = second.step(|_, _| 0.0).unwrap_err();
    assert!(error.to_string().contains("is v of 600 elements here, and u of 600 elements on worker:1"), "{error}");
    drop(second);
    let second = Quadratic::of(options(1).over(one_device()).unwrap(), 0.5, [("w", tensor(6))]);
    let error = second.step(|_, _| 0.0).unwrap_err();
    assert!(error.to_string().contains("is w of 5 elements here, and w of 6 elements on worker:1"), "{error}");
    assert_eq!(error.failure_kind(), FailureKind::Permanent);
    drop(second);

    // Changes that are not finite, in either wire format; the outer parameters stay.
    for wire in [Wire::F32, Wire::Int8] {
        let second = Quadratic::new(options(1).wire(wire).over(one_device()).unwrap(), 0.5);
        second.step(|_, _| 0.0).unwrap();
        let error = second.step(|variable, at| if (variable, at) == (1, 7) { f32::NAN } else { 0.0 }).unwrap_err();
        assert!(
            error.to_string().contains("changes of worker:1 are not finite, first those of variable \"v\""),
            "{error}"
        );
    }
    first.step(|_, _| 0.0).unwrap();
    assert!(first.values().iter().all(|value| value.is_finite()));

    // Another process of the same task; the earlier one is told.
    let again = Quadratic::new(options(0).over(one_device()).unwrap(), 0.5);
    again.step(|_, _| 0.0).unwrap();
    let error = first.step(|_, _| 0.0).unwrap_err();
    assert!(error.to_string().contains("another process attends as worker:0 by now"), "{error}");
    drop((first, again));
    server.join().unwrap();
}

#[test]
fn settings_outside_their_ranges_are_refused_before_anything_is_sent() {
    // No server listens.
    let spec = cluster(1, 2);
    let told = |builder: DecoupledDilocoBuilder, words: &str| {
        let error = builder.over(one_device()).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(error.failure_kind(), FailureKind::Configuration);
    };
    let options = || builder(&spec, 0);
    told(options().inner_steps(0), "at least 1");
    told(options().inner_steps(10).fragments(4), "such as 12");
    told(options().quorum(3), "the quorum is 3 of 2 islands");
    told(options().quorum(0), "the quorum is 0 of 2 islands");
    told(options().mixing(1.0), "from 0 to below 1");
    told(options().mixing(f64::NAN), "from 0 to below 1");
    told(options().examples_per_step(0), "at least 1");
    told(options().grace(Duration::MAX), "at most a day");
    told(options().silence(Duration::ZERO), "at least 1 s");
    told(options().outer(OuterNesterov { learning_rate: 0.0, momentum: 0.0 }), "outer learning rate");
    let apart = distribute_strategy::DilocoStrategy::builder().over(one_device()).unwrap();
    let error = options().over(apart).unwrap_err().to_string();
    assert!(error.contains("train apart already"), "{error}");
    let error = DecoupledDilocoStrategy::builder(&resolver(&spec, TaskType::Ps, 0)).unwrap_err().to_string();
    assert!(error.contains("ps:0") && error.contains("OuterServer::start"), "{error}");
    let error = OuterServer::start(&resolver(&spec, TaskType::Worker, 0)).unwrap_err().to_string();
    assert!(error.contains("worker:0") && error.contains("DecoupledDilocoStrategy"), "{error}");
}
