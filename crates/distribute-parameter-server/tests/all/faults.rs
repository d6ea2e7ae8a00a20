//! Workers, servers and coordinators that are killed, frozen and restarted.

use std::time::Duration;

use distribute_cluster::{SimpleResolver, TfConfigResolver};
use distribute_parameter_server::{
    ClusterCoordinator, CoordinatorOptions, Delivery, Error, FixedShardsPartitioner, ParameterServerStrategy,
    RemoteValueStatus, WorkerState,
};
use distribute_rules::{OptimizerDescription, UpdateRule};
use distribute_strategy::Strategy;
use distribute_testkit::{Job, Signal};
use distribute_train::checkpoint::{CheckpointManager, Checkpointed, Snapshot};
use distribute_types::ErrorClass;
use distribute_values::{HostTensor, TensorStorage};

use crate::harness::{Cluster, SILENCE, SOON, program, server, total, until, worker};

fn ready(coordinator: &ClusterCoordinator, worker: usize) -> bool {
    coordinator.workers()[worker] == WorkerState::Ready
}

#[test]
fn a_worker_that_was_killed_between_functions_takes_part_again() {
    let mut cluster = Cluster::start(2, 1);
    let coordinator = cluster.coordinator();
    (0..2).for_each(|_| drop(coordinator.schedule("add", &1.0).unwrap()));
    coordinator.join().unwrap();
    cluster.signal(worker(0), Signal::KILL);
    until("the worker is missed", || !ready(&coordinator, 0));
    cluster.restart(worker(0));
    (0..2).for_each(|_| drop(coordinator.schedule("add", &1.0).unwrap()));
    coordinator.join().unwrap();
    assert_eq!(total(&coordinator), 4.0);
}

#[test]
fn what_a_killed_worker_was_doing_is_done_by_another() {
    let mut cluster = Cluster::start(2, 2);
    let coordinator = cluster.coordinator();
    let values: Vec<_> = (0..60).map(|_| coordinator.schedule("add_after", &(1.0, 20)).unwrap()).collect();
    until("some have run", || total(&coordinator) >= 10.0);
    cluster.signal(worker(0), Signal::KILL);
    // The other one continues; nothing is lost or counted twice.
    coordinator.join().unwrap();
    assert_eq!(total(&coordinator), 60.0);
    // The results of the killed worker are available.
    coordinator.fetch::<()>(&values).unwrap();
}

#[test]
fn a_worker_that_hangs_in_a_function_and_is_killed_is_made_up_for() {
    let mut cluster = Cluster::start(1, 2);
    let coordinator = cluster.coordinator();
    until("both are there", || ready(&coordinator, 0) && ready(&coordinator, 1));
    let endless = coordinator.schedule("forever", &()).unwrap();
    (0..10).for_each(|_| drop(coordinator.schedule("add", &1.0).unwrap()));
    until("the others have run", || total(&coordinator) == 10.0);
    // Either may run it: both are killed in turn, and the function never succeeds.
    for index in [0, 1] {
        cluster.signal(worker(index), Signal::KILL);
        cluster.restart(worker(index));
    }
    (0..4).for_each(|_| drop(coordinator.schedule("add", &1.0).unwrap()));
    until("others go on", || total(&coordinator) == 14.0);
    assert_eq!(endless.status(), RemoteValueStatus::NotReady);
}

#[test]
fn a_frozen_worker_is_given_up_and_what_it_sends_later_changes_nothing() {
    let mut cluster = Cluster::start(2, 2);
    let coordinator = cluster.coordinator();
    until("both are there", || ready(&coordinator, 0) && ready(&coordinator, 1));
    (0..2).for_each(|_| drop(coordinator.schedule("add_after", &(1.0, 700)).unwrap()));
    until("both run", || coordinator.counts() == (0, 2));
    cluster.signal(worker(0), Signal::STOP);
    coordinator.join().unwrap();
    assert_eq!(total(&coordinator), 2.0);
    assert!(!ready(&coordinator, 0));
    // It wakes up and tries to finish closures that are done already.
    cluster.signal(worker(0), Signal::CONT);
    until("it is back", || ready(&coordinator, 0));
    (0..10).for_each(|_| drop(coordinator.schedule("add_after", &(1.0, 100)).unwrap()));
    coordinator.join().unwrap();
    assert_eq!(total(&coordinator), 12.0);
}

#[test]
fn a_worker_that_is_told_to_stop_hands_its_function_on() {
    let mut cluster = Cluster::start(1, 2);
    let coordinator = cluster.coordinator();
    until("both are there", || ready(&coordinator, 0) && ready(&coordinator, 1));
    (0..2).for_each(|_| drop(coordinator.schedule("add_after", &(1.0, 500)).unwrap()));
    until("both run", || coordinator.counts() == (0, 2));
    cluster.signal(worker(1), Signal::TERM);
    assert!(cluster.end_of(worker(1)).contains("worker:1 was stopped by signal 15"));
    coordinator.join().unwrap();
    assert_eq!(total(&coordinator), 2.0);
}

#[test]
fn an_error_wins_over_a_lost_worker_and_cancels_what_it_did() {
    let mut cluster = Cluster::start(1, 2);
    let coordinator = cluster.coordinator();
    until("both are there", || ready(&coordinator, 0) && ready(&coordinator, 1));
    let endless = coordinator.schedule("forever", &()).unwrap();
    until("it runs", || coordinator.counts() == (0, 1));
    coordinator.schedule("fail", &"the error").unwrap();
    std::thread::sleep(Duration::from_millis(300));
    for index in [0, 1] {
        cluster.signal(worker(index), Signal::KILL);
    }
    let error = coordinator.join().unwrap_err();
    assert!(matches!(error, Error::UserFunction { .. }), "{error}");
    assert!(matches!(endless.fetch::<()>(), Err(Error::Cancelled { .. })));
}

#[test]
fn datasets_are_made_again_on_a_worker_that_is_back() {
    let mut cluster = Cluster::start(1, 1);
    let coordinator = cluster.coordinator();
    let numbers = coordinator.create_per_worker_dataset::<distribute_input::Array<i64>>("numbers").unwrap().iter();
    let next = || coordinator.schedule("next", &numbers).unwrap().fetch::<(usize, i64)>().unwrap().1;
    assert_eq!([next(), next()], [0, 1]);
    cluster.signal(worker(0), Signal::KILL);
    cluster.restart(worker(0));
    assert_eq!([next(), next()], [0, 1]);
}

#[test]
fn a_function_that_takes_every_worker_along_is_an_error_in_the_end() {
    let mut cluster = Cluster::start(1, 1);
    let strategy = cluster.strategy();
    let options = CoordinatorOptions::default().max_attempts(2);
    let coordinator = ClusterCoordinator::with_options(&strategy, program(), options).unwrap();
    let value = coordinator.schedule("die", &()).unwrap();
    cluster.end_of(worker(0));
    cluster.restart(worker(0));
    let error = coordinator.join().unwrap_err();
    assert!(matches!(error, Error::WorkerLost { .. }), "{error}");
    assert!(error.to_string().contains("function \"die\"") && error.to_string().contains("2 times"), "{error}");
    assert!(matches!(value.fetch::<()>(), Err(Error::WorkerLost { .. })));
}

#[test]
fn without_any_worker_join_ends_with_words() {
    let mut cluster = Cluster::start(1, 1);
    let strategy = cluster.strategy();
    let options = CoordinatorOptions::default().worker_timeout(Duration::from_millis(500));
    let coordinator = ClusterCoordinator::with_options(&strategy, program(), options).unwrap();
    cluster.signal(worker(0), Signal::KILL);
    coordinator.schedule("nested", &1).unwrap();
    let error = coordinator.join().unwrap_err();
    assert!(matches!(error, Error::WorkerLost { .. }), "{error}");
    assert!(error.to_string().contains("no worker for"), "{error}");
}

#[test]
fn the_last_worker_may_go_for_a_while_however_long_others_are_lost() {
    let mut cluster = Cluster::start(1, 2);
    let strategy = cluster.strategy();
    strategy.untrained("total", &HostTensor::scalar(0.0)).unwrap();
    let options = CoordinatorOptions::default().worker_timeout(SILENCE);
    let coordinator = ClusterCoordinator::with_options(&strategy, program(), options).unwrap();
    until("both are there", || ready(&coordinator, 0) && ready(&coordinator, 1));
    cluster.signal(worker(0), Signal::KILL);
    until("it is missed", || !ready(&coordinator, 0));
    // The other one is busy for longer than there may be no worker at all.
    let milliseconds = SILENCE.as_millis() as u64 + 500;
    coordinator.schedule("add_after", &(1.0, milliseconds)).unwrap().fetch::<()>().unwrap();
    coordinator.schedule("add_after", &(1.0, 700)).unwrap();
    until("it runs", || coordinator.counts() == (0, 1));
    cluster.signal(worker(1), Signal::KILL);
    until("it is missed", || !ready(&coordinator, 1));
    cluster.restart(worker(1));
    coordinator.join().unwrap();
    assert_eq!(total(&coordinator), 2.0);
}

#[test]
fn a_lost_server_is_told_to_whoever_joins_or_schedules() {
    let mut cluster = Cluster::start(2, 2);
    let coordinator = cluster.coordinator();
    coordinator.schedule("add", &1.0).unwrap();
    coordinator.join().unwrap();
    (0..20).for_each(|_| drop(coordinator.schedule("add_after", &(1.0, 50)).unwrap()));
    cluster.signal(server(0), Signal::KILL);
    let error = coordinator.join().unwrap_err();
    assert!(matches!(error, Error::ServerLost { server: 0, .. }) && error.is_retryable(), "{error}");
    // Every further call returns it too; it is not an error of the function.
    until("schedule says so too", || {
        matches!(coordinator.schedule("add", &1.0), Err(Error::ServerLost { server: 0, .. }))
    });
    drop(coordinator);
    // Living tasks wait for the next coordinator.
    let coordinator_again = {
        cluster.restart(server(0));
        cluster.coordinator()
    };
    coordinator_again.schedule("add", &3.0).unwrap();
    coordinator_again.join().unwrap();
    assert_eq!(total(&coordinator_again), 3.0);
}

#[test]
fn every_coordinator_of_a_strategy_learns_of_a_lost_server() {
    let mut cluster = Cluster::start(1, 1);
    let first = cluster.coordinator();
    first.schedule("add", &1.0).unwrap();
    first.join().unwrap();
    let strategy = first.strategy().clone();
    drop(first);
    let second = ClusterCoordinator::new(&strategy, program()).unwrap();
    second.schedule("add", &1.0).unwrap();
    second.join().unwrap();
    assert_eq!(total(&second), 2.0);
    cluster.signal(server(0), Signal::KILL);
    // Even though no function uses it.
    let mut error = None;
    until("it is noticed", || {
        error = second.done().err();
        error.is_some()
    });
    assert!(matches!(error, Some(Error::ServerLost { server: 0, .. })), "{error:?}");
}

#[test]
fn a_second_coordinator_takes_over_and_the_first_is_told() {
    let cluster = Cluster::start(1, 1);
    let first = cluster.coordinator();
    first.schedule("add", &1.0).unwrap();
    first.join().unwrap();
    let running = first.schedule("forever", &()).unwrap();
    until("it runs", || first.counts() == (0, 1));
    let second = cluster.coordinator();
    second.schedule("add", &5.0).unwrap();
    second.join().unwrap();
    let error = first.join().unwrap_err();
    assert!(error.to_string().contains("another coordinator"), "{error}");
    drop(first);
    // A wait for a result that will never come also gets an error.
    let outcome = running.fetch::<()>();
    assert!(matches!(outcome, Err(Error::Cancelled { .. } | Error::ServerLost { .. })), "{outcome:?}");
    second.schedule("add", &5.0).unwrap();
    second.join().unwrap();
    assert_eq!(total(&second), 10.0);
}

/// Returns a strategy that restores servers, with trained weights and a checkpoint of them.
fn checkpointed(cluster: &Cluster, folder: &std::path::Path) -> (ParameterServerStrategy, u32, CheckpointManager) {
    let strategy = ParameterServerStrategy::builder(&cluster.resolver())
        .options(Cluster::options())
        .partitioner(FixedShardsPartitioner::new(2))
        .restore_servers_from(folder)
        .build()
        .unwrap();
    let weights = strategy.variable("w", &HostTensor::new(&[5], vec![0.0f64; 5]).unwrap()).unwrap();
    let optimizer = strategy.optimizer(adam(), &[&weights]).unwrap();
    (strategy, optimizer, CheckpointManager::new(folder))
}

fn adam() -> OptimizerDescription {
    let rule = UpdateRule::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 };
    OptimizerDescription { learning_rate: 0.05, rule }
}

fn weights(strategy: &ParameterServerStrategy) -> Vec<f64> {
    strategy.find("w").unwrap().read::<f64>().unwrap().to_elements().unwrap()
}

#[test]
fn a_server_that_is_started_again_gets_its_shards_from_the_last_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(2, 2);
    let (strategy, optimizer, mut checkpoints) = checkpointed(&cluster, folder.path());
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let local = Strategy::default_strategy().unwrap();
    for step in 0..100u64 {
        coordinator.schedule("regress", &(optimizer, 0u64, step)).unwrap();
    }
    coordinator.join().unwrap();
    checkpoints.save(&local, 100, &[&strategy], &()).unwrap();
    checkpoints.finish().unwrap();
    let saved = weights(&strategy);
    // Under load.
    for step in 100..300u64 {
        coordinator.schedule("regress", &(optimizer, 5u64, step)).unwrap();
    }
    std::thread::sleep(Duration::from_millis(100));
    cluster.signal(server(1), Signal::KILL);
    std::thread::sleep(Duration::from_millis(300));
    cluster.restart(server(1));
    coordinator.join().unwrap();
    for (at, weight) in weights(&strategy).into_iter().enumerate() {
        let truth = at as f64 - 2.0;
        assert!((weight - truth).abs() < (saved[at] - truth).abs().max(0.05), "{at}: {saved:?}, then {weight}");
    }
    // Without load: its part is exactly that of the checkpoint, the other server's is kept.
    let before = weights(&strategy);
    cluster.signal(server(1), Signal::KILL);
    cluster.restart(server(1));
    until("it is restored", || {
        let read = strategy.find("w").unwrap().read::<f64>();
        read.is_ok_and(|read| read.to_elements::<f64>().unwrap()[3..] == saved[3..])
    });
    assert_eq!(weights(&strategy)[..3], before[..3]);
}

#[test]
fn a_damaged_checkpoint_does_not_lose_the_server_while_the_one_before_it_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(2, 1);
    let (strategy, optimizer, mut checkpoints) = checkpointed(&cluster, folder.path());
    let local = Strategy::default_strategy().unwrap();
    ten_steps(&strategy, optimizer, 0);
    checkpoints.save(&local, 10, &[&strategy], &()).unwrap();
    checkpoints.finish().unwrap();
    let whole = weights(&strategy);
    ten_steps(&strategy, optimizer, 1);
    checkpoints.save(&local, 20, &[&strategy], &()).unwrap();
    checkpoints.finish().unwrap();
    let path = folder.path().join("step-00000020/model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let _coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    cluster.signal(server(1), Signal::KILL);
    cluster.restart(server(1));
    until("it is restored", || {
        let read = strategy.find("w").unwrap().read::<f64>();
        read.is_ok_and(|read| read.to_elements::<f64>().unwrap()[3..] == whole[3..])
    });
}

#[test]
fn a_server_is_not_given_what_was_left_by_returning_to_an_earlier_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(2, 1);
    let (strategy, optimizer, mut checkpoints) = checkpointed(&cluster, folder.path());
    let local = Strategy::default_strategy().unwrap();
    let mut saved = Vec::new();
    for round in 0..2 {
        ten_steps(&strategy, optimizer, round);
        saved.push(weights(&strategy));
        checkpoints.save(&local, 10 * (round + 1), &[&strategy], &()).unwrap();
    }
    checkpoints.finish().unwrap();
    assert_ne!(saved[0][3..], saved[1][3..]);
    let earlier = checkpoints.restore_from(&local, &folder.path().join("step-00000010"), &[&strategy]).unwrap();
    checkpoints.continue_run(earlier.run().unwrap());
    let _coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let read = || strategy.find("w").unwrap().read::<f64>().map(|read| read.to_elements::<f64>().unwrap());
    let mut restarted = |part: Vec<f64>| {
        cluster.signal(server(1), Signal::KILL);
        until("the loss is noticed", || read().is_err());
        cluster.restart(server(1));
        let mut now = Vec::new();
        until("it is restored", || read().map(|read| now = read).is_ok());
        assert_eq!(now[3..], part);
    };
    restarted(saved[0][3..].to_vec());
    // What is saved now is of this training, also if it takes the place of what was left.
    let other = HostTensor::new(&[5], vec![7.0f64; 5]).unwrap();
    strategy.find("w").unwrap().assign(&other).unwrap();
    checkpoints.save(&local, 20, &[&strategy], &()).unwrap();
    checkpoints.finish().unwrap();
    restarted(vec![7.0; 2]);
}

#[test]
fn a_server_is_lost_if_all_checkpoints_were_left() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(2, 1);
    let (strategy, optimizer, mut checkpoints) = checkpointed(&cluster, folder.path());
    let local = Strategy::default_strategy().unwrap();
    ten_steps(&strategy, optimizer, 0);
    checkpoints.save(&local, 10, &[&strategy], &()).unwrap();
    checkpoints.finish().unwrap();
    // One that is in memory, and of an earlier step.
    let mut earlier = Snapshot::new(5);
    let saved = Foreign(Snapshot::read(folder.path().join("step-00000010")).unwrap());
    saved.save(&local, &mut earlier).unwrap();
    strategy.load(&local, &earlier).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    cluster.signal(server(1), Signal::KILL);
    cluster.restart(server(1));
    until("it is lost", || {
        let told = coordinator.schedule("regress", &(optimizer, 0u64, 0u64)).and_then(|_| coordinator.join());
        matches!(&told, Err(Error::ServerLost { server: 1, why, .. }) if why.contains("save one after loading"))
    });
}

/// Saves a checkpoint of another run, of a model with the same names and shapes.
struct Foreign(Snapshot);

impl Checkpointed for Foreign {
    fn save(&self, _: &Strategy, snapshot: &mut Snapshot) -> Result<(), distribute_train::BoxError> {
        for file in ["model", "optimizer"] {
            for name in self.0.names(file) {
                let (dtype, shape, bytes) = self.0.tensor(file, name).unwrap();
                snapshot.put_bytes(file, name, dtype, shape, bytes.to_vec());
            }
        }
        Ok(())
    }

    fn load(&self, _: &Strategy, _: &Snapshot) -> Result<(), distribute_train::BoxError> {
        Ok(())
    }
}

#[test]
fn a_server_is_not_given_the_weights_of_another_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(2, 1);
    let (strategy, optimizer, mut checkpoints) = checkpointed(&cluster, folder.path());
    let local = Strategy::default_strategy().unwrap();
    ten_steps(&strategy, optimizer, 0);
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    checkpoints.save(&local, 10, &[&strategy], &()).unwrap();
    checkpoints.finish().unwrap();
    let ours = Snapshot::read(folder.path().join("step-00000010")).unwrap();
    let mut others = CheckpointManager::new(folder.path()).set_aside_other_runs();
    others.save(&local, 5, &[&Foreign(ours)], &()).unwrap();
    others.finish().unwrap();
    cluster.signal(server(1), Signal::KILL);
    cluster.restart(server(1));
    until("it is lost", || {
        let told = coordinator.schedule("regress", &(optimizer, 0u64, 0u64)).and_then(|_| coordinator.join());
        let run = others.run().unwrap().to_string();
        matches!(&told, Err(Error::ServerLost { server: 1, why, .. }) if why.contains(&run))
    });
}

#[test]
fn a_frozen_server_is_waited_for_and_counts_nothing_twice() {
    let folder = tempfile::tempdir().unwrap();
    let mut cluster = Cluster::start(2, 2);
    let strategy = ParameterServerStrategy::builder(&cluster.resolver())
        .options(Cluster::options())
        .restore_servers_from(folder.path())
        .build()
        .unwrap();
    let variable = strategy.untrained("total", &HostTensor::scalar(0.0)).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let values: Vec<_> = (0..60).map(|_| coordinator.schedule("add_after", &(1.0, 20)).unwrap()).collect();
    until("some have run", || total(&coordinator) >= 10.0);
    let frozen = server(variable.shards()[0].server as u32);
    cluster.signal(frozen, Signal::STOP);
    std::thread::sleep(2 * SILENCE);
    cluster.signal(frozen, Signal::CONT);
    coordinator.join().unwrap();
    coordinator.fetch::<()>(&values).unwrap();
    // It has kept its variables, so nothing had to be restored.
    assert_eq!(total(&coordinator), 60.0);
}

#[test]
fn a_checkpoint_goes_into_any_number_of_shards_and_trains_on() {
    let folder = tempfile::tempdir().unwrap();
    let local = Strategy::default_strategy().unwrap();
    let mut expected = Vec::new();
    for (round, (servers, shards)) in [(2u32, 4usize), (1, 1), (2, 2), (2, 5)].into_iter().enumerate() {
        let cluster = Cluster::start(servers, 1);
        let strategy = ParameterServerStrategy::builder(&cluster.resolver())
            .options(Cluster::options())
            .partitioner(FixedShardsPartitioner::new(shards))
            .build()
            .unwrap();
        let variable = strategy.variable("w", &HostTensor::new(&[5], vec![0.0f64; 5]).unwrap()).unwrap();
        assert_eq!(variable.shards().len(), shards);
        let optimizer = strategy.optimizer(adam(), &[&variable]).unwrap();
        let mut checkpoints = CheckpointManager::new(folder.path());
        if round > 0 {
            checkpoints.restore::<()>(&local, &[&strategy]).unwrap().unwrap();
            assert_eq!(weights(&strategy), expected);
        }
        ten_steps(&strategy, optimizer, round as u64);
        expected = weights(&strategy);
        checkpoints.save(&local, 10 * (round as u64 + 1), &[&strategy], &()).unwrap();
        checkpoints.finish().unwrap();
    }
    // Slots and step counts were restored too; otherwise Adam would have computed other values.
    let cluster = Cluster::start(1, 1);
    let strategy = cluster.strategy();
    let variable = strategy.variable("w", &HostTensor::new(&[5], vec![0.0f64; 5]).unwrap()).unwrap();
    let optimizer = strategy.optimizer(adam(), &[&variable]).unwrap();
    (0..4).for_each(|round| ten_steps(&strategy, optimizer, round));
    assert_eq!(weights(&strategy), expected);
}

/// Trains sequentially, without servers.
fn ten_steps(strategy: &ParameterServerStrategy, optimizer: u32, round: u64) {
    let coordinator = ClusterCoordinator::new(strategy, program()).unwrap();
    for step in 10 * round..10 * (round + 1) {
        coordinator.schedule("regress", &(optimizer, 0u64, step)).unwrap();
        coordinator.join().unwrap();
    }
}

#[test]
fn at_least_once_may_count_twice_and_never_loses() {
    let mut cluster = Cluster::start(1, 2);
    let strategy = cluster.strategy();
    strategy.untrained("total", &HostTensor::scalar(0.0)).unwrap();
    let options = CoordinatorOptions::default().delivery(Delivery::AtLeastOnce);
    let coordinator = ClusterCoordinator::with_options(&strategy, program(), options).unwrap();
    for _ in 0..60 {
        coordinator.schedule("add_after", &(1.0, 10)).unwrap();
    }
    until("some have run", || total(&coordinator) >= 10.0);
    cluster.signal(worker(1), Signal::KILL);
    coordinator.join().unwrap();
    let total = total(&coordinator);
    assert!((60.0..=61.0).contains(&total), "{total}");
}

#[test]
fn evaluation_counts_each_part_once_whoever_is_killed() {
    let mut cluster = Cluster::start(1, 2);
    let coordinator = cluster.coordinator();
    let sums = std::thread::scope(|scope| {
        let sums = scope.spawn(|| coordinator.evaluate::<u64>("sum_of_part", 40, &1000u64).unwrap());
        std::thread::sleep(Duration::from_millis(200));
        cluster.signal(worker(0), Signal::KILL);
        cluster.restart(worker(0));
        sums.join().unwrap()
    });
    assert_eq!(sums.len(), 40);
    assert_eq!(sums.into_iter().sum::<u64>(), 999 * 1000 / 2);
}

/// The body of a started process: a coordinator that adds and saves, and is killed.
#[test]
#[ignore = "a process that other tests start"]
fn coordinating() {
    let (Ok(config), Some(folder)) = (std::env::var("TEST_CLUSTER"), std::env::var_os("TEST_FOLDER")) else { return };
    let resolver = TfConfigResolver::from_json(&config).unwrap();
    let strategy = ParameterServerStrategy::builder(&resolver).options(Cluster::options()).build().unwrap();
    strategy.untrained("total", &HostTensor::scalar(0.0)).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let (local, mut checkpoints) = (Strategy::default_strategy().unwrap(), CheckpointManager::new(folder));
    let restored = checkpoints.restore::<u64>(&local, &[&strategy]).unwrap();
    let begun = restored.map_or(0, |(_, done)| done);
    println!("begins after {begun}");
    for done in begun..20 {
        coordinator.schedule("add_after", &(1.0, 20)).unwrap();
        coordinator.join().unwrap();
        checkpoints.save(&local, done + 1, &[&strategy], &(done + 1)).unwrap();
        checkpoints.finish().unwrap();
        println!("saved {}", done + 1);
    }
    println!("the total is {}", total(&coordinator));
}

#[test]
fn a_coordinator_that_is_started_again_goes_on_from_its_checkpoint() {
    let mut cluster = Cluster::start(2, 2);
    let folder = tempfile::tempdir().unwrap();
    let resolver: SimpleResolver = cluster.resolver();
    let config = serde_json::json!({
        "cluster": resolver.spec.to_json(),
        "task": {"type": "chief", "index": 0},
    });
    let start = || {
        Job::of_test("faults::coordinating")
            .unwrap()
            .env("TEST_CLUSTER", config.to_string())
            .env("TEST_FOLDER", folder.path().to_str().unwrap())
            .start()
            .unwrap()
    };
    let mut first = start();
    first.wait_for_line(0, "saved 5", SOON).unwrap();
    first.kill(0, Signal::KILL).unwrap();
    first.wait(0, SOON).unwrap();
    let mut second = start();
    let said = second.wait(0, SOON).unwrap().stdout;
    assert!(!said.contains("begins after 0") && said.contains("begins after"), "{said}");
    assert!(said.contains("the total is 20"), "{said}");
    for task in [server(0), server(1), worker(0), worker(1)] {
        assert!(cluster.end_of(task).contains("left"), "{task}");
    }
}
