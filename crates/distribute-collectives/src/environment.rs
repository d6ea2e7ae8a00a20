//! Reads the process's environment; no other module of the crate does.

use std::ffi::OsString;
use std::path::PathBuf;

/// Returns the value of a variable as text. If it is not UTF-8, it contains replacement characters, so that it is
/// refused with an error that names it.
pub(crate) fn text(name: &str) -> Option<String> {
    Some(std::env::var_os(name)?.to_string_lossy().into_owned())
}

/// Returns the path in a variable; `None` if it is not set or empty.
pub(crate) fn path(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Returns the bytes of a variable; empty if it is not set.
pub(crate) fn raw(name: &str) -> OsString {
    std::env::var_os(name).unwrap_or_default()
}

/// Returns whether NCCL was told to accept several ranks on one GPU, which it does since version 2.30.
#[cfg(feature = "cuda")]
pub(crate) fn nccl_shares_gpus() -> bool {
    std::env::var_os("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|value| value == "1")
}
