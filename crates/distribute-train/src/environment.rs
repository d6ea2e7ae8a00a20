//! The environment of this process, which no other module of the crate reads.

/// Returns a variable as a text; bytes that are not UTF-8 are replaced.
pub(crate) fn text(name: &str) -> Option<String> {
    Some(std::env::var_os(name)?.to_string_lossy().into_owned())
}
