//! Reads the process's environment; no other module of the crate does.

use std::cell::RefCell;
use std::env::VarError;
#[cfg(feature = "coordination")]
use std::time::Duration;

use crate::secret::is_secret;
use crate::{Error, Result};

/// Calls `read` with a lookup of the process's environment variables. A variable that is not UTF-8 is an error even if
/// `read` tolerates its absence: it was set on purpose.
pub(crate) fn read<T>(read: impl FnOnce(&dyn Fn(&str) -> Option<String>) -> Result<T>) -> Result<T> {
    let unreadable = RefCell::new(None);
    let look_up = |name: &str| match std::env::var(name) {
        Ok(value) => Some(value),
        Err(VarError::NotPresent) => None,
        Err(VarError::NotUnicode(raw)) => {
            unreadable.borrow_mut().get_or_insert_with(|| {
                let given = if is_secret(name) { "a secret, which is not shown".into() } else { raw.to_string_lossy() };
                Error::config(
                    "the environment",
                    format!("the value of {name} is not UTF-8"),
                    given,
                    "text in UTF-8",
                    "Set it anew; a file or a script that it was taken from may be in another encoding.",
                )
            });
            None
        }
    };
    let outcome = read(&look_up);
    match unreadable.into_inner() {
        Some(error) => Err(error),
        None => outcome,
    }
}

/// Reads DISTRIBUTE_TIMEOUT, with a lookup that treats an empty value as unset.
///
/// # Errors
/// [`Error::Config`] if it is not a number of seconds above 0.
#[cfg(feature = "coordination")]
pub(crate) fn timeout(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Duration>> {
    let Some(given) = variable("DISTRIBUTE_TIMEOUT") else { return Ok(None) };
    let seconds = given.trim().parse::<f64>().ok().filter(|seconds| *seconds > 0.0 && *seconds < 1e9);
    let wrong = || {
        let remedy = "Correct it, or leave it unset for 5 minutes.";
        let problem = "it is not a number of seconds above 0";
        Error::config("DISTRIBUTE_TIMEOUT", problem, &given, "seconds, such as 30 or 0.5", remedy)
    };
    seconds.map(|seconds| Some(Duration::from_secs_f64(seconds))).ok_or_else(wrong)
}

/// Returns a lookup that treats an empty value as unset.
pub(crate) fn set<'a>(variable: &'a dyn Fn(&str) -> Option<String>) -> impl Fn(&str) -> Option<String> + 'a {
    |name| variable(name).filter(|value| !value.trim().is_empty())
}
