//! A `Trainer` whose workers are killed, told to leave, and replaced. The workers are this test program, in another
//! role.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use candle_core::{Device, Module, Tensor};
use candle_nn::linear;
use distribute_candle::{Adam, Error, Fit, MeanSquaredError, Trainer};
use distribute_cluster::{Authority, FileRegister, Membership};
use distribute_input::{Dataset, InputContext};
use distribute_optim::{HostError, HostLoss, HostModel};
use distribute_strategy::{MultiWorkerMirroredStrategy, Strategy};
use distribute_testkit::{Job, JobBuilder, Ports, Signal};
use distribute_train::callbacks::{BackupAndRestore, Callback, CsvLogger, EarlyStopping, Training};
use distribute_train::metrics::Metrics;
use distribute_train::preemption::TerminationConfig;
use distribute_types::ErrorClass;
use distribute_values::HostTensor;

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

/// The variable whose value is the smallest number of members, if it is not 1.
const LEAST: &str = "LEAST";

fn strategy() -> distribute_strategy::Strategy {
    let least = std::env::var(LEAST).map_or(1, |least| least.parse().unwrap());
    let builder = MultiWorkerMirroredStrategy::builder().elastic(least..=4).devices(["CPU:0"]);
    builder.heartbeat_timeout(Duration::from_secs(1)).build().unwrap()
}

#[test]
#[ignore = "a process that other tests start"]
fn elastic_worker() {
    let folder = PathBuf::from(std::env::var_os(ROLE).unwrap());
    if std::env::var_os("FIXED").is_some() {
        drop(MultiWorkerMirroredStrategy::builder().devices(["CPU:0"]).build().unwrap());
        return;
    }
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
        // Each process would train alone.
        let optimizer = Adam::new(0.05).build(trainer.model()).unwrap();
        let step = strategy.run_with((trainer.model(), &optimizer), |context, (model, optimizer)| {
            let loss = model.forward(&rows(4).0)?.sqr()?.mean_all()?;
            optimizer.minimize(context, &loss)?;
            Ok::<(), Error>(())
        });
        let refused = step.unwrap_err();
        assert!(refused.to_string().contains("worker:0 of 2") && refused.exit_code() == 2, "{refused}");
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
    place.into_iter().fold(workers_at(folder), |job, (name, value)| job.env(name, value))
}

fn workers_at(folder: &Path) -> JobBuilder {
    let job = Job::of_test("elastic::elastic_worker").unwrap().env(ROLE, folder.to_str().unwrap());
    let job = job.env("DISTRIBUTE_GENERATIONS", format!("file:{}", folder.join("generations").display()));
    job.env("DISTRIBUTE_JOB_ID", "elastic-test")
}

/// Returns the rest of the line that begins so.
#[track_caller]
fn line<'a>(printed: &'a str, begin: &str) -> &'a str {
    let found = printed.lines().find_map(|line| line.strip_prefix(begin));
    found.unwrap_or_else(|| panic!("no {begin:?} in {printed}"))
}

#[test]
fn a_trainer_trains_on_without_its_chief_and_with_processes_that_join() {
    /// A loss, a join and a departure.
    const CHANGES: u64 = 3;
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
        // A member whose step failed when members changed, and which others have made, gets their values, and its
        // callbacks are not called.
        let missed: u64 = steps.windows(2).map(|pair| pair[1].checked_sub(pair[0] + 1).unwrap()).sum();
        assert!(missed <= CHANGES, "{steps:?}");
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

/// Returns the number of a worker's last step.
fn last_step(printed: &str) -> u64 {
    printed.lines().filter_map(|line| line.strip_prefix("step ")).map(first).next_back().unwrap()
}

fn is_saved(folder: &Path, step: u64) -> bool {
    folder.join(format!("backup/step-{step:08}/manifest.json")).exists()
}

#[test]
fn signals_to_all_members_save_their_last_step() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = workers(folder.path()).tasks(2).start().unwrap();
    (0..2).for_each(|rank| drop(job.wait_for_line(rank, " of 2", DEADLINE).unwrap()));
    (0..2).for_each(|rank| job.kill(rank, Signal::TERM).unwrap());
    let outcomes = [job.wait(0, DEADLINE).unwrap(), job.wait(1, DEADLINE).unwrap()];
    let last = outcomes.iter().map(|outcome| last_step(&outcome.stdout)).max().unwrap();
    assert!(is_saved(folder.path(), last), "step {last}: {outcomes:?}");
    for outcome in &outcomes {
        assert_eq!(outcome.code, Some(143), "{outcome:?}");
        let own = last_step(&outcome.stdout);
        let (saved, left) = (format!("after step {own}, which is saved"), format!("elastic job after step {own}"));
        let is_left = own < last && outcome.stdout.contains(&left);
        assert!(is_left || (own == last && outcome.stdout.contains(&saved)), "step {last}: {outcome:?}");
    }
}

#[test]
fn members_of_which_too_few_remain_save_and_wait_until_a_signal() {
    let folder = tempfile::tempdir().unwrap();
    let workers = Ports::reserve(2).unwrap().addresses();
    let place = move |index: u32| {
        let (workers, task) = (&workers, serde_json::json!({"type": "worker", "index": index}));
        let cluster = serde_json::json!({"cluster": {"worker": workers}, "task": task});
        vec![("TF_CONFIG".to_owned(), cluster.to_string())]
    };
    let mut job = workers_at(folder.path()).env(LEAST, "2").task_env(place).tasks(2).start().unwrap();
    // After the epoch's first steps, so that the last one is none after which they save anyway.
    (0..2).for_each(|rank| drop(job.wait_for_line(rank, "step 11 of 2", DEADLINE).unwrap()));
    job.kill(0, Signal::TERM).unwrap();
    let left = job.wait(0, DEADLINE).unwrap();
    let last = last_step(&left.stdout);
    assert!(left.code == Some(143) && is_saved(folder.path(), last), "{left:?}");
    job.kill(1, Signal::TERM).unwrap();
    let stayed = job.wait(1, Duration::from_secs(30)).unwrap();
    for outcome in [&left, &stayed] {
        assert_eq!((outcome.code, last_step(&outcome.stdout)), (Some(143), last), "{outcome:?}");
        assert!(outcome.stdout.contains(&format!("after step {last}, which is saved")), "{outcome:?}");
    }
}

/// Returns the elastic strategy of one of a number of processes, whose members are decided in a folder, and a model.
fn alone(processes: u32, folder: &Path) -> (Strategy, HostModel) {
    let mut membership = Membership::new(0, processes, "127.0.0.1:1").unwrap();
    membership.advertised_host = Some("127.0.0.1".to_owned());
    let register = Authority::Register(Arc::new(FileRegister::new(folder, &membership.job_id()).unwrap()));
    let builder = MultiWorkerMirroredStrategy::builder().elastic(1..=2).devices(["CPU:0"]);
    let strategy = builder.membership(membership).generations(register).build().unwrap();
    let model = HostModel::new(&strategy, [("w", HostTensor::new(&[1], vec![0.5]).unwrap())]).unwrap();
    (strategy, model)
}

fn slope(gradient: f32) -> HostLoss {
    HostLoss(vec![Some(HostTensor::new(&[1], vec![gradient]).unwrap())])
}

#[test]
fn a_step_before_others_are_joined_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (strategy, model) = alone(2, folder.path());
    let optimizer = distribute_optim::Sgd::new(0.5).momentum(0.9).build(&model).unwrap();
    let step = || strategy.run_with(&optimizer, |context, optimizer| optimizer.minimize(context, &slope(1.0)));
    let refused = step().unwrap_err();
    assert!(matches!(refused, HostError::Strategy(distribute_strategy::Error::NotJoined { .. })), "{refused}");
    assert_eq!(model.values().unwrap(), [[0.5]]);
    let gathering = strategy.next_generation(None).unwrap();
    gathering.form().unwrap();
    let refused = step().unwrap_err();
    assert!(matches!(refused, HostError::Strategy(distribute_strategy::Error::NotBegun)), "{refused}");
    assert_eq!((model.values().unwrap(), strategy.commits()), (vec![vec![0.5]], 0));
    gathering.begin().unwrap();
    step().unwrap();
    assert_eq!(model.values().unwrap(), [[0.0]]);
    strategy.leave_job().unwrap();
}

#[test]
fn gradients_from_before_a_change_of_members_are_not_in_the_next_step() {
    let folder = tempfile::tempdir().unwrap();
    let (strategy, model) = alone(1, folder.path());
    let optimizer = distribute_optim::Sgd::new(0.5).build(&model).unwrap();
    let accumulate = |gradient: f32| {
        let run = strategy.run_with(&optimizer, |context, optimizer| optimizer.accumulate(context, &slope(gradient)));
        run.map(drop).unwrap();
    };
    let step = || {
        let run = strategy.run_with(&optimizer, |context, optimizer| optimizer.minimize(context, &slope(0.0)));
        run.map(drop).unwrap();
        model.values().unwrap().remove(0).remove(0)
    };
    let gathering = strategy.next_generation(None).unwrap();
    gathering.form().unwrap();
    gathering.begin().unwrap();
    accumulate(1.0);
    accumulate(2.0);
    assert_eq!(step(), 0.5 - 0.5 * 3.0);
    accumulate(4.0);
    strategy.leave_job().unwrap();
    // The examples since the last step are those of others now, or come again.
    accumulate(8.0);
    accumulate(16.0);
    assert_eq!(step(), -1.0 - 0.5 * 24.0);
}

#[test]
fn a_strategy_that_is_not_elastic_warns_of_the_variable() {
    let folder = tempfile::tempdir().unwrap();
    let job = workers(folder.path()).env("FIXED", "1").env("WORLD_SIZE", "1");
    let outcome = job.start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(outcome.passed(), "{outcome:?}");
    assert!(outcome.stderr.contains("has no effect: MultiWorkerMirroredStrategy is not elastic"), "{outcome:?}");
}

#[test]
fn what_an_elastic_job_cannot_do_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let outcome = workers(folder.path()).env("REFUSED", "1").start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(outcome.passed(), "{outcome:?}");
}
