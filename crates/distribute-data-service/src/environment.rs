//! Reads the process's environment; no other module of the crate does.

use distribute_cluster::JobId;

use crate::{Error, Result};

/// Where the dispatcher is: host:port.
pub(crate) const ADDRESS: &str = "DISTRIBUTE_DATA_SERVICE";

/// The name that the processes of one data service share.
pub(crate) const IDENTITY: &str = "DISTRIBUTE_DATA_SERVICE_ID";

/// Returns the dispatcher's address, if it is given.
pub(crate) fn address() -> Option<String> {
    set(ADDRESS)
}

/// Returns the identity of the data service: the one that is given, else one that all services without a name share.
///
/// # Errors
/// [`Error::Option`] if the name is malformed, see [`JobId::new`].
pub(crate) fn identity() -> Result<JobId> {
    let name = set(IDENTITY).unwrap_or_else(|| UNNAMED.to_owned());
    JobId::new(name.clone()).map_err(|_| Error::Option {
        what: IDENTITY,
        given: name.escape_debug().take(80).collect(),
        expected: "1 to 128 printable ASCII characters without spaces",
    })
}

fn set(name: &str) -> Option<String> {
    std::env::var(name).ok().map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
}

/// The name of services that were given none.
const UNNAMED: &str = "data-service";
