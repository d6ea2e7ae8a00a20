//! Synchronous updates: each gradient that counts is part of exactly one step, also if functions run again or push
//! nothing.

use distribute_parameter_server::{
    ClusterCoordinator, CoordinatorOptions, Delivery, ParameterServerStrategy, RemoteValue, Updates,
};
use distribute_rules::{OptimizerDescription, UpdateRule};
use distribute_strategy::Strategy;
use distribute_testkit::Signal;
use distribute_train::checkpoint::CheckpointManager;
use distribute_values::{HostTensor, TensorStorage};

use crate::harness::{Cluster, program, worker};

/// Starts one server and two workers for steps of two contributions. Each step takes 1 from the weights, from 0.
fn started(delivery: Delivery) -> (Cluster, ClusterCoordinator, u32) {
    let cluster = Cluster::start(1, 2);
    let updates = Updates::Synchronous { contributions: 2, backups: 0 };
    let builder = ParameterServerStrategy::builder(&cluster.resolver()).options(Cluster::options());
    let strategy = builder.updates(updates).build().unwrap();
    let weights = strategy.variable("w", &HostTensor::new(&[2], vec![0.0f64; 2]).unwrap()).unwrap();
    let rule = UpdateRule::Sgd { momentum: 0.0, nesterov: false };
    let optimizer = strategy.optimizer(OptimizerDescription { learning_rate: 1.0, rule }, &[&weights]).unwrap();
    let options = CoordinatorOptions::default().delivery(delivery);
    let coordinator = ClusterCoordinator::with_options(&strategy, program(), options).unwrap();
    (cluster, coordinator, optimizer)
}

fn steps(coordinator: &ClusterCoordinator) -> f64 {
    -coordinator.strategy().find("w").unwrap().read::<f64>().unwrap().to_elements::<f64>().unwrap()[0]
}

/// Makes some contributions, one after another.
fn push(coordinator: &ClusterCoordinator, optimizer: u32, count: usize) {
    for _ in 0..count {
        let counted: bool = coordinator.schedule("push", &(optimizer, 1usize, 0u64)).unwrap().fetch().unwrap();
        assert!(counted);
        coordinator.join().unwrap();
    }
}

#[test]
fn a_worker_that_dies_after_its_push_takes_no_other_gradient_along() {
    let (mut cluster, coordinator, optimizer) = started(Delivery::EffectivelyOnce);
    let schedule = |_| coordinator.schedule("push", &(optimizer, 1usize, 300u64)).unwrap();
    let values: Vec<RemoteValue> = (0..8).map(schedule).collect();
    cluster.wait_for(worker(0), "has pushed");
    cluster.signal(worker(0), Signal::KILL);
    cluster.restart(worker(0));
    coordinator.join().unwrap();
    assert_eq!(coordinator.fetch::<bool>(&values).unwrap(), [true; 8]);
    assert_eq!(steps(&coordinator), 4.0);
}

#[test]
fn functions_that_push_nothing_take_no_part_in_a_step() {
    let (_cluster, coordinator, optimizer) = started(Delivery::EffectivelyOnce);
    push(&coordinator, optimizer, 1);
    coordinator.evaluate::<u64>("sum_of_part", 3, &10u64).unwrap();
    push(&coordinator, optimizer, 1);
    assert_eq!(steps(&coordinator), 1.0);
    coordinator.evaluate::<u64>("sum_of_part", 3, &10u64).unwrap();
    push(&coordinator, optimizer, 2);
    assert_eq!(steps(&coordinator), 2.0);
}

#[test]
fn a_second_push_of_a_function_is_refused() {
    for delivery in [Delivery::EffectivelyOnce, Delivery::AtLeastOnce] {
        let (_cluster, coordinator, optimizer) = started(delivery);
        coordinator.schedule("push", &(optimizer, 2usize, 0u64)).unwrap();
        let error = coordinator.join().unwrap_err().to_string();
        assert!(error.contains("give one push of the sum"), "{error}");
        // The step that it began is given up.
        push(&coordinator, optimizer, 2);
        assert_eq!(steps(&coordinator), 1.0);
    }
}

#[test]
fn a_step_that_has_failed_counts_when_it_is_scheduled_again() {
    let (_cluster, coordinator, optimizer) = started(Delivery::EffectivelyOnce);
    // Its first push is a contribution to a round that is given up.
    coordinator.schedule_step(0, "push", &(optimizer, 2usize, 0u64)).unwrap();
    assert!(coordinator.join().is_err());
    for of_both in [[0, 1], [2, 3]] {
        let schedule = |step| coordinator.schedule_step(step, "push", &(optimizer, 1usize, 0u64)).unwrap();
        let values: Vec<RemoteValue> = of_both.into_iter().map(schedule).collect();
        assert_eq!(coordinator.fetch::<bool>(&values).unwrap(), [true; 2]);
        coordinator.join().unwrap();
    }
    assert_eq!(steps(&coordinator), 2.0);
}

#[test]
fn a_step_that_counted_before_it_failed_takes_no_place_in_another_round() {
    let (_cluster, coordinator, optimizer) = started(Delivery::EffectivelyOnce);
    let schedule =
        |step: u64, times: usize| coordinator.schedule_step(step, "push", &(optimizer, times, 0u64)).unwrap();
    schedule(0, 1);
    coordinator.join().unwrap();
    // Its first push completes the round.
    schedule(1, 2);
    assert!(coordinator.join().is_err());
    assert_eq!(steps(&coordinator), 1.0);
    let values = [1, 2, 3].map(|step| schedule(step, 1));
    assert_eq!(coordinator.fetch::<bool>(&values).unwrap(), [true; 3]);
    coordinator.join().unwrap();
    assert_eq!(steps(&coordinator), 2.0);
}

#[test]
fn a_step_that_has_begun_is_given_up_when_a_checkpoint_is_loaded() {
    let folder = tempfile::tempdir().unwrap();
    let local = Strategy::default_strategy().unwrap();
    let (_cluster, coordinator, optimizer) = started(Delivery::EffectivelyOnce);
    let mut checkpoints = CheckpointManager::new(folder.path());
    checkpoints.save(&local, 1, &[coordinator.strategy()], &()).unwrap();
    checkpoints.finish().unwrap();
    push(&coordinator, optimizer, 1);
    checkpoints.restore::<()>(&local, &[coordinator.strategy()]).unwrap().unwrap();
    push(&coordinator, optimizer, 2);
    assert_eq!(steps(&coordinator), 1.0);
}
