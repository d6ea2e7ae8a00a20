//! This host's part in a job: its screen, its signals, and the tasks that it starts.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded, never, select, unbounded};
use distribute_cluster::JobSecret;
use signal_hook::consts::{SIGCHLD, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::iterator::Signals;
use tempfile::TempDir;

use crate::certs::Ephemeral;
use crate::cores::{Cores, Place};
use crate::environment;
use crate::error::Error;
use crate::guardian::Guardian;
use crate::job::{self, Addresses, Task};
use crate::local::{Local, Running};
use crate::output::{Follow, Look, Output, Screen, Stream, Tail, ends_within};
use crate::process;
use crate::progress::Progress;
use crate::signals::Signal;

/// The launcher of this host, for all attempts of a job.
#[derive(Debug)]
pub(crate) struct Host {
    program: Vec<OsString>,
    log_dir: Option<PathBuf>,
    only: Option<usize>,
    quiet: bool,
    cores: Option<Cores>,
    signals: Receiver<Signal>,
    guardian: Guardian,
    screen: Screen,
    progress: Option<Progress>,
    /// Where tasks write the errors that end them, and read the job's secret. Its owner alone can read it.
    errors: TempDir,
    /// The file of the secret that the launcher has drawn for the job.
    secret: Option<PathBuf>,
    /// The authority of the tasks' certificates, which lives as long as the job.
    authority: Option<Ephemeral>,
}

/// How a launcher starts and shows tasks.
#[derive(Debug, Default)]
pub(crate) struct Settings {
    pub(crate) program: Vec<OsString>,
    pub(crate) log_dir: Option<PathBuf>,
    /// The only task whose output is shown.
    pub(crate) only: Option<String>,
    pub(crate) quiet: bool,
    pub(crate) timestamps: bool,
    pub(crate) cpus_per_worker: Option<u32>,
    /// Whether tasks report progress.
    pub(crate) progress: bool,
    /// Whether tasks get certificates, unless the user has given some.
    pub(crate) tls: bool,
    /// Whether the job gets a secret, unless the user has set one.
    pub(crate) draws_secret: bool,
}

/// A start of a job's tasks.
#[derive(Debug, Clone)]
pub(crate) struct Start {
    pub(crate) addresses: Addresses,
    /// The job's identity.
    pub(crate) job: String,
    pub(crate) attempt: u32,
    /// The value of DISTRIBUTE_STATUS_ADDR, if it is to be set.
    pub(crate) reports_to: Option<String>,
}

impl Host {
    /// Takes over signals, and starts what shows the job to the user.
    pub(crate) fn new(settings: Settings, tasks: &[Task]) -> Result<Host, Error> {
        let Settings { program, log_dir, only, quiet, timestamps, cpus_per_worker, progress, tls, draws_secret } =
            settings;
        let only = only.as_deref().map(|given| job::find(tasks, given)).transpose()?;
        let json = environment::progress_is_json()?;
        if let Some(folder) = &log_dir {
            let refused = |source| Error::LogDir { path: folder.clone(), source };
            fs::create_dir_all(folder).map_err(refused)?;
        }
        // Before the first task, so that the end of none is missed.
        let signals = signals().map_err(Error::system("handle signals"))?;
        process::adopt_orphans().map_err(Error::system("adopt orphaned processes"))?;
        let guardian = Guardian::start().map_err(Error::system("start the guardian process"))?;
        let look = Look::from_streams(tasks, timestamps);
        let screen = Screen::start(look, json).map_err(Error::system("start a thread"))?;
        let progress = match progress && !environment::is_set("DISTRIBUTE_PROGRESS") {
            false => None,
            true => {
                let started = Progress::start(tasks, screen.output(), screen.notes());
                Some(started.map_err(Error::system("listen for progress"))?)
            }
        };
        let errors = tempfile::tempdir().map_err(Error::system("make a temporary folder"))?;
        let cores = cpus_per_worker.map(Cores::of_this_host).transpose()?;
        let secret = match draws_secret && !environment::gives_secret() {
            true => {
                let file = errors.path().join("secret");
                let drawn = JobSecret::create_file(&file).map_err(std::io::Error::other);
                drawn.map_err(Error::system("write the job's secret"))?;
                Some(file)
            }
            false => None,
        };
        let authority = match tls && !environment::gives_certificate() {
            true => Some(Ephemeral::create(errors.path())?),
            false => None,
        };
        Ok(Host {
            program,
            log_dir,
            only,
            quiet,
            cores,
            signals,
            guardian,
            screen,
            progress,
            errors,
            secret,
            authority,
        })
    }

    pub(crate) fn signals(&self) -> &Receiver<Signal> {
        &self.signals
    }

    pub(crate) fn guardian(&self) -> &Guardian {
        &self.guardian
    }

    pub(crate) fn output(&self) -> Sender<Output> {
        self.screen.output()
    }

    /// Shows a message of the launcher.
    pub(crate) fn note(&self, note: String) {
        // Fails only once the screen has ended, which is later.
        let _ = self.screen.notes().send(note);
    }

    pub(crate) fn notes(&self) -> Sender<String> {
        self.screen.notes()
    }

    /// Starts those tasks of an attempt that belong to this host.
    pub(crate) fn start(&self, tasks: &[Task], node: usize, start: &Start) -> Result<Local<'_>, Error> {
        let Start { addresses, job, attempt, reports_to } = start;
        let own: Vec<&Task> = tasks.iter().filter(|task| task.node == node).collect();
        let mut logs = match &self.log_dir {
            Some(folder) => Some(open_logs(&folder.join(format!("attempt-{attempt}")), &own)?.into_iter()),
            None => None,
        };
        let places = self.places(own.len())?;
        let shared = self.shared_environment(job, *attempt, own.len());
        let mut local = Local::new(&self.guardian);
        for (task, place) in own.into_iter().zip(places) {
            let place_of_task = job::environment(tasks, task, addresses).ok_or(Error::Addresses)?;
            let mut env = place_of_task;
            env.extend(shared.iter().map(|(name, value)| (*name, Some(value.clone()))));
            env.extend(reports_to.as_ref().map(|address| ("DISTRIBUTE_STATUS_ADDR", Some(address.clone()))));
            let logs = logs.as_mut().and_then(Iterator::next);
            local.add(self.start_task(task, *attempt, env, logs, place.as_ref())?);
        }
        Ok(local)
    }

    /// Returns the cores of each of `tasks` tasks, if they are pinned.
    pub(crate) fn places(&self, tasks: usize) -> Result<Vec<Option<Place>>, Error> {
        match &self.cores {
            Some(cores) => Ok(cores.places(tasks)?.into_iter().map(Some).collect()),
            None => Ok(vec![None; tasks]),
        }
    }

    /// Starts one task without the others of its attempt, with these variables besides the launcher's own.
    pub(crate) fn start_alone(
        &self,
        task: &Task,
        attempt: u32,
        env: Vec<(&'static str, Option<String>)>,
        place: Option<&Place>,
    ) -> Result<Local<'_>, Error> {
        let logs = match &self.log_dir {
            Some(folder) => open_logs(&folder.join(format!("attempt-{attempt}")), &[task])?.pop(),
            None => None,
        };
        let mut local = Local::new(&self.guardian);
        local.add(self.start_task(task, attempt, env, logs, place)?);
        Ok(local)
    }

    /// Starts a task, and shows and keeps what it prints.
    fn start_task(
        &self,
        task: &Task,
        attempt: u32,
        mut env: Vec<(&'static str, Option<String>)>,
        logs: Option<[(PathBuf, File); 2]>,
        place: Option<&Place>,
    ) -> Result<Running, Error> {
        let error_file = self.errors.path().join(format!("{attempt}-{task}.json"));
        env.push(("TORCHELASTIC_ERROR_FILE", Some(error_file.to_string_lossy().into_owned())));
        if let Some(authority) = &self.authority {
            let variables = authority.issue(&task.to_string())?;
            env.extend(variables.map(|(name, path)| (name, Some(path.to_string_lossy().into_owned()))));
        }
        let pinned = place.map(|place| place.pin()).transpose()?;
        let started = process::spawn(&self.program, env, &self.guardian);
        drop(pinned);
        let started = started.map_err(|source| Error::start(task, &self.program[0], source))?;
        let (tail, (done, followed)) = (Tail::default(), bounded(0));
        let [out_log, err_log] = logs.map_or([None, None], |logs| logs.map(Some));
        let follow = |stream, log| Follow {
            rank: Some(task.rank),
            stream,
            tail: tail.clone(),
            log,
            show: self.shows(task.rank).then(|| self.screen.output()),
            note: self.screen.notes(),
            done: done.clone(),
        };
        let out = follow(Stream::Stdout, out_log).start(format!("{task}-stdout"), started.stdout);
        let err = out.and_then(|()| follow(Stream::Stderr, err_log).start(format!("{task}-stderr"), started.stderr));
        err.map_err(Error::system("start a thread"))?;
        Ok(Running::new(task.rank, started.pid, tail, error_file, followed))
    }

    /// Ends the screen once everything is written.
    pub(crate) fn close(self) {
        if let Some(progress) = self.progress {
            progress.finish();
        }
        written(&self.screen.close(), &self.signals);
    }

    fn shows(&self, rank: usize) -> bool {
        !self.quiet && self.only.is_none_or(|only| only == rank)
    }

    /// Returns the variables that are the same for all tasks of the host.
    pub(crate) fn shared_environment(&self, job: &str, attempt: u32, tasks: usize) -> Vec<(&'static str, String)> {
        let mut env = vec![("DISTRIBUTE_JOB_ID", job.to_owned()), ("DISTRIBUTE_RESTART_COUNT", attempt.to_string())];
        if let Some(file) = &self.secret {
            env.push(("DISTRIBUTE_JOB_SECRET_FILE", file.to_string_lossy().into_owned()));
        }
        if let Some(progress) = &self.progress {
            env.push(("DISTRIBUTE_PROGRESS", "launcher".to_owned()));
            env.push(("DISTRIBUTE_PROGRESS_ADDR", progress.address().to_string()));
        }
        if !environment::is_set("RAYON_NUM_THREADS") {
            let cores = thread::available_parallelism().map_or(1, usize::from);
            let threads = self.cores.as_ref().map_or((cores / tasks.max(1)).max(1), Cores::per_task);
            env.push(("RAYON_NUM_THREADS", threads.to_string()));
            if !self.quiet && tasks > 1 && attempt == 0 {
                let of = if cores == 1 { "1 core".into() } else { format!("{cores} cores") };
                self.note(format!("{tasks} tasks share {of}: RAYON_NUM_THREADS={threads} unless you set it"));
            }
        }
        env
    }
}

/// Returns the launcher's signals, except those that its parent made it ignore, as `nohup` does.
pub(crate) fn signals() -> std::io::Result<Receiver<Signal>> {
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
            if sender.send(signal.into()).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().name("signals".into()).spawn(pass_on)?;
    Ok(receiver)
}

type Logs = Vec<[(PathBuf, File); 2]>;

/// Creates `FOLDER/worker-0/{stdout,stderr}.log` for every task, empty.
fn open_logs(folder: &Path, tasks: &[&Task]) -> Result<Logs, Error> {
    let open = |path: PathBuf| match File::create(&path) {
        Ok(file) => Ok((path, file)),
        Err(source) => Err(Error::LogDir { path, source }),
    };
    let of_task = |task: &&Task| {
        let folder = folder.join(task.to_string());
        fs::create_dir_all(&folder).map_err(|source| Error::LogDir { path: folder.clone(), source })?;
        Ok([open(folder.join("stdout.log"))?, open(folder.join("stderr.log"))?])
    };
    tasks.iter().map(of_task).collect()
}

/// Waits until everything is written, however long the user's pager takes. A request to end bounds the rest of the
/// wait: one that was meant for tasks which have ended meanwhile costs none of their lines.
fn written(done: &Receiver<()>, signals: &Receiver<Signal>) {
    let mut signals = signals;
    let none = never();
    loop {
        select! {
            recv(done) -> _ => return,
            recv(signals) -> signal => match signal {
                Ok(Signal::End(_)) => {
                    ends_within(done, ASKED);
                    return;
                }
                Ok(Signal::Child | Signal::Request(_)) => {}
                Err(_) => signals = &none,
            },
        }
    }
}

/// How long the terminal has to accept the last lines once the launcher was asked to end.
const ASKED: Duration = Duration::from_secs(2);

/// How often the state of processes is polled without a notification.
pub(crate) const TICK: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use signal_hook::consts::{SIGTERM, SIGUSR2};

    use super::*;

    #[test]
    fn signals_cost_no_line_that_the_terminal_accepts() {
        for number in [SIGTERM, SIGUSR2] {
            let (sender, signals) = unbounded();
            sender.send(Signal::from(number)).unwrap();
            let (writing, done) = bounded::<()>(0);
            let writer = thread::spawn(move || {
                thread::sleep(Duration::from_millis(50));
                drop(writing);
            });
            written(&done, &signals);
            assert_eq!(done.try_recv(), Err(crossbeam_channel::TryRecvError::Disconnected));
            writer.join().unwrap();
        }
    }
}
