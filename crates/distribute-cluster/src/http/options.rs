//! Settings of requests to a cloud.

use std::fmt;
use std::time::Duration;

/// Limits of the requests that a resolver sends to a cloud.
///
/// Refused and broken connections, the status 429 and those from 500 are tried again, with delays that double each
/// time and vary at random; a `Retry-After` of the answer is obeyed up to a minute. Other statuses are final.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use distribute_cluster::RequestOptions;
/// let options = RequestOptions::default().timeout(Duration::from_secs(20)).attempts(3);
/// assert_eq!(options.connect_timeout, Duration::from_secs(5));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RequestOptions {
    /// The time in which all requests of one call must end, with their repetitions. Default: 60 s.
    pub timeout: Duration,
    /// The time in which a connection must be there. Default: 5 s; at most 1 s towards a metadata server at its usual
    /// address, which exists on machines of Google Cloud alone.
    pub connect_timeout: Duration,
    /// The number of times that a request is sent, from 1. Default: 5.
    pub attempts: u32,
    /// The delay before the first repetition. Default: 500 ms.
    pub first_delay: Duration,
}

impl Default for RequestOptions {
    fn default() -> RequestOptions {
        RequestOptions {
            timeout: Duration::from_secs(60),
            connect_timeout: Duration::from_secs(5),
            attempts: 5,
            first_delay: Duration::from_millis(500),
        }
    }
}

distribute_types::setters! {
    RequestOptions { timeout: Duration, connect_timeout: Duration, attempts: u32, first_delay: Duration }
}

/// A token by which requests to a cloud are authorised. Its value is neither displayed nor logged.
///
/// # Examples
/// ```
/// use distribute_cluster::AccessToken;
/// assert_eq!(format!("{:?}", AccessToken::new("ya29.secret")), "AccessToken(not shown)");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct AccessToken(String);

impl AccessToken {
    /// Creates a token from its text, such as `gcloud auth print-access-token` prints.
    pub fn new(text: impl Into<String>) -> AccessToken {
        AccessToken(text.into().trim().to_owned())
    }

    pub(crate) fn text(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for AccessToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("AccessToken(not shown)")
    }
}

impl From<&str> for AccessToken {
    fn from(text: &str) -> AccessToken {
        AccessToken::new(text)
    }
}

impl From<String> for AccessToken {
    fn from(text: String) -> AccessToken {
        AccessToken::new(text)
    }
}
