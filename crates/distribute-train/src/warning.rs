//! Warnings that must not be lost.

/// Warns through `tracing`, or on standard error if no subscriber has ever been installed in this process.
#[expect(clippy::print_stderr, reason = "a warning that is not shown would be silent")]
pub(crate) fn warn(text: &str) {
    if tracing::dispatcher::has_been_set() {
        tracing::warn!("{text}");
    } else {
        eprintln!("warning: {text}");
    }
}
