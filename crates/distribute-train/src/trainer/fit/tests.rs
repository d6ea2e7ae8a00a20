use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use distribute_cluster::Membership;
use distribute_input::{Array, Dataset};
use distribute_strategy::{CommunicationOptions, MirroredStrategy, MultiWorkerMirroredStrategy, Strategy};
use distribute_testkit::{Job, Ports};
use distribute_types::ErrorClass;
use distribute_values::PerReplica;
use serde_json::Value;

use super::*;
use crate::BoxError;
use crate::callbacks::{BackupAndRestore, CsvLogger, EarlyStopping, ModelCheckpoint, TerminateOnNan, Training};
use crate::checkpoint::{CheckpointManager, Checkpointed, Snapshot};
use crate::metrics::{Mean, MeanSquaredError, Metrics, Named, Precision};
use crate::preemption::TerminationConfig;
use crate::trainer::{Part, evaluate, sums};

mod settings;
mod shared_folders;
mod tables;
mod told_at_the_end;

/// A model without variables. The loss of an example is its number, or that of the call if there is a list.
struct Toy {
    strategy: Strategy,
    nothing: Nothing,
    metrics: Metrics,
    passes: AtomicU64,
    losses: Vec<f64>,
    calls: AtomicUsize,
    pause: Duration,
    rate: Mutex<f64>,
}

struct Nothing;

impl Checkpointed for Nothing {
    fn save(&self, _: &Strategy, _: &mut Snapshot) -> Result<(), BoxError> {
        Ok(())
    }

    fn load(&self, _: &Strategy, _: &Snapshot) -> Result<(), BoxError> {
        Ok(())
    }
}

impl Toy {
    fn new(strategy: Strategy) -> Toy {
        let (passes, calls, pause) = (AtomicU64::new(0), AtomicUsize::new(0), Duration::ZERO);
        let (metrics, losses, rate) = (Metrics::new(), Vec::new(), Mutex::new(0.1));
        Toy { strategy, nothing: Nothing, metrics, passes, losses, calls, pause, rate }
    }

    /// A toy of one replica, whose steps have these losses.
    fn of_losses(losses: &[f64]) -> Toy {
        Toy { losses: losses.to_vec(), ..Toy::new(Strategy::default_strategy().unwrap()) }
    }
}

impl Trainee for Toy {
    type Examples = Array<i64>;
    type Error = Error;

    fn strategy(&self) -> &Strategy {
        &self.strategy
    }

    fn model(&self) -> &dyn Checkpointed {
        &self.nothing
    }

    fn optimizer(&self) -> &dyn Checkpointed {
        &self.nothing
    }

    fn learning_rate(&self) -> f64 {
        *self.rate.lock().unwrap()
    }

    fn set_learning_rate(&self, rate: f64) {
        *self.rate.lock().unwrap() = rate;
    }

    fn num_parameters(&self) -> usize {
        0
    }

    fn passes(&self) -> &AtomicU64 {
        &self.passes
    }

    fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    fn train_on(
        &self,
        batches: PerReplica<Vec<Part<Array<i64>>>>,
        _: usize,
        _: &[f32],
    ) -> Result<PerReplica<Vec<f64>>, Error> {
        std::thread::sleep(self.pause * batches.values()[0].len() as u32);
        let loss = self.losses.get(self.calls.fetch_add(1, Ordering::Relaxed));
        self.strategy.run_with(batches, |context, parts| {
            // As optimizers do if the digests of settings differ.
            context.compare_settings(Vec::new())?;
            let mut sums = sums(&self.metrics);
            for part in parts.iter().filter(|part| part.has_examples) {
                let numbers = part.examples.as_slice();
                sums[0] += numbers.iter().map(|number| loss.copied().unwrap_or(*number as f64)).sum::<f64>();
                sums[1] += numbers.len() as f64;
            }
            Ok(sums)
        })
    }

    fn evaluate_on(&self, _: PerReplica<Array<i64>>) -> Result<PerReplica<Vec<f64>>, Error> {
        Ok(PerReplica::new(vec![sums(&self.metrics); self.strategy.num_local_replicas()]))
    }
}

/// The numbers from 0, two in a batch.
#[derive(Clone, Copy)]
struct Numbers(i64);

impl TrainingData<Array<i64>, Error> for Numbers {
    fn distribute(&self, strategy: &Strategy, _: Batching) -> Result<(DistributedDataset<Array<i64>>, usize), Error> {
        Ok((strategy.distribute_dataset(&Dataset::<Array<i64>>::range(0..self.0).batch(2))?, 2))
    }
}

/// Fails after a step, or at the end of its epoch.
struct Fails {
    step: u64,
    at_end: bool,
}

impl Fails {
    fn check(&self, training: &Training<'_>, at_end: bool) -> Result<()> {
        let fails = training.step == self.step && at_end == self.at_end;
        if fails { Err(Error::Chief("the power is off".to_owned())) } else { Ok(()) }
    }
}

impl Callback for Fails {
    fn step_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.check(training, false)
    }

    fn epoch_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        self.check(training, true)
    }
}

#[test]
fn an_epoch_that_was_interrupted_has_the_loss_of_all_its_steps() {
    for (devices, ranks) in [(1, 1), (2, 1), (4, 2), (2, 2)] {
        for fails in [Fails { step: 4, at_end: false }, Fails { step: 4, at_end: true }] {
            let (folder, at_end) = (tempfile::tempdir().unwrap(), fails.at_end);
            let toy = || {
                let devices: Vec<String> = (0..devices).map(|index| format!("CPU:{index}")).collect();
                Toy::new(MirroredStrategy::builder().devices(devices).tensor_parallel(ranks).build().unwrap())
            };
            let backup = || BackupAndRestore::new(folder.path().join("backup")).every_steps(1);
            fit(&toy(), &Numbers(8), Fit::epochs(1).callback(fails).callback(backup())).unwrap_err();
            let history = fit(&toy(), &Numbers(8), Fit::epochs(1).callback(backup())).unwrap();
            assert_eq!(history.of("loss"), [3.5], "{devices} devices in groups of {ranks}, at the end: {at_end}");
        }
    }
}

/// Returns the checkpoints in a folder.
fn kept(folder: &Path) -> Vec<String> {
    let names = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.file_name());
    let mut names: Vec<String> = names.filter_map(|name| name.into_string().ok()).collect();
    names.retain(|name| name.starts_with("step-"));
    names.sort();
    names
}

#[test]
fn a_best_model_that_was_not_written_is_saved_after_the_restart() {
    let folder = tempfile::tempdir().unwrap();
    let best = folder.path().join("best");
    let train = |losses: &[f64], epochs| {
        let fit_settings = Fit::epochs(epochs)
            .callback(ModelCheckpoint::new(&best).best("loss"))
            .callback(BackupAndRestore::new(folder.path().join("backup")).keep_at_end());
        fit(&Toy::of_losses(losses), &Numbers(2), fit_settings).unwrap()
    };
    train(&[3.0, 1.0], 2);
    assert_eq!(kept(&best), ["step-00000002"]);
    // The process was killed after the backup was written, and before this was.
    std::fs::remove_dir_all(best.join("step-00000002")).unwrap();
    std::fs::remove_file(best.join("latest")).unwrap();
    let history = train(&[2.0, 2.5], 4);
    assert_eq!(history.of("loss"), [3.0, 1.0, 2.0, 2.5]);
    assert_eq!(kept(&best), ["step-00000002"]);
}

#[test]
fn an_epoch_whose_sums_are_lost_has_no_loss_and_is_not_the_best() {
    let folder = tempfile::tempdir().unwrap();
    let (best, backup) = (folder.path().join("best"), folder.path().join("backup"));
    // All steps of the first epoch were made, by processes of which none is left.
    let (strategy, mut made) = (Strategy::default_strategy().unwrap(), CheckpointManager::new(&backup));
    let standing = Standing { steps: 4, all_steps: true, ..Standing::default() };
    made.save(&strategy, 4, &[&Nothing, &Nothing], &standing).unwrap();
    made.finish_everywhere(&strategy).unwrap();
    drop(made);
    let settings = Fit::epochs(2)
        .callback(BackupAndRestore::new(&backup))
        .callback(ModelCheckpoint::new(&best).best("loss"))
        .callback(EarlyStopping::new("loss"))
        .callback(TerminateOnNan::default());
    let history = fit(&Toy::new(strategy), &Numbers(8), settings).unwrap();
    let lost = (1, Vec::new());
    assert_eq!((&history.epochs[0], history.of("loss")), (&lost, vec![3.5]));
    assert_eq!(kept(&best), ["step-00000008"]);
}

/// Returns the strategy of one of two workers.
fn one_of_two(rank: u32, address: &str) -> Strategy {
    MultiWorkerMirroredStrategy::builder()
        .membership(Membership::new(rank, 2, address).unwrap())
        .communication(CommunicationOptions::default().timeout(Duration::from_secs(10)))
        .build()
        .unwrap()
}

/// Returns what `f` returns on each of two workers, for its rank and the address of the first.
fn on_two<R: Send>(f: impl Fn(u32, &str) -> R + Sync) -> [R; 2] {
    let address = format!("127.0.0.1:{}", Ports::reserve(1).unwrap().release()[0]);
    let (f, address) = (&f, &address);
    std::thread::scope(|scope| {
        [0, 1].map(|rank| scope.spawn(move || f(rank, address))).map(|worker| worker.join().unwrap())
    })
}

#[test]
fn a_job_resumes_of_whose_workers_one_has_more_callbacks() {
    let folder = tempfile::tempdir().unwrap();
    let place = |name: &str| folder.path().join(name);
    let job = |fails: bool| {
        on_two(|rank, address| {
            let (mut settings, calls) = (Fit::epochs(3), Arc::default());
            if rank == 0 {
                settings = settings.callback(CsvLogger::new(place("history.csv")));
            }
            let settings = settings
                .callback(Calls(Arc::clone(&calls)))
                .callback(ModelCheckpoint::new(place("best")).best("loss"))
                .callback(BackupAndRestore::new(place("backup")).every_steps(1))
                .callback(fails.then_some(Fails { step: 6, at_end: false }));
            let outcome = fit(&Toy::new(one_of_two(rank, address)), &Numbers(8), settings);
            let first: Vec<&str> = calls.lock().unwrap().iter().take(3).copied().collect();
            (outcome.map(|history| history.epochs.len()).map_err(|error| error.to_string()), first)
        })
    };
    for (outcome, _) in job(true) {
        assert!(outcome.as_ref().is_err_and(|error| error.contains("the power is off")), "{outcome:?}");
    }
    for (outcome, first) in job(false) {
        assert_eq!((outcome, first), (Ok(3), vec!["set_state", "resumed", "epoch_begin"]));
    }
    assert_eq!(std::fs::read_to_string(place("history.csv")).unwrap().lines().count(), 4);
}

/// Keeps a number in checkpoints.
struct Keeps(&'static str, u64, Arc<Mutex<Vec<Value>>>);

impl Callback for Keeps {
    fn name(&self) -> &'static str {
        self.0
    }

    fn state(&self) -> Value {
        self.1.into()
    }

    fn set_state(&mut self, state: &Value) {
        self.2.lock().unwrap().push(state.clone());
    }
}

#[test]
fn callbacks_get_the_states_of_their_names_and_those_of_earlier_versions_in_their_order() {
    let given = |states: &[(&str, u64)], with_names: bool, callbacks: &[&'static str]| {
        let (toy, told) = (Toy::of_losses(&[]), Arc::default());
        let keeps = |(name, state): (&'static str, u64)| -> Box<dyn Callback> {
            Box::new(Keeps(name, state, Arc::clone(&told)))
        };
        let mut session = session(&toy);
        session.standing.callbacks = states.iter().map(|(_, state)| (*state).into()).collect();
        if with_names {
            session.standing.callback_names = states.iter().map(|(name, _)| (*name).to_owned()).collect();
        }
        let mut callbacks: Vec<Box<dyn Callback>> = callbacks.iter().map(|name| keeps((*name, 0))).collect();
        let resumes = session.give_states(&mut callbacks);
        let told: Vec<u64> = told.lock().unwrap().iter().filter_map(Value::as_u64).collect();
        (resumes, told)
    };
    let saved = [("a", 1), ("b", 2), ("a", 3)];
    assert_eq!(given(&saved, true, &["b", "a", "a"]), (true, vec![2, 1, 3]));
    assert_eq!(given(&saved, true, &["a", "c"]), (true, vec![1]));
    assert_eq!(given(&saved, true, &[]), (true, vec![]));
    assert_eq!(given(&saved, false, &["b", "a", "a"]), (true, vec![1, 2, 3]));
    assert_eq!(given(&saved, false, &["a", "c"]), (false, vec![]));
    assert_eq!(given(&[], true, &["a"]), (false, vec![]));
}

/// Returns a session that has not begun.
fn session(toy: &Toy) -> Session<'_, Toy> {
    let batching = Batching { batch_size: 2, is_set: false, shuffle: false };
    let (data, batch_size) = Numbers(8).distribute(&toy.strategy, batching).unwrap();
    Session {
        trainer: toy,
        data,
        batch_size,
        class_weights: Vec::new(),
        settings: Settings::of(&Fit::<Array<i64>, Error>::epochs(1), &toy.metrics),
        batches: None,
        after: (0, None),
        commits: 0,
        standing: Standing::default(),
        joins: false,
        leaves: false,
        departures: Departures::default(),
        saved: None,
        epoch: 0,
        epochs: 1,
        steps_per_epoch: None,
        steps: 0,
        examples: 0,
        sums: zeros(toy),
        stop: None,
        without_validation: false,
        without_training: false,
        run: None,
        folders: Folders::default(),
    }
}

#[test]
fn a_member_that_lacks_the_end_of_an_epoch_gets_its_learning_rate() {
    let toy = Toy::of_losses(&[]);
    let further = Toy { rate: Mutex::new(0.07), ..Toy::of_losses(&[]) };
    let whole = serde_json::to_string(&session(&further).whole(&[])).unwrap();
    let adopted: Whole = serde_json::from_str(&whole).unwrap();
    let mut course =
        Course { validation: None, preemption: None, progress: None, is_memory_told: false, fit: Fit::epochs(1) };
    let mut mine = session(&toy);
    let joined = |adopted| Joined { generation: 2, members: 2, adopted: Some(adopted), begins: false };
    mine.continue_with(joined(adopted.clone()), true, &mut course).unwrap();
    assert_eq!(toy.learning_rate(), 0.07);
    // Members of an earlier version do not tell it.
    mine.continue_with(joined(Whole { learning_rate: None, ..adopted }), true, &mut course).unwrap();
    assert_eq!(toy.learning_rate(), 0.07);
}

/// The variable that makes a process a member of an elastic job; its value is the number of epochs.
const MEMBER: &str = "DISTRIBUTE_TEST_FIT_MEMBER";

/// Prints each step.
struct Prints;

impl Callback for Prints {
    fn step_end(&mut self, training: &mut Training<'_>) -> Result<()> {
        println!("step {} of {}", training.step, training.strategy.topology().workers());
        Ok(())
    }
}

#[test]
#[ignore = "a process that another test starts"]
fn trains_elastically() {
    let epochs = std::env::var(MEMBER).unwrap().parse().unwrap();
    let strategy = MultiWorkerMirroredStrategy::builder().elastic(1..=2).devices(["CPU:0"]).build().unwrap();
    let toy = Toy { pause: Duration::from_millis(10), ..Toy::new(strategy.clone()) };
    let outcome = fit(&toy, &Numbers(8), Fit::epochs(epochs).callback(Prints));
    // As trainers do.
    match strategy.report_failure_as(outcome, ErrorClass::failure_kind) {
        Ok(history) => println!("epochs {}", history.epochs.len()),
        Err(error) => {
            println!("{error}");
            std::process::exit(error.class().exit_code().into());
        }
    }
}

#[test]
fn a_process_that_joins_an_elastic_job_with_other_settings_ends_alone() {
    let folder = tempfile::tempdir().unwrap();
    let member = |epochs: &str| {
        let job = Job::of_test("trainer::fit::tests::trains_elastically").unwrap().env(MEMBER, epochs);
        let job = job.env("DISTRIBUTE_GENERATIONS", format!("file:{}", folder.path().display()));
        let place = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")];
        let job = place.into_iter().fold(job, |job, (name, value)| job.env(name, value));
        job.env("DISTRIBUTE_JOB_ID", "settings-of-fit").start().unwrap()
    };
    let deadline = Duration::from_secs(60);
    let mut first = member("80");
    first.wait_for_line(0, "step 3 ", deadline).unwrap();
    let mut other = member("81");
    let outcome = other.wait(0, deadline).unwrap();
    assert_eq!(outcome.code, Some(2), "{outcome:?}");
    assert!(outcome.stdout.contains("fit, epochs: 81 on"), "{outcome:?}");
    assert!(outcome.stdout.contains("fit, epochs: 80 on the members of the job"), "{outcome:?}");
    let outcome = first.wait(0, deadline).unwrap();
    assert!(outcome.success() && outcome.stdout.contains("epochs 80"), "{outcome:?}");
}

/// Notes some of its calls.
struct Calls(Arc<Mutex<Vec<&'static str>>>);

impl Callback for Calls {
    fn resumed(&mut self, _: &mut Training<'_>) -> Result<()> {
        self.0.lock().unwrap().push("resumed");
        Ok(())
    }

    fn epoch_begin(&mut self, _: &mut Training<'_>) -> Result<()> {
        self.0.lock().unwrap().push("epoch_begin");
        Ok(())
    }

    fn set_state(&mut self, _: &Value) {
        self.0.lock().unwrap().push("set_state");
    }
}

#[test]
fn callbacks_learn_of_a_restart_between_their_states_and_the_epoch() {
    let (folder, calls) = (tempfile::tempdir().unwrap(), Arc::default());
    let settings = |fails: Option<Fails>| {
        let backup = BackupAndRestore::new(folder.path()).every_steps(1);
        Fit::epochs(1).callback(Calls(Arc::clone(&calls))).callback(fails).callback(backup)
    };
    fit(&Toy::of_losses(&[]), &Numbers(8), settings(Some(Fails { step: 3, at_end: false }))).unwrap_err();
    assert_eq!(std::mem::take(&mut *calls.lock().unwrap()), ["epoch_begin"]);
    fit(&Toy::of_losses(&[]), &Numbers(8), settings(None)).unwrap();
    assert_eq!(*calls.lock().unwrap(), ["set_state", "resumed", "epoch_begin"]);
}

#[test]
fn a_metric_tells_callbacks_whether_it_should_rise() {
    let train = |metrics: Metrics, name: &str| {
        let toy = Toy { metrics, ..Toy::of_losses(&[]) };
        fit(&toy, &Numbers(2), Fit::epochs(1).callback(EarlyStopping::new(name)))
    };
    train(Metrics::new().with(Named::new("rmse", MeanSquaredError)), "rmse").unwrap();
    let error = train(Metrics::new().with(Mean), "mean").unwrap_err();
    assert!(matches!(error, Error::Direction { .. }), "{error}");
}

#[test]
fn metrics_of_equal_names_are_refused_before_the_first_step() {
    let names = |metrics: Metrics| {
        let toy = Toy { metrics, ..Toy::of_losses(&[]) };
        let errors = [fit(&toy, &Numbers(2), Fit::epochs(1)).err(), evaluate(&toy, &Numbers(2)).err()];
        errors.map(|error| error.map(|error| error.to_string()).unwrap_or_default())
    };
    let named = |name: &str| Metrics::new().with(Precision::default()).with(Named::new(name, Precision::default()));
    for (name, words) in [("loss", "the loss has it"), ("val_precision", "the validation's precision has it")] {
        for text in names(named(name)) {
            assert!(text.contains(name) && text.contains(words), "{text}");
        }
    }
    named("strict").check_names().unwrap();
    for text in names(Metrics::new().with(Precision { threshold: 0.5 }).with(Precision { threshold: 0.9 })) {
        assert!(text.contains("\"precision\"") && text.contains("1 and 2"), "{text}");
    }
}

/// The variable that makes a process one that shows its progress.
const ROLE: &str = "DISTRIBUTE_TEST_FIT_PROGRESS";

#[test]
#[ignore = "a process that another test starts"]
fn shows_its_progress() {
    if std::env::var_os(ROLE).is_some() {
        let toy = Toy { pause: Duration::from_millis(40), ..Toy::of_losses(&[]) };
        fit(&toy, &Numbers(10), Fit::epochs(1).steps_per_execution(2).progress("numbers")).unwrap();
    }
}

#[test]
fn the_examples_of_all_steps_that_are_run_at_once_count() {
    let job = Job::of_test("trainer::fit::tests::shows_its_progress").unwrap();
    let mut job = job.env(ROLE, "1").env("DISTRIBUTE_PROGRESS", "json").start().unwrap();
    let outcome = job.wait(0, Duration::from_secs(60)).unwrap();
    assert!(outcome.passed(), "{outcome:?}");
    let line = outcome.stderr.lines().find(|line| line.contains("\"event\":\"epoch\"")).unwrap();
    let status: Value = serde_json::from_str(line).unwrap();
    let number = |name: &str| status[name].as_f64().unwrap();
    // The epoch ends a moment after its last step: ten examples in five steps, of which two are run at once.
    let examples = number("examples_per_s") * number("elapsed_s");
    assert!((9.9..16.0).contains(&examples), "{examples}: {line}");
}
