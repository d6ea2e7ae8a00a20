//! Reads the process's environment; no other module of the crate does, except the options, which clap reads.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::OsString;
#[cfg(feature = "status")]
use std::path::PathBuf;

use distribute_cluster::Membership;

use crate::error::Error;

/// Returns whether a variable is set. An empty value, as from a template, counts as unset, as it does for the tasks.
pub(crate) fn is_set(name: &str) -> bool {
    trimmed(name).is_some()
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
/// [`Error::Options`] if the variables cannot be read, or name only a part of the tasks that train.
pub(crate) fn place_in_job() -> Result<Option<Membership>, Error> {
    let names =
        ["TF_CONFIG", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DISTRIBUTE_PORT", "DISTRIBUTE_ALONE"];
    let given = names.into_iter().filter_map(|name| Some((name, std::env::var_os(name)?)));
    place(&given.collect())
}

/// Returns the place that these variables describe.
fn place(given: &BTreeMap<&str, OsString>) -> Result<Option<Membership>, Error> {
    let unreadable = |given: String, expected: &str| Error::Options {
        problem: "a job of one worker in a process whose place in its own job cannot be read",
        given,
        expected: expected.to_owned(),
    };
    let not_text = Cell::new(None);
    let variable = |name: &str| {
        let (name, value) = given.get_key_value(name)?;
        let text = value.to_str().map(str::to_owned);
        if text.is_none() {
            not_text.set(not_text.get().or(Some((*name, value))));
        }
        text
    };
    let membership = Membership::from_vars(variable);
    // One that was not looked at decides nothing.
    if let Some((name, value)) = not_text.get() {
        let shown: String = value.to_string_lossy().escape_debug().take(80).collect();
        let expected = "text in UTF-8; set it anew, or unset it if this process is to train alone";
        return Err(unreadable(format!("{name}, whose value is not UTF-8: {shown}"), expected));
    }
    let expected = "variables that can be read, or DISTRIBUTE_ALONE=1 if this process is to train alone";
    let membership = membership.map_err(|error| unreadable(error.to_string(), expected))?;
    Ok(membership.filter(|membership| membership.world_size() > 1))
}

/// Returns whether the user has given the job a secret.
pub(crate) fn gives_secret() -> bool {
    ["DISTRIBUTE_JOB_SECRET_FILE", "DISTRIBUTE_JOB_SECRET"].into_iter().any(|name| trimmed(name).is_some())
}

/// Returns the variables that name the files of the job's secret and certificate, and the certificate's name, as far as
/// the user has given them: hosts that are reached by `--hosts` get them too.
pub(crate) fn paths() -> Vec<(&'static str, OsString)> {
    let names = [
        "DISTRIBUTE_JOB_SECRET_FILE",
        "DISTRIBUTE_TLS_CA",
        "DISTRIBUTE_TLS_CERT",
        "DISTRIBUTE_TLS_KEY",
        "DISTRIBUTE_TLS_NAME",
    ];
    names.into_iter().filter_map(|name| Some((name, trimmed(name)?))).collect()
}

/// Returns a variable's value without white space around it; `None` if nothing is left. A value that is not UTF-8 is
/// returned as it is: it was set on purpose.
pub(crate) fn trimmed(name: &str) -> Option<OsString> {
    trimmed_value(std::env::var_os(name)?)
}

fn trimmed_value(given: OsString) -> Option<OsString> {
    match given.to_str() {
        Some(text) => Some(text.trim()).filter(|text| !text.is_empty()).map(OsString::from),
        None => Some(given),
    }
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

    #[cfg(unix)]
    #[test]
    fn a_value_that_is_not_utf_8_is_not_taken_for_none() {
        use std::os::unix::ffi::OsStringExt;

        let of = |bytes: &[u8]| OsString::from_vec(bytes.to_vec());
        let config = [&br#"{"cluster": {"worker": ["caf"#[..], b"\xe9", br#":1", "b:1"]}}"#].concat();
        let error = place(&BTreeMap::from([("TF_CONFIG", of(&config))])).unwrap_err();
        let details = error.details();
        assert!(details.iter().any(|(_, text)| text.starts_with("TF_CONFIG, whose value is not UTF-8")), "{details:?}");
        assert!(place(&BTreeMap::new()).unwrap().is_none());
        assert_eq!(
            [of(b" a "), of(b"  "), of(b"\xe9 ")].map(trimmed_value),
            [Some(of(b"a")), None, Some(of(b"\xe9 "))]
        );
    }
}
