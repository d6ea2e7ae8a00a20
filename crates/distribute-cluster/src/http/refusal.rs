//! Failed attempts of a request.

use std::error::Error as _;
use std::time::{Duration, SystemTime};

use distribute_types::FailureKind;
use reqwest::StatusCode;
use reqwest::header::{HeaderMap, RETRY_AFTER};
use serde::Deserialize;

use crate::Error;
use crate::text::{LONGEST, clean};

/// The failure of one attempt of a request.
#[derive(Clone, Debug)]
pub(crate) struct Refusal {
    /// The status of the answer, if there is one.
    pub(crate) status: Option<StatusCode>,
    pub(crate) problem: String,
    pub(crate) remedy: String,
    pub(crate) kind: FailureKind,
    /// Whether the same request may succeed if it is sent again.
    pub(crate) is_passing: bool,
    /// The delay that the server asks for.
    pub(crate) after: Option<Duration>,
}

/// Remedies of the statuses that depend on the request.
#[derive(Clone, Debug)]
pub(crate) struct Remedies {
    /// Status 401.
    pub(crate) unauthorized: String,
    /// Status 403.
    pub(crate) forbidden: String,
    /// Status 404.
    pub(crate) not_found: String,
}

impl Refusal {
    /// A connection that could not be made, or broke.
    pub(crate) fn broken(error: reqwest::Error) -> Refusal {
        let error = error.without_url();
        let mut problem = error.to_string();
        let mut source = error.source();
        while let Some(cause) = source {
            problem = format!("{problem}: {cause}");
            source = cause.source();
        }
        let is_passing = !error.is_builder();
        Refusal {
            status: None,
            problem: clean(&problem, LONGEST),
            remedy: "Check the host, the network and the proxy".to_owned(),
            kind: FailureKind::Retryable,
            is_passing,
            after: None,
        }
    }

    /// Returns whether there is no such server, or nothing at the path.
    #[cfg(feature = "tpu")]
    pub(crate) fn is_absent(&self) -> bool {
        self.status.is_none() && self.is_passing || self.status == Some(StatusCode::NOT_FOUND)
    }

    /// An answer that cannot be used.
    pub(crate) fn unusable(problem: String, remedy: &str) -> Refusal {
        Refusal {
            status: None,
            problem: clean(&problem, LONGEST),
            remedy: remedy.to_owned(),
            kind: FailureKind::Permanent,
            is_passing: false,
            after: None,
        }
    }

    /// An answer with a status that is not a success.
    pub(crate) fn of_status(
        status: StatusCode,
        headers: &HeaderMap,
        body: &[u8],
        remedies: &Remedies,
        now: SystemTime,
    ) -> Refusal {
        let (kind, remedy) = match status {
            StatusCode::UNAUTHORIZED => (FailureKind::Configuration, remedies.unauthorized.clone()),
            StatusCode::FORBIDDEN => (FailureKind::Configuration, remedies.forbidden.clone()),
            StatusCode::NOT_FOUND => (FailureKind::Configuration, remedies.not_found.clone()),
            StatusCode::TOO_MANY_REQUESTS => {
                (FailureKind::Retryable, "Ask less often, or raise the quota of the project".to_owned())
            }
            _ if status.is_server_error() => (FailureKind::Retryable, "Try again later".to_owned()),
            _ => (FailureKind::Permanent, "Check the host and the names in the request".to_owned()),
        };
        let is_passing = kind == FailureKind::Retryable;
        let after = headers.get(RETRY_AFTER).and_then(|value| delay(value.to_str().ok()?, now));
        let mut problem = format!("status {status}");
        if let Some(message) = message(body) {
            problem = format!("{problem}: {}", clean(&message, MAX_MESSAGE));
        }
        if let Some(after) = after {
            problem = format!("{problem} (ask again in {} s)", after.as_secs());
        }
        Refusal { status: Some(status), problem, remedy, kind, is_passing, after }
    }

    pub(crate) fn into_error(self, service: &'static str, request: &str) -> Error {
        let Refusal { problem, remedy, kind, .. } = self;
        Error::Service { service, request: request.to_owned(), problem, remedy, kind }
    }
}

/// Returns the delay of a `Retry-After`: a number of seconds, or a date.
pub(super) fn delay(value: &str, now: SystemTime) -> Option<Duration> {
    if let Ok(seconds) = value.trim().parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = httpdate::parse_http_date(value.trim()).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

/// Returns the message of an error of Google's interfaces, or the text of another server's short answer.
fn message(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Answer {
        error: Message,
    }
    #[derive(Deserialize)]
    struct Message {
        message: String,
    }
    if let Ok(answer) = serde_json::from_slice::<Answer>(body) {
        return Some(answer.error.message);
    }
    let text = std::str::from_utf8(body).ok()?.trim();
    (!text.is_empty() && text.len() <= MAX_MESSAGE && !text.starts_with(['<', '{', '['])).then(|| text.to_owned())
}

/// Length limit of the server's message, in characters.
pub(super) const MAX_MESSAGE: usize = 300;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_are_seconds_or_dates() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_770);
        assert_eq!(delay("7", now), Some(Duration::from_secs(7)));
        assert_eq!(delay("Sun, 06 Nov 1994 08:49:37 GMT", now), Some(Duration::from_secs(7)));
        assert_eq!(delay("Sat, 05 Nov 1994 08:49:37 GMT", now), Some(Duration::ZERO));
        for wrong in ["", "soon", "-1", "1.5"] {
            assert_eq!(delay(wrong, now), None, "{wrong}");
        }
    }

    #[test]
    fn messages_are_those_of_google_or_short_texts() {
        assert_eq!(message(br#"{"error": {"code": 403, "message": "no"}}"#).as_deref(), Some("no"));
        assert_eq!(message(b" busy \n").as_deref(), Some("busy"));
        for silent in [&b""[..], b"<html>", b"{}", b"\xff", &[b'a'; 301]] {
            assert_eq!(message(silent), None);
        }
    }
}
