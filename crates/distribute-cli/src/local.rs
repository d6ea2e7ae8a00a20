//! The processes of this host's tasks in one attempt.

use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;
use rustix::process::Pid;
use serde::Deserialize;

use crate::guardian::Guardian;
use crate::hosts::Last;
use crate::outcome::Exit;
use crate::output::{Tail, ends_within};
use crate::process;

/// The running tasks of this host.
#[derive(Debug)]
pub(crate) struct Local<'a> {
    tasks: Vec<Running>,
    guardian: &'a Guardian,
}

/// One of them.
#[derive(Debug)]
pub(crate) struct Running {
    rank: usize,
    pid: Pid,
    exit: Option<Exit>,
    forgotten: bool,
    tail: Tail,
    error_file: PathBuf,
    /// Disconnected once its streams have ended.
    followed: Receiver<()>,
}

impl Running {
    pub(crate) fn new(rank: usize, pid: Pid, tail: Tail, error_file: PathBuf, followed: Receiver<()>) -> Running {
        Running { rank, pid, exit: None, forgotten: false, tail, error_file, followed }
    }
}

/// An end of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Event {
    /// Its first process has ended; `leftover` tells whether others of its group live.
    Exit { rank: usize, exit: Exit, leftover: bool },
    /// The last process of its group has ended.
    Gone { rank: usize },
}

impl<'a> Local<'a> {
    pub(crate) fn new(guardian: &'a Guardian) -> Local<'a> {
        Local { tasks: Vec::new(), guardian }
    }

    pub(crate) fn add(&mut self, task: Running) {
        self.tasks.push(task);
    }

    /// Returns the tasks' last lines, as they are printed.
    pub(crate) fn tails(&self) -> impl Iterator<Item = (usize, i32, Tail)> {
        self.tasks.iter().map(|task| (task.rank, task.pid.as_raw_pid(), task.tail.clone()))
    }

    /// Returns the ranks and process ids.
    pub(crate) fn pids(&self) -> impl Iterator<Item = (usize, i32)> {
        self.tasks.iter().map(|task| (task.rank, task.pid.as_raw_pid()))
    }

    /// Returns what a process's end means, if it is one of a task's.
    pub(crate) fn ended(&mut self, pid: Pid, exit: Exit) -> Option<Event> {
        let task = self.tasks.iter_mut().find(|task| task.pid == pid && task.exit.is_none())?;
        task.exit = Some(exit);
        let leftover = process::group_lives(pid);
        if !leftover {
            task.forgotten = true;
            self.guardian.forget(pid);
        }
        Some(Event::Exit { rank: task.rank, exit, leftover })
    }

    /// Returns the groups that have ended since the last call, after their first processes.
    pub(crate) fn gone(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        for task in self.tasks.iter_mut().filter(|task| task.exit.is_some() && !task.forgotten) {
            if !process::group_lives(task.pid) {
                task.forgotten = true;
                self.guardian.forget(task.pid);
                events.push(Event::Gone { rank: task.rank });
            }
        }
        events
    }

    /// Returns the ends so far.
    pub(crate) fn so_far(&self) -> impl Iterator<Item = Event> {
        let ended = |task: &Running| Some(Event::Exit { rank: task.rank, exit: task.exit?, leftover: !task.forgotten });
        self.tasks.iter().filter_map(ended)
    }

    /// Returns whether no process of any task is left.
    pub(crate) fn is_done(&self) -> bool {
        self.tasks.iter().all(|task| task.forgotten)
    }

    /// Sends a signal to a task's group, or to its first process only. One that has ended meanwhile gets none: its id
    /// may have been reused.
    pub(crate) fn signal(&self, rank: usize, signal: i32, leader_only: bool) {
        match self.tasks.iter().find(|task| task.rank == rank) {
            Some(task) if leader_only && task.exit.is_none() => process::signal_process(task.pid, signal),
            Some(task) if !leader_only && !task.forgotten => process::signal_group(task.pid, signal),
            _ => {}
        }
    }

    /// Waits until what tasks of some ranks, whose processes have ended, have printed is shown and kept. A descendant
    /// that has left its group may hold a stream open, so it waits for a limited time.
    pub(crate) fn wait_for_streams(&self, is_meant: impl Fn(usize) -> bool) {
        let until = Instant::now() + STREAMS;
        for task in self.tasks.iter().filter(|task| is_meant(task.rank)) {
            ends_within(&task.followed, until.saturating_duration_since(Instant::now()));
        }
    }

    /// Returns what the tasks left behind, once their streams have ended.
    pub(crate) fn lasts(&self) -> Vec<Last> {
        self.wait_for_streams(|_| true);
        let last = |task: &Running| {
            let lines = task.tail.lines().iter().map(|line| line.chars().take(LONGEST_LINE).collect()).collect();
            Last { rank: task.rank, lines, error: task.error() }
        };
        self.tasks.iter().map(last).collect()
    }
}

impl Running {
    /// Returns the message in the error file, in the form that torchrun expects.
    fn error(&self) -> Option<String> {
        #[derive(Deserialize)]
        struct Error {
            message: Message,
        }
        /// Python's `record` decorator writes an object.
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Message {
            Text(String),
            Object { message: String },
        }
        let mut text = String::new();
        fs::File::open(&self.error_file).ok()?.take(LONGEST_ERROR).read_to_string(&mut text).ok()?;
        let (Message::Text(message) | Message::Object { message }) = serde_json::from_str::<Error>(&text).ok()?.message;
        Some(message.chars().take(LONGEST_LINE).collect())
    }
}

/// How long streams may stay open after the last process of a task.
pub(crate) const STREAMS: Duration = Duration::from_secs(2);

/// The longest line that is quoted at the end, in characters.
const LONGEST_LINE: usize = 2000;

/// The largest error file that is read, in bytes.
const LONGEST_ERROR: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use crossbeam_channel::never;

    use super::*;

    #[test]
    fn the_error_file_is_read_in_both_forms() {
        let folder = tempfile::tempdir().unwrap();
        let error = |text: &str| {
            let path = folder.path().join("error.json");
            fs::write(&path, text).unwrap();
            Running::new(0, Pid::INIT, Tail::default(), path, never()).error()
        };
        assert_eq!(error(r#"{"message": "disk full", "timestamp": 1}"#).as_deref(), Some("disk full"));
        let python = r#"{"message": {"message": "ValueError: x", "extraInfo": {"py_callstack": "…"}}}"#;
        assert_eq!(error(python).as_deref(), Some("ValueError: x"));
        for text in ["", "{", "[]", r#"{"message": 3}"#] {
            assert_eq!(error(text), None, "{text}");
        }
        assert_eq!(Running::new(0, Pid::INIT, Tail::default(), folder.path().join("none"), never()).error(), None);
    }
}
