//! The environment of this process, which no other module of the crate reads.

#[cfg(feature = "kubeflow")]
use std::ffi::OsString;

/// Returns a variable as a text; bytes that are not UTF-8 are replaced.
pub(crate) fn text(name: &str) -> Option<String> {
    Some(std::env::var_os(name)?.to_string_lossy().into_owned())
}

/// Returns a variable as it is, for names of files.
#[cfg(feature = "kubeflow")]
pub(crate) fn raw(name: &str) -> Option<OsString> {
    std::env::var_os(name)
}
