//! A `Trainer` of a burn model whose chief is killed, and that another process joins. The workers are this test
//! program, in another role.

use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::tensor::{Device, Int, Tensor};
use distribute_burn::{Adam, Fit, SparseCategoricalCrossentropy, ToArray, Trainer};
use distribute_input::{Array, Dataset};
use distribute_strategy::MultiWorkerMirroredStrategy;
use distribute_testkit::{Job, JobBuilder, Signal};
use distribute_train::callbacks::{Callback, Training};
use distribute_train::metrics::{Accuracy, Metrics};

use crate::common::*;

const DEADLINE: Duration = Duration::from_secs(60);

/// The variable by which this program is a worker; its value is the folder for its files.
const ROLE: &str = "DISTRIBUTE_TEST_ELASTIC_BURN_WORKER";

const EXAMPLES: usize = 64;

/// Tells of the steps, and slows them down.
struct Tells;

impl Callback for Tells {
    #[expect(clippy::print_stdout, reason = "the test waits for these lines")]
    fn step_end(&mut self, training: &mut Training<'_>) -> distribute_train::Result<()> {
        println!("step {} of {}", training.step, training.strategy.topology().workers());
        std::thread::sleep(Duration::from_millis(10));
        Ok(())
    }
}

#[test]
#[ignore = "a process that other tests start"]
fn elastic_worker() {
    let folder = PathBuf::from(std::env::var_os(ROLE).unwrap());
    assert!(folder.is_dir());
    let builder = MultiWorkerMirroredStrategy::builder().elastic(1..=3).devices(["CPU:0"]);
    let strategy = builder.heartbeat_timeout(Duration::from_secs(1)).build().unwrap();
    // Every process begins with values of its own, and has those of the others later.
    let build = |device: &Device| {
        device.seed(std::process::id().into());
        Mlp::new(device)
    };
    let adam = |model: &_| Adam::new(0.01).build(model);
    let metrics = Metrics::new().with(Accuracy);
    let mut trainer: Trainer<Mlp, Tensor<2>, Tensor<1, Int>, 2> =
        Trainer::new(&strategy, build, Mlp::forward, adam, SparseCategoricalCrossentropy, metrics).unwrap();
    let (x, y) = batch(3, EXAMPLES);
    let x = Array::new([EXAMPLES, INPUTS], x).unwrap();
    let data = Dataset::from_tensor_slices((x.clone(), Array::from(y))).shuffle(EXAMPLES, 7).batch(16);
    let history = trainer.fit(&data, Fit::epochs(40).callback(Tells)).unwrap();
    let predicted = trainer.predict(&Dataset::from_tensor_slices(x).batch(16)).unwrap();
    let bits: Vec<u32> = predicted.to_array().unwrap().as_slice().iter().map(|value: &f32| value.to_bits()).collect();
    println!("predictions {bits:?}");
    println!("epochs {} accuracy {}", history.epochs.len(), history.of("accuracy").last().unwrap());
}

fn workers(folder: &Path) -> JobBuilder {
    let place = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")];
    let job = Job::of_test("elastic::elastic_worker").unwrap().env(ROLE, folder.to_str().unwrap());
    let job = job.env("DISTRIBUTE_GENERATIONS", format!("file:{}", folder.join("generations").display()));
    place.into_iter().fold(job, |job, (name, value)| job.env(name, value)).env("DISTRIBUTE_JOB_ID", "elastic-burn")
}

#[test]
fn a_trainer_trains_on_without_its_chief_and_with_a_process_that_joins() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = workers(folder.path()).tasks(2).start().unwrap();
    (0..2).for_each(|rank| drop(job.wait_for_line(rank, " of 2", DEADLINE).unwrap()));
    job.kill(0, Signal::KILL).unwrap();
    job.wait_for_line(1, " of 1", DEADLINE).unwrap();
    let mut joined = workers(folder.path()).start().unwrap();
    joined.wait_for_line(0, " of 2", DEADLINE).unwrap();
    let (stayed, new) = (job.wait(1, DEADLINE).unwrap(), joined.wait(0, DEADLINE).unwrap());
    assert!(stayed.success() && new.success(), "{stayed:?} {new:?}");
    for begin in ["predictions ", "epochs 40 "] {
        let of = |printed: &str| printed.lines().find(|line| line.starts_with(begin)).map(str::to_owned);
        assert!(of(&stayed.stdout).is_some() && of(&stayed.stdout) == of(&new.stdout), "{stayed:?} {new:?}");
    }
    assert!(stayed.stdout.contains("step 160 of 2") && !stayed.stdout.contains("step 161"), "{stayed:?}");
}
