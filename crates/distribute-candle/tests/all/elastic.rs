//! A `Trainer` whose workers are killed, told to leave, and replaced. The workers are this test program, in another
//! role.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use candle_core::{Device, Tensor};
use candle_nn::linear;
use distribute_candle::{Adam, Error, Fit, MeanSquaredError, Trainer};
use distribute_input::{Dataset, InputContext};
use distribute_strategy::MultiWorkerMirroredStrategy;
use distribute_testkit::{Job, JobBuilder, Signal};
use distribute_train::callbacks::{BackupAndRestore, Callback, CsvLogger, EarlyStopping, Training};
use distribute_train::metrics::Metrics;
use distribute_train::preemption::TerminationConfig;
use distribute_types::ErrorClass;

const DEADLINE: Duration = Duration::from_secs(60);

/// The variable by which this program is a worker; its value is the folder for its files.
const ROLE: &str = "DISTRIBUTE_TEST_ELASTIC_WORKER";

const EPOCHS: u32 = 12;
const STEPS: u64 = 10;

/// Tells of the steps, and slows them down.
struct Tells;

#[expect(clippy::print_stdout, reason = "the test waits for these lines")]
impl Callback for Tells {
    fn members_changed(&mut self, training: &mut Training<'_>) -> distribute_train::Result<()> {
        println!("members {} rate {}", training.strategy.topology().workers(), training.learning_rate);
        Ok(())
    }

    fn step_end(&mut self, training: &mut Training<'_>) -> distribute_train::Result<()> {
        println!("step {} of {}", training.step, training.strategy.topology().workers());
        std::thread::sleep(Duration::from_millis(10));
        Ok(())
    }

    fn epoch_end(&mut self, training: &mut Training<'_>) -> distribute_train::Result<()> {
        *training.learning_rate *= 0.9;
        Ok(())
    }
}

fn rows(count: usize) -> (Tensor, Tensor) {
    let x = (0..count * 4).map(|at| ((at * 37 % 101) as f32 - 50.0) / 50.0).collect::<Vec<_>>();
    let x = Tensor::from_vec(x, (count, 4), &Device::Cpu).unwrap();
    let y = x.matmul(&Tensor::new(&[[1.0f32], [-2.0], [0.5], [3.0]], &Device::Cpu).unwrap()).unwrap();
    (x, y)
}

fn strategy() -> distribute_strategy::Strategy {
    let builder = MultiWorkerMirroredStrategy::builder().elastic(1..=4).devices(["CPU:0"]);
    builder.heartbeat_timeout(Duration::from_secs(1)).build().unwrap()
}

#[test]
#[ignore = "a process that other tests start"]
fn elastic_worker() {
    let folder = PathBuf::from(std::env::var_os(ROLE).unwrap());
    let strategy = strategy();
    let build = |vb: candle_nn::VarBuilder<'_>| linear(4, 1, vb.pp("fc"));
    let adam = |model: &_| Adam::new(0.05).build(model);
    let mut trainer = Trainer::new(&strategy, build, adam, MeanSquaredError, Metrics::new()).unwrap();
    // What a process that joins would not have, or divide otherwise.
    let data = Dataset::from_tensor_slices(rows(STEPS as usize * 24)).shuffle(240, 7).batch(24);
    let refused = strategy.distribute_datasets_from_function(|_: InputContext| Ok(data.clone())).err().unwrap();
    assert!(refused.to_string().contains("pass a dataset to distribute_dataset"), "{refused}");
    let best = Fit::epochs(1).callback(EarlyStopping::new("loss").restore_best());
    if std::env::var_os("REFUSED").is_some() {
        let refused = trainer.fit(&data, best).unwrap_err().to_string();
        assert!(refused.contains("restore_best does not go with an elastic strategy"), "{refused}");
        let refused = Adam::new(0.05).build(trainer.model()).unwrap().zero1().err().unwrap().to_string();
        assert!(refused.contains("zero1 does not go with an elastic strategy"), "{refused}");
        return;
    }
    let fit = Fit::epochs(EPOCHS)
        .validation(&Dataset::from_tensor_slices(rows(40)).shuffle(40, 3).batch(16))
        .callback(BackupAndRestore::new(folder.join("backup")).every_steps(5).keep_at_end())
        .callback(CsvLogger::new(folder.join("history.csv")))
        .callback(Tells)
        .stop_on(TerminationConfig::default());
    match trainer.fit(&data, fit) {
        Ok(history) => {
            let weights = trainer.model().variables().iter().map(|variable| {
                let bits = variable.components()[0].flatten_all().unwrap().to_vec1::<f32>().unwrap();
                bits.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            });
            println!("weights {:?}", weights.collect::<Vec<_>>());
            println!("losses {:?}", history.of("val_loss"));
            let loss = trainer.evaluate(&Dataset::from_tensor_slices(rows(40)).batch(16)).unwrap()[0].1;
            println!("rate {} loss {loss:.12}", trainer.optimizer().learning_rate());
        }
        Err(error) => end(&error),
    }
}

#[expect(clippy::print_stdout, reason = "the test reads it")]
fn end(error: &Error) -> ! {
    println!("{error}");
    std::process::exit(error.class().exit_code().into());
}

fn workers(folder: &Path) -> JobBuilder {
    let place = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")];
    let job = Job::of_test("elastic::elastic_worker").unwrap().env(ROLE, folder.to_str().unwrap());
    let job = job.env("DISTRIBUTE_GENERATIONS", format!("file:{}", folder.join("generations").display()));
    place.into_iter().fold(job, |job, (name, value)| job.env(name, value)).env("DISTRIBUTE_JOB_ID", "elastic-test")
}

/// Returns the rest of the line that begins so.
#[track_caller]
fn line<'a>(printed: &'a str, begin: &str) -> &'a str {
    let found = printed.lines().find_map(|line| line.strip_prefix(begin));
    found.unwrap_or_else(|| panic!("no {begin:?} in {printed}"))
}

#[test]
fn a_trainer_trains_on_without_its_chief_and_with_processes_that_join() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = workers(folder.path()).tasks(3).start().unwrap();
    (0..3).for_each(|rank| drop(job.wait_for_line(rank, " of 3", DEADLINE).unwrap()));
    // One of them is the chief.
    job.kill(0, Signal::KILL).unwrap();
    job.wait_for_line(1, "members 2", DEADLINE).unwrap();
    let mut joined = workers(folder.path()).start().unwrap();
    joined.wait_for_line(0, " of 3", DEADLINE).unwrap();
    job.kill(1, Signal::TERM).unwrap();
    let left = job.wait(1, DEADLINE).unwrap();
    assert_eq!(left.code, Some(143), "{left:?}");
    let (stayed, new) = (job.wait(2, DEADLINE).unwrap(), joined.wait(0, DEADLINE).unwrap());
    assert!(stayed.success() && new.success(), "{stayed:?} {new:?}");
    for begin in ["weights ", "losses ", "rate "] {
        assert_eq!(line(&stayed.stdout, begin), line(&new.stdout, begin));
    }
    // Each step was made once, by all that were there.
    let killed = job.wait(0, DEADLINE).unwrap();
    let mut made = BTreeSet::new();
    for worker in [&killed, &left, &stayed, &new] {
        let steps: Vec<u64> = worker.stdout.lines().filter_map(|line| line.strip_prefix("step ")).map(first).collect();
        assert!(steps.windows(2).all(|pair| pair[0] + 1 == pair[1]), "{steps:?}");
        made.extend(steps);
    }
    assert_eq!(made, (1..=STEPS * u64::from(EPOCHS)).collect());
    // The rate is that after each epoch, also on the process that joined later.
    let rate: f64 = line(&new.stdout, "rate ").split(' ').next().unwrap().parse().unwrap();
    assert!((rate - 0.05 * 0.9f64.powi(EPOCHS as i32)).abs() < 1e-9, "{rate}");
    let table = std::fs::read_to_string(folder.path().join("history.csv")).unwrap();
    let epochs: Vec<&str> = table.lines().skip(1).map(|row| row.split(',').next().unwrap()).collect();
    assert_eq!(epochs, (1..=EPOCHS).map(|epoch| epoch.to_string()).collect::<Vec<_>>());
    let last = folder.path().join(format!("backup/step-{:08}/manifest.json", STEPS * u64::from(EPOCHS)));
    assert!(last.exists(), "{:?}", std::fs::read_dir(folder.path().join("backup")).unwrap().collect::<Vec<_>>());
}

fn first(line: &str) -> u64 {
    line.split(' ').next().unwrap().parse().unwrap()
}

#[test]
fn what_an_elastic_job_cannot_do_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let outcome = workers(folder.path()).env("REFUSED", "1").start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(outcome.passed(), "{outcome:?}");
}
