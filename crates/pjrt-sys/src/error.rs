//! Errors of opening and calling a plugin.

use std::fmt;
use std::path::PathBuf;

use crate::search::{ENV_PLUGIN, ENV_SKIP_METADATA, ENV_TPU_LIBRARY, NamedBy};
use crate::{Code, Version};

/// An error of opening or calling a plugin.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// None of the files tried is a usable plugin.
    #[error("{}", not_found(*named_by, attempts))]
    NotFound {
        /// The source of the file name, if one was given; no other file is tried then.
        named_by: Option<NamedBy>,
        /// All files tried, in order.
        attempts: Vec<Attempt>,
    },
    /// The plugin lacks a function.
    #[error("{function} is not in the PJRT plugin {} of version {found}: {reason}; install a newer one", path.display())]
    Missing {
        /// The function.
        function: &'static str,
        /// The plugin's version.
        found: Version,
        /// The plugin.
        path: PathBuf,
        /// Whether the table ends before the function, or its entry is null.
        reason: &'static str,
    },
    /// A function failed.
    #[error("{function} failed: {code}: {text}")]
    Call {
        /// The function.
        function: &'static str,
        /// The code of the error.
        code: Code,
        /// The plugin's text, with replacement characters for bytes that are not UTF-8.
        text: String,
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
    /// It is a library, but not a plugin.
    #[error("it is a library, but no PJRT plugin: it has no GetPjrtApi")]
    NotPlugin,
    /// `GetPjrtApi` returned null.
    #[error("its GetPjrtApi returned null")]
    NoTable,
    /// The table is too short to have a version and functions for errors.
    #[error("its table has {0} bytes, and at least {least} are needed", least = crate::library::LEAST_TABLE)]
    ShortTable(usize),
    /// An incompatible version.
    #[error("it has version {0} of PJRT, and this program uses version 0")]
    Version(Version),
    /// The table has no function for errors.
    #[error("its table has null in place of {0}, without which errors have no text")]
    NoErrors(&'static str),
    /// It is libtpu, which would ask Google Cloud's metadata server for minutes.
    #[error(
        "it is libtpu, which on a machine without TPU chips asks a metadata server for five minutes; set \
         {ENV_SKIP_METADATA}=1 before the program starts"
    )]
    MetadataQuery,
}

impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.file.display().to_string();
        match &self.problem {
            // The loader's message usually names the file.
            Problem::Loader(text) if text.starts_with(&file) => f.write_str(text),
            problem => write!(f, "{file}: {problem}"),
        }
    }
}

fn not_found(named_by: Option<NamedBy>, attempts: &[Attempt]) -> String {
    let tried = attempts.iter().map(Attempt::to_string).collect::<Vec<_>>().join("; ");
    let by_variable = |name| {
        format!(
            "the file that {name} gives for the PJRT plugin cannot be used: {tried}; correct the variable, or unset it \
             to have a plugin searched for"
        )
    };
    match named_by {
        Some(NamedBy::Caller) => format!("the file that was given for the PJRT plugin cannot be used: {tried}"),
        Some(NamedBy::Environment) => by_variable(ENV_PLUGIN),
        Some(NamedBy::TpuEnvironment) => by_variable(ENV_TPU_LIBRARY),
        None => format!(
            "no PJRT plugin that can be used was found: {tried}; install libtpu (pip install libtpu), or give a \
             plugin's file in {ENV_PLUGIN}"
        ),
    }
}
