//! Real processes of one program, as the tasks of a distributed job.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::capture::{Capture, Stream};
use crate::family::Family;
use crate::{Error, hook};

/// The running tasks of one program. Dropping a job kills the remaining ones, including descendants of tasks. A test
/// that fails meanwhile shows what they have printed.
///
/// Every task has its own process group. Tasks die with the thread that started them.
#[derive(Debug)]
pub struct Job {
    program: OsString,
    tasks: Vec<Task>,
    family: Family,
}

#[derive(Debug)]
struct Task {
    child: Child,
    pid: Pid,
    capture: Capture,
    status: Option<ExitStatus>,
}

/// The exit status and the output of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome {
    /// The rank of the task.
    pub rank: u32,
    /// Its exit code, unless a signal killed it.
    pub code: Option<i32>,
    /// The signal that killed it, if any.
    pub signal: Option<i32>,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
}

impl Outcome {
    /// Returns whether the exit code is 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.code == Some(0)
    }

    /// Returns whether the task is a [process of a test](Job::of_test), and that test was run and has passed. A test
    /// program that finds no test of a name exits with 0, too.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.success() && self.stdout.contains("test result: ok. 1 passed")
    }
}

/// A job that has not been started, created by [`Job::builder`].
pub struct JobBuilder {
    program: OsString,
    args: Vec<OsString>,
    tasks: u32,
    env: Vec<(String, String)>,
    unset: Vec<String>,
    task_env: Box<TaskEnv>,
}

type TaskEnv = dyn Fn(u32) -> Vec<(String, String)>;

impl JobBuilder {
    /// Adds one argument.
    #[must_use]
    pub fn arg(self, arg: impl AsRef<OsStr>) -> Self {
        self.args([arg])
    }

    /// Adds several arguments.
    #[must_use]
    pub fn args(mut self, args: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Self {
        self.args.extend(args.into_iter().map(|arg| arg.as_ref().to_owned()));
        self
    }

    /// Sets an environment variable for all tasks.
    #[must_use]
    pub fn env(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.push((key.into(), value.into()));
        self
    }

    /// Removes an environment variable of this process from all tasks.
    #[must_use]
    pub fn without_env(mut self, key: impl Into<String>) -> Self {
        self.unset.push(key.into());
        self
    }

    /// Sets environment variables that depend on the rank.
    #[must_use]
    pub fn task_env(mut self, env: impl Fn(u32) -> Vec<(String, String)> + 'static) -> Self {
        self.task_env = Box::new(env);
        self
    }

    /// Sets the number of tasks; 1 by default.
    #[must_use]
    pub fn tasks(mut self, tasks: u32) -> Self {
        self.tasks = tasks;
        self
    }

    /// Starts the tasks in rank order.
    ///
    /// # Errors
    /// [`Error::Start`] if a task cannot be started; tasks started before it are killed.
    pub fn start(self) -> Result<Job, Error> {
        let mut job = Job { program: self.program.clone(), tasks: Vec::new(), family: Family::new() };
        for rank in 0..self.tasks {
            let task = self.start_task(rank, &job.family);
            let program = self.program.to_string_lossy().into_owned();
            job.tasks.push(task.map_err(|source| Error::Start { rank, program, source })?);
        }
        Ok(job)
    }

    fn start_task(&self, rank: u32, family: &Family) -> std::io::Result<Task> {
        let mut command = Command::new(&self.program);
        command.args(&self.args);
        for key in &self.unset {
            command.env_remove(key);
        }
        command.envs(self.env.iter().cloned()).envs((self.task_env)(rank));
        command.env(family.key(), family.value()).process_group(0);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        hook::die_with_parent(&mut command);
        let mut child = command.spawn()?;
        let id = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let pid = id.ok_or_else(|| std::io::Error::other("a process id outside 1..2^31"))?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let task = Task { child, pid, capture: Capture::default(), status: None };
        if let Some(stdout) = stdout {
            task.capture.follow(format!("task-{rank}-stdout"), Stream::Stdout, stdout)?;
        }
        if let Some(stderr) = stderr {
            task.capture.follow(format!("task-{rank}-stderr"), Stream::Stderr, stderr)?;
        }
        task.watch(rank)?;
        Ok(task)
    }
}

impl fmt::Debug for JobBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut fields = f.debug_struct("JobBuilder");
        fields.field("program", &self.program).field("args", &self.args).field("tasks", &self.tasks);
        fields.finish_non_exhaustive()
    }
}

impl Job {
    /// Returns a builder of a job of `program`, a path or a name in `PATH`.
    pub fn builder(program: impl AsRef<OsStr>) -> JobBuilder {
        let program = program.as_ref().to_owned();
        JobBuilder {
            program,
            args: Vec::new(),
            tasks: 1,
            env: Vec::new(),
            unset: Vec::new(),
            task_env: Box::new(|_| Vec::new()),
        }
    }

    /// Returns a builder of a job of this test program, whose tasks run one test each: the body of a process, which is
    /// marked `#[ignore]`, so that it counts as a test nowhere else. `name` is its full name, such as `faults::member`.
    ///
    /// # Errors
    /// [`Error::OwnPath`] if the path of this program is unknown.
    pub fn of_test(name: &str) -> Result<JobBuilder, Error> {
        let program = std::env::current_exe().map_err(Error::OwnPath)?;
        Ok(Job::builder(program).args([name, "--exact", "--ignored", "--nocapture"]))
    }

    /// Sends a signal to a task's process group. Does nothing if the task has ended. After [`Signal::STOP`] none of the
    /// task's threads runs any more, as far as /proc tells.
    ///
    /// # Errors
    /// [`Error::NoTask`] if there is no task of this rank, [`Error::Signal`] if the signal cannot be sent.
    pub fn kill(&self, rank: u32, signal: Signal) -> Result<(), Error> {
        let task = self.task(rank)?;
        if task.status.is_some() {
            // The process has been reaped, so its id may belong to another one.
            return Ok(());
        }
        match kill_process_group(task.pid, signal) {
            Ok(()) if signal == Signal::STOP => {
                wait_until_stopped(task.child.id());
                Ok(())
            }
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(errno) => Err(Error::Signal { rank, source: errno.into() }),
        }
    }

    /// Returns the process id of a task.
    ///
    /// # Errors
    /// [`Error::NoTask`] if there is no task of this rank.
    pub fn pid(&self, rank: u32) -> Result<u32, Error> {
        Ok(self.task(rank)?.child.id())
    }

    /// Waits until a task has printed a line that contains `text`, and returns the first such line. Lines printed
    /// before the call count.
    ///
    /// # Errors
    /// [`Error::NoTask`] if there is no task of this rank, [`Error::NoLine`] at the deadline, [`Error::OutputEnded`] as
    /// soon as the output has ended without such a line.
    pub fn wait_for_line(&self, rank: u32, text: &str, deadline: Duration) -> Result<String, Error> {
        let capture = &self.task(rank)?.capture;
        let found = capture.wait(Instant::now() + deadline, |state| match state.line_with(text) {
            None if state.open > 0 => None,
            line => Some(line),
        });
        let (text, output) = (text.to_owned(), capture.printed());
        match found {
            Some(Some(line)) => Ok(line),
            Some(None) => Err(Error::OutputEnded { rank, text, output }),
            None => Err(Error::NoLine { rank, text, waited: deadline, output }),
        }
    }

    /// Waits for the end of one task and of its output.
    ///
    /// # Errors
    /// [`Error::NoTask`] if there is no task of this rank, [`Error::StillRunning`] at the deadline.
    pub fn wait(&mut self, rank: u32, deadline: Duration) -> Result<Outcome, Error> {
        let tasks = self.tasks.len();
        let task = self.tasks.get_mut(rank as usize).ok_or(Error::NoTask { rank, tasks })?;
        task.wait(rank, Instant::now() + deadline, deadline)
    }

    /// Waits for the end of all tasks and of their output, with one common deadline.
    ///
    /// # Errors
    /// [`Error::StillRunning`] with the first task that is not done at the deadline.
    pub fn wait_all(&mut self, deadline: Duration) -> Result<Vec<Outcome>, Error> {
        let end = Instant::now() + deadline;
        (0..).zip(&mut self.tasks).map(|(rank, task)| task.wait(rank, end, deadline)).collect()
    }

    /// Returns everything that a task has printed so far, standard output first.
    ///
    /// # Errors
    /// [`Error::NoTask`] if there is no task of this rank.
    pub fn printed(&self, rank: u32) -> Result<String, Error> {
        Ok(self.task(rank)?.capture.printed())
    }

    /// Returns the family of all processes of the job, including descendants.
    #[must_use]
    pub fn family(&self) -> &Family {
        &self.family
    }

    fn task(&self, rank: u32) -> Result<&Task, Error> {
        self.tasks.get(rank as usize).ok_or(Error::NoTask { rank, tasks: self.tasks.len() })
    }
}

impl Drop for Job {
    #[allow(clippy::print_stderr, reason = "cargo test shows what a failed test has printed")]
    fn drop(&mut self) {
        if thread::panicking() {
            for (rank, task) in self.tasks.iter().enumerate() {
                let printed = task.capture.printed();
                eprintln!("task {rank} of {:?} had printed:\n{}", self.program, printed.trim());
            }
        }
        for task in &mut self.tasks {
            task.end();
        }
        // Includes processes that a task moved to a session of their own.
        self.family.kill();
    }
}

impl Task {
    /// Records the end of the process without reaping it, so that its id is not reused before this job waits for it.
    fn watch(&self, rank: u32) -> std::io::Result<()> {
        let (pid, capture) = (self.pid, self.capture.clone());
        let watch = move || {
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while let Err(rustix::io::Errno::INTR) = waitid(WaitId::Pid(pid), options) {}
            capture.update(|state| state.exited = true);
        };
        thread::Builder::new().name(format!("task-{rank}-watch")).spawn(watch).map(drop)
    }

    fn wait(&mut self, rank: u32, end: Instant, waited: Duration) -> Result<Outcome, Error> {
        let ended = self.capture.wait(end, |state| (state.exited && state.open == 0).then_some(()));
        let still_running = |output| Error::StillRunning { rank, waited, output };
        ended.ok_or_else(|| still_running(self.capture.printed()))?;
        let status = match self.status {
            Some(status) => status,
            None => self.child.wait().map_err(|error| still_running(error.to_string()))?,
        };
        self.status = Some(status);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (stdout, stderr) = self.capture.update(|state| (text(&state.stdout), text(&state.stderr)));
        Ok(Outcome { rank, code: status.code(), signal: status.signal(), stdout, stderr })
    }

    fn end(&mut self) {
        if self.status.is_some() {
            return;
        }
        let _ = kill_process_group(self.pid, Signal::KILL);
        let end = Instant::now() + REAP_DEADLINE;
        if self.capture.wait(end, |state| state.exited.then_some(())).is_some() {
            self.status = self.child.wait().ok();
        }
    }
}

/// A killed process ends at once, unless the kernel blocks it.
const REAP_DEADLINE: Duration = Duration::from_secs(5);

/// Waits until no thread of a process runs: the kernel stops a busy one only when it next looks for signals.
fn wait_until_stopped(pid: u32) {
    let runs = || {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let stats = threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("stat")).ok());
        // The state follows the name, which is in parentheses and may contain some.
        stats.filter_map(|stat| stat.rsplit_once(") ")?.1.chars().next()).any(|state| !matches!(state, 'T' | 't' | 'Z'))
    };
    let begun = Instant::now();
    while runs() && begun.elapsed() < STOPPED {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Limit of the wait for a process to stop.
const STOPPED: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests;
