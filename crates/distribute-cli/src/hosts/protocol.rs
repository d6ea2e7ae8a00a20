//! The messages between the launchers of a job's hosts: one JSON object per line over TCP.
//!
//! One of them, the leader, decides; the others start tasks, signal them and report their ends as it tells them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::job::{Addresses, Ports, Roles};
use crate::outcome::Exit;

/// The version of the protocol. Launchers of different versions refuse each other.
pub(super) const VERSION: u32 = 1;

/// The first message of a launcher that joins.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) version: u32,
    /// The name of the host.
    pub(crate) host: String,
    /// The address at which the other hosts reach its tasks, if it was told.
    pub(crate) address: Option<String>,
    /// The number of the host, if it was told.
    pub(crate) node: Option<usize>,
    pub(crate) command: Command,
    /// A digest of the program's file; `None` if it is not one.
    pub(crate) program_digest: Option<u64>,
}

impl Hello {
    pub(crate) fn new(
        host: String,
        address: Option<String>,
        node: Option<usize>,
        command: Command,
        program_digest: Option<u64>,
    ) -> Hello {
        Hello { version: VERSION, host, address, node, command, program_digest }
    }
}

/// The parts of the command line that must be the same on all hosts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Command {
    pub(crate) id: String,
    pub(crate) nodes: usize,
    pub(crate) roles: Roles,
    pub(crate) program: Vec<String>,
}

impl Command {
    /// Returns in words where another launcher's command differs; `None` if it is the same.
    pub(crate) fn difference(&self, other: &Command) -> Option<String> {
        let differs = |what: &str, theirs: &dyn fmt::Display, ours: &dyn fmt::Display| {
            format!("it was started with {what} {theirs}, the others with {ours}")
        };
        match other {
            _ if other.id != self.id => Some(differs("--rendezvous-id", &shown(&other.id), &shown(&self.id))),
            _ if other.nodes != self.nodes => Some(differs("--nnodes", &other.nodes, &self.nodes)),
            _ if other.roles != self.roles => Some(differs("the tasks", &other.roles, &self.roles)),
            _ if other.program != self.program => {
                Some(differs("the program", &other.program.join(" "), &self.program.join(" ")))
            }
            _ => None,
        }
    }
}

fn shown(id: &str) -> &str {
    if id.is_empty() { "(none)" } else { id }
}

/// A message to the leader.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToLeader {
    Hello(Hello),
    /// The ports of the host's tasks are reserved.
    Ready {
        attempt: u32,
        ports: Ports,
    },
    /// The tasks run, with these process ids in the order of their ranks.
    Started {
        attempt: u32,
        pids: Vec<i32>,
    },
    /// The tasks cannot be started.
    Failed {
        attempt: u32,
        problem: String,
        details: Vec<(String, String)>,
        code: u8,
    },
    /// The first process of a task has ended.
    Exit {
        attempt: u32,
        rank: usize,
        exit: Exit,
        leftover: bool,
    },
    /// The last process of a task's group has ended.
    Gone {
        attempt: u32,
        rank: usize,
    },
    /// All tasks of the host have ended.
    Ended {
        attempt: u32,
        lasts: Vec<Last>,
    },
    /// The launcher was sent a signal.
    Signal(i32),
}

/// The last output of a task, and its error.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Last {
    pub(crate) rank: usize,
    /// The last lines that it printed.
    pub(crate) lines: Vec<String>,
    /// The error that it wrote to the file in TORCHELASTIC_ERROR_FILE.
    pub(crate) error: Option<String>,
}

/// A message of the leader.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ToMember {
    /// All hosts are there; this one has number `node`.
    Welcome { node: usize, hosts: Vec<String> },
    /// This launcher is not part of the job; if it is so for now, the same may be let in later.
    Refused {
        reason: String,
        #[serde(default)]
        for_now: bool,
    },
    /// Reserve ports for an attempt.
    Prepare { attempt: u32 },
    /// Start the tasks.
    Start { attempt: u32, job: String, addresses: Addresses, reports_to: Option<String> },
    /// Send a signal to the process group of a task, or only to its first process.
    Signal { attempt: u32, rank: usize, signal: i32, leader_only: bool },
    /// The job has ended.
    End { code: u8, summary: String },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_differs_is_told_in_words() {
        let command = |id: &str, nodes, workers, program: &str| Command {
            id: id.to_owned(),
            nodes,
            roles: Roles { workers, ..Roles::default() },
            program: vec![program.to_owned()],
        };
        let ours = command("a", 2, 4, "train");
        assert_eq!(ours.difference(&ours), None);
        for (theirs, words) in [
            (command("b", 2, 4, "train"), "--rendezvous-id b, the others with a"),
            (command("a", 3, 4, "train"), "--nnodes 3, the others with 2"),
            (command("a", 2, 5, "train"), "the tasks 5 worker, the others with 4 worker"),
            (command("a", 2, 4, "test"), "the program test, the others with train"),
        ] {
            let text = ours.difference(&theirs).unwrap();
            assert!(text.contains(words), "{text}");
        }
    }

    #[test]
    fn messages_are_lines_of_json() {
        let exit = ToLeader::Exit { attempt: 1, rank: 2, exit: Exit::Signal(9), leftover: false };
        let line = serde_json::to_string(&exit).unwrap();
        assert_eq!(line, r#"{"exit":{"attempt":1,"rank":2,"exit":{"signal":9},"leftover":false}}"#);
        assert_eq!(serde_json::from_str::<ToLeader>(&line).unwrap(), exit);
    }
}
