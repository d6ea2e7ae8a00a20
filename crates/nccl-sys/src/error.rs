//! Errors of loading and calling NCCL.

use std::fmt;
use std::path::PathBuf;

use crate::search::{ENV_LIBRARY, NamedBy};
use crate::{Code, Version};

/// An error of loading or calling NCCL.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// None of the files tried is a usable NCCL.
    #[error("{}", not_found(*named_by, attempts))]
    NotFound {
        /// The source of the file name, if one was given; no other file is tried then.
        named_by: Option<NamedBy>,
        /// All files tried, in order.
        attempts: Vec<Attempt>,
    },
    /// This NCCL is too old for a function.
    #[error(
        "{function} is not in NCCL {found} at {}; it came with NCCL {since}: install that or newer",
        path.display()
    )]
    Missing {
        /// The function.
        function: &'static str,
        /// The version that introduced it.
        since: Version,
        /// The version of the open library.
        found: Version,
        /// The open library.
        path: PathBuf,
    },
    /// This NCCL is too old for a setting of a communicator.
    #[error(
        "the communicator's configuration has settings of NCCL {needs}, and the NCCL at hand is {found}; leave out \
         newer settings, or install that version"
    )]
    ConfigTooNew {
        /// The version that supports every setting.
        needs: Version,
        /// The version of the open library.
        found: Version,
    },
    /// A function failed.
    #[error("{function} failed: {name} (code {}): {text}{}", code.0, words(last))]
    Call {
        /// The function.
        function: &'static str,
        /// The code that it returned.
        code: Code,
        /// The code's name.
        name: &'static str,
        /// The text of `ncclGetErrorString` for the code.
        text: String,
        /// The text of `ncclGetLastError`. It is shared by the whole process and kept by calls that succeed, so it may
        /// stem from an earlier failure, even of another communicator.
        last: Option<String>,
    },
}

/// A file that was tried, and why it was rejected.
#[derive(Debug)]
pub struct Attempt {
    /// The file, or its name if the system's loader searched for it; `*` if several folders were searched and none
    /// contains it.
    pub file: PathBuf,
    /// Why it was rejected.
    pub problem: Problem,
}

/// Why a file was rejected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// No folder matching the pattern contains it.
    #[error("there is no such file")]
    NoSuchFile,
    /// The system's loader rejected it, with this message.
    #[error("{0}")]
    Loader(String),
    /// It is a library, but not NCCL.
    #[error("it is a library, but no NCCL: it has no ncclGetVersion")]
    NotNccl,
    /// Its version cannot be determined.
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
            // The loader's message usually names the file.
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
            "the file that {ENV_LIBRARY} gives for NCCL cannot be used: {tried}; correct the variable, or unset it to \
             have NCCL searched for"
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
