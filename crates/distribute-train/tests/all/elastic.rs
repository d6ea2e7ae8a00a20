//! Elastic loops whose only process with a state is killed or frozen before the others have it. The workers are this
//! test program, in another role.

use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use distribute_cluster::{FileRegister, JobId, Register};
use distribute_collectives::ReduceOp;
use distribute_strategy::{MultiWorkerMirroredStrategy, Strategy};
use distribute_testkit::{Job, JobBuilder, Signal};
use distribute_train::BoxError;
use distribute_train::checkpoint::{Checkpointed, Snapshot};
use distribute_train::elastic::{self, Standing};
use distribute_types::ErrorClass;
use serde::{Deserialize, Serialize};

const DEADLINE: Duration = Duration::from_secs(60);

/// The variable by which this program is a worker; its value is the folder for its files.
const ROLE: &str = "DISTRIBUTE_TEST_LOST_STATE_WORKER";

/// The variable whose value is the step in which a worker computes until it is killed.
const LAST: &str = "DISTRIBUTE_TEST_LAST_STEP";

const JOB: &str = "lost-state";
const STEPS: u64 = 60;

/// A model of one number, which counts the members of all steps.
#[derive(Default)]
struct Model(Mutex<f64>);

#[expect(clippy::print_stdout, reason = "the test waits for this line")]
impl Checkpointed for Model {
    fn save(&self, _: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        println!("saves its state");
        // Time enough to be frozen.
        std::thread::sleep(Duration::from_millis(300));
        Ok(snapshot.put_state("model", &*self.0.lock().unwrap())?)
    }

    fn load(&self, _: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        *self.0.lock().unwrap() = snapshot.get_state("model")?.ok_or("no model")?;
        Ok(())
    }
}

#[derive(Default, Serialize, Deserialize)]
struct Loop {
    steps: u64,
}

impl Standing for Loop {
    fn commits(&self) -> u64 {
        0
    }

    fn progress(&self) -> u64 {
        self.steps
    }
}

#[test]
#[ignore = "a process that other tests start"]
fn elastic_worker() {
    assert!(std::env::var_os(ROLE).is_some());
    let builder = MultiWorkerMirroredStrategy::builder().elastic(1..=3).devices(["CPU:0"]);
    let strategy = builder.heartbeat_timeout(Duration::from_millis(500)).build().unwrap();
    let (model, last) = (Model::default(), std::env::var(LAST).ok().map(|last| last.parse::<u64>().unwrap()));
    let ended = elastic::run(&strategy, &[&model], Loop::default(), |state| {
        while state.steps < STEPS {
            if last == Some(state.steps) {
                std::thread::sleep(DEADLINE);
            }
            let members = strategy.run_with((), |context, ()| {
                let mut one = [1.0f64];
                context.group().all_reduce(&mut one, ReduceOp::Sum)?;
                Ok::<_, distribute_strategy::Error>(one[0])
            })?;
            *model.0.lock().unwrap() += strategy.local_results(&members)[0];
            state.steps += 1;
            println!("step {} of {}", state.steps, strategy.topology().workers());
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok::<_, distribute_train::Error>(())
    });
    match ended {
        Ok(()) => println!("model {}", *model.0.lock().unwrap()),
        Err(error) => {
            println!("{error}");
            std::process::exit(error.class().exit_code().into());
        }
    }
}

fn worker(folder: &Path) -> JobBuilder {
    let place = [("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")];
    let job = Job::of_test("elastic::elastic_worker").unwrap().env(ROLE, folder.to_str().unwrap());
    let job = job.env("DISTRIBUTE_GENERATIONS", format!("file:{}", folder.display()));
    place.into_iter().fold(job, |job, (name, value)| job.env(name, value)).env("DISTRIBUTE_JOB_ID", JOB)
}

/// Returns the number of the first step that a worker has printed.
fn first_step(printed: &str) -> Option<u64> {
    printed.lines().find_map(|line| line.strip_prefix("step ")?.split(' ').next()?.parse().ok())
}

#[test]
fn processes_that_have_not_heard_of_the_state_do_not_begin_anew_when_it_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let first = worker(folder.path()).env(LAST, "20").start().unwrap();
    first.wait_for_line(0, "step 20 ", DEADLINE).unwrap();
    // It is in the computation of a step, and cannot tell those that join how far it is.
    let mut joined = worker(folder.path()).tasks(2).start().unwrap();
    let register = FileRegister::new(folder.path(), &JobId::new(JOB).unwrap()).unwrap();
    let began = Instant::now();
    while register.read().unwrap().is_none_or(|generation| generation.members.len() < 3) {
        assert!(began.elapsed() < DEADLINE, "they do not join");
        std::thread::sleep(Duration::from_millis(5));
    }
    first.kill(0, Signal::KILL).unwrap();
    for rank in 0..2 {
        let outcome = joined.wait(rank, DEADLINE).unwrap();
        assert_eq!(first_step(&outcome.stdout), None, "{outcome:?}");
        assert!(outcome.stdout.contains("of generation 1, which has trained: the steps since are lost"), "{outcome:?}");
        assert_eq!(outcome.code, Some(138), "{outcome:?}");
    }
    drop(first);
}

#[test]
fn a_process_that_is_frozen_while_it_sends_the_only_state_brings_it_when_it_is_back() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = worker(folder.path()).start().unwrap();
    first.wait_for_line(0, "step 10 ", DEADLINE).unwrap();
    let mut joined = worker(folder.path()).tasks(2).start().unwrap();
    first.wait_for_line(0, "saves its state", DEADLINE).unwrap();
    first.kill(0, Signal::STOP).unwrap();
    std::thread::sleep(Duration::from_secs(3));
    first.kill(0, Signal::CONT).unwrap();
    let mut ends = Vec::new();
    for outcome in [first.wait(0, DEADLINE), joined.wait(0, DEADLINE), joined.wait(1, DEADLINE)] {
        let outcome = outcome.unwrap();
        assert!(outcome.success(), "{outcome:?}");
        ends.push(outcome.stdout);
    }
    assert!(ends[1..].iter().all(|printed| first_step(printed) > Some(10)), "{ends:?}");
    let model = |printed: &String| printed.lines().find(|line| line.starts_with("model ")).map(str::to_owned);
    assert!(model(&ends[0]).is_some() && ends.iter().all(|printed| model(printed) == model(&ends[0])), "{ends:?}");
}
