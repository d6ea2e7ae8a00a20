//! The one place that reads the process's environment.

/// The value of a variable; an empty one counts as unset.
pub(crate) fn process(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.trim().is_empty())
}
