//! The launcher's side of the status page, and of `distribute top`.

use std::ffi::OsStr;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use distribute_train::status::{Board, Collector, End, Job, Private, Server};

use crate::environment;
use crate::error::Error;
use crate::job::Task;
use crate::jobs;
use crate::outcome::{Exit, signal_name};
use crate::output::Tail;
use crate::stacks::Stacks;
use crate::status::Reports;

/// Options of the page.
#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// Serve a page with the state of all tasks, at a port of this machine (0 for a free one) or at HOST:PORT
    ///
    /// Also /status.json, and /metrics for Prometheus. Anyone who reaches the address can read it; a port by itself is
    /// reached from this machine only.
    #[arg(long, value_name = "[HOST:]PORT", env = "DISTRIBUTE_STATUS", hide_env = true)]
    status: Option<String>,
}

/// The state of the job, and the threads that serve it.
#[derive(Debug)]
pub(crate) struct Status {
    board: Board,
    tasks: Vec<Supervised>,
    stacks: Stacks,
    /// Takes the tasks' reports, and answers `distribute top`.
    collector: Collector,
    /// Whether the tasks report.
    reports: bool,
    _page: Option<Server>,
}

#[derive(Debug)]
struct Supervised {
    /// As `worker:1`.
    name: String,
    tail: Tail,
    /// Signals that the launcher sent it.
    sent: Vec<i32>,
    /// When it failed, until its last words are added.
    failed: Option<Instant>,
}

impl Status {
    /// Starts what takes the tasks' reports and answers `distribute top`, and the page if the options ask for it, whose
    /// address the user is told.
    pub(crate) fn start(
        options: &Options,
        tasks: &[Task],
        program: &OsStr,
        reports: Reports,
        notes: &Sender<String>,
    ) -> Result<Self, Error> {
        let name = Path::new(program).file_stem().unwrap_or(program).to_string_lossy();
        let mut job = Job::new(&name);
        let supervised = |task: &Task| {
            let name = format!("{}:{}", task.job, task.index);
            job.expect(&name);
            Supervised { name, tail: Tail::default(), sent: Vec::new(), failed: None }
        };
        let tasks: Vec<Supervised> = tasks.iter().map(supervised).collect();
        let board = Board::new(job);
        let stacks = Stacks::new(tasks.iter().map(|task| task.name.clone()));
        let refused = |given: &str, error: distribute_train::Error| Error::Status {
            given: given.to_owned(),
            problem: error.to_string(),
        };
        let page = options
            .status
            .as_ref()
            .map(|given| Server::serve(&address(given), &board).map_err(|error| refused(given, error)));
        let page = page.transpose()?;
        // Fails only once the screen has ended, which is later.
        let say = |text: String| drop(notes.send(text));
        if let Some(page) = &page {
            say(note(page.address()));
        }
        let private = private(stacks.clone());
        let private = private.inspect_err(|problem| say(format!("distribute top cannot ask this job: {problem}"))).ok();
        // Reports of other hosts cross a network, so that the user has to ask for them.
        let reports_here = reports == Reports::OfThisHost || page.is_some();
        let at = if reports_here { reports.address() } else { Reports::OfThisHost.address() };
        let collector = Collector::start(at, private, &board).map_err(|error| refused(at, error))?;
        Ok(Self { board, tasks, stacks, collector, reports: reports_here, _page: page })
    }

    /// Returns the variable that tells the tasks where to report: at `host`, if they are on several.
    pub(crate) fn environment(&self, host: &str) -> Option<(&'static str, String)> {
        let address = self.collector.reports_address();
        match self.reports {
            true if address.ip().is_unspecified() => Some((REPORTS_TO, host_and_port(host, address.port()))),
            true => Some((REPORTS_TO, address.to_string())),
            // In a task of another job, whose page does not show the tasks of this one.
            false => environment::is_set(REPORTS_TO).then(|| (REPORTS_TO, String::new())),
        }
    }

    /// Shows the process of a task; its last words are in `tail` if it runs on this host.
    pub(crate) fn started(&mut self, rank: usize, pid: i32, tail: Option<Tail>) {
        let Some(task) = self.tasks.get_mut(rank) else { return };
        self.stacks.started(rank, pid, tail.is_some());
        (task.tail, task.sent, task.failed) = (tail.unwrap_or_default(), Vec::new(), None);
        self.board.update(|job, now| job.start(&task.name, pid.unsigned_abs(), now));
    }

    /// Remembers a signal of the launcher, which explains the end of the task.
    pub(crate) fn signalled(&mut self, rank: usize, signal: i32) {
        if let Some(task) = self.tasks.get_mut(rank) {
            task.sent.push(signal);
        }
    }

    /// Shows the end of a task's process.
    pub(crate) fn ended(&mut self, rank: usize, exit: Exit) {
        let Some(task) = self.tasks.get_mut(rank) else { return };
        self.stacks.ended(rank);
        let end = match exit {
            _ if task.sent.iter().any(|signal| exit.answers(*signal)) => End::Stopped,
            Exit::Code(code) => End::Code(code),
            Exit::Signal(signal) => End::Signal(signal_name(signal).into_owned()),
            Exit::Lost => End::Lost,
        };
        task.failed = (!exit.is_success() && end != End::Stopped).then(Instant::now);
        self.board.update(|job, now| job.end(&task.name, end, now));
    }

    /// Adds the last words of tasks that have failed, once they have been read.
    pub(crate) fn poll(&mut self) {
        for task in &mut self.tasks {
            if task.failed.is_some_and(|failed| failed.elapsed() >= LAST_WORDS) {
                task.failed = None;
                if let Some(words) = task.tail.lines().iter().rev().find(|line| !line.trim().is_empty()) {
                    self.board.update(|job, _| job.explain(&task.name, words));
                }
            }
        }
    }
}

/// Opens the socket on which `distribute top` asks this job.
fn private(stacks: Stacks) -> Result<Private, String> {
    let path = jobs::own_socket().map_err(|error| error.to_string())?;
    Private::bind(&path, move |task| stacks.of(task)).map_err(|error| error.to_string())
}

/// Returns the address to listen on; a port by itself is one of this machine.
fn address(given: &str) -> String {
    let given = given.trim();
    if given.parse::<u16>().is_ok() { format!("127.0.0.1:{given}") } else { given.to_owned() }
}

fn note(address: SocketAddr) -> String {
    if address.ip().is_loopback() {
        return format!("status page: http://{address}");
    }
    let host = match address.ip().is_unspecified() {
        true => rustix::system::uname().nodename().to_string_lossy().into_owned(),
        false if address.is_ipv6() => format!("[{}]", address.ip()),
        false => address.ip().to_string(),
    };
    format!("status page: http://{host}:{}, for anyone who reaches it", address.port())
}

/// The variable with the address to which a task reports; empty, it reports to none.
const REPORTS_TO: &str = "DISTRIBUTE_STATUS_ADDR";

fn host_and_port(host: &str, port: u16) -> String {
    if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") }
}

/// Time for reading what a task has printed before its end.
const LAST_WORDS: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_by_itself_is_one_of_this_machine() {
        assert_eq!(address(" 8080"), "127.0.0.1:8080");
        assert_eq!(address("0.0.0.0:0"), "0.0.0.0:0");
        assert_eq!(address("70000"), "70000");
    }

    #[test]
    fn an_address_that_others_reach_is_said_to_be_one() {
        assert_eq!(note("127.0.0.1:80".parse().unwrap()), "status page: http://127.0.0.1:80");
        assert_eq!(note("[::1]:80".parse().unwrap()), "status page: http://[::1]:80");
        let note = |address: &str| note(address.parse().unwrap());
        assert_eq!(note("10.0.0.7:80"), "status page: http://10.0.0.7:80, for anyone who reaches it");
        assert!(note("[fe80::1]:80").starts_with("status page: http://[fe80::1]:80,"));
        assert!(note("0.0.0.0:80").ends_with(":80, for anyone who reaches it"));
        assert!(!note("0.0.0.0:80").contains("0.0.0.0"));
    }
}
