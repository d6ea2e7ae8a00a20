//! Reads the process's environment; no other module of the crate does, except the options, which clap reads.

use std::collections::BTreeMap;
use std::ffi::OsString;
#[cfg(feature = "status")]
use std::path::PathBuf;

use distribute_cluster::Membership;

use crate::error::Error;

/// Returns whether a variable is set, to any value.
pub(crate) fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some()
}

/// Returns whether a variable has this value, in any case.
pub(crate) fn is(name: &str, value: &str) -> bool {
    std::env::var(name).is_ok_and(|given| given.trim().eq_ignore_ascii_case(value))
}

/// Returns whether DISTRIBUTE_LOG asks for lines of progress as JSON objects.
///
/// # Errors
/// [`Error::Options`] if its value is neither `text` nor `json`.
pub(crate) fn progress_is_json() -> Result<bool, Error> {
    is_json(std::env::var_os("DISTRIBUTE_LOG").unwrap_or_default().to_string_lossy().trim())
}

fn is_json(given: &str) -> Result<bool, Error> {
    match given.to_ascii_lowercase().as_str() {
        "" | "text" => Ok(false),
        "json" => Ok(true),
        _ => Err(Error::Options {
            problem: "DISTRIBUTE_LOG has an unknown value",
            given: given.to_owned(),
            expected: "json or text, or unset it for text".to_owned(),
        }),
    }
}

/// Returns the place of this process in a job of several, as TF_CONFIG or RANK describes it: the launcher replaces both
/// for its tasks, which therefore cannot notice.
///
/// # Errors
/// [`distribute_cluster::Error`] if the variables cannot be read, or name only a part of the tasks that train.
pub(crate) fn place_in_job() -> distribute_cluster::Result<Option<Membership>> {
    let names =
        ["TF_CONFIG", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DISTRIBUTE_PORT", "DISTRIBUTE_ALONE"];
    let variable = |name: &str| names.contains(&name).then(|| std::env::var(name).ok()).flatten();
    Ok(Membership::from_vars(variable)?.filter(|membership| membership.world_size() > 1))
}

/// Returns whether the user has given the job a secret.
pub(crate) fn gives_secret() -> bool {
    let given = |name| std::env::var_os(name).is_some_and(|value| !value.to_string_lossy().trim().is_empty());
    secret_file().is_some() || given("DISTRIBUTE_JOB_SECRET")
}

/// Returns the path of the file with the job's secret, if the user has given one.
fn secret_file() -> Option<String> {
    trimmed("DISTRIBUTE_JOB_SECRET_FILE")
}

/// Returns the variables that name the files of the job's secret and certificate, and the certificate's name, as far as
/// the user has given them: hosts that are reached by `--hosts` get them too.
pub(crate) fn paths() -> Vec<(&'static str, String)> {
    let names = [
        "DISTRIBUTE_JOB_SECRET_FILE",
        "DISTRIBUTE_TLS_CA",
        "DISTRIBUTE_TLS_CERT",
        "DISTRIBUTE_TLS_KEY",
        "DISTRIBUTE_TLS_NAME",
    ];
    names.into_iter().filter_map(|name| Some((name, trimmed(name)?))).collect()
}

fn trimmed(name: &str) -> Option<String> {
    let given = std::env::var(name).ok()?;
    Some(given.trim().to_owned()).filter(|path| !path.is_empty())
}

/// Returns the folder for the sockets of this user's jobs, if the user has named one.
#[cfg(feature = "status")]
pub(crate) fn jobs_folder() -> Option<PathBuf> {
    std::env::var_os("DISTRIBUTE_JOBS_DIR").filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Returns whether the user has given the job's tasks a certificate.
pub(crate) fn gives_certificate() -> bool {
    ["DISTRIBUTE_TLS_CA", "DISTRIBUTE_TLS_CERT", "DISTRIBUTE_TLS_KEY"].into_iter().any(|name| trimmed(name).is_some())
}

/// Returns all variables.
pub(crate) fn all(text: impl Fn(OsString) -> String) -> BTreeMap<String, String> {
    std::env::vars_os().map(|(name, value)| (text(name), text(value))).collect()
}

/// Returns the names of all variables.
pub(crate) fn names() -> impl Iterator<Item = OsString> {
    std::env::vars_os().map(|(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_of_progress_that_is_not_known_is_refused() {
        assert!(is_json("JSON").unwrap() && !is_json("text").unwrap() && !is_json("").unwrap());
        let error = is_json("xml").unwrap_err();
        assert!(error.to_string().contains("DISTRIBUTE_LOG"), "{error}");
    }
}
