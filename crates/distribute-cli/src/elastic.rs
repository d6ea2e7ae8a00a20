//! `distribute run --elastic`: workers that train together, each of which is started again alone when it is lost.

use std::cell::RefCell;
use std::fmt;
use std::net::Ipv4Addr;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use distribute_cluster::{FileRegister, JobId, Register};
use tempfile::TempDir;

use crate::args::Run;
use crate::environment;
use crate::error::Error;
use crate::host::Host;
use crate::job::{self, Addresses, LOOPBACK, Roles, TASK_RESTARTS, Task};
use crate::output;
use crate::ports::Reserved;
use crate::report;
use crate::restart::Budget;
use crate::revival::{Ended, Environment, Newest, Revival, Rules, Runner, Start};
use crate::run;
use crate::status::Reports;

/// How many workers train together; displayed as `2:4`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Elastic {
    /// The fewest that train.
    pub(crate) min: u32,
    /// The number that is started.
    pub(crate) max: u32,
}

impl Elastic {
    /// Checks the other options of the job.
    ///
    /// # Errors
    /// [`Error::Options`].
    pub(crate) fn check(self, args: &Run) -> Result<(), Error> {
        let wrong = |problem: &'static str, given: String, expected: &str| {
            let given = format!("--elastic {self} and {given}");
            Err(Error::Options { problem, given, expected: expected.to_owned() })
        };
        let hosts = args.hosts.as_ref().map(|hosts| format!("--hosts {}", hosts.join(",")));
        if let Some(given) = hosts.or((args.nnodes > 1).then(|| format!("--nnodes {}", args.nnodes))) {
            return wrong("an elastic job runs on one host", given, "--elastic without --hosts and --nnodes");
        }
        for (name, count) in [("chief", args.chief), ("ps", args.ps), ("evaluator", args.evaluator)] {
            if count > 0 {
                let expected = format!("--elastic without --{name}");
                return wrong("an elastic job has workers only", format!("--{name} {count}"), &expected);
            }
        }
        for (name, count) in [("workers", args.workers), ("workers-per-node", args.workers_per_node)] {
            if let Some(count) = count.filter(|count| *count != self.max) {
                let expected = format!("--elastic alone, which starts {} workers", self.max);
                return wrong("--elastic contradicts the number of workers", format!("--{name} {count}"), &expected);
            }
        }
        Ok(())
    }
}

impl FromStr for Elastic {
    type Err = &'static str;

    fn from_str(given: &str) -> Result<Elastic, &'static str> {
        let number = |text: &str| text.trim().parse::<u32>().map_err(|_| "expected MIN:MAX, such as 2:4");
        let (min, max) = given.split_once(':').ok_or("expected MIN:MAX, such as 2:4")?;
        let elastic = Elastic { min: number(min)?, max: number(max)? };
        match elastic {
            Elastic { min: 0, .. } => Err("MIN is at least 1"),
            Elastic { min, max } if min > max => Err("MIN is larger than MAX"),
            Elastic { max: 1025.., .. } => Err("MAX is at most 1024"),
            elastic => Ok(elastic),
        }
    }
}

impl fmt::Display for Elastic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.min, self.max)
    }
}

/// Runs a job to its end; returns the launcher's exit code.
pub(crate) fn run(args: &Run, elastic: Elastic) -> Result<u8, Error> {
    let tasks = Roles { workers: elastic.max, ..Roles::default() }.tasks(1);
    let host = Host::new(run::settings(args), &tasks)?;
    let ended = train(args, elastic, &host, &tasks);
    host.close();
    let (code, text) = ended?;
    output::say(&text);
    Ok(code)
}

/// Starts the workers, and starts again those that are lost. Returns the exit code, and what to print last.
fn train(args: &Run, elastic: Elastic, host: &Host, tasks: &[Task]) -> Result<(u8, String), Error> {
    let seconds = |seconds: u32| Duration::from_secs(seconds.into());
    let mut status = run::status(args, host, tasks, Reports::OfThisHost)?;
    let name = || JobId::random().map_err(std::io::Error::other).map_err(Error::system("name the job"));
    let (mut jobs, mut job) = (0, name()?);
    let reserved = Reserved::new(tasks.len(), Ipv4Addr::LOCALHOST.into());
    let ports = reserved.map_err(|source| Error::Ports { tasks: tasks.len(), source })?.release();
    let control = ports.tasks.clone();
    let addresses = Addresses { hosts: vec![LOOPBACK.to_owned()], ports: vec![ports] };
    let folder = Generations::new()?;
    let mut shared: Environment = Vec::new();
    let of_host = host.shared_environment(job.name(), 0, tasks.len());
    shared.extend(of_host.into_iter().map(|(name, value)| (name, Some(value))));
    shared.extend(status.environment(LOOPBACK).map(|(name, address)| (name, Some(address))));
    shared.extend(folder.own.is_some().then(|| (GENERATIONS, Some(folder.value.clone()))));
    let register = RefCell::new(folder.register(&job));
    let newest = || Newest::of(&register.borrow().as_ref()?.read().ok()??, &control);
    let environment = |task: &Task, start: Start| {
        if start.job > jobs {
            (jobs, job) = (start.job, name()?);
            *register.borrow_mut() = folder.register(&job);
        }
        let mut env = job::environment(tasks, task, &addresses).ok_or(Error::Addresses)?;
        env.extend(shared.iter().cloned());
        let of_start = [
            (JOB_ID, job.name().to_owned()),
            (RESTARTS, start.attempt.to_string()),
            (TASK_RESTARTS, start.in_job.to_string()),
        ];
        for (name, value) in of_start {
            env.retain(|(known, _)| *known != name);
            env.push((name, Some(value)));
        }
        Ok(env)
    };
    let window = seconds(args.restart_window.unwrap_or(WINDOW));
    let budget = Budget::new(args.max_restarts(), Some(window), seconds(args.restart_backoff));
    let (rules, grace) = (Rules::Elastic { min: elastic.min as usize }, seconds(args.grace));
    let revival = Revival::new(tasks.len(), rules, &budget, grace);
    let runner = Runner::new(host, tasks, revival, grace, environment)?.with_status(&mut status);
    let ended = runner.with_newest(&newest).run()?;
    Ok(report(&ended, tasks, elastic))
}

/// Returns the exit code, and what to print last.
fn report(ended: &Ended, tasks: &[Task], elastic: Elastic) -> (u8, String) {
    let (outcomes, starts) = (ended.outcomes(), ended.revival.starts());
    let verdict = ended.revival.verdict(&outcomes);
    let line = |(rank, task): (usize, &Task)| report::Line {
        task: *task,
        host: None,
        pid: ended.pids[rank],
        outcome: outcomes[rank],
        starts: Some(starts[rank]),
        last: &ended.lasts[rank],
    };
    let lines: Vec<_> = tasks.iter().enumerate().map(line).collect();
    let mut text = report::report(&lines, verdict);
    if ended.revival.was_too_few() {
        text.push_str(&format!("distribute: stopped with fewer workers than --elastic {elastic} needs\n"));
    }
    (verdict.exit_code(&outcomes), text)
}

/// The place where the workers decide who trains, as long as the job runs.
struct Generations {
    /// The value of the variable.
    value: String,
    /// Unless the user has set the variable.
    own: Option<TempDir>,
}

impl Generations {
    fn new() -> Result<Generations, Error> {
        if let Some(value) = environment::trimmed(GENERATIONS) {
            return Ok(Generations { value: value.to_string_lossy().into_owned(), own: None });
        }
        let system = Error::system("make a folder for the generations of the job");
        let made = tempfile::Builder::new().prefix("distribute-generations-").tempdir().and_then(|folder| {
            let path = folder.path().to_str().ok_or_else(|| std::io::Error::other("TMPDIR is not UTF-8"))?;
            Ok((format!("file:{path}"), folder))
        });
        let (value, folder) = made.map_err(system)?;
        Ok(Generations { value, own: Some(folder) })
    }

    /// Returns the register of a job, if it is a file.
    fn register(&self, job: &JobId) -> Option<FileRegister> {
        let folder = self.value.strip_prefix("file:").map(Path::new).filter(|folder| folder.is_absolute())?;
        // The workers say what is wrong with the folder.
        FileRegister::new(folder, job).ok()
    }
}

/// The variable with the place where the workers decide who trains.
const GENERATIONS: &str = "DISTRIBUTE_GENERATIONS";

const JOB_ID: &str = "DISTRIBUTE_JOB_ID";

const RESTARTS: &str = "DISTRIBUTE_RESTART_COUNT";

/// Restarts of each worker, if the user gives no number, as those of data workers.
pub(crate) const MAX_RESTARTS: u32 = 3;

/// Restarts that are longer ago do not count, in seconds.
const WINDOW: u32 = 600;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_read_and_wrong_ones_refused() {
        assert_eq!("2:4".parse(), Ok(Elastic { min: 2, max: 4 }));
        assert_eq!("3:3".parse::<Elastic>().map(|elastic| elastic.to_string()), Ok("3:3".to_owned()));
        for (given, words) in [
            ("4", "MIN:MAX"),
            ("2:", "MIN:MAX"),
            ("-1:4", "MIN:MAX"),
            ("1:2:3", "MIN:MAX"),
            ("0:4", "at least 1"),
            ("4:2", "MIN is larger than MAX"),
            ("1:1025", "at most 1024"),
        ] {
            assert!(given.parse::<Elastic>().unwrap_err().contains(words), "{given}");
        }
    }
}
