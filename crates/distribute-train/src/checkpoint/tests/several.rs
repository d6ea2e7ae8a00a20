//! Several models, optimizers and averages in one checkpoint.

use std::sync::Arc;
use std::time::Duration;

use distribute_cluster::Membership;
use distribute_device::DType;
use distribute_optim::backend::{LibraryOptimizer, Reduced, Variable};
use distribute_optim::{Adam, Ema, HostError, HostLoss, HostModel, Optimizer, OptimizerState, Sgd, Trainable};
use distribute_strategy::{CommunicationOptions, FullyShardedStrategy, MultiWorkerMirroredStrategy};
use distribute_testkit::Ports;
use parking_lot::Mutex;

use super::sharded::two_workers;
use super::*;

/// A model with one large variable, which strategies that shard divide, and a small one.
struct Net(HostModel);

impl Net {
    fn new(strategy: &Strategy, name: &str, value: f32) -> Net {
        let names = [format!("{name}.weight"), format!("{name}.bias")];
        let variable =
            |(name, len): (&String, usize)| HostTensor::new(&[len], vec![value; len]).map(|of| (name.clone(), of));
        let variables: Vec<_> = names.iter().zip([7, 2]).map(variable).collect::<Result<_, _>>().unwrap();
        let variables = variables.iter().map(|(name, value)| (name.as_str(), value.clone()));
        Net(HostModel::new(strategy, variables).unwrap())
    }

    fn train(&self, strategy: &Strategy, optimizer: &Optimizer<Host>, steps: usize) {
        for step in 0..steps {
            let gradient = |len: usize| HostTensor::new(&[len], vec![0.5 + step as f32; len]).unwrap();
            let loss = HostLoss(vec![Some(gradient(7)), Some(gradient(2))]);
            strategy.run_with(optimizer, |context, optimizer| optimizer.minimize(context, &loss)).unwrap();
        }
    }
}

impl Checkpointed for Net {
    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        for variable in self.0.parameters().variables() {
            let whole = variable.whole_on_chief(strategy)?;
            snapshot.put_whole::<Host, _>(strategy, MODEL, variable.name(), whole)?;
        }
        Ok(())
    }

    fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        for variable in self.0.parameters().variables() {
            let like = &variable.components()[0];
            let saved = snapshot.get_shaped::<Host, _>(MODEL, variable.name(), like, &variable.shape())?;
            variable.overwrite(&saved)?;
        }
        Ok(())
    }
}

fn mirrored() -> Strategy {
    MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build().unwrap()
}

fn in_parts() -> Strategy {
    FullyShardedStrategy::builder().devices(["CPU:0", "CPU:1"]).mirror_below(3).build().unwrap()
}

fn saved_in(root: &Path, strategy: &Strategy, parts: &[&dyn Checkpointed]) -> crate::Result<()> {
    let mut manager = CheckpointManager::new(root);
    manager.save(strategy, 1, parts, &())?;
    manager.finish_everywhere(strategy)
}

fn restored_from(root: &Path, strategy: &Strategy, parts: &[&dyn Checkpointed]) -> crate::Result<()> {
    CheckpointManager::new(root).restore::<()>(strategy, parts).map(drop)
}

#[test]
fn each_optimizer_gets_its_own_state_back_in_any_order() {
    for (from, to) in [(mirrored(), mirrored()), (in_parts(), in_parts()), (mirrored(), in_parts())] {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (Net::new(&from, "a", 0.5), Net::new(&from, "b", 0.25));
        let (of_a, of_b) = (Sgd::new(0.1).build(&a.0).unwrap(), Adam::new(0.3).build(&b.0).unwrap());
        a.train(&from, &of_a, 1);
        b.train(&from, &of_b, 2);
        saved_in(folder.path(), &from, &[&a, &b, &of_a, &of_b]).unwrap();

        let (a, b) = (Net::new(&to, "a", 0.0), Net::new(&to, "b", 0.0));
        let (new_a, new_b) = (Sgd::new(9.0).build(&a.0).unwrap(), Adam::new(9.0).build(&b.0).unwrap());
        restored_from(folder.path(), &to, &[&a, &b, &new_b, &new_a]).unwrap();
        assert_eq!((new_a.state(), new_b.state()), (of_a.state(), of_b.state()));
        assert_eq!((new_a.learning_rate(), new_b.learning_rate()), (0.1, 0.3));
        assert_ne!(new_a.state(), new_b.state());
        // Of a model that was saved without an optimizer.
        let c = Net::new(&to, "c", 0.0);
        let of_c = Sgd::new(9.0).build(&c.0).unwrap();
        let told = restored_from(folder.path(), &to, &[&of_c]).unwrap_err().to_string();
        assert!(told.contains("\"a.bias\"") && told.contains("\"c.bias\""), "{told}");
    }
}

#[test]
fn the_state_of_an_earlier_version_is_that_of_any_optimizer() {
    let strategy = mirrored();
    let net = Net::new(&strategy, "a", 0.5);
    let of_before = serde_json::json!({"steps": 5, "learning_rate": 0.2, "loss_scale": null, "good_steps": 0});
    let mut snapshot = Snapshot::new(5);
    snapshot.put_state(OPTIMIZER, &of_before).unwrap();
    let optimizer = Sgd::new(0.1).build(&net.0).unwrap();
    optimizer.load(&strategy, &snapshot).unwrap();
    assert_eq!(optimizer.state(), serde_json::from_value::<OptimizerState>(of_before).unwrap());
    // And that of a single optimizer is read by earlier versions, and by parameter servers.
    let mut snapshot = Snapshot::new(5);
    optimizer.save(&strategy, &mut snapshot).unwrap();
    assert_eq!(snapshot.get_state::<OptimizerState>(OPTIMIZER).unwrap(), Some(optimizer.state()));
}

/// A tensor library's own optimizer, whose state is a text.
struct Own(Mutex<Vec<u8>>);

impl Own {
    fn of(net: &Net, state: &str) -> (Arc<Own>, Optimizer<Host>) {
        let own = Arc::new(Own(Mutex::new(state.as_bytes().to_vec())));
        let optimizer = Optimizer::of_library(&net.0, 0.1, own.clone()).unwrap();
        (own, optimizer)
    }
}

impl LibraryOptimizer<Host> for Own {
    fn describe(&self) -> String {
        "own".to_owned()
    }

    fn apply(&self, _: usize, _: f64, _: Vec<Reduced<Host>>) -> Result<(), HostError> {
        Ok(())
    }

    fn copy(&self, _: usize, _: usize) {}

    fn save(&self, _: &Strategy) -> Result<Option<Vec<u8>>, HostError> {
        Ok(Some(self.0.lock().clone()))
    }

    fn load(&self, state: &[u8]) -> Result<(), HostError> {
        *self.0.lock() = state.to_vec();
        Ok(())
    }
}

#[test]
fn optimizers_of_the_library_keep_their_own_states_too() {
    let (strategy, folder) = (mirrored(), tempfile::tempdir().unwrap());
    let (a, b) = (Net::new(&strategy, "a", 0.5), Net::new(&strategy, "b", 0.25));
    let ((_, of_a), (_, of_b)) = (Own::of(&a, "state of a"), Own::of(&b, "state of b"));
    saved_in(folder.path(), &strategy, &[&of_a, &of_b]).unwrap();
    let ((own_a, of_a), (own_b, of_b)) = (Own::of(&a, ""), Own::of(&b, ""));
    restored_from(folder.path(), &strategy, &[&of_b, &of_a]).unwrap();
    assert_eq!((&own_a.0.lock()[..], &own_b.0.lock()[..]), (&b"state of a"[..], &b"state of b"[..]));
}

/// Puts the bytes of a tensor twice, on the chief alone.
struct TwiceOnChief;

impl Checkpointed for TwiceOnChief {
    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        for byte in if strategy.is_chief() { 0..2 } else { 0..0 } {
            snapshot.put_bytes(MODEL, "bytes", DType::U8, &[1], vec![byte]);
        }
        Ok(())
    }

    fn load(&self, _: &Strategy, _: &Snapshot) -> Result<(), BoxError> {
        Ok(())
    }
}

#[test]
fn what_would_overwrite_another_part_is_not_saved() {
    for strategy in [mirrored(), in_parts()] {
        let folder = tempfile::tempdir().unwrap();
        let (one, other) = (Net::new(&strategy, "a", 0.5), Net::new(&strategy, "a", 0.25));
        let build = |net: &Net| Sgd::new(0.1).build(&net.0).unwrap();
        let optimizers = [build(&one), build(&one), build(&other)];
        let ema = Ema::new(&one.0, 0.5).unwrap();
        let told = |parts: &[&dyn Checkpointed], expected: [&str; 2]| {
            let error = saved_in(folder.path(), &strategy, parts).unwrap_err();
            let Error::PutTwice { file, name } = &error else { panic!("{error}") };
            assert_eq!([file.as_str(), name], expected);
            assert_eq!(names(folder.path()), ["run"]);
        };
        told(&[&one, &other], [MODEL, "a.weight"]);
        told(&[&optimizers[0], &optimizers[1]], ["state.json", "optimizer a.bias"]);
        told(&[&one, &optimizers[0], &optimizers[2]], ["state.json", "optimizer a.bias"]);
        told(&[&ema, &ema], [OPTIMIZER, "a.weight/ema"]);
        told(&[&TwiceOnChief], [MODEL, "bytes"]);
        saved_in(folder.path(), &strategy, &[&one, &optimizers[0], &ema]).unwrap();
    }
}

#[test]
fn all_workers_get_the_error_of_a_name_that_the_chief_has_put_twice() {
    let folder = tempfile::tempdir().unwrap();
    let errors = two_workers(|_, strategy| saved_in(folder.path(), strategy, &[&TwiceOnChief]).unwrap_err());
    assert!(matches!(errors[0], Error::PutTwice { .. }), "{}", errors[0]);
    assert!(matches!(errors[1], Error::Chief(_)), "{}", errors[1]);
}

/// Fails in one call on one worker.
struct FailsIn(&'static str, bool);

impl FailsIn {
    fn check(&self, call: &str) -> Result<(), BoxError> {
        if self.1 && self.0 == call { Err(format!("no ink to {call}").into()) } else { Ok(()) }
    }
}

impl Checkpointed for FailsIn {
    fn prepare(&self, _: &Strategy) -> Result<(), BoxError> {
        self.check("prepare")
    }

    fn save(&self, _: &Strategy, _: &mut Snapshot) -> Result<(), BoxError> {
        self.check("save")
    }

    fn load(&self, _: &Strategy, _: &Snapshot) -> Result<(), BoxError> {
        self.check("load")
    }
}

/// Runs two workers whose models are whole.
fn two_mirrored<T: Send>(work: impl Fn(u32, &Strategy) -> T + Sync) -> [T; 2] {
    let address = format!("127.0.0.1:{}", Ports::reserve(1).unwrap().release()[0]);
    let worker = &|rank: u32| {
        let strategy = MultiWorkerMirroredStrategy::builder()
            .membership(Membership::new(rank, 2, &address).unwrap())
            .communication(CommunicationOptions::default().timeout(Duration::from_secs(10)))
            .build()
            .unwrap();
        work(rank, &strategy)
    };
    std::thread::scope(|scope| {
        [0, 1].map(|rank| scope.spawn(move || worker(rank))).map(|worker| worker.join().unwrap())
    })
}

#[test]
fn a_part_that_fails_on_one_worker_is_an_error_of_all_and_they_continue_together() {
    let work = |failing: u32, rank: u32, strategy: &Strategy, folder: &Path| {
        let mut told = Vec::new();
        let parts = |call| FailsIn(call, rank == failing);
        let mut manager = CheckpointManager::new(folder);
        manager.save(strategy, 1, &[&parts("")], &1).unwrap();
        manager.finish_everywhere(strategy).unwrap();
        for call in ["prepare", "save"] {
            told.push(manager.save(strategy, 2, &[&parts(call)], &2).map_err(|error| error.to_string()));
        }
        let newest = folder.join("step-00000001");
        let load = parts("load");
        told.push(manager.restore_newest(strategy, &[&load]).map(drop).map_err(|error| error.to_string()));
        told.push(manager.restore_from(strategy, &newest, &[&load]).map(drop).map_err(|error| error.to_string()));
        // No worker waits in an operation of its own.
        manager.save(strategy, 3, &[&parts("")], &3).unwrap();
        manager.finish_everywhere(strategy).unwrap();
        told
    };
    for (failing, whose) in [(0, "on the chief: "), (1, "on worker:1: ")] {
        let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let mirrored = two_mirrored(|rank, strategy| work(failing, rank, strategy, folders[0].path()));
        let in_parts = two_workers(|rank, strategy| work(failing, rank, strategy, folders[1].path()));
        for told in [mirrored, in_parts] {
            for (rank, told) in (0..).zip(told) {
                for (call, outcome) in ["prepare", "save", "load", "load"].iter().zip(told) {
                    let prefix = if rank == failing { "" } else { whose };
                    let expected = format!("no ink to {call}");
                    let error = outcome.unwrap_err();
                    assert!(error.starts_with(prefix) && error.ends_with(&expected), "{rank}: {error}");
                }
            }
        }
    }
}

#[test]
fn backups_that_cannot_be_removed_are_an_error_of_all_workers() {
    let folder = tempfile::tempdir().unwrap();
    let faults = Faults::default();
    let errors = two_mirrored(|rank, strategy| {
        let mut manager = CheckpointManager::new(folder.path()).of_backups();
        if rank == 0 {
            manager = manager.with_disk(Disk::with(&faults));
        }
        manager.save(strategy, 1, &[], &1).unwrap();
        manager.finish_everywhere(strategy).unwrap();
        if rank == 0 {
            faults.set(Fault::Fails(1));
        }
        manager.remove_backups(strategy).unwrap_err().to_string()
    });
    faults.set(Fault::None);
    assert!(errors[0].contains("injected"), "{errors:?}");
    assert_eq!(errors[1], format!("on the chief: {}", errors[0]));
}

#[test]
fn averages_continue_as_without_the_interruption() {
    let wholes = |strategy: &Strategy, ema: &Ema<Host>| -> Vec<Vec<f32>> {
        let whole = |average: &Variable<Host>| average.whole(strategy).unwrap().to_elements::<f32>().unwrap();
        ema.averages().map(whole).collect()
    };
    for (from, to) in [(mirrored(), mirrored()), (in_parts(), in_parts()), (in_parts(), mirrored())] {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (Net::new(&from, "a", 0.5), Net::new(&from, "b", 0.25));
        let (sgd, of_b) = (Sgd::new(0.1).build(&a.0).unwrap(), Ema::new(&b.0, 0.5).unwrap());
        let mut ema = Ema::new(&a.0, 0.999).unwrap();
        for _ in 0..3 {
            a.train(&from, &sgd, 1);
            ema.update(&a.0).unwrap();
        }
        a.train(&from, &sgd, 1);
        saved_in(folder.path(), &from, &[&a, &b, &sgd, &of_b, &ema]).unwrap();
        ema.update(&a.0).unwrap();

        let (a, b) = (Net::new(&to, "a", 0.0), Net::new(&to, "b", 0.0));
        let (sgd, of_b) = (Sgd::new(0.1).build(&a.0).unwrap(), Ema::new(&b.0, 0.5).unwrap());
        let mut again = Ema::new(&a.0, 0.999).unwrap();
        let parts: [&dyn Checkpointed; 5] = [&a, &b, &sgd, &again, &of_b];
        restored_from(folder.path(), &to, &parts).unwrap();
        assert_eq!((again.updates(), of_b.updates()), (3, 0));
        assert_eq!(wholes(&to, &of_b), [vec![0.25; 7], vec![0.25; 2]]);
        again.update(&a.0).unwrap();
        assert_eq!(wholes(&to, &again), wholes(&from, &ema));

        // The averages, and not what the variables have, would otherwise be lost.
        again.swap(&a.0).unwrap();
        for told in [
            saved_in(&folder.path().join("other"), &to, &[&again]).unwrap_err(),
            restored_from(folder.path(), &to, &[&again]).unwrap_err(),
        ] {
            assert!(told.to_string().contains("since swap"), "{told}");
        }
        again.swap(&a.0).unwrap();
        assert_eq!(wholes(&to, &again), wholes(&from, &ema));
    }
}

#[test]
fn a_writer_that_cannot_be_started_is_an_error_of_all_workers() {
    let work = |rank: u32, strategy: &Strategy, folder: &Path| {
        let (faults, mut manager) = (Faults::default(), CheckpointManager::new(folder));
        if rank == 0 {
            manager = manager.with_disk(Disk::with(&faults));
        }
        manager.claim(strategy).unwrap();
        faults.without_threads();
        let saved = manager.save(strategy, 1, &[&FailsIn("", false)], &1);
        saved.and_then(|()| manager.finish_everywhere(strategy)).unwrap_err().to_string()
    };
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let mirrored = two_mirrored(|rank, strategy| work(rank, strategy, folders[0].path()));
    let in_parts = two_workers(|rank, strategy| work(rank, strategy, folders[1].path()));
    for [chief, other] in [mirrored, in_parts] {
        assert!(chief.contains("step 1: no thread can be started"), "{chief}");
        assert_eq!(other, format!("on the chief: {chief}"));
    }
}

#[test]
fn an_optimizer_without_slots_is_not_restored_from_a_checkpoint_without_one() {
    let (folder, strategy) = (tempfile::tempdir().unwrap(), mirrored());
    let net = Net::new(&strategy, "a", 0.5);
    let sgd = Sgd::new(0.1).build(&net.0).unwrap();
    saved_in(folder.path(), &strategy, &[&net]).unwrap();
    let error = restored_from(folder.path(), &strategy, &[&net, &sgd]).unwrap_err().to_string();
    assert!(error.contains("the checkpoint has no optimizer"), "{error}");
    saved_in(&folder.path().join("with it"), &strategy, &[&net, &sgd]).unwrap();
    restored_from(&folder.path().join("with it"), &strategy, &[&net, &sgd]).unwrap();
}
