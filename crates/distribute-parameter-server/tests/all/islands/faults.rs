//! Islands and servers that are killed and frozen: real processes, which are this test program started again.

use std::path::{Path, PathBuf};
use std::time::Instant;

use distribute_cluster::{ClusterResolver, TfConfigResolver};
use distribute_testkit::{Job, Signal};

use super::*;

/// The variables by which processes get the folder of checkpoints, the number of their steps, and the pause after one.
const CHECKPOINTS: &str = "TEST_CHECKPOINTS";
const STEPS: &str = "TEST_STEPS";
const PAUSE_MS: &str = "TEST_PAUSE_MS";

/// The body of a started process.
#[test]
#[ignore = "a process that other tests start"]
fn task() {
    if std::env::var_os("TF_CONFIG").is_none() {
        return;
    }
    let cluster = TfConfigResolver::from_env().unwrap();
    match cluster.task_type() {
        Some(TaskType::Ps) => serve(&cluster),
        _ => train(&cluster),
    }
}

fn serve(cluster: &TfConfigResolver) {
    let options = OuterServerOptions::default().silence(SILENCE).island_timeout(SOON).save_every(1);
    let options = match std::env::var_os(CHECKPOINTS) {
        Some(folder) => options.checkpoints(PathBuf::from(folder)),
        None => options,
    };
    let server = OuterServer::start_with(cluster, options).unwrap();
    println!("serving");
    match server.join() {
        Ok(()) => println!("left"),
        Err(error) => println!("ended: {error}"),
    }
}

fn train(cluster: &TfConfigResolver) {
    let number = |name| std::env::var(name).unwrap().parse::<u64>().unwrap();
    let (steps, pause) = (number(STEPS), Duration::from_millis(number(PAUSE_MS)));
    let builder = DecoupledDilocoStrategy::builder(cluster).unwrap();
    let outer = OuterNesterov { learning_rate: 0.7, momentum: 0.5 };
    let builder = builder.inner_steps(2).outer(outer).quorum(1).grace(Duration::from_millis(10)).staleness(10_000);
    let builder = builder.silence(SILENCE).connect_timeout(SOON).message_timeout(SOON).server_timeout(SOON);
    let builder = builder.on_exchange(|exchange| {
        let OuterExchange { outcome, outer_steps, steps, .. } = exchange;
        println!("exchange after {steps}: {outcome:?}, outer step {outer_steps}");
    });
    let island = Quadratic::new(builder.over(one_device()).unwrap(), 0.05);
    for step in 1..=steps {
        island.step(|_, _| 3.0).unwrap();
        println!("step {step}");
        std::thread::sleep(pause);
    }
    println!("trained to {}", island.values()[0]);
}

/// Processes, which end with it.
struct Processes {
    spec: ClusterSpec,
    jobs: Vec<(Task, Job)>,
    checkpoints: Option<PathBuf>,
}

impl Processes {
    fn new(islands: usize, checkpoints: Option<&Path>) -> Processes {
        let mut all =
            Processes { spec: cluster(1, islands), jobs: Vec::new(), checkpoints: checkpoints.map(Path::to_owned) };
        all.begin(SERVER, 0, 0);
        all.wait_for(SERVER, "serving");
        all
    }

    /// Starts a task, again if it has run before.
    fn begin(&mut self, task: Task, steps: u64, pause_ms: u64) {
        let config = serde_json::json!({
            "cluster": self.spec.to_json(), "task": {"type": task.kind.name(), "index": task.index},
        });
        let mut job = Job::of_test("islands::faults::task").unwrap().env("TF_CONFIG", config.to_string());
        job = job.env(STEPS, steps.to_string()).env(PAUSE_MS, pause_ms.to_string());
        if let Some(folder) = &self.checkpoints {
            job = job.env(CHECKPOINTS, folder.display().to_string());
        }
        self.jobs.retain(|(of, _)| *of != task);
        self.jobs.push((task, job.start().unwrap()));
    }

    fn job(&mut self, task: Task) -> &mut Job {
        self.jobs.iter_mut().find(|(of, _)| *of == task).map(|(_, job)| job).unwrap()
    }

    fn wait_for(&mut self, task: Task, words: &str) -> String {
        self.job(task).wait_for_line(0, words, SOON).unwrap()
    }

    fn printed(&mut self, task: Task) -> String {
        self.job(task).printed(0).unwrap()
    }

    fn signal(&mut self, task: Task, signal: Signal) {
        self.job(task).kill(0, signal).unwrap();
        if signal == Signal::KILL {
            self.job(task).wait(0, SOON).unwrap();
        }
    }

    fn end_of(&mut self, task: Task) -> String {
        self.job(task).wait(0, SOON).unwrap().stdout
    }

    /// Waits until a task has printed more lines with these words.
    fn more(&mut self, task: Task, words: &str, count: usize) {
        let counted = |all: &str| all.lines().filter(|line| line.contains(words)).count();
        let before = counted(&self.printed(task));
        let end = Instant::now() + SOON;
        while counted(&self.printed(task)) < before + count {
            assert!(Instant::now() < end, "no further {words:?} of {task}: {}", self.printed(task));
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

const SERVER: Task = Task::new(TaskType::Ps, 0);

const fn island(index: u32) -> Task {
    Task::new(TaskType::Worker, index)
}

#[test]
fn islands_that_are_killed_and_frozen_stop_no_other() {
    let mut all = Processes::new(3, None);
    (0..3).for_each(|index| all.begin(island(index), 600, 5));
    (0..3).for_each(|index| drop(all.wait_for(island(index), "Counted")));
    all.signal(island(1), Signal::KILL);
    all.signal(island(2), Signal::STOP);
    // Outer steps continue at once, and after the frozen one is given up.
    all.more(island(0), "Counted", 20);
    let text = all.end_of(island(0));
    assert!(text.contains("trained to") && !text.contains("Away"), "{text}");
    all.signal(island(2), Signal::CONT);
    // It was given up, attends again, and trains to the end.
    let text = all.end_of(island(2));
    assert!(text.contains("trained to"), "{text}");
    // The killed one does not come again.
    assert!(all.end_of(SERVER).contains("left"));
}

#[test]
fn an_island_that_is_started_again_goes_on_from_the_outer_parameters() {
    let mut all = Processes::new(2, None);
    all.begin(island(0), 400, 5);
    all.begin(island(1), 1_000_000, 5);
    all.wait_for(island(0), "Counted");
    all.wait_for(island(1), "Counted");
    all.signal(island(1), Signal::KILL);
    all.begin(island(1), 20, 5);
    let joined = all.wait_for(island(1), "Joined");
    assert!(!joined.contains("outer step 0"), "{joined}");
    for index in [0, 1] {
        let text = all.end_of(island(index));
        let trained: f32 = text.lines().find_map(|line| line.strip_prefix("trained to ")).unwrap().parse().unwrap();
        assert!((trained - 3.0).abs() < 0.5, "{trained}");
    }
    assert!(all.end_of(SERVER).contains("left"));
}

#[test]
fn a_server_that_is_started_again_continues_from_its_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let mut all = Processes::new(1, Some(folder.path()));
    all.begin(island(0), 400, 5);
    all.more(island(0), "Counted", 20);
    all.signal(SERVER, Signal::KILL);
    all.wait_for(island(0), "Away");
    let before = highest(&all.printed(island(0)));
    all.begin(SERVER, 0, 0);
    all.wait_for(SERVER, "serving");
    let joined = loop_for_second_join(&mut all);
    // Each outer step is saved, the last ones perhaps not.
    assert!(joined > 10 && joined <= before + 1, "{joined} of {before}");
    all.more(island(0), "Counted", 5);
    assert!(all.end_of(island(0)).contains("trained to"));
    assert!(all.end_of(SERVER).contains("left"));
}

#[test]
fn islands_train_on_while_their_server_is_frozen() {
    let mut all = Processes::new(1, None);
    all.begin(island(0), 700, 10);
    all.more(island(0), "Counted", 5);
    all.signal(SERVER, Signal::STOP);
    // The first exchange may have been taken; those that follow are not sent.
    all.wait_for(island(0), "Away");
    all.more(island(0), "step", 4);
    all.signal(SERVER, Signal::CONT);
    all.more(island(0), "Counted", 5);
    let text = all.end_of(island(0));
    assert!(text.contains("trained to") && text.matches("Joined").count() == 1, "{text}");
    assert!(all.end_of(SERVER).contains("left"));
}

#[test]
fn a_server_without_checkpoints_gets_the_outer_parameters_of_an_island() {
    let mut all = Processes::new(1, None);
    all.begin(island(0), 400, 5);
    all.more(island(0), "Counted", 20);
    all.signal(SERVER, Signal::KILL);
    all.wait_for(island(0), "Away");
    all.begin(SERVER, 0, 0);
    all.wait_for(SERVER, "serving");
    assert_eq!(loop_for_second_join(&mut all), 0, "it counts anew");
    all.more(island(0), "Counted", 5);
    let text = all.end_of(island(0));
    let trained: f32 = text.lines().find_map(|line| line.strip_prefix("trained to ")).unwrap().parse().unwrap();
    assert!((trained - 3.0).abs() < 0.1, "what was trained before is kept: {trained}");
    assert!(all.end_of(SERVER).contains("left"));
}

/// Returns the highest outer step that an island has printed.
fn highest(text: &str) -> u64 {
    text.lines().filter_map(outer_step).max().unwrap()
}

fn outer_step(line: &str) -> Option<u64> {
    line.split_once("outer step ")?.1.parse().ok()
}

/// Waits until the island has joined again; returns the outer step of what it got.
fn loop_for_second_join(all: &mut Processes) -> u64 {
    let end = Instant::now() + SOON;
    loop {
        let text = all.printed(island(0));
        if let Some(line) = text.lines().filter(|line| line.contains("Joined")).nth(1) {
            return outer_step(line).unwrap();
        }
        assert!(Instant::now() < end, "it has not joined again: {text}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
