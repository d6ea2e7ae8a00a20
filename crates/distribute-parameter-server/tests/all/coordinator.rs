//! Scheduling on two servers and three workers, as real processes.

use std::collections::{BTreeMap, BTreeSet};

use distribute_parameter_server::{ClusterCoordinator, CoordinatorOptions, Error, RemoteValueStatus, Updates};
use distribute_rules::{OptimizerDescription, UpdateRule};
use distribute_testkit::short_or_long;
use distribute_values::{HostTensor, TensorStorage};

use crate::harness::{Cluster, program, server, total, until, worker};

#[test]
fn functions_run_on_workers_and_return_values() {
    let mut cluster = Cluster::start(2, 3);
    let coordinator = cluster.coordinator();
    let values: Vec<_> = (0..40).map(|_| coordinator.schedule("add_after", &(0.5, 2)).unwrap()).collect();
    coordinator.join().unwrap();
    assert!(coordinator.done().unwrap());
    assert_eq!(total(&coordinator), 20.0);
    assert!(values.iter().all(|value| value.status() == RemoteValueStatus::Ready));
    // Nested values are returned unchanged.
    let nested = coordinator.schedule("nested", &21).unwrap();
    let (x, map, list): (i64, BTreeMap<String, i64>, Vec<Option<i64>>) = nested.fetch().unwrap();
    assert_eq!((x, map["double"], list), (21, 42, vec![Some(21), None]));
    let wrong = nested.fetch::<String>().unwrap_err();
    assert!(matches!(wrong, Error::Value { .. }), "{wrong}");
    // Several workers took part.
    let workers: Vec<_> = (0..30).map(|_| coordinator.schedule("add", &0.0).unwrap()).collect();
    let workers: BTreeSet<usize> = coordinator.fetch(&workers).unwrap().into_iter().collect();
    assert!(workers.len() > 1, "{workers:?}");
    // A function whose result is there does not run any more.
    for _ in 0..200 {
        coordinator.schedule("add", &0.0).unwrap().fetch::<usize>().unwrap();
        assert!(coordinator.done().unwrap());
    }
    // An unknown function, and arguments that do not fit.
    let error = coordinator.schedule("ad", &0.0).unwrap_err().to_string();
    assert!(error.contains("did you mean \"add\"?"), "{error}");
    assert!(matches!(coordinator.schedule("add", &"text"), Err(Error::Value { .. })));
    // The same coordinator again.
    let again = ClusterCoordinator::new(coordinator.strategy(), program()).unwrap();
    again.schedule("add", &1.0).unwrap();
    coordinator.join().unwrap();
    assert_eq!(total(&again), 21.0);
    drop((coordinator, again));
    // All tasks leave when the coordinator ends.
    for task in [server(0), server(1), worker(0), worker(1), worker(2)] {
        let said = cluster.end_of(task);
        assert!(said.contains("left"), "{task}: {said}");
    }
}

#[test]
fn every_worker_has_a_dataset_of_its_own() {
    let cluster = Cluster::start(1, 2);
    let coordinator = cluster.coordinator();
    let numbers = || coordinator.create_per_worker_dataset::<distribute_input::Array<i64>>("numbers").unwrap();
    let iterator = numbers().iter();
    let values: Vec<_> = (0..5).map(|_| coordinator.schedule("next", &iterator).unwrap()).collect();
    let mut seen: BTreeMap<usize, Vec<i64>> = BTreeMap::new();
    for (worker, element) in coordinator.fetch::<(usize, i64)>(&values).unwrap() {
        seen.entry(worker).or_default().push(element);
    }
    for (worker, elements) in seen {
        // In order, and different from another worker's.
        let first = 100 * worker as i64;
        assert_eq!(elements, (first..first + elements.len() as i64).collect::<Vec<_>>());
    }
    // A dataset that is created again starts anew.
    let (worker, element) = coordinator.schedule("next", &numbers().iter()).unwrap().fetch::<(usize, i64)>().unwrap();
    assert_eq!(element, 100 * worker as i64);
    // The end, another type, a dataset that cannot be created, an unknown one.
    let iterator = numbers().iter();
    (0..11).for_each(|_| drop(coordinator.schedule("next", &iterator)));
    let error = coordinator.join().unwrap_err().to_string();
    assert!(error.contains("\"numbers\" has no further element"), "{error}");
    coordinator.schedule("next_of_wrong_type", &numbers().iter()).unwrap();
    let error = coordinator.join().unwrap_err().to_string();
    assert!(error.contains("elements of dataset \"numbers\" are no"), "{error}");
    assert!(matches!(coordinator.create_per_worker_dataset::<u8>("numbres"), Err(Error::UnknownName { .. })));
    let broken = coordinator.create_per_worker_dataset::<distribute_input::Array<i64>>("broken").unwrap();
    coordinator.schedule("next", &broken.iter()).unwrap();
    let error = coordinator.join().unwrap_err().to_string();
    assert!(error.contains("no such file"), "{error}");
}

#[test]
fn the_first_error_is_told_once_and_then_all_is_as_before() {
    let cluster = Cluster::start(1, 2);
    let coordinator = cluster.coordinator();
    // Returned by join.
    let failed = coordinator.schedule("fail", &"bad luck").unwrap();
    let error = coordinator.join().unwrap_err();
    assert!(
        matches!(&error, Error::UserFunction { function, message, .. } if function == "fail" && message == "bad luck"),
        "{error}"
    );
    coordinator.join().unwrap();
    // Returned by the value, every time.
    assert!(matches!(failed.fetch::<()>(), Err(Error::UserFunction { .. })));
    assert!(matches!(failed.fetch::<()>(), Err(Error::UserFunction { .. })));
    assert_eq!(failed.status(), RemoteValueStatus::Aborted);
    // Returned by schedule; a panic is an error like others.
    coordinator.schedule("panic", &"oh no").unwrap();
    until("schedule returns the error", || coordinator.schedule("add_after", &(0.0, 1)).is_err());
    // Returned by done.
    coordinator.schedule("fail", &"x").unwrap();
    until("done returns the error", || coordinator.done().is_err());
    // Many failures, one error.
    for at in 0..20 {
        if coordinator.schedule("fail", &format!("{at}")).is_err() {
            break;
        }
    }
    let _ = coordinator.join();
    coordinator.join().unwrap();
    // The coordinator works again.
    coordinator.schedule("add", &2.0).unwrap();
    coordinator.join().unwrap();
    assert_eq!(total(&coordinator), 2.0);
}

#[test]
fn an_error_cancels_what_waits_and_lets_end_what_runs() {
    let cluster = Cluster::start(1, 2);
    let coordinator = cluster.coordinator();
    coordinator.schedule("fail_after", &("stop", 100)).unwrap();
    let running = coordinator.schedule("add_after", &(1.0, 400)).unwrap();
    let waiting: Vec<_> = (0..50).map(|_| coordinator.schedule("add_after", &(1.0, 400)).unwrap()).collect();
    let error = coordinator.join().unwrap_err().to_string();
    assert!(error.contains("stop"), "{error}");
    let cancelled = waiting.iter().filter(|value| matches!(value.fetch::<()>(), Err(Error::Cancelled { .. }))).count();
    assert!(cancelled >= 48, "{cancelled}");
    running.fetch::<()>().unwrap();
    assert!(coordinator.done().unwrap());
}

#[test]
fn what_was_cancelled_can_be_scheduled_again_as_soon_as_the_error_is_told() {
    let cluster = Cluster::start(1, 1);
    let coordinator = cluster.coordinator();
    for _ in 0..30 {
        // It takes some time to cancel 300.
        let scheduled = (0..300u64).map(|step| match step {
            0 => coordinator.schedule_step(step, "fail_after", &("stop", 20)),
            _ => coordinator.schedule_step(step, "add", &1.0),
        });
        let error = match scheduled.collect::<Result<Vec<_>, _>>() {
            Ok(values) => {
                values[0].fetch::<()>().unwrap_err();
                let error = coordinator.join().unwrap_err();
                assert_eq!(values[299].status(), RemoteValueStatus::Aborted);
                assert!(values.iter().all(|value| value.status() == RemoteValueStatus::Aborted));
                error
            }
            Err(error) => error,
        };
        assert!(matches!(error, Error::UserFunction { .. }), "{error}");
    }
    assert_eq!(total(&coordinator), 0.0);
}

#[test]
fn functions_change_variables_by_their_context() {
    let cluster = Cluster::start(1, 1);
    let coordinator = cluster.coordinator();
    coordinator.schedule("set", &(5.0, 0.5)).unwrap();
    coordinator.join().unwrap();
    assert_eq!(total(&coordinator), 4.5);
    coordinator.schedule("add_itself", &1.0).unwrap();
    let error = coordinator.join().unwrap_err().to_string();
    assert!(error.contains("WorkerContext::assign_add"), "{error}");
    assert_eq!(total(&coordinator), 4.5);
}

#[test]
fn a_short_queue_holds_up_who_schedules() {
    let cluster = Cluster::start(1, 2);
    let strategy = cluster.strategy();
    strategy.untrained("total", &HostTensor::scalar(0.0)).unwrap();
    let options = CoordinatorOptions::default().queue_size(2);
    let coordinator = ClusterCoordinator::with_options(&strategy, program(), options).unwrap();
    for _ in 0..20 {
        coordinator.schedule("add_after", &(1.0, 10)).unwrap();
        assert!(coordinator.counts().0 <= 2);
    }
    coordinator.join().unwrap();
    assert_eq!(total(&coordinator), 20.0);
    // A caller that waits for room gets the error.
    coordinator.schedule("fail_after", &("full", 50)).unwrap();
    until("schedule returns the error", || coordinator.schedule("add_after", &(0.0, 20)).is_err());
}

#[test]
fn workers_of_another_build_are_told_again_and_again() {
    let cluster = Cluster::start(1, 1);
    let strategy = cluster.strategy();
    let newer =
        program().function("newer", |_: &distribute_parameter_server::WorkerContext, (): ()| Ok::<_, Error>(()));
    let coordinator = ClusterCoordinator::new(&strategy, newer).unwrap();
    for _ in 0..2 {
        let mut error = None;
        until("it is told", || {
            error = coordinator.schedule("newer", &()).and_then(|_| coordinator.join()).err();
            error.is_some()
        });
        let error = error.unwrap().to_string();
        assert!(error.contains("worker:0 refused Attend") && error.contains("\"newer\""), "{error}");
    }
}

#[test]
fn callers_on_many_threads_share_a_coordinator() {
    let cluster = Cluster::start(2, 3);
    let coordinator = cluster.coordinator();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..25 {
                    coordinator.schedule("add", &1.0).unwrap();
                }
                coordinator.join().unwrap();
            });
        }
    });
    assert_eq!(total(&coordinator), 200.0);
}

#[test]
fn what_a_worker_keeps_stays_from_call_to_call() {
    let cluster = Cluster::start(1, 1);
    let coordinator = cluster.coordinator();
    let counts: Vec<_> = (0..3).map(|_| coordinator.schedule("kept", &()).unwrap()).collect();
    assert_eq!(coordinator.fetch::<u64>(&counts).unwrap(), [0, 1, 2]);
}

#[test]
fn each_worker_looks_ids_up_in_a_table_of_its_own() {
    let cluster = Cluster::start(1, 2);
    let coordinator = cluster.coordinator();
    let words = ["of", "the", "ship", "of"].map(str::to_owned).to_vec();
    let (mut workers, mut answers) = (BTreeSet::new(), BTreeSet::new());
    until("both workers have answered twice", || {
        let values: Vec<_> = (0..4).map(|_| coordinator.schedule("ids", &words).unwrap()).collect();
        for (worker, made, ids) in coordinator.fetch::<(usize, u64, Vec<i64>)>(&values).unwrap() {
            assert_eq!(made, 1, "worker:{worker} has made it again");
            workers.insert(worker);
            answers.insert(ids);
        }
        workers.len() == 2
    });
    // The same on both, also for a word outside the vocabulary.
    let [ids] = <[Vec<i64>; 1]>::try_from(answers.into_iter().collect::<Vec<_>>()).unwrap();
    assert!([ids[0], ids[1], ids[3]] == [1, 0, 1] && (2..5).contains(&ids[2]), "{ids:?}");
}

/// Trains with this number of scheduled steps and returns the weights.
fn trained(updates: Updates, steps: usize) -> Vec<f64> {
    let cluster = Cluster::start(2, 3);
    let strategy = distribute_parameter_server::ParameterServerStrategy::builder(&cluster.resolver())
        .options(Cluster::options())
        .updates(updates)
        .partitioner(distribute_parameter_server::FixedShardsPartitioner::new(2))
        .build()
        .unwrap();
    let weights = strategy.variable("w", &HostTensor::new(&[5], vec![0.0f64; 5]).unwrap()).unwrap();
    let rule = UpdateRule::Sgd { momentum: 0.0, nesterov: false };
    let optimizer = strategy.optimizer(OptimizerDescription { learning_rate: 0.1, rule }, &[&weights]).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    for step in 0..steps as u64 {
        coordinator.schedule("regress", &(optimizer, 0u64, step)).unwrap();
    }
    coordinator.join().unwrap();
    weights.read::<f64>().unwrap().to_elements().unwrap()
}

#[test]
fn all_kinds_of_updates_find_the_same_solution() {
    // The same number of steps each.
    let all = [
        (Updates::Asynchronous, 300),
        (Updates::Synchronous { contributions: 2, backups: 1 }, 900),
        (Updates::BoundedStaleness { rounds: 1 }, 300),
        (Updates::Synchronous { contributions: 3, backups: 0 }, 900),
    ];
    for (updates, closures) in all.into_iter().take(short_or_long(2, 4)) {
        let weights = trained(updates, closures);
        for (at, weight) in weights.iter().enumerate() {
            assert!((weight - (at as f64 - 2.0)).abs() < 1e-3, "{updates:?}: {weights:?}");
        }
    }
}

#[test]
fn synchronous_updates_repeat_bit_for_bit() {
    let updates = Updates::Synchronous { contributions: 3, backups: 0 };
    let [first, second] = [0; 2].map(|_| trained(updates, 30));
    assert_eq!(
        first.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
        second.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    );
}
