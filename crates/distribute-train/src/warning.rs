//! Warnings that must not be lost.

/// Warns through `tracing`; on standard error where no subscriber has ever been installed in this process.
#[expect(clippy::print_stderr, reason = "a warning that nobody shows would be silent")]
pub(crate) fn warn(text: &str) {
    if tracing::dispatcher::has_been_set() {
        tracing::warn!("{text}");
    } else {
        eprintln!("warning: {text}");
    }
}
