//! Reads the process's environment; no other module of the crate does, except the options, which clap reads.

use std::collections::BTreeMap;
use std::ffi::OsString;

/// Returns whether a variable is set, to any value.
pub(crate) fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some()
}

/// Returns whether a variable has this value, in any case.
pub(crate) fn is(name: &str, value: &str) -> bool {
    std::env::var(name).is_ok_and(|given| given.trim().eq_ignore_ascii_case(value))
}

/// Returns all variables.
pub(crate) fn all(text: impl Fn(OsString) -> String) -> BTreeMap<String, String> {
    std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect()
}

/// Returns the names of all variables.
pub(crate) fn names() -> impl Iterator<Item = OsString> {
    std::env::vars_os().map(|(name, _)| name)
}
