//! What can go wrong with NCCL.

use std::fmt;
use std::path::PathBuf;

use crate::search::{ENV_LIBRARY, NamedBy};
use crate::{Code, Version};

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No file that was tried is an NCCL that can be used.
    #[error("{}", not_found(*named_by, attempts))]
    NotFound {
        /// Who named the file, where somebody did; nothing else was tried then.
        named_by: Option<NamedBy>,
        /// Every file tried, in order.
        attempts: Vec<Attempt>,
    },
    /// This NCCL is too old for a function.
    #[error("{function} is not in NCCL {found} at {}; it came with NCCL {since}: install that or newer", path.display())]
    Missing {
        /// The function.
        function: &'static str,
        /// The version that brought it.
        since: Version,
        /// The version of the open library.
        found: Version,
        /// The open library.
        path: PathBuf,
    },
    /// This NCCL is too old for a setting of a communicator.
    #[error(
        "the communicator's configuration has settings of NCCL {needs}, and the NCCL at hand is {found}; leave out newer settings, or install that version"
    )]
    ConfigTooNew {
        /// The version that reads every setting.
        needs: Version,
        /// The version of the open library.
        found: Version,
    },
    /// A function failed.
    #[error("{function} failed: {name} (code {}): {text}{}", code.0, words(last))]
    Call {
        /// The function.
        function: &'static str,
        /// What it returned.
        code: Code,
        /// The code's name.
        name: &'static str,
        /// What `ncclGetErrorString` says of the code.
        text: String,
        /// What `ncclGetLastError` says. It is one text for the whole process and stays after calls that succeed, so it may
        /// be of an earlier failure, even of another communicator.
        last: Option<String>,
    },
}

/// A file that was tried, and why it was not taken.
#[derive(Debug)]
pub struct Attempt {
    /// The file, or its name where the system's loader searched; `*` where several folders were looked at and none had it.
    pub file: PathBuf,
    /// Why it was not taken.
    pub problem: Problem,
}

/// Why a file was not taken for NCCL.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// No folder of that pattern has it.
    #[error("there is no such file")]
    NoSuchFile,
    /// The system's loader refused it, in its own words.
    #[error("{0}")]
    Loader(String),
    /// It is a library, but not NCCL.
    #[error("it is a library, but no NCCL: it has no ncclGetVersion")]
    NotNccl,
    /// It does not tell its version.
    #[error("ncclGetVersion returned code {}", .0.0)]
    NoVersion(Code),
    /// It is older than [`Version::OLDEST`].
    #[error("it is NCCL {0}, and the oldest that can be used is {oldest}", oldest = Version::OLDEST)]
    TooOld(Version),
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.file.display().to_string();
        match &self.problem {
            // The loader mostly names the file itself.
            Problem::Loader(words) if words.starts_with(&file) => f.write_str(words),
            problem => write!(f, "{file}: {problem}"),
        }
    }
}

fn not_found(named_by: Option<NamedBy>, attempts: &[Attempt]) -> String {
    let tried = attempts.iter().map(Attempt::to_string).collect::<Vec<_>>().join("; ");
    match named_by {
        Some(NamedBy::Caller) => format!("the file that was given for NCCL cannot be used: {tried}"),
        Some(NamedBy::Environment) => format!(
            "the file that {ENV_LIBRARY} gives for NCCL cannot be used: {tried}; correct the variable, or unset it to have \
             NCCL searched for"
        ),
        None => format!(
            "no NCCL that can be used was found: {tried}; install NCCL {} or newer (package libnccl2, or pip install \
             nvidia-nccl-cu13 or nvidia-nccl-cu12), or give its libnccl.so.2 in {ENV_LIBRARY}",
            Version::OLDEST
        ),
    }
}

fn words(last: &Option<String>) -> String {
    last.as_ref().map(|last| format!("; the last words of NCCL in this process: {last}")).unwrap_or_default()
}
