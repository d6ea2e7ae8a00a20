//! Reads the process's environment; no other module of the crate does.

use std::env;
use std::ffi::OsString;
#[cfg(feature = "cuda")]
use std::path::PathBuf;

/// Returns the value of a variable.
pub(crate) fn value(name: &str) -> Option<OsString> {
    env::var_os(name)
}

/// Returns the path in a variable, which may be empty.
#[cfg(feature = "cuda")]
pub(crate) fn path(name: &str) -> Option<PathBuf> {
    value(name).map(PathBuf::from)
}

/// Returns the value of a variable; none if it is not UTF-8.
#[cfg(feature = "cuda")]
pub(crate) fn text(name: &str) -> Option<String> {
    env::var(name).ok()
}
