//! Coordinators that are started again in place, while servers and workers keep what the one before has made.

use distribute_cluster::TfConfigResolver;
use distribute_parameter_server::{
    ClusterCoordinator, Error, FixedShardsPartitioner, ParameterServerStrategy, Updates,
};
use distribute_rules::{OptimizerDescription, UpdateRule};
use distribute_strategy::Strategy;
use distribute_testkit::{Job, JobBuilder, Signal};
use distribute_train::checkpoint::CheckpointManager;
use distribute_types::{ErrorClass, FailureKind};
use distribute_values::{HostTensor, TensorStorage};

use crate::harness::{COORDINATOR_TIMEOUT, Cluster, SOON, program, server, worker};

const STEPS: u64 = 40;

fn adam(learning_rate: f64) -> OptimizerDescription {
    let rule = UpdateRule::Adam { beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 };
    OptimizerDescription { learning_rate, rule }
}

fn zeros(len: usize) -> HostTensor<f64> {
    HostTensor::new(&[len], vec![0.0; len]).unwrap()
}

/// A strategy that continues in place, with the model of these tests.
fn in_place(cluster: &Cluster) -> Result<ParameterServerStrategy, Error> {
    strategy_of(&cluster.resolver(), 5, 0.05)
}

fn strategy_of(
    resolver: &impl distribute_cluster::ClusterResolver,
    len: usize,
    rate: f64,
) -> Result<ParameterServerStrategy, Error> {
    let strategy = ParameterServerStrategy::builder(resolver)
        .options(Cluster::options())
        .restart_in_place()
        .partitioner(FixedShardsPartitioner::new(2))
        .build()?;
    let weights = strategy.variable("w", &zeros(len))?;
    strategy.untrained("total", &HostTensor::scalar(0.0))?;
    strategy.optimizer(adam(rate), &[&weights])?;
    Ok(strategy)
}

fn weights(strategy: &ParameterServerStrategy) -> Vec<u64> {
    let weights = strategy.find("w").unwrap().read::<f64>().unwrap();
    weights.to_elements::<f64>().unwrap().into_iter().map(f64::to_bits).collect()
}

fn total(strategy: &ParameterServerStrategy) -> f64 {
    strategy.find("total").unwrap().read::<f64>().unwrap().to_elements::<f64>().unwrap()[0]
}

/// Ends a coordinator so that the tasks wait for the next one.
fn leave(strategy: ParameterServerStrategy) {
    strategy.report_failure("it is started again", FailureKind::Retryable);
}

/// The body of a started process: a coordinator that trains step by step, or adds many numbers at once.
#[test]
#[ignore = "a process that other tests start"]
fn coordinating() {
    let Ok(config) = std::env::var("TEST_CLUSTER") else { return };
    let resolver = TfConfigResolver::from_json(&config).unwrap();
    let number = |name: &str, default: u64| std::env::var(name).map_or(default, |text| text.parse().unwrap());
    let trained = (|| {
        let strategy = strategy_of(&resolver, number("TEST_LEN", 5) as usize, 0.05)?;
        let coordinator = ClusterCoordinator::new(&strategy, program())?;
        let first = strategy.first_step();
        println!("begins with step {first}");
        if std::env::var_os("TEST_SUM").is_some() {
            let steps = first..10 * STEPS;
            let values: Vec<_> = steps
                .map(|step| coordinator.schedule_step(step, "add_after", &(1.0, 10 + step % 7)))
                .collect::<Result<_, _>>()?;
            for (step, value) in (first..).zip(&values) {
                value.fetch::<()>()?;
                println!("made step {step}.");
            }
            println!("the total is {}", total(&strategy));
        } else {
            for step in first..STEPS {
                coordinator.schedule_step(step, "regress", &(0u32, 20u64, step))?;
                coordinator.join()?;
                println!("made step {step}.");
            }
            println!("the weights are {:?}", weights(&strategy));
        }
        Ok::<_, Error>(())
    })();
    if let Err(error) = trained {
        println!("ended with {:?}: {error}", error.failure_kind());
    }
}

fn coordinator_of(cluster: &Cluster) -> JobBuilder {
    let config = serde_json::json!({
        "cluster": cluster.resolver().spec.to_json(), "task": {"type": "chief", "index": 0},
    });
    Job::of_test("restarts::coordinating").unwrap().env("TEST_CLUSTER", config.to_string())
}

fn killed(mut coordinator: Job) {
    coordinator.kill(0, Signal::KILL).unwrap();
    coordinator.wait(0, SOON).unwrap();
}

fn line<'a>(said: &'a str, words: &str) -> &'a str {
    said.lines().find(|line| line.contains(words)).unwrap_or_else(|| panic!("no {words:?} in {said}"))
}

/// Returns the weights of a training that nothing disturbs.
fn undisturbed() -> String {
    let cluster = Cluster::start(2, 1);
    let said = coordinator_of(&cluster).start().unwrap().wait(0, SOON).unwrap().stdout;
    line(&said, "the weights are").to_owned()
}

#[test]
fn a_coordinator_that_is_killed_continues_in_place_with_the_same_results() {
    let expected = undisturbed();
    let mut cluster = Cluster::start(2, 2);
    let tasks = [server(0), server(1), worker(0), worker(1)];
    let before = tasks.map(|task| cluster.pid(task));
    for made in [5, 12, 25] {
        let coordinator = coordinator_of(&cluster).start().unwrap();
        coordinator.wait_for_line(0, &format!("made step {made}."), SOON).unwrap();
        // Within the next step.
        std::thread::sleep(std::time::Duration::from_millis(made % 20));
        killed(coordinator);
    }
    let said = coordinator_of(&cluster).start().unwrap().wait(0, SOON).unwrap().stdout;
    let first: u64 = line(&said, "begins with step").rsplit(' ').next().unwrap().parse().unwrap();
    // At most the step that was under way is made again.
    assert!((25..=27).contains(&first), "{said}");
    assert_eq!(line(&said, "the weights are"), expected);
    assert_eq!(tasks.map(|task| cluster.pid(task)), before);
    for task in tasks {
        let said = cluster.end_of(task);
        assert!(said.contains("left") && said.matches("serving").count() == 1, "{task}: {said}");
    }
}

#[test]
fn each_change_counts_once_however_many_steps_were_under_way() {
    let mut cluster = Cluster::start(2, 3);
    for made in [60, 170] {
        let coordinator = coordinator_of(&cluster).env("TEST_SUM", "1").start().unwrap();
        coordinator.wait_for_line(0, &format!("made step {made}."), SOON).unwrap();
        // With a worker, whose changes may be on their way.
        cluster.signal(worker(1), Signal::KILL);
        killed(coordinator);
        cluster.restart(worker(1));
    }
    let said = coordinator_of(&cluster).env("TEST_SUM", "1").start().unwrap().wait(0, SOON).unwrap().stdout;
    assert!(!said.contains("begins with step 0"), "{said}");
    assert!(said.contains(&format!("the total is {}", 10 * STEPS)), "{said}");
}

#[test]
fn a_frozen_coordinator_is_fenced_when_another_has_attached() {
    let expected = undisturbed();
    let cluster = Cluster::start(2, 1);
    let mut old = coordinator_of(&cluster).start().unwrap();
    old.wait_for_line(0, "made step 5.", SOON).unwrap();
    old.kill(0, Signal::STOP).unwrap();
    // At once, before servers and workers have noticed.
    let mut new = coordinator_of(&cluster).start().unwrap();
    new.wait_for_line(0, "made step 8.", SOON).unwrap();
    old.kill(0, Signal::CONT).unwrap();
    let said = old.wait(0, SOON).unwrap().stdout;
    let end = line(&said, "ended with");
    assert!(end.contains("another coordinator") && end.contains("Permanent"), "{said}");
    assert!(!said.contains("made step 8."), "{said}");
    let said = new.wait(0, SOON).unwrap().stdout;
    assert_eq!(line(&said, "the weights are"), expected);
}

#[test]
fn other_coordinators_are_refused_in_words_and_the_training_stays() {
    let mut cluster = Cluster::start(2, 1);
    let coordinator = coordinator_of(&cluster).start().unwrap();
    coordinator.wait_for_line(0, "made step 5.", SOON).unwrap();
    killed(coordinator);
    // Of another job.
    let said = coordinator_of(&cluster).env("DISTRIBUTE_JOB_ID", "other").start().unwrap().wait(0, SOON).unwrap();
    assert!(said.stdout.contains("and the caller to job other"), "{said:?}");
    // With another shape, rate, or number of variables.
    let said = coordinator_of(&cluster).env("TEST_LEN", "6").start().unwrap().wait(0, SOON).unwrap().stdout;
    let end = line(&said, "ended with");
    assert!(end.contains("variable \"w\" is f64 [5], trained, rows 0..3 on ps:0"), "{said}");
    assert!(end.contains("and f64 [6], trained, rows 0..3 on ps:0") && end.contains("Configuration"), "{said}");
    let refused = |strategy: Result<ParameterServerStrategy, Error>, words: &str| {
        let error = strategy.unwrap_err();
        assert!(matches!(error, Error::OtherTraining { .. }) && error.to_string().contains(words), "{error}");
    };
    refused(strategy_of(&cluster.resolver(), 5, 0.01), "optimizer 0 is {\"learning_rate\":0.05");
    let strategy = in_place(&cluster).unwrap();
    assert!(strategy.is_continued());
    refused(strategy.untrained("further", &zeros(1)).map(|_| strategy.clone()), "\"further\" is not on the servers");
    drop(strategy);
    let builder = || ParameterServerStrategy::builder(&cluster.resolver()).options(Cluster::options());
    let strategy = builder().restart_in_place().partitioner(FixedShardsPartitioner::new(2)).build().unwrap();
    strategy.variable("w", &zeros(5)).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let outcome = coordinator.schedule_step(strategy.first_step(), "add", &1.0).map(|_| strategy.clone());
    refused(outcome, "the servers hold variable \"total\", optimizer 0");
    drop((coordinator, strategy));
    // The right one continues.
    let said = coordinator_of(&cluster).start().unwrap().wait(0, SOON).unwrap().stdout;
    assert!(said.contains("begins with step 6") || said.contains("begins with step 5"), "{said}");
    assert_eq!(line(&said, "the weights are"), undisturbed());
    assert!(cluster.end_of(server(0)).contains("left"));
}

#[test]
fn tasks_end_when_the_coordinator_never_comes_back() {
    let mut cluster = Cluster::prepare(1, 1).env(COORDINATOR_TIMEOUT, "2").begin_all();
    let coordinator = coordinator_of(&cluster).start().unwrap();
    coordinator.wait_for_line(0, "made step 3.", SOON).unwrap();
    killed(coordinator);
    for task in [server(0), worker(0)] {
        let said = cluster.end_of(task);
        assert!(said.contains(&format!("ended: {task}: no coordinator for 2 s")), "{said}");
    }
}

#[test]
fn workers_keep_their_place_in_datasets() {
    let cluster = Cluster::start(1, 1);
    let mut elements = Vec::new();
    for round in 0..2u64 {
        let strategy = in_place(&cluster).unwrap();
        let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
        let data = coordinator.create_per_worker_dataset::<distribute_input::Array<i64>>("numbers").unwrap().iter();
        for step in 2 * round..2 * round + 2 {
            let next = coordinator.schedule_step(step, "next", &data).unwrap();
            elements.push(next.fetch::<(usize, i64)>().unwrap().1);
        }
        let counts = ["kept", "lasting"].map(|name| coordinator.schedule(name, &()).unwrap().fetch::<u64>().unwrap());
        assert_eq!(counts, [0, round]);
        // Steps that change nothing on the servers leave no trace there, so one that does follows.
        coordinator.schedule_step(2 * round + 2, "add", &1.0).unwrap();
        coordinator.join().unwrap();
        assert_eq!(strategy.first_step(), 2 * round);
        drop(coordinator);
        leave(strategy);
    }
    assert_eq!(elements, [0, 1, 2, 3]);
}

#[test]
fn servers_win_over_an_older_checkpoint_unless_the_program_says_otherwise() {
    let cluster = Cluster::start(2, 1);
    let folder = tempfile::tempdir().unwrap();
    let local = Strategy::default_strategy().unwrap();
    let step = |coordinator: &ClusterCoordinator, step: u64| {
        coordinator.schedule_step(step, "regress", &(0u32, 0u64, step)).unwrap();
        coordinator.join().unwrap();
    };
    let strategy = in_place(&cluster).unwrap();
    let mut checkpoints = CheckpointManager::new(folder.path());
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    (0..4).for_each(|at| step(&coordinator, at));
    checkpoints.save(&local, 4, &[&strategy], &4u64).unwrap();
    checkpoints.finish().unwrap();
    let saved = weights(&strategy);
    (4..7).for_each(|at| step(&coordinator, at));
    let (newest, variable) = (weights(&strategy), strategy.find("w").unwrap());
    // Everything is made before the first step.
    let error = strategy.untrained("late", &zeros(1)).unwrap_err().to_string();
    assert!(error.contains("before the first step"), "{error}");
    drop((coordinator, variable));
    leave(strategy);

    let strategy = in_place(&cluster).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let mut checkpoints = CheckpointManager::new(folder.path());
    assert_eq!(checkpoints.restore::<u64>(&local, &[&strategy]).unwrap(), Some((4, 4)));
    assert_eq!(weights(&strategy), newest);
    // A program that goes by the checkpoint, or begins from the start, is told.
    for wrong in [0, 4] {
        let error = coordinator.schedule_step(wrong, "regress", &(0u32, 0u64, wrong)).unwrap_err();
        assert!(matches!(error, Error::Step { .. }) && error.to_string().contains("continue with step"), "{error}");
    }
    let error = strategy.find("w").unwrap().assign(&zeros(5)).unwrap_err().to_string();
    assert!(error.contains("kept its trained values"), "{error}");
    let first = strategy.first_step();
    // The last step is known to have begun.
    assert_eq!(first, 6);
    (first..9).for_each(|at| step(&coordinator, at));
    let expected = weights(&strategy);
    drop(coordinator);
    leave(strategy);

    // The checkpoint, and the steps after it, are the same training.
    let strategy = in_place(&cluster).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    strategy.prefer_checkpoint();
    CheckpointManager::new(folder.path()).restore::<u64>(&local, &[&strategy]).unwrap().unwrap();
    assert_eq!(weights(&strategy), saved);
    (4..9).for_each(|at| step(&coordinator, at));
    assert_eq!(weights(&strategy), expected);
}

#[test]
fn steps_after_a_loaded_checkpoint_count_again_also_without_restarts_in_place() {
    let cluster = Cluster::start(2, 1);
    let folder = tempfile::tempdir().unwrap();
    let local = Strategy::default_strategy().unwrap();
    let builder = ParameterServerStrategy::builder(&cluster.resolver()).options(Cluster::options());
    let strategy = builder.partitioner(FixedShardsPartitioner::new(2)).build().unwrap();
    let trained = strategy.variable("w", &zeros(5)).unwrap();
    strategy.optimizer(adam(0.05), &[&trained]).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let made = |steps: std::ops::Range<u64>| {
        for step in steps {
            coordinator.schedule_step(step, "regress", &(0u32, 0u64, step)).unwrap();
            coordinator.join().unwrap();
        }
    };
    let mut checkpoints = CheckpointManager::new(folder.path());
    made(0..4);
    checkpoints.save(&local, 4, &[&strategy], &()).unwrap();
    checkpoints.finish().unwrap();
    let saved = weights(&strategy);
    made(4..7);
    let expected = weights(&strategy);
    for _ in 0..2 {
        checkpoints.restore::<()>(&local, &[&strategy]).unwrap().unwrap();
        assert_eq!(weights(&strategy), saved);
        made(4..7);
        assert_eq!(weights(&strategy), expected);
    }
    // The next coordinator cannot keep what this one has made.
    drop((coordinator, trained));
    leave(strategy);
    assert!(!in_place(&cluster).unwrap().is_continued());
}

#[test]
fn a_server_that_was_lost_with_the_coordinator_takes_training_back_to_its_checkpoint() {
    let mut cluster = Cluster::start(2, 1);
    let folder = tempfile::tempdir().unwrap();
    let local = Strategy::default_strategy().unwrap();
    let strategy = in_place(&cluster).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    let made = |coordinator: &ClusterCoordinator, steps: std::ops::Range<u64>| {
        for step in steps {
            coordinator.schedule_step(step, "regress", &(0u32, 0u64, step)).unwrap();
            coordinator.join().unwrap();
        }
    };
    made(&coordinator, 0..3);
    let mut checkpoints = CheckpointManager::new(folder.path());
    checkpoints.save(&local, 3, &[&strategy], &3u64).unwrap();
    checkpoints.finish().unwrap();
    made(&coordinator, 3..6);
    let expected = weights(&strategy);
    drop(coordinator);
    leave(strategy);
    cluster.signal(server(1), Signal::KILL);
    cluster.restart(server(1));
    let strategy = in_place(&cluster).unwrap();
    assert!(!strategy.is_continued());
    let restored = CheckpointManager::new(folder.path()).restore::<u64>(&local, &[&strategy]).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    made(&coordinator, restored.unwrap().1..6);
    assert_eq!(weights(&strategy), expected);
}

#[test]
fn what_could_not_be_continued_is_refused() {
    let cluster = Cluster::start(1, 1);
    let updates = Updates::Synchronous { contributions: 1, backups: 0 };
    let builder = ParameterServerStrategy::builder(&cluster.resolver()).options(Cluster::options());
    let error = builder.restart_in_place().updates(updates).build().unwrap_err();
    assert!(error.to_string().contains("Asynchronous or BoundedStaleness"), "{error}");
    // A change that no later coordinator could recognise.
    let strategy = in_place(&cluster).unwrap();
    let coordinator = ClusterCoordinator::new(&strategy, program()).unwrap();
    coordinator.schedule("add", &1.0).unwrap();
    let error = coordinator.join().unwrap_err().to_string();
    assert!(error.contains("schedule_step"), "{error}");
    coordinator.schedule_step(0, "add", &1.0).unwrap();
    let outcome = coordinator.schedule_step(5, "add", &1.0);
    assert!(outcome.unwrap_err().to_string().contains("step 1 is next"));
    coordinator.join().unwrap();
    // One that no server could recognise.
    coordinator.schedule_step(1, "add_itself", &1.0).unwrap();
    let error = coordinator.join().unwrap_err().to_string();
    assert!(error.contains("\"total\"") && error.contains("WorkerContext::assign_add"), "{error}");
    coordinator.join().unwrap();
    assert_eq!(total(&strategy), 1.0);
}
