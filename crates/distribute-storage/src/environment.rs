//! Settings of stores in the process's environment.

use std::ffi::OsString;
use std::time::Duration;

use crate::{Error, Result};

/// The variables from which stores take settings and credentials, by name and value.
pub(crate) fn variables() -> Vec<(String, String)> {
    std::env::vars_os().filter_map(|(name, value)| text(name, value)).collect()
}

/// Returns a variable as text; none if it is not UTF-8. In [`RETRY`] bytes that are not UTF-8 are replaced, so that it
/// is refused.
fn text(name: OsString, value: OsString) -> Option<(String, String)> {
    let name = name.into_string().ok()?;
    let value = if name == RETRY { value.to_string_lossy().into_owned() } else { value.into_string().ok()? };
    Some((name, value))
}

/// The variable that sets how long requests are repeated.
const RETRY: &str = "DISTRIBUTE_STORAGE_RETRY";

/// The default of [`RETRY`]: longer than most interruptions, and within the five minutes for which a signed request is
/// valid.
const RETRY_SECONDS: u64 = 180;

/// Returns how long a request that fails for the moment is repeated.
pub(crate) fn retry_limit(variables: &[(String, String)]) -> Result<Duration> {
    let Some((_, value)) = variables.iter().find(|(name, _)| name == RETRY) else {
        return Ok(Duration::from_secs(RETRY_SECONDS));
    };
    let seconds = value.trim().parse().ok().filter(|seconds| *seconds <= MOST_SECONDS);
    let seconds = seconds.ok_or_else(|| Error::Retry { given: value.clone(), most: MOST_SECONDS })?;
    Ok(Duration::from_secs(seconds))
}

/// A request is signed once; servers refuse a signature that is older.
const MOST_SECONDS: u64 = 290;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_of_repeating_is_checked() {
        let of = |value: &str| retry_limit(&[(RETRY.to_owned(), value.to_owned())]);
        assert_eq!(retry_limit(&[]).unwrap(), Duration::from_secs(180));
        assert_eq!(of(" 0 ").unwrap(), Duration::ZERO);
        for wrong in ["", "-1", "1.5", "291", "a minute"] {
            let text = of(wrong).unwrap_err().to_string();
            assert!(text.contains("DISTRIBUTE_STORAGE_RETRY") && text.contains(&format!("{wrong:?}")), "{text}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_limit_that_is_not_utf_8_is_not_taken_for_none() {
        use std::os::unix::ffi::OsStringExt;

        let wrong = || OsString::from_vec(b"18\xe9".to_vec());
        let error = retry_limit(&[text(RETRY.into(), wrong()).unwrap()]).unwrap_err().to_string();
        assert!(error.starts_with("DISTRIBUTE_STORAGE_RETRY is \"18"), "{error}");
        assert_eq!(text("AWS_REGION".into(), wrong()), None);
    }
}
