use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

/// Why a job cannot be started, or a crate or page not be written.
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
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: io::Error },
    #[error("{given} does not end with the name of a crate")]
    Name { given: String },
    #[error("{} exists already", path.display())]
    Exists { path: PathBuf },
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
            Self::Exists { .. } => vec![("remedy", "give another name, or remove it".into())],
            Self::Write { .. } => vec![("remedy", "look at the path, its permissions and the room on its disk".into())],
            Self::Start { .. } | Self::System { .. } => {
                vec![("remedy", "look at the limits of processes and open files: ulimit -a".into())]
            }
        }
    }

    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            Self::Program { .. }
            | Self::Only { .. }
            | Self::LogDir { .. }
            | Self::Status { .. }
            | Self::Name { .. }
            | Self::Exists { .. } => 2,
            Self::Ports { .. } | Self::Start { .. } | Self::System { .. } | Self::Write { .. } => 1,
        }
    }
}
