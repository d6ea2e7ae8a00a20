//! Models in parts, in one process and in two: saved and restored one variable at a time.

use std::ops::ControlFlow;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use distribute_cluster::Membership;
use distribute_optim::backend::Variable;
use distribute_optim::{Adam, HostLoss, HostModel, Optimizer, Trainable};
use distribute_strategy::{CommunicationOptions, FullyShardedStrategy, OneDeviceStrategy};
use distribute_testkit::Ports;
use parking_lot::Mutex;

use super::super::disk::{Fault, Faults};
use super::*;
use crate::callbacks::{Callback, EarlyStopping, Run, Training};

mod restoring;

/// Names and shapes: odd sizes, and one that stays whole.
const SHAPES: [(&str, &[usize]); 4] =
    [("embed", &[7, 3]), ("a.weight", &[5, 13]), ("a.bias", &[2]), ("head", &[3, 11])];

/// Less than the largest variable, so that there are files of one variable and of several.
const FILE_BYTES: usize = 200;

/// The most time that an error takes to reach the other worker; a deadline is a minute.
const AT_ONCE: Duration = Duration::from_secs(20);

/// A model that is saved and loaded in the order of its variables, or in the opposite one.
struct Layers {
    model: HostModel,
    is_reversed: bool,
}

impl Layers {
    fn variables(&self) -> Vec<&Variable<Host>> {
        let mut variables: Vec<&Variable<Host>> = self.model.parameters().variables().iter().collect();
        if self.is_reversed {
            variables.reverse();
        }
        variables
    }
}

impl Checkpointed for Layers {
    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        for variable in self.variables() {
            snapshot.put_whole::<Host, _>(strategy, "model", variable.name(), variable.whole_on_chief(strategy)?)?;
        }
        Ok(())
    }

    fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        for variable in self.variables() {
            let like = &variable.components()[0];
            let saved = snapshot.get_shaped::<Host, _>("model", variable.name(), like, &variable.shape())?;
            variable.overwrite(&saved)?;
        }
        Ok(())
    }
}

type Trained = (Layers, Optimizer<Host>);

fn values(shape: &[usize], step: usize) -> HostTensor<f32> {
    let len: usize = shape.iter().product();
    HostTensor::new(shape, (0..len).map(|i| ((i * 37 + step * 11) % 19) as f32 / 16.0 - 0.5).collect()).unwrap()
}

fn made(strategy: &Strategy) -> Trained {
    let model = HostModel::new(strategy, SHAPES.map(|(name, shape)| (name, values(shape, 0)))).unwrap();
    let optimizer = Adam::new(0.1).build(&model).unwrap();
    (Layers { model, is_reversed: false }, optimizer)
}

fn train(strategy: &Strategy, (_, optimizer): &Trained, steps: std::ops::Range<usize>) {
    for step in steps {
        let run = strategy.run_with(optimizer, |context, optimizer| {
            let gradients = SHAPES.map(|(_, shape)| Some(values(shape, step + 1))).to_vec();
            optimizer.minimize(context, &HostLoss(gradients))
        });
        run.unwrap();
    }
}

/// Returns all variables and slots, whole, bit for bit.
fn wholes(strategy: &Strategy, (layers, optimizer): &Trained) -> Vec<(String, Vec<u32>)> {
    let bits = |tensor: &HostTensor<f32>| tensor.to_elements::<f32>().unwrap().into_iter().map(f32::to_bits).collect();
    let of = |variable: &&Variable<Host>| (variable.name().to_owned(), bits(&variable.whole(strategy).unwrap()));
    let mut all: Vec<(String, Vec<u32>)> = layers.variables().iter().map(of).collect();
    let visited = optimizer.visit_whole_slots(strategy, |name, slot| {
        all.extend(slot.map(|slot| (name.to_owned(), bits(&slot))));
        ControlFlow::<()>::Continue(())
    });
    assert!(visited.unwrap().is_continue());
    all
}

fn in_parts(replicas: usize) -> Strategy {
    let devices = (0..replicas).map(|index| format!("CPU:{index}"));
    FullyShardedStrategy::builder().devices(devices).mirror_below(3).build().unwrap()
}

fn mirrored(replicas: usize) -> Strategy {
    MirroredStrategy::builder().devices((0..replicas).map(|index| format!("CPU:{index}"))).build().unwrap()
}

fn one_device() -> Strategy {
    OneDeviceStrategy::builder("CPU:0").build().unwrap()
}

/// Returns a folder in memory if there is such a one, since it is synced some thousand times.
pub(super) fn folder_in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

fn manager(root: &Path) -> CheckpointManager {
    CheckpointManager::new(root).max_shard_bytes(FILE_BYTES)
}

fn save_in(manager: &mut CheckpointManager, strategy: &Strategy, trained: &Trained, step: u64) -> crate::Result<()> {
    manager.save(strategy, step, &[&trained.0, &trained.1], &step)?;
    manager.finish_everywhere(strategy)
}

fn restore_in(
    manager: &mut CheckpointManager,
    strategy: &Strategy,
    trained: &Trained,
) -> crate::Result<Option<(u64, u64)>> {
    manager.restore(strategy, &[&trained.0, &trained.1])
}

/// Runs two workers with two replicas each, of which the first is the chief.
pub(super) fn two_workers<T: Send>(work: impl Fn(u32, &Strategy) -> T + Sync) -> [T; 2] {
    let address = format!("127.0.0.1:{}", Ports::reserve(1).unwrap().release()[0]);
    let worker = &|rank: u32| {
        let strategy = FullyShardedStrategy::builder()
            .devices(["CPU:0", "CPU:1"])
            .membership(Membership::new(rank, 2, &address).unwrap())
            .communication(CommunicationOptions::default().timeout(Duration::from_secs(60)))
            .mirror_below(3)
            .build()
            .unwrap();
        work(rank, &strategy)
    };
    std::thread::scope(|scope| {
        let workers = [0, 1].map(|rank| scope.spawn(move || worker(rank)));
        workers.map(|worker| worker.join().unwrap())
    })
}

#[test]
fn checkpoints_in_parts_are_those_of_whole_models() {
    for saved_in in [in_parts(4), mirrored(2), in_parts(1), one_device()] {
        let folder = folder_in_memory();
        let trained = made(&saved_in);
        train(&saved_in, &trained, 0..3);
        save_in(&mut manager(folder.path()), &saved_in, &trained, 3).unwrap();
        // The files hold what a snapshot in memory does.
        let mut expected = Snapshot::new(3);
        trained.0.save(&saved_in, &mut expected).unwrap();
        trained.1.save(&saved_in, &mut expected).unwrap();
        expected.put_state("program", &3).unwrap();
        let checkpoint = folder.path().join("step-00000003");
        let read = Snapshot::read(&checkpoint).unwrap();
        expected.run = read.run;
        assert_eq!(read, expected, "{}", saved_in.describe());
        let files = names(&checkpoint);
        assert!(files.iter().all(|name| !name.ends_with(".part")), "{files:?}");
        for group in ["model", "optimizer"] {
            let index = fs::read_to_string(checkpoint.join(format!("{group}.safetensors.index.json"))).unwrap();
            let index: serde_json::Value = serde_json::from_str(&index).unwrap();
            let shards: Vec<&String> = files.iter().filter(|name| name.starts_with(&format!("{group}-"))).collect();
            assert!(shards.len() >= 2 && shards[0].ends_with(&format!("-of-{:05}.safetensors", shards.len())));
            let total: usize = expected.files[group].values().map(|stored| stored.bytes.len()).sum();
            assert_eq!(index["metadata"]["total_size"], total);
            for (name, stored) in &expected.files[group] {
                let file = fs::read(checkpoint.join(index["weight_map"][name].as_str().unwrap())).unwrap();
                let tensors = safetensors::SafeTensors::deserialize(&file).unwrap();
                assert_eq!(tensors.tensor(name).unwrap().data(), stored.bytes);
                assert!(tensors.len() == 1 || file.len() < FILE_BYTES + 1000);
            }
        }
        let wholes_then = wholes(&saved_in, &trained);
        for strategy in [in_parts(4), in_parts(3), mirrored(2), one_device()] {
            let restored = made(&strategy);
            let found = restore_in(&mut manager(folder.path()), &strategy, &restored).unwrap();
            assert_eq!(found, Some((3, 3)));
            assert_eq!(wholes(&strategy, &restored), wholes_then, "{}", strategy.describe());
        }
        // Training continues with the optimizer's state.
        let again = made(&saved_in);
        restore_in(&mut manager(folder.path()), &saved_in, &again).unwrap();
        train(&saved_in, &again, 3..5);
        train(&saved_in, &trained, 3..5);
        assert_eq!(wholes(&saved_in, &again), wholes(&saved_in, &trained));
    }
}

#[test]
fn a_model_that_fits_one_file_has_one() {
    let folder = folder_in_memory();
    let strategy = in_parts(2);
    let trained = made(&strategy);
    save_in(&mut CheckpointManager::new(folder.path()), &strategy, &trained, 1).unwrap();
    let files = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"];
    assert_eq!(names(&folder.path().join("step-00000001")), files);
}

#[test]
fn two_workers_save_and_restore_parts() {
    let folder = folder_in_memory();
    let saved = two_workers(|_, strategy| {
        let trained = made(strategy);
        train(strategy, &trained, 0..3);
        let mut manager = manager(folder.path());
        for step in [2, 3] {
            save_in(&mut manager, strategy, &trained, step).unwrap();
        }
        let wholes = wholes(strategy, &trained);
        let again = made(strategy);
        assert_eq!(restore_in(&mut manager, strategy, &again).unwrap(), Some((3, 3)));
        train(strategy, &trained, 3..4);
        train(strategy, &again, 3..4);
        (wholes, self::wholes(strategy, &trained), self::wholes(strategy, &again))
    });
    // Slots are gathered by the chief.
    let (then, later, again) = &saved[0];
    assert_eq!(later, again);
    assert_eq!(saved[1].0[..SHAPES.len()], then[..SHAPES.len()]);
    assert_eq!(saved[1].1, saved[1].2);
    for strategy in [in_parts(4), mirrored(2), one_device()] {
        let restored = made(&strategy);
        restore_in(&mut CheckpointManager::new(folder.path()), &strategy, &restored).unwrap();
        assert_eq!(wholes(&strategy, &restored), *then);
    }
    // What one process has saved is restored by two.
    let alone = one_device();
    let trained = made(&alone);
    train(&alone, &trained, 0..4);
    let folder = folder_in_memory();
    save_in(&mut CheckpointManager::new(folder.path()), &alone, &trained, 4).unwrap();
    let expected = wholes(&alone, &trained);
    let restored = two_workers(|_, strategy| {
        let restored = made(strategy);
        assert_eq!(restore_in(&mut manager(folder.path()), strategy, &restored).unwrap(), Some((4, 4)));
        wholes(strategy, &restored)
    });
    assert_eq!(restored[0], expected);
    assert_eq!(restored[1][..SHAPES.len()], expected[..SHAPES.len()]);
}

struct Fit<'a>(&'a Strategy, &'a Trained);

impl Run for Fit<'_> {
    fn model(&self) -> &dyn Checkpointed {
        &self.1.0
    }

    fn claim(&mut self, checkpoints: &mut CheckpointManager) -> crate::Result<()> {
        checkpoints.claim(self.0).map(drop)
    }

    fn save(&mut self, checkpoints: &mut CheckpointManager) -> crate::Result<()> {
        save_in(checkpoints, self.0, self.1, 1)
    }

    fn restore(&mut self, checkpoints: &mut CheckpointManager) -> crate::Result<Option<u64>> {
        Ok(restore_in(checkpoints, self.0, self.1)?.map(|(step, _)| step))
    }
}

#[test]
fn early_stopping_restores_the_best_parts_on_all_workers() {
    let ended = two_workers(|_, strategy| {
        let trained = made(strategy);
        let mut stopping = EarlyStopping::new("loss").restore_best();
        let mut best = Vec::new();
        for (epoch, loss) in (1..).zip([2.0, 1.0, 3.0]) {
            train(strategy, &trained, epoch as usize..epoch as usize + 1);
            if epoch == 2 {
                best = wholes(strategy, &trained);
            }
            let (mut learning_rate, mut stop, values) = (0.1, None, [("loss".to_owned(), loss)]);
            let mut training = Training {
                epoch,
                epochs: 3,
                steps_per_epoch: Some(1),
                step: u64::from(epoch),
                examples: 0,
                values: &values,
                without_validation: false,
                without_training: false,
                learning_rate: &mut learning_rate,
                stop: &mut stop,
                strategy,
                run: &mut Fit(strategy, &trained),
            };
            stopping.epoch_end(&mut training).unwrap();
            if epoch == 3 {
                stopping.train_end(&mut training).unwrap();
                assert!(stop.is_some());
            }
        }
        (best, wholes(strategy, &trained))
    });
    for (best, restored) in ended {
        assert_eq!(best[..SHAPES.len()], restored[..SHAPES.len()]);
    }
}

/// The chief's disk fails or is gone at every operation of a save, as when it is full.
#[test]
fn an_error_of_the_chiefs_disk_amid_a_save_reaches_all_workers_and_leaves_the_checkpoint_before() {
    let folder = folder_in_memory();
    let faults = Faults::default();
    let told = two_workers(|rank, strategy| {
        let trained = made(strategy);
        let mut manager = manager(folder.path()).keep(2);
        if rank == 0 {
            manager = manager.with_disk(Disk::with(&faults));
        }
        save_in(&mut manager, strategy, &trained, 1).unwrap();
        let count = crate::from_chief::<_, Error>(strategy, Ok(faults.count())).unwrap();
        let mut seen = Vec::new();
        for at in (1..=count).step_by(3) {
            if rank == 0 {
                faults.set(Fault::Fails(at));
            }
            let began = Instant::now();
            let outcome = save_in(&mut manager, strategy, &trained, 100 + at as u64);
            assert!(began.elapsed() < AT_ONCE, "{at}: {:?}", began.elapsed());
            if rank == 0 {
                faults.set(Fault::None);
                let newest = steps(folder.path())[0];
                let before = outcome.is_err() && newest < 100 + at as u64;
                assert!(before || newest == 100 + at as u64, "{at}: {outcome:?}, {newest}");
                assert!(names(folder.path()).iter().all(|name| !name.contains(".tmp-")), "{at}");
            }
            seen.push(outcome.map_err(|error| error.to_string()));
            // Another save works, and the checkpoint is whole.
            save_in(&mut manager, strategy, &trained, 50).unwrap();
        }
        seen
    });
    assert!(told[0].len() > 5 && told[0].iter().filter(|outcome| outcome.is_err()).count() > 5, "{told:?}");
    for (chiefs, others) in told[0].iter().zip(&told[1]) {
        match (chiefs, others) {
            (Ok(()), Ok(())) => {}
            (Err(chiefs), Err(others)) => {
                assert!(chiefs.contains("injected"), "{chiefs}");
                assert_eq!(*others, format!("on the chief: {chiefs}"));
            }
            _ => panic!("{chiefs:?} and {others:?}"),
        }
    }
}

#[test]
fn a_crash_at_any_operation_of_a_save_in_parts_leaves_a_good_checkpoint() {
    let strategy = in_parts(2);
    let trained = made(&strategy);
    let save = |root: &Path, faults: &Faults, step| {
        let mut manager = manager(root).with_disk(Disk::with(faults));
        let restored = manager.restore::<u64>(&strategy, &[]);
        restored.and_then(|_| save_in(&mut manager, &strategy, &trained, step))
    };
    let folder = folder_in_memory();
    let calm = Faults::default();
    save(folder.path(), &calm, 1).unwrap();
    calm.set(Fault::None);
    save(folder.path(), &calm, 2).unwrap();
    assert!(calm.log().iter().any(|operation| operation.contains("renaming to") && operation.contains("-of-")));
    for at in (1..=calm.count()).step_by(2) {
        let folder = folder_in_memory();
        let faults = Faults::default();
        save(folder.path(), &faults, 1).unwrap();
        faults.set(Fault::Killed(at));
        let outcome = save(folder.path(), &faults, 2);
        faults.set(Fault::None);
        let restored = restore_in(&mut manager(folder.path()), &strategy, &made(&strategy)).unwrap();
        assert!(restored == Some((2, 2)) || (outcome.is_err() && restored == Some((1, 1))), "{at}: {restored:?}");
    }
}

#[test]
fn a_disk_that_hangs_amid_a_save_is_told_to_all_workers() {
    let folder = folder_in_memory();
    let faults = Faults::default();
    let errors = two_workers(|rank, strategy| {
        let trained = made(strategy);
        let mut manager = manager(folder.path()).write_timeout(Duration::from_millis(200));
        if rank == 0 {
            manager = manager.with_disk(Disk::with(&faults));
        }
        manager.claim(strategy).unwrap();
        if rank == 0 {
            faults.set(Fault::Hangs("writing"));
        }
        let began = Instant::now();
        let error = manager.save(strategy, 1, &[&trained.0, &trained.1], &1u64).unwrap_err();
        assert!(began.elapsed() < AT_ONCE, "{:?}", began.elapsed());
        error
    });
    faults.set(Fault::None);
    assert!(matches!(errors[0], Error::DiskHangs { .. }), "{}", errors[0]);
    assert!(matches!(errors[1], Error::ChiefsDisk(_)), "{}", errors[1]);
    assert!(errors[1].to_string().contains("writing"), "{}", errors[1]);
}

#[test]
fn a_disk_that_waits_for_tensors_does_not_hang() {
    /// Takes longer between two tensors than an operation on the disk may.
    struct Slow(Mutex<mpsc::Sender<()>>);
    impl Checkpointed for Slow {
        fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
            snapshot.put_whole::<Host, _>(strategy, "model", "a", Some(HostTensor::scalar(7.0f32)))?;
            self.0.lock().send(())?;
            std::thread::sleep(4 * LIMIT);
            Ok(snapshot.put_whole::<Host, _>(strategy, "model", "b", Some(HostTensor::scalar(8.0f32)))?)
        }
        fn load(&self, _: &Strategy, _: &Snapshot) -> Result<(), BoxError> {
            Ok(())
        }
    }
    const LIMIT: Duration = Duration::from_millis(300);
    let folder = folder_in_memory();
    let (send, receive) = mpsc::channel();
    std::thread::scope(|scope| {
        // Waits for the folder, and so for the disk of the manager that saves.
        let root = folder.path();
        let other = scope.spawn(move || {
            receive.recv_timeout(AT_ONCE).unwrap();
            manager(root).write_timeout(LIMIT).restore::<u64>(&one_device(), &[])
        });
        let strategy = in_parts(2);
        let mut manager = manager(folder.path()).write_timeout(LIMIT);
        manager.save(&strategy, 1, &[&Slow(Mutex::new(send))], &1).unwrap();
        manager.finish_everywhere(&strategy).unwrap();
        assert_eq!(other.join().unwrap().unwrap(), Some((1, 1)));
    });
}

#[test]
fn one_name_for_two_tensors_is_an_error() {
    struct Twice;
    impl Checkpointed for Twice {
        fn save(&self, _: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
            for _ in 0..2 {
                snapshot.put::<Host, _>("model", "w", &HostTensor::scalar(7.0f32))?;
            }
            Ok(())
        }
        fn load(&self, _: &Strategy, _: &Snapshot) -> Result<(), BoxError> {
            Ok(())
        }
    }
    let folder = folder_in_memory();
    let strategy = in_parts(2);
    let mut manager = manager(folder.path());
    let saved = manager.save(&strategy, 1, &[&Twice], &()).and_then(|()| manager.finish_everywhere(&strategy));
    let error = saved.unwrap_err();
    assert!(matches!(error, Error::PutTwice { .. }), "{error}");
    assert!(steps(folder.path()).is_empty());
}

#[cfg(feature = "object-store")]
#[test]
fn a_store_gets_files_with_the_same_names() {
    let root = std::path::PathBuf::from("memory://checkpoints/sharded/run");
    let strategy = in_parts(3);
    let trained = made(&strategy);
    train(&strategy, &trained, 0..2);
    save_in(&mut manager(&root), &strategy, &trained, 2).unwrap();
    let place = distribute_storage::Location::open(root.join("step-00000002").to_str().unwrap()).unwrap();
    let names: Vec<String> = place.list_below().unwrap().into_iter().map(|entry| entry.name).collect();
    assert!(names.iter().any(|name| name == "model-00001-of-00003.safetensors"), "{names:?}");
    assert!(names.iter().all(|name| !name.ends_with(".part")), "{names:?}");
    let restored = made(&strategy);
    assert_eq!(restore_in(&mut manager(&root), &strategy, &restored).unwrap(), Some((2, 2)));
    assert_eq!(wholes(&strategy, &restored), wholes(&strategy, &trained));
}
