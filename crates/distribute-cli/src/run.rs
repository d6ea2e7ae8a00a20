//! `distribute run`: combines ports, processes, output and the supervisor.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded, never, select, unbounded};
use distribute_cluster::JobId;
use rustix::process::Pid;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;

use crate::args::Run;
use crate::environment;
use crate::error::Error;
use crate::guardian::Guardian;
use crate::job::{self, Task};
use crate::outcome::{Exit, Verdict, tells_of_another};
use crate::output::{Follow, Look, Screen, Stream, Tail, ends_within};
use crate::ports::Ports;
use crate::process::{self, Process};
use crate::progress::Progress;
use crate::report;
use crate::status::Status;
use crate::supervisor::{Action, Supervisor};

/// Runs a job to its end; returns the launcher's exit code.
pub(crate) fn run(args: &Run) -> Result<u8, Error> {
    let tasks = job::tasks(args.chief.max(args.ps.min(1)), args.workers, args.ps);
    let only = args.only.as_deref().map(|given| job::find(&tasks, given)).transpose()?;
    let logs = args.log_dir.as_deref().map(|folder| open_logs(folder, &tasks)).transpose()?;
    let shown = Shown { only, quiet: args.quiet };

    // Before the first task, so that the end of none is missed.
    let signals = signals().map_err(Error::system("handle signals"))?;
    process::adopt_orphans().map_err(Error::system("adopt orphaned processes"))?;
    let ports = Ports::reserve(tasks.len()).map_err(|source| Error::Ports { tasks: tasks.len(), source })?;
    let guardian = Guardian::start().map_err(Error::system("start the guardian process"))?;
    let look = Look::from_streams(&tasks, args.timestamps);
    let screen = Screen::start(look).map_err(Error::system("start a thread"))?;
    let progress = match environment::is_set("DISTRIBUTE_PROGRESS") {
        true => None,
        false => Some(
            Progress::start(&tasks, screen.output(), screen.notes()).map_err(Error::system("listen for progress"))?,
        ),
    };
    let mut status = Status::start(&args.status, &tasks, &args.program[0], &screen.notes())?;
    // A new one for each job, even if it is started by a task of another one.
    let job = JobId::random().map_err(std::io::Error::other).map_err(Error::system("name the job"))?;
    let mut shared = shared_environment(&job, tasks.len(), progress.as_ref(), &screen, args.quiet);
    shared.extend(status.environment());

    let addresses = ports.release();
    let environment = |task: &Task| {
        let own = job::environment(&tasks, task, &addresses);
        own.into_iter().chain(shared.iter().cloned()).collect()
    };
    let begun = Instant::now();
    let (processes, streams) = match start(args, &tasks, environment, &guardian) {
        Ok(started) => started.into_iter().map(|it| (it.pid, (it.stdout, it.stderr))).unzip::<_, _, Vec<_>, Vec<_>>(),
        Err(error) => {
            // The output of tasks that ran for a moment is not shown. The guardian ends them.
            screen.close();
            return Err(error);
        }
    };
    let (tails, followed) = follow(&tasks, streams, logs, &shown, &screen)?;
    status.started(&processes, &tails);
    let grace = Duration::from_secs(args.grace.into());
    let expendable = tasks.iter().filter(|task| args.ps > 0 && task.job == "worker").map(|task| task.rank);
    let mut running = Running {
        tasks: &tasks,
        processes,
        reaped: vec![false; tasks.len()],
        forgotten: vec![false; tasks.len()],
        // A coordinator reschedules the work of a lost worker on another one.
        supervisor: Supervisor::new(tasks.len(), grace).with_expendable(expendable),
        guardian,
        notes: screen.notes(),
        status,
        begun,
        grace,
    };
    running.until_done(&signals);

    // A descendant that has left its group may hold a stream open.
    ends_within(&followed, STREAMS);
    if let Some(progress) = progress {
        progress.finish();
    }
    finish_screen(screen, &signals);
    let mut outcomes = running.supervisor.outcomes();
    for (outcome, tail) in outcomes.iter_mut().zip(&tails) {
        outcome.told = tells_of_another(&tail.lines());
    }
    let verdict = Verdict::of(&outcomes, running.supervisor.interrupted());
    let line =
        |((task, pid), outcome): ((_, &Pid), &_)| report::Line { task, pid: pid.as_raw_pid(), outcome: *outcome };
    let lines: Vec<_> = tasks.iter().zip(&running.processes).zip(&outcomes).map(line).collect();
    let tail = match verdict {
        Verdict::Cause(rank) => tails[rank].lines(),
        _ => Vec::new(),
    };
    eprint!("{}", report::report(&lines, verdict, &tail));
    Ok(verdict.exit_code(&outcomes))
}

/// A job whose processes run.
struct Running<'a> {
    tasks: &'a [Task],
    processes: Vec<Pid>,
    reaped: Vec<bool>,
    forgotten: Vec<bool>,
    supervisor: Supervisor,
    guardian: Guardian,
    notes: Sender<String>,
    status: Status,
    begun: Instant,
    grace: Duration,
}

impl Running<'_> {
    fn until_done(&mut self, signals: &Receiver<i32>) {
        loop {
            self.reap();
            self.supervisor.handle_timeout(self.begun.elapsed());
            while let Some(action) = self.supervisor.poll_action() {
                self.act(action);
            }
            self.status.poll();
            if self.supervisor.is_done() {
                return;
            }
            let timeout = self.supervisor.poll_timeout().map(|at| at.saturating_sub(self.begun.elapsed()));
            if let Ok(signal) = signals.recv_timeout(timeout.unwrap_or(TICK).min(TICK))
                && signal != SIGCHLD
            {
                self.supervisor.handle_signal(signal, self.begun.elapsed());
            }
        }
    }

    fn reap(&mut self) {
        while let Some((pid, exit)) = process::reap() {
            if let Some(rank) = self.processes.iter().position(|it| *it == pid) {
                self.reaped[rank] = true;
                self.ended(rank, exit);
            }
        }
        for rank in 0..self.processes.len() {
            if self.reaped[rank] && !self.forgotten[rank] && !process::group_lives(self.processes[rank]) {
                self.forget(rank);
                self.supervisor.handle_gone(rank);
            }
        }
    }

    fn ended(&mut self, rank: usize, exit: Exit) {
        let leftover = process::group_lives(self.processes[rank]);
        if !leftover {
            self.forget(rank);
        }
        self.status.ended(rank, exit);
        self.supervisor.handle_exit(rank, exit, leftover, self.begun.elapsed());
    }

    fn forget(&mut self, rank: usize) {
        self.forgotten[rank] = true;
        self.guardian.forget(self.processes[rank]);
    }

    fn act(&mut self, action: Action) {
        if let Action::Signal { rank, signal } = action {
            self.status.signalled(rank, signal);
        }
        match action {
            Action::Signal { rank, signal } if !self.forgotten[rank] => {
                process::signal_group(self.processes[rank], signal);
            }
            Action::SignalLeader { rank, signal } if !self.reaped[rank] => {
                process::signal_process(self.processes[rank], signal);
            }
            // It has ended meanwhile, and its id may have been reused.
            Action::Signal { .. } | Action::SignalLeader { .. } => {}
            Action::Note(note) => {
                // Fails only once the screen has ended, which is later.
                let _ = self.notes.send(report::note(&note, self.tasks, self.grace));
            }
        }
    }
}

/// The tasks whose lines are shown.
struct Shown {
    only: Option<usize>,
    quiet: bool,
}

impl Shown {
    fn shows(&self, rank: usize) -> bool {
        !self.quiet && self.only.is_none_or(|only| only == rank)
    }
}

/// Returns the launcher's signals, except those that its parent made it ignore, as `nohup` does.
fn signals() -> std::io::Result<Receiver<i32>> {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    let ignored = |signal: &i32| ignored.unwrap_or(0) >> (signal - 1) & 1 == 1;
    let all = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];
    let mut wanted = vec![SIGCHLD];
    wanted.extend(all.iter().filter(|signal| !ignored(signal)));
    let mut signals = Signals::new(wanted)?;
    let (sender, receiver) = unbounded();
    let pass_on = move || {
        for signal in signals.forever() {
            if sender.send(signal).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("signals".into()).spawn(pass_on)?;
    Ok(receiver)
}

/// Returns the variables that are the same for all tasks.
fn shared_environment(
    job: &JobId,
    tasks: usize,
    progress: Option<&Progress>,
    screen: &Screen,
    quiet: bool,
) -> Vec<(&'static str, String)> {
    let mut env = vec![("DISTRIBUTE_JOB_ID", job.to_string())];
    if let Some(progress) = progress {
        env.push(("DISTRIBUTE_PROGRESS", "launcher".to_owned()));
        env.push(("DISTRIBUTE_PROGRESS_ADDR", progress.address().to_string()));
    }
    if !environment::is_set("RAYON_NUM_THREADS") {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let threads = (cores / tasks.max(1)).max(1);
        env.push(("RAYON_NUM_THREADS", threads.to_string()));
        if !quiet && tasks > 1 {
            let of = if cores == 1 { "1 core".into() } else { format!("{cores} cores") };
            let note = format!("{tasks} tasks share {of}: RAYON_NUM_THREADS={threads} unless you set it");
            // A lost note is harmless.
            let _ = screen.notes().send(note);
        }
    }
    env
}

type Logs = Vec<[(PathBuf, File); 2]>;

/// Creates `FOLDER/attempt-0/worker-0/{stdout,stderr}.log` for every task, empty.
fn open_logs(folder: &Path, tasks: &[Task]) -> Result<Logs, Error> {
    let open = |path: PathBuf| match File::create(&path) {
        Ok(file) => Ok((path, file)),
        Err(source) => Err(Error::LogDir { path, source }),
    };
    let of_task = |task: &Task| {
        let folder = folder.join("attempt-0").join(task.to_string());
        fs::create_dir_all(&folder).map_err(|source| Error::LogDir { path: folder.clone(), source })?;
        Ok([open(folder.join("stdout.log"))?, open(folder.join("stderr.log"))?])
    };
    tasks.iter().map(of_task).collect()
}

fn start(
    args: &Run,
    tasks: &[Task],
    environment: impl Fn(&Task) -> Vec<(&'static str, String)>,
    guardian: &Guardian,
) -> Result<Vec<Process>, Error> {
    let program = &args.program;
    let one = |task: &Task| {
        let started = process::spawn(program, environment(task), guardian);
        started.map_err(|source| Error::start(task, &program[0], source))
    };
    tasks.iter().map(one).collect()
}

/// Reads all streams. The receiver is disconnected once they have ended.
fn follow(
    tasks: &[Task],
    streams: Vec<(std::process::ChildStdout, std::process::ChildStderr)>,
    logs: Option<Logs>,
    shown: &Shown,
    screen: &Screen,
) -> Result<(Vec<Tail>, Receiver<()>), Error> {
    let (done, followed) = bounded(0);
    let mut logs = logs.into_iter().flatten();
    let mut tails = Vec::new();
    for (task, (stdout, stderr)) in tasks.iter().zip(streams) {
        let tail = Tail::default();
        let [out_log, err_log] = logs.next().map_or([None, None], |[out, err]| [Some(out), Some(err)]);
        let follow = |stream, log| Follow {
            rank: task.rank,
            stream,
            tail: tail.clone(),
            log,
            show: shown.shows(task.rank).then(|| screen.output()),
            note: screen.notes(),
            done: done.clone(),
        };
        let out = follow(Stream::Stdout, out_log).start(format!("{task}-stdout"), stdout);
        let err = out.and_then(|()| follow(Stream::Stderr, err_log).start(format!("{task}-stderr"), stderr));
        err.map_err(Error::system("start a thread"))?;
        tails.push(tail);
    }
    Ok((tails, followed))
}

/// Waits until everything is written, however long the user's pager takes; a signal ends the wait.
fn finish_screen(screen: Screen, signals: &Receiver<i32>) {
    let done = screen.close();
    let mut signals = signals;
    let none = never();
    loop {
        select! {
            recv(done) -> _ => return,
            recv(signals) -> signal => match signal {
                Ok(SIGCHLD) => {}
                Ok(_) => return,
                Err(_) => signals = &none,
            },
        }
    }
}

/// How often the state of processes is polled without a notification.
const TICK: Duration = Duration::from_secs(1);

/// How long streams may stay open after the last process of a task.
const STREAMS: Duration = Duration::from_secs(2);
