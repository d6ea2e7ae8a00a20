use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::outcome::{Exit, INFRASTRUCTURE, signal_name};
use crate::report;

/// Why a job cannot be started, or a crate, job file or page not be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum Error {
    #[error("cannot start {given}: {problem}")]
    Program { given: String, problem: &'static str, remedy: &'static str },
    #[error("--only names no task of this job")]
    Only { given: String, expected: String },
    #[error("cannot write logs to {}: {source}", path.display())]
    LogDir { path: PathBuf, source: io::Error },
    #[error("no free ports on 127.0.0.1 for {tasks} tasks: {source}")]
    Ports { tasks: usize, source: io::Error },
    #[error("cannot start {task}: {source}")]
    Start { task: String, source: io::Error },
    #[error("cannot serve the status page: {problem}")]
    #[cfg_attr(not(feature = "status"), expect(dead_code, reason = "the page is a feature"))]
    Status { given: String, problem: String },
    #[error("{problem}")]
    #[cfg_attr(not(feature = "status"), expect(dead_code, reason = "running jobs are asked with the feature"))]
    Top { problem: String, remedy: String },
    #[error("cannot serve: {problem}")]
    DataService { problem: String },
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error("{problem}")]
    Options { problem: &'static str, given: String, expected: String },
    #[error("{workers} workers cannot be dealt to {nodes} hosts: each host needs one")]
    FewWorkers { workers: u32, nodes: usize },
    #[error("{tasks} tasks with {per_task} cores each need more than the {all} cores that the launcher may use")]
    Cores { tasks: usize, per_task: usize, all: usize },
    #[error("the hosts' addresses are not those of the job's tasks")]
    Addresses,
    #[error("cannot meet the other hosts at {address}: {source}")]
    Rendezvous { address: String, source: io::Error },
    #[error("missing after {}: {missing}", report::seconds(*waited))]
    HostsMissing { missing: String, waited: Duration },
    #[error("no leader at {address} within {}: {why}", report::seconds(*waited))]
    NoLeader { address: String, waited: Duration, why: String },
    #[error("the leader at {address} is lost: {why}")]
    LeaderLost { address: String, why: String },
    #[error("the leader at {address} refuses this host: {reason}")]
    Refused { address: String, reason: String },
    #[error("host {host} is lost: {why}")]
    HostLost { host: String, why: String },
    #[error("on host {host}: {problem}")]
    Remote { host: String, problem: String, details: Vec<(String, String)>, code: u8 },
    #[error("cannot start the launcher on {host}: {program} has ended with {exit}: {last}")]
    NoLauncher { host: String, program: String, exit: String, last: String },
    #[error("{given:?} cannot be part of a command for another host's shell")]
    Ssh { given: String },
    #[error("interrupted by {}", signal_name(*signal))]
    Interrupted { signal: i32 },
    #[error("{given} does not end with the name of a crate")]
    Name { given: String },
    #[error("{problem}")]
    Manifest { problem: String, given: String, expected: String, remedy: String },
    #[error("{problem}")]
    Certificates { problem: String, given: String, remedy: &'static str },
    #[error("{} exists already", path.display())]
    Exists { path: PathBuf },
    #[error("cannot read the checkpoint {}: {problem}", path.display())]
    Checkpoint { path: PathBuf, problem: String },
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
}

impl Error {
    /// Creates the error of a program that the system did not start as `task`.
    pub(crate) fn start(task: &impl ToString, program: &OsStr, source: io::Error) -> Self {
        let path = Path::new(program);
        let is_path = path.components().count() > 1;
        let (problem, remedy) = match source.kind() {
            io::ErrorKind::NotFound if is_path && path.exists() => (
                "the interpreter or loader that it asks for does not exist",
                "correct its first line, or build it for this system",
            ),
            io::ErrorKind::NotFound if is_path => ("there is no such file", "build it first, or correct the path"),
            io::ErrorKind::NotFound => {
                ("no folder in PATH has such a program", "give a path, such as ./train, or correct the name")
            }
            io::ErrorKind::PermissionDenied if path.is_dir() => ("it is a folder", "give the program inside it"),
            io::ErrorKind::PermissionDenied => ("it is not executable", "make it executable with chmod +x"),
            _ if source.raw_os_error() == Some(rustix::io::Errno::NOEXEC.raw_os_error()) => {
                ("it is neither a program nor a script with a first line #!", "add a first line such as #!/bin/sh")
            }
            _ => return Self::Start { task: task.to_string(), source },
        };
        Self::Program { given: program.to_string_lossy().into_owned(), problem, remedy }
    }

    pub(crate) fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }

    /// Returns labels and texts: what was given, what was expected, and the remedy.
    pub(crate) fn details(&self) -> Vec<(&'static str, String)> {
        match self {
            Self::Program { given, remedy, .. } => vec![
                ("given", given.clone()),
                ("expected", "a program: a path, or a name in PATH".into()),
                ("remedy", (*remedy).into()),
            ],
            Self::Only { given, expected } => vec![
                ("given", given.clone()),
                ("expected", expected.clone()),
                ("remedy", "name one of these tasks, or leave --only out".into()),
            ],
            Self::LogDir { path, .. } => vec![
                ("given", path.display().to_string()),
                ("expected", "a folder that can be written, or be made".into()),
                ("remedy", "give another --log-dir".into()),
            ],
            Self::Status { given, .. } => vec![
                ("given", given.clone()),
                ("expected", "an address of this machine and a free port, such as 127.0.0.1:8080, or port 0".into()),
                ("remedy", "give another --status".into()),
            ],
            Self::Top { remedy, .. } => vec![("remedy", remedy.clone())],
            Self::Ports { .. } => {
                vec![("remedy", "end programs that listen on many ports, or start fewer tasks".into())]
            }
            Self::Name { given } => vec![
                ("given", given.clone()),
                (
                    "expected",
                    "a folder whose name has letters, digits, \"-\" and \"_\" and begins with a letter".into(),
                ),
                ("remedy", "give another name; distribute, candle-core and candle-nn are taken".into()),
            ],
            Self::Manifest { given, expected, remedy, .. } => {
                vec![("given", given.clone()), ("expected", expected.clone()), ("remedy", remedy.clone())]
            }
            Self::Certificates { given, remedy, .. } => {
                vec![("given", given.clone()), ("remedy", (*remedy).into())]
            }
            Self::Exists { .. } => vec![("remedy", "give another name, or remove it".into())],
            Self::Write { .. } => vec![("remedy", "look at the path, its permissions and the room on its disk".into())],
            Self::Checkpoint { .. } => vec![
                ("expected", "a file of safetensors, or the folder of a checkpoint".into()),
                ("remedy", "look at the path; a checkpoint that was cut off has no manifest.json".into()),
            ],
            Self::Options { given, expected, .. } => vec![("given", given.clone()), ("expected", expected.clone())],
            Self::FewWorkers { .. } => vec![("remedy", "start more workers, or on fewer hosts".into())],
            Self::Cores { .. } => vec![("remedy", "lower --cpus-per-worker, or start fewer tasks on this host".into())],
            Self::Addresses => vec![("remedy", "start the same version of distribute on every host".into())],
            Self::Rendezvous { .. } => vec![
                ("expected", "an address of one of the hosts with a free port, such as 10.0.0.1:29400".into()),
                ("remedy", "correct --rendezvous, or end the program that uses the port".into()),
            ],
            Self::HostsMissing { .. } => {
                vec![("remedy", "start the same command on every host, or raise --join-timeout".into())]
            }
            Self::NoLeader { .. } => vec![(
                "remedy",
                "start the same command on the host of that address; look at the route to it and at firewalls".into(),
            )],
            Self::LeaderLost { .. } | Self::HostLost { .. } => vec![(
                "remedy",
                "look at that host and the network; --max-restarts starts the job again once all hosts are back".into(),
            )],
            // The leader's reason has a remedy.
            Self::Refused { .. } => Vec::new(),
            Self::Remote { details, .. } => {
                details.iter().map(|(label, text)| (label_of(label), text.clone())).collect()
            }
            Self::NoLauncher { host, .. } => vec![(
                "remedy",
                format!("try the same by hand, such as ssh {host} true; keys must work without a question"),
            )],
            Self::Ssh { .. } => vec![("expected", "text in UTF-8, with balanced quotes in --ssh".into())],
            // The problem has a remedy.
            Self::Interrupted { .. } | Self::DataService { .. } => Vec::new(),
            Self::Start { .. } | Self::System { .. } => {
                vec![("remedy", "look at the limits of processes and open files: ulimit -a".into())]
            }
        }
    }

    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Program { .. }
            | Self::DataService { .. }
            | Self::Only { .. }
            | Self::LogDir { .. }
            | Self::Status { .. }
            | Self::Name { .. }
            | Self::Options { .. }
            | Self::FewWorkers { .. }
            | Self::Cores { .. }
            | Self::Addresses
            | Self::Rendezvous { .. }
            | Self::Refused { .. }
            | Self::Ssh { .. }
            | Self::Manifest { .. }
            | Self::Checkpoint { .. }
            | Self::Certificates { .. }
            | Self::Exists { .. } => 2,
            Self::HostsMissing { .. }
            | Self::NoLeader { .. }
            | Self::LeaderLost { .. }
            | Self::NoLauncher { .. }
            | Self::HostLost { .. } => INFRASTRUCTURE as u8,
            Self::Remote { code, .. } => *code,
            Self::Interrupted { signal } => Exit::Signal(*signal).code(),
            Self::Top { .. } | Self::Ports { .. } | Self::Start { .. } | Self::System { .. } | Self::Write { .. } => 1,
        }
    }
}

/// Returns the label that another launcher sent, if it is one of this version's.
fn label_of(label: &str) -> &'static str {
    ["given", "expected", "remedy"].into_iter().find(|known| *known == label).unwrap_or("detail")
}
