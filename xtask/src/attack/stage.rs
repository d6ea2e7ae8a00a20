//! Where attacks start processes: programs, addresses, and how long there is.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use distribute_testkit::{Job, Outcome, Ports};

use super::verdict::{Held, Verdict, accuracy, all_done, text};

/// The means of an attack.
pub(super) struct Stage {
    programs: PathBuf,
    end: Instant,
    random: Cell<u64>,
    folder: tempfile::TempDir,
}

impl Stage {
    pub(super) fn new(programs: PathBuf, bound: Duration, seed: u64) -> Result<Stage, String> {
        let folder = tempfile::tempdir().map_err(text)?;
        Ok(Stage { programs, end: Instant::now() + bound, random: Cell::new(seed | 1), folder })
    }

    /// A folder of this attack alone.
    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The rest of the attack's time: how long processes are waited for.
    pub(super) fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
    }

    /// A number from 0 to 1, of xorshift.
    pub(super) fn random(&self) -> f64 {
        let mut state = self.random.get();
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        self.random.set(state);
        (state >> 11) as f64 / (1_u64 << 53) as f64
    }

    pub(super) fn mnist(&self, args: &[&str]) -> Task {
        Task::new(self.programs.join("mnist"), args)
    }

    pub(super) fn parameter_server(&self, args: &[&str]) -> Task {
        Task::new(self.programs.join("parameter_server"), args)
    }

    pub(super) fn elastic(&self, args: &[&str]) -> Task {
        Task::new(self.programs.join("elastic"), args)
    }

    /// Workers of one job with TF_CONFIG, one for each list of arguments. The first one is the chief; its address is
    /// returned.
    pub(super) fn workers(&self, args: &[&[&str]]) -> Result<(Vec<Task>, String), String> {
        let addresses = addresses(args.len())?;
        let task = |(index, args): (usize, &&[&str])| self.mnist(args).env("TF_CONFIG", config(&addresses, index));
        Ok((args.iter().enumerate().map(task).collect(), addresses[0].clone()))
    }

    /// Starts tasks and waits for all of them.
    pub(super) fn outcomes(&self, tasks: Vec<Task>) -> Result<Vec<Outcome>, String> {
        start(tasks)?.wait_all(self.left()).map_err(text)
    }

    /// The accuracy of an undisturbed training in one process.
    pub(super) fn undisturbed(&self, args: &[&str]) -> Result<f64, String> {
        let outcomes = self.outcomes(vec![self.mnist(args)])?;
        all_done(&outcomes)?;
        accuracy(&outcomes[0].stdout)
    }
}

/// One process that is to be started.
#[derive(Clone)]
pub(super) struct Task {
    command: String,
    before: String,
    env: Vec<(String, String)>,
}

impl Task {
    fn new(program: PathBuf, args: &[&str]) -> Task {
        let words =
            std::iter::once(program.to_string_lossy().into_owned()).chain(args.iter().map(|arg| (*arg).to_owned()));
        let words: Vec<String> = words.map(|word| quoted(&word)).collect();
        // Tasks share few cores, and wait no longer than an attack does.
        let env = [("RAYON_NUM_THREADS", "1"), ("DISTRIBUTE_TIMEOUT", "30"), ("DISTRIBUTE_PROGRESS", "plain")];
        let env = env.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        Task { command: words.join(" "), before: String::new(), env }
    }

    pub(super) fn env(mut self, name: &str, value: impl Into<String>) -> Task {
        self.env.push((name.to_owned(), value.into()));
        self
    }

    /// Has the shell do this first.
    pub(super) fn after(mut self, command: &str) -> Task {
        self.before += &format!("{command} && ");
        self
    }

    /// In a pid namespace of its own, which it is the first process of.
    pub(super) fn contained(mut self) -> Task {
        self.command = format!("unshare --pid --fork --kill-child --mount-proc {}", self.command);
        self
    }

    /// In a mount namespace of its own, where a shell does something first.
    pub(super) fn with_mounts(mut self, command: &str) -> Task {
        self.command = format!("unshare --mount sh -c {}", quoted(&format!("{command} && exec {}", self.command)));
        self
    }

    /// The command line as a shell takes it.
    pub(super) fn command(&self) -> &str {
        &self.command
    }

    /// A shell script in its place, with the variables of this task.
    pub(super) fn scripted(mut self, script: &str) -> Task {
        self.command = format!("sh -c {}", quoted(script));
        self
    }
}

/// Starts tasks, each through a shell that becomes the task.
pub(super) fn start(tasks: Vec<Task>) -> Result<Job, String> {
    let count = u32::try_from(tasks.len()).map_err(text)?;
    let variables = move |rank: u32| {
        let task = &tasks[rank as usize];
        let script = ("ATTACK_SCRIPT".to_owned(), format!("{}exec {}", task.before, task.command));
        task.env.iter().cloned().chain([script]).collect()
    };
    let job = Job::builder("sh").args(["-c", "eval \"$ATTACK_SCRIPT\""]).tasks(count);
    job.task_env(variables).start().map_err(text)
}

fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Addresses on loopback that are free now.
pub(super) fn addresses(count: usize) -> Result<Vec<String>, String> {
    Ok(Ports::reserve(count).map_err(text)?.addresses())
}

/// The TF_CONFIG of a worker.
pub(super) fn config(workers: &[String], index: usize) -> String {
    format!(r#"{{"cluster": {{"worker": {workers:?}}}, "task": {{"type": "worker", "index": {index}}}}}"#)
}

/// Runs the attack where namespaces of a kind are permitted.
pub(super) fn with_namespaces(kinds: &[&str], attack: impl FnOnce() -> Verdict) -> Verdict {
    let mut command = Command::new("unshare");
    command.args(kinds).arg("true").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    match command.status().is_ok_and(|status| status.success()) {
        true => attack(),
        false => Ok(Held::Skipped(format!("`unshare {}` is missing or not permitted here", kinds.join(" ")))),
    }
}
