//! Servers that are restored, and workers that have seen their earlier values.

use distribute_parameter_server::{ClusterCoordinator, FixedShardsPartitioner, ParameterServerStrategy};
use distribute_rules::{OptimizerDescription, UpdateRule};
use distribute_strategy::Strategy;
use distribute_testkit::Signal;
use distribute_train::checkpoint::{CheckpointManager, Checkpointed, Snapshot};
use distribute_values::{HostTensor, TensorStorage};

use crate::harness::{Cluster, program, server, until};

/// Returns a strategy with weights of 0 in two shards, and SGD with a rate of 1.
fn strategy(cluster: &Cluster, folder: &std::path::Path) -> (ParameterServerStrategy, u32) {
    let builder = ParameterServerStrategy::builder(&cluster.resolver()).options(Cluster::options());
    let builder = builder.partitioner(FixedShardsPartitioner::new(2)).restore_servers_from(folder);
    let strategy = builder.build().unwrap();
    let weights = strategy.variable("w", &HostTensor::new(&[2], vec![0.0f64; 2]).unwrap()).unwrap();
    let rule = UpdateRule::Sgd { momentum: 0.0, nesterov: false };
    let optimizer = strategy.optimizer(OptimizerDescription { learning_rate: 1.0, rule }, &[&weights]).unwrap();
    (strategy, optimizer)
}

fn weights(strategy: &ParameterServerStrategy) -> Vec<f64> {
    strategy.find("w").unwrap().read::<f64>().unwrap().to_elements().unwrap()
}

#[test]
fn workers_see_each_checkpoint_that_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let local = Strategy::default_strategy().unwrap();
    let cluster = Cluster::start(1, 1);
    let (strategy, optimizer) = strategy(&cluster, folder.path());
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let mut checkpoints = CheckpointManager::new(folder.path());
    for step in [1, 2] {
        let values = HostTensor::new(&[2], vec![step as f64; 2]).unwrap();
        strategy.find("w").unwrap().assign(&values).unwrap();
        checkpoints.save(&local, step, &[&strategy], &()).unwrap();
    }
    checkpoints.finish().unwrap();
    let saved = checkpoints.list().unwrap().into_iter().map(|(_, folder)| Snapshot::read(folder).unwrap());
    let saved: Vec<Snapshot> = saved.collect();
    let mut pulled = Vec::new();
    for at in [0, 1, 0, 1] {
        strategy.load(&local, &saved[at]).unwrap();
        pulled.push(coordinator.schedule("pulled", &()).unwrap().fetch::<Vec<f64>>().unwrap());
        assert_eq!(pulled[pulled.len() - 1], weights(&strategy));
    }
    assert!(pulled[0] != pulled[1] && pulled[..2] == pulled[2..], "{pulled:?}");
    // Not under functions, whose gradients are of the values before.
    coordinator.schedule("push", &(optimizer, 1usize, 200u64)).unwrap();
    let error = strategy.load(&local, &saved[0]).unwrap_err().to_string();
    assert!(error.contains("call join first"), "{error}");
    coordinator.join().unwrap();
    strategy.load(&local, &saved[0]).unwrap();
    assert_eq!(weights(&strategy), pulled[0]);
}

#[test]
fn a_server_that_is_lost_again_while_it_is_restored_is_restored_then() {
    let folder = tempfile::tempdir().unwrap();
    let local = Strategy::default_strategy().unwrap();
    let mut cluster = Cluster::start(1, 1);
    let (strategy, optimizer) = strategy(&cluster, folder.path());
    // So large that its restore takes some time.
    strategy.variable_by_parts("table", &[12 << 10, 1 << 10], |rows| Ok(vec![1.0f32; rows.len() << 10])).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    coordinator.schedule("push", &(optimizer, 3usize, 0u64)).unwrap();
    coordinator.join().unwrap();
    let mut checkpoints = CheckpointManager::new(folder.path());
    checkpoints.save(&local, 1, &[&strategy], &()).unwrap();
    checkpoints.finish().unwrap();
    let read = || strategy.find("w").unwrap().read::<f64>();
    for _ in 0..2 {
        cluster.signal(server(0), Signal::KILL);
        cluster.restart(server(0));
        until("its restore has begun", || read().is_err_and(|error| error.to_string().contains("is being restored")));
    }
    coordinator.schedule("push", &(optimizer, 1usize, 0u64)).unwrap();
    cluster.signal(server(0), Signal::KILL);
    cluster.restart(server(0));
    coordinator.join().unwrap();
    assert_eq!(weights(&strategy), [-4.0; 2]);
}

#[test]
fn a_server_that_is_started_again_has_the_learning_rate_of_the_others() {
    let folder = tempfile::tempdir().unwrap();
    let local = Strategy::default_strategy().unwrap();
    let mut cluster = Cluster::start(2, 1);
    let (strategy, optimizer) = strategy(&cluster, folder.path());
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let mut checkpoints = CheckpointManager::new(folder.path());
    checkpoints.save(&local, 1, &[&strategy], &()).unwrap();
    checkpoints.finish().unwrap();
    strategy.set_learning_rate(optimizer, 0.25).unwrap();
    cluster.signal(server(1), Signal::KILL);
    cluster.restart(server(1));
    until("it is restored", || strategy.find("w").unwrap().read::<f64>().is_ok());
    coordinator.schedule("push", &(optimizer, 1usize, 0u64)).unwrap();
    coordinator.join().unwrap();
    assert_eq!((strategy.learning_rate(optimizer), weights(&strategy)), (Some(0.25), vec![-0.25; 2]));
    // One that is lost while the rate is set has it too, and the contents of the checkpoint.
    cluster.signal(server(1), Signal::KILL);
    assert!(strategy.set_learning_rate(optimizer, 0.5).is_err());
    cluster.restart(server(1));
    until("it is restored again", || strategy.find("w").unwrap().read::<f64>().is_ok());
    coordinator.schedule("push", &(optimizer, 1usize, 0u64)).unwrap();
    coordinator.join().unwrap();
    assert_eq!((strategy.learning_rate(optimizer), weights(&strategy)), (Some(0.5), vec![-0.75, -0.5]));
    // A checkpoint that the program loads brings its own.
    checkpoints.restore::<()>(&local, &[&strategy]).unwrap().unwrap();
    coordinator.schedule("push", &(optimizer, 1usize, 0u64)).unwrap();
    coordinator.join().unwrap();
    assert_eq!((strategy.learning_rate(optimizer), weights(&strategy)), (Some(1.0), vec![-1.0; 2]));
}

#[test]
fn a_learning_rate_that_a_server_was_not_told_reaches_it_when_it_is_set_again() {
    let mut cluster = Cluster::start(2, 1);
    let options = Cluster::options().message_timeout(std::time::Duration::from_secs(1));
    let builder = ParameterServerStrategy::builder(&cluster.resolver()).options(options);
    let strategy = builder.partitioner(FixedShardsPartitioner::new(2)).build().unwrap();
    let weights_of_both = strategy.variable("w", &HostTensor::new(&[2], vec![0.0f64; 2]).unwrap()).unwrap();
    let rule = UpdateRule::Sgd { momentum: 0.0, nesterov: false };
    let optimizer = strategy.optimizer(OptimizerDescription { learning_rate: 1.0, rule }, &[&weights_of_both]).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    // Each was told, unless it was frozen itself.
    for (frozen, rate) in [(0, 0.25), (1, 0.5)] {
        cluster.signal(server(frozen), Signal::STOP);
        let outcome = strategy.set_learning_rate(optimizer, rate);
        cluster.signal(server(frozen), Signal::CONT);
        assert!(outcome.is_err());
        assert_eq!(strategy.learning_rate(optimizer), Some(rate));
    }
    // A rate outside its range changes nothing.
    assert!(strategy.set_learning_rate(optimizer, -1.0).is_err());
    until("both are told", || strategy.set_learning_rate(optimizer, 0.5).is_ok());
    coordinator.schedule("push", &(optimizer, 1usize, 0u64)).unwrap();
    coordinator.join().unwrap();
    assert_eq!((strategy.learning_rate(optimizer), weights(&strategy)), (Some(0.5), vec![-0.5; 2]));
}

#[test]
fn a_checkpoint_is_loaded_though_the_folder_for_lost_servers_cannot_be_listed() {
    let folder = tempfile::tempdir().unwrap();
    let (elsewhere, for_servers) = (folder.path().join("elsewhere"), folder.path().join("for_servers"));
    let local = Strategy::default_strategy().unwrap();
    let mut cluster = Cluster::start(1, 1);
    let (strategy, optimizer) = strategy(&cluster, &for_servers);
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let mut checkpoints = CheckpointManager::new(&elsewhere);
    checkpoints.save(&local, 1, &[&strategy], &()).unwrap();
    checkpoints.finish().unwrap();
    coordinator.schedule("push", &(optimizer, 1usize, 0u64)).unwrap();
    coordinator.join().unwrap();
    std::fs::write(&for_servers, "no folder").unwrap();
    checkpoints.restore::<()>(&local, &[&strategy]).unwrap().unwrap();
    assert_eq!(weights(&strategy), [0.0; 2]);
    // What is saved when it is a folder again counts.
    std::fs::remove_file(&for_servers).unwrap();
    coordinator.schedule("push", &(optimizer, 1usize, 0u64)).unwrap();
    coordinator.join().unwrap();
    let mut checkpoints = CheckpointManager::new(&for_servers);
    checkpoints.continue_run(CheckpointManager::new(&elsewhere).open_newest().unwrap().unwrap().run().unwrap());
    checkpoints.save(&local, 2, &[&strategy], &()).unwrap();
    checkpoints.finish().unwrap();
    cluster.signal(server(0), Signal::KILL);
    cluster.restart(server(0));
    until("it is restored", || strategy.find("w").unwrap().read::<f64>().is_ok());
    assert_eq!(weights(&strategy), [-1.0; 2]);
}
