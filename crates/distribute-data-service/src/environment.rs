//! Reads the process's environment; no other module of the crate does.

use std::ffi::OsString;

use distribute_cluster::JobId;

use crate::{Error, Result};

/// Where the dispatcher is: host:port.
pub(crate) const ADDRESS: &str = "DISTRIBUTE_DATA_SERVICE";

/// The name that the processes of one data service share.
pub(crate) const IDENTITY: &str = "DISTRIBUTE_DATA_SERVICE_ID";

/// Returns the dispatcher's address, if it is given.
///
/// # Errors
/// [`Error::Option`] if it is not UTF-8.
pub(crate) fn address() -> Result<Option<String>> {
    set(ADDRESS)
}

/// Returns the identity of the data service: the one that is given, else one that all services without a name share.
///
/// # Errors
/// [`Error::Option`] if the name is not UTF-8 or malformed, see [`JobId::new`].
pub(crate) fn identity() -> Result<JobId> {
    let name = set(IDENTITY)?.unwrap_or_else(|| UNNAMED.to_owned());
    JobId::new(name.clone()).map_err(|_| Error::Option {
        what: IDENTITY,
        given: name.escape_debug().take(80).collect(),
        expected: "1 to 128 printable ASCII characters without spaces",
    })
}

fn set(name: &'static str) -> Result<Option<String>> {
    text(name, std::env::var_os(name))
}

/// Returns the value of a variable as text; none if it is empty.
fn text(what: &'static str, value: Option<OsString>) -> Result<Option<String>> {
    let value = value.map(OsString::into_string).transpose().map_err(|given| Error::Option {
        what,
        given: given.to_string_lossy().escape_debug().take(80).collect(),
        expected: "text in UTF-8",
    })?;
    Ok(value.map(|value| value.trim().to_owned()).filter(|value| !value.is_empty()))
}

/// The name of services that were given none.
const UNNAMED: &str = "data-service";

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    #[test]
    fn a_value_that_is_not_utf_8_is_not_taken_for_none() {
        assert_eq!(text(ADDRESS, None).unwrap(), None);
        assert_eq!(text(ADDRESS, Some("  ".into())).unwrap(), None);
        assert_eq!(text(ADDRESS, Some(" a:5050\n".into())).unwrap().as_deref(), Some("a:5050"));
        let error = text(ADDRESS, Some(OsString::from_vec(b"caf\xe9:5050".to_vec()))).unwrap_err().to_string();
        assert!(error.starts_with("DISTRIBUTE_DATA_SERVICE is caf"), "{error}");
        assert!(error.ends_with(":5050; expected text in UTF-8"), "{error}");
    }
}
