//! Reads the process's environment; no other module of the crate does.

use std::env;
use std::path::PathBuf;

/// Returns the path in a variable, which may be empty.
pub(super) fn path(name: &str) -> Option<PathBuf> {
    env::var_os(name).map(PathBuf::from)
}

/// Returns the value of a variable; none if it is not UTF-8.
pub(super) fn text(name: &str) -> Option<String> {
    env::var(name).ok()
}
