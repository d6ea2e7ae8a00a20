//! Failures and interruptions, which end training on all replicas and workers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::data::dataloader::{DataLoader, DataLoaderIterator, Progress};
use burn::data::dataset::DatasetError;
use burn::tensor::{Device, Tensor};
use burn::train::Interrupter;
use distribute_burn::learner::DistributedTraining;
use distribute_strategy::{
    FullyShardedStrategy, LocalUpdates, MirroredStrategy, MultiWorkerMirroredStrategy, Replicas, Strategy,
    StrategyExtended,
};
use distribute_testkit::{Job, Signal};

use crate::common::*;

/// Rows of which one, in the second half, makes the model panic.
fn poisoned() -> Vec<Row> {
    let mut all = rows(64);
    all[40].0[2] = POISON;
    all
}

#[test]
fn a_step_that_panics_on_one_replica_ends_training_with_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    let (training, _) = training(folder.path(), loader(poisoned(), 4), loader(rows(8), 4));
    let result = training.distributed(&mirrored(2)).launch(learner(Net::new(false)));
    assert_eq!(error_of(&result), "training worker on device 1 failed: replica 1 panicked: a poisoned row");
    assert!(result.interrupted.is_none());
}

#[test]
fn a_replica_that_fails_on_one_worker_ends_all_of_them() {
    let folder = tempfile::tempdir().unwrap();
    let began = Instant::now();
    let errors = on_workers(2, 2, |strategy, _| {
        let (training, _) = training(folder.path(), loader(poisoned(), 4), loader(rows(8), 4));
        error_of(&training.distributed(&strategy).launch(learner(Net::new(false))))
    });
    assert!(errors[1].contains("replica 2 panicked: a poisoned row"), "{}", errors[1]);
    assert!(errors[0].contains("replica 2 failed"), "{}", errors[0]);
    assert!(began.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_validation_that_panics_on_the_chief_ends_the_other_workers() {
    let folder = tempfile::tempdir().unwrap();
    let results = on_workers(2, 1, |strategy, rank| {
        let valid = if rank == 0 { poisoned() } else { rows(8) };
        let (training, _) = training(folder.path(), loader(rows(64), 4), loader(valid, 4));
        let launch = || error_of(&training.distributed(&strategy).launch(learner(Net::new(false))));
        // burn lets it through to the program.
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(launch))
    });
    assert!(results[0].is_err());
    let told = results[1].as_ref().unwrap();
    assert!(told.contains("worker 0 failed: it panicked outside a step"), "{told}");
}

/// An event at a loader's fourth batch.
#[derive(Clone)]
enum Event {
    Error,
    Panic,
    /// The batch comes after all, and training is interrupted.
    Interruption(Interrupter),
}

/// A loader with an event.
struct Eventful {
    inner: Loader,
    event: Event,
}

struct EventfulIterator<'a> {
    inner: Box<dyn DataLoaderIterator<(Tensor<2>, Tensor<2>)> + 'a>,
    read: usize,
    event: Event,
}

impl Iterator for EventfulIterator<'_> {
    type Item = Result<(Tensor<2>, Tensor<2>), DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.read += 1;
        if self.read == 4 {
            match &self.event {
                Event::Error => return Some(Err(DatasetError::new(std::io::Error::other("the disk is gone")))),
                Event::Panic => panic!("the disk is gone"),
                Event::Interruption(interrupter) => interrupter.stop(Some("enough")),
            }
        }
        self.inner.next()
    }
}

impl DataLoaderIterator<(Tensor<2>, Tensor<2>)> for EventfulIterator<'_> {
    fn progress(&self) -> Progress {
        self.inner.progress()
    }
}

impl DataLoader<(Tensor<2>, Tensor<2>)> for Eventful {
    fn iter<'a>(&'a self) -> Box<dyn DataLoaderIterator<(Tensor<2>, Tensor<2>)> + 'a> {
        Box::new(EventfulIterator { inner: self.inner.iter(), read: 0, event: self.event.clone() })
    }

    fn num_items(&self) -> usize {
        self.inner.num_items()
    }

    fn to_device(&self, device: &Device) -> Loader {
        Arc::new(Eventful { inner: self.inner.to_device(device), event: self.event.clone() })
    }

    fn slice(&self, start: usize, end: usize) -> Loader {
        Arc::new(Eventful { inner: self.inner.slice(start, end), event: self.event.clone() })
    }
}

#[test]
fn data_that_cannot_be_read_on_one_worker_end_all_of_them() {
    let folder = tempfile::tempdir().unwrap();
    for event in [Event::Error, Event::Panic] {
        let errors = on_workers(2, 1, |strategy, rank| {
            let inner = loader(rows(64), 4);
            let train: Loader = if rank == 1 { Arc::new(Eventful { inner, event: event.clone() }) } else { inner };
            let (training, _) = training(folder.path(), train, loader(rows(8), 4));
            error_of(&training.distributed(&strategy).launch(learner(Net::new(false))))
        });
        assert!(errors[1].contains("the disk is gone"), "{}", errors[1]);
        assert!(errors[0].contains("the training data of replica 1"), "{}", errors[0]);
        assert!(errors[0].contains("the disk is gone"), "{}", errors[0]);
    }
}

#[test]
fn an_interruption_of_one_worker_stops_all_before_the_same_step() {
    let folder = tempfile::tempdir().unwrap();
    let results = on_workers(2, 1, |strategy, rank| {
        let interrupter = Interrupter::new();
        let inner = loader(rows(64), 4);
        let event = Event::Interruption(interrupter.clone());
        let train: Loader = if rank == 1 { Arc::new(Eventful { inner, event }) } else { inner };
        let (training, _) = training(folder.path(), train, loader(rows(8), 4));
        let training = training.with_interrupter(interrupter).distributed(&strategy);
        let result = training.launch(learner(Net::new(false)));
        assert_eq!(error_of(&result), "no error");
        (result.interrupted.unwrap().reason.unwrap(), values(&result.model))
    });
    assert_eq!(results[1].0, "enough");
    assert_eq!(results[0].0, "worker 1 was interrupted: enough");
    assert_eq!(results[0].1, results[1].1);
}

#[test]
fn workers_with_different_models_or_settings_are_told_which() {
    let folder = tempfile::tempdir().unwrap();
    let run = |norms: [bool; 2], epochs: [usize; 2], items: [usize; 2]| {
        on_workers(2, 1, |strategy, rank| {
            let of = rank as usize;
            let (training, _) = training(folder.path(), loader(rows(items[of]), 4), loader(rows(8), 4));
            let training = training.num_epochs(epochs[of]).distributed(&strategy);
            error_of(&training.launch(learner(Net::new(norms[of]))))
        })
    };
    let same = ([false; 2], [2; 2], [8; 2]);
    for (errors, expected) in [
        (run([true, false], same.1, same.2), "parameter norm"),
        (run(same.0, [2, 3], same.2), "epochs: 2"),
        (run(same.0, same.1, [8, 9]), "items of the training loader: 9"),
    ] {
        assert!(errors.iter().all(|error| error.contains(expected)), "{errors:?}");
    }
}

/// The variable that makes a process of this test a worker.
const WORKER: &str = "LEARNER_TEST_WORKER";

const DEADLINE: Duration = Duration::from_secs(120);

/// Trains in a process of its own until another one fails, and prints the error.
#[test]
#[ignore = "a process that other tests start"]
fn worker() {
    if std::env::var_os(WORKER).is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let strategy = MultiWorkerMirroredStrategy::builder().devices(["CPU:0"]).build().unwrap();
    let (training, _) = training(folder.path(), loader(rows(64), 4), loader(rows(8), 4));
    let result = training.num_epochs(1_000_000).distributed(&strategy).launch(learner(Net::new(false)));
    println!("outcome: {}", error_of(&result));
}

#[test]
fn a_process_that_is_killed_is_named_by_the_others() {
    let place = |rank: u32| {
        // Nothing listens at the leader's address: they meet in a folder.
        let place = [("RANK", rank.to_string()), ("WORLD_SIZE", "3".to_owned())];
        let leader = [("MASTER_ADDR", "127.0.0.1".to_owned()), ("MASTER_PORT", "1".to_owned())];
        place.into_iter().chain(leader).map(|(name, value)| (name.to_owned(), value)).collect()
    };
    let folder = tempfile::tempdir().unwrap();
    let job = Job::of_test("failures::worker").unwrap();
    let job = job.env("DISTRIBUTE_STORE", format!("file:{}", folder.path().display()));
    let job = job.env("DISTRIBUTE_JOB_ID", "killed-1");
    let mut job = job.tasks(3).task_env(place).env(WORKER, "1").start().unwrap();
    // The renderer of the chief prints each step.
    job.wait_for_line(0, "ProgressSnapshot", DEADLINE).unwrap();
    job.kill(1, Signal::KILL).unwrap();
    for rank in [0, 2] {
        let outcome = job.wait(rank, DEADLINE).unwrap();
        let told = outcome.stdout.lines().find(|line| line.starts_with("outcome: ")).unwrap_or(&outcome.stderr);
        assert!(told.contains("worker:1"), "{told}");
        // Others print nothing.
        assert_eq!(outcome.stdout.contains("ProgressSnapshot"), rank == 0);
    }
}

#[test]
fn strategies_with_tensor_groups_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (training, _) = training(folder.path(), loader(rows(64), 4), loader(rows(8), 4));
    let mesh = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).tensor_parallel(2).build().unwrap();
    let told = error_of(&training.distributed(&mesh).launch(learner(Net::new(false))));
    assert!(told.contains("groups of 2 tensor ranks") && told.contains("leave tensor_parallel out"), "{told}");
    let devices = (0..4).map(|cpu| format!("CPU:{cpu}"));
    let mesh = FullyShardedStrategy::builder().devices(devices).tensor_parallel(2).build().unwrap();
    let (training, _) = crate::common::training(folder.path(), loader(rows(64), 4), loader(rows(8), 4));
    let told = error_of(&training.distributed(&mesh).launch(learner(Net::new(false))));
    assert!(told.contains("groups of 2 tensor ranks"), "{told}");
}

#[test]
fn a_process_of_an_elastic_job_that_has_joined_no_others_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (training, _) = training(folder.path(), loader(rows(64), 4), loader(rows(8), 4));
    let membership = distribute_cluster::Membership::new(0, 2, "127.0.0.1:1").unwrap();
    let known = (1..=2).map(|port| Some(format!("127.0.0.1:{port}"))).collect();
    let membership = distribute_cluster::Membership { addresses: known, ..membership };
    let builder = MultiWorkerMirroredStrategy::builder().membership(membership).devices(["CPU:0"]);
    let elastic = builder.elastic(1..=2).build().unwrap();
    let told = error_of(&training.distributed(&elastic).launch(learner(Net::new(false))));
    assert!(told.contains("worker:0 of 2") && told.contains("each would train alone"), "{told}");
}

/// Replicas that train apart.
struct Apart(Strategy);

impl LocalUpdates for Apart {
    fn is_due(&self, _: u64) -> bool {
        false
    }
}

impl StrategyExtended for Apart {
    fn name(&self) -> &'static str {
        "Apart"
    }
    fn replicas(&self) -> &Replicas {
        self.0.extended().replicas()
    }
    fn describe(&self) -> String {
        self.0.describe()
    }
    fn local_updates(&self) -> Option<&dyn LocalUpdates> {
        Some(self)
    }
}

#[test]
fn strategies_of_local_updates_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (training, _) = training(folder.path(), loader(rows(64), 4), loader(rows(8), 4));
    let apart = Strategy::new(Apart(MirroredStrategy::builder().num_replicas(2).build().unwrap()));
    let told = error_of(&training.distributed(&apart).launch(learner(Net::new(false))));
    assert!(told.contains("under Apart replicas update their own models"), "{told}");
}
