//! Errors as `cargo xtask` reports them.

/// Any error as text.
pub(crate) fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
