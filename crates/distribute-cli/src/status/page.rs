//! The launcher's side of the status page.

use std::ffi::OsStr;
use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use crossbeam_channel::Sender;
use distribute_train::status::{Board, End, Job, Server};

use crate::environment;
use crate::error::Error;
use crate::job::Task;
use crate::outcome::{Exit, signal_name};
use crate::output::Tail;
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

/// The page, if it is wanted.
#[derive(Debug)]
pub(crate) struct Status(Option<Page>);

#[derive(Debug)]
struct Page {
    server: Server,
    board: Board,
    tasks: Vec<Supervised>,
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
    /// Starts the server if the options ask for it, and tells the user its address.
    pub(crate) fn start(
        options: &Options,
        tasks: &[Task],
        program: &OsStr,
        reports: Reports,
        notes: &Sender<String>,
    ) -> Result<Self, Error> {
        let Some(given) = &options.status else { return Ok(Self(None)) };
        let name = Path::new(program).file_stem().unwrap_or(program).to_string_lossy();
        let mut job = Job::new(&name);
        let supervised = |task: &Task| {
            let name = format!("{}:{}", task.job, task.index);
            job.expect(&name);
            Supervised { name, tail: Tail::default(), sent: Vec::new(), failed: None }
        };
        let tasks = tasks.iter().map(supervised).collect();
        let board = Board::new(job);
        let server = Server::serve_and_collect(&address(given), reports.address(), &board)
            .map_err(|error| Error::Status { given: given.clone(), problem: error.to_string() })?;
        // Fails only once the screen has ended, which is later.
        let _ = notes.send(note(server.address()));
        Ok(Self(Some(Page { server, board, tasks })))
    }

    /// Returns the variable that tells the tasks where to report: at `host`, if they are on several.
    pub(crate) fn environment(&self, host: &str) -> Option<(&'static str, String)> {
        match self.0.as_ref().and_then(|page| page.server.reports_address()) {
            Some(address) if address.ip().is_unspecified() => Some((REPORTS_TO, host_and_port(host, address.port()))),
            Some(address) => Some((REPORTS_TO, address.to_string())),
            // In a task of another job, whose page does not show the tasks of this one.
            None => environment::is_set(REPORTS_TO).then(|| (REPORTS_TO, String::new())),
        }
    }

    /// Shows the process of a task; its last words are in `tail` if it runs on this host.
    pub(crate) fn started(&mut self, rank: usize, pid: i32, tail: Option<Tail>) {
        let Some(page) = &mut self.0 else { return };
        let Some(task) = page.tasks.get_mut(rank) else { return };
        (task.tail, task.sent, task.failed) = (tail.unwrap_or_default(), Vec::new(), None);
        page.board.update(|job, now| job.start(&task.name, pid.unsigned_abs(), now));
    }

    /// Remembers a signal of the launcher, which explains the end of the task.
    pub(crate) fn signalled(&mut self, rank: usize, signal: i32) {
        if let Some(task) = self.0.as_mut().and_then(|page| page.tasks.get_mut(rank)) {
            task.sent.push(signal);
        }
    }

    /// Shows the end of a task's process.
    pub(crate) fn ended(&mut self, rank: usize, exit: Exit) {
        let Some(page) = &mut self.0 else { return };
        let Some(task) = page.tasks.get_mut(rank) else { return };
        let end = match exit {
            _ if task.sent.iter().any(|signal| exit.answers(*signal)) => End::Stopped,
            Exit::Code(code) => End::Code(code),
            Exit::Signal(signal) => End::Signal(signal_name(signal).into_owned()),
            Exit::Lost => End::Lost,
        };
        task.failed = (!exit.is_success() && end != End::Stopped).then(Instant::now);
        page.board.update(|job, now| job.end(&task.name, end, now));
    }

    /// Adds the last words of tasks that have failed, once they have been read.
    pub(crate) fn poll(&mut self) {
        let Some(page) = &mut self.0 else { return };
        for task in &mut page.tasks {
            if task.failed.is_some_and(|failed| failed.elapsed() >= LAST_WORDS) {
                task.failed = None;
                if let Some(words) = task.tail.lines().iter().rev().find(|line| !line.trim().is_empty()) {
                    page.board.update(|job, _| job.explain(&task.name, words));
                }
            }
        }
    }
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
