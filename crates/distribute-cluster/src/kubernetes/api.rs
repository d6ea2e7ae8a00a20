//! Requests to the API server.

use std::collections::BTreeMap;
use std::error::Error as StdError;
use std::time::Duration;

use futures_util::{Stream, StreamExt};
use http_body_util::{BodyExt, Limited};
use kube::api::{ListParams, Request, WatchEvent, WatchParams};
use kube::client::{AuthError, Body, Client};
use serde::Deserialize;

use super::pod::Pod;
use super::trouble::Trouble;
use crate::ClusterSpec;

/// The pods of a namespace, at an API server.
#[derive(Clone)]
pub(super) struct Api {
    pub(super) client: Client,
    pub(super) namespace: String,
}

/// Objects of one kind in a namespace.
#[cfg(feature = "coordination")]
#[derive(Clone)]
pub(super) struct Objects {
    pub(super) client: Client,
    /// The path of the kind in the namespace.
    pub(super) path: String,
}

/// An answer about one object.
#[cfg(feature = "coordination")]
#[derive(Debug)]
pub(super) enum Answered {
    Object(serde_json::Value),
    /// There is no such object.
    Absent,
    /// The object exists already, or has changed since it was read.
    Conflict,
}

#[cfg(feature = "coordination")]
impl Objects {
    /// Returns an object.
    pub(super) async fn get(&self, name: &str) -> Result<Answered, Trouble> {
        let request = Request::new(&self.path).get(name, &kube::api::GetParams::default());
        self.send(request.map_err(|error| refused(&error))?).await
    }

    /// Creates an object.
    pub(super) async fn create(&self, object: &serde_json::Value) -> Result<Answered, Trouble> {
        let request =
            Request::new(&self.path).create(&kube::api::PostParams::default(), object.to_string().into_bytes());
        self.send(request.map_err(|error| refused(&error))?).await
    }

    /// Replaces an object, if it has still the version of the new one.
    pub(super) async fn replace(&self, name: &str, object: &serde_json::Value) -> Result<Answered, Trouble> {
        let parameters = kube::api::PostParams::default();
        let request = Request::new(&self.path).replace(name, &parameters, object.to_string().into_bytes());
        match self.send(request.map_err(|error| refused(&error))?).await? {
            // Deleted since it was read.
            Answered::Absent => Ok(Answered::Conflict),
            other => Ok(other),
        }
    }

    async fn send(&self, request: http::Request<Vec<u8>>) -> Result<Answered, Trouble> {
        let response = self.client.send(request.map(Body::from)).await.map_err(trouble)?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, MAX_OBJECT_BYTES).collect().await;
        let body = body.map_err(|error| Trouble::Unreadable(chain(&*error)))?.to_bytes();
        match head.status.as_u16() {
            200..=299 => {
                let object = serde_json::from_slice(&body).map_err(|error| Trouble::Unreadable(error.to_string()))?;
                Ok(Answered::Object(object))
            }
            // A path that the server does not know has no status object.
            404 if serde_json::from_slice::<Failure>(&body).is_ok_and(|failure| failure.reason == "NotFound") => {
                Ok(Answered::Absent)
            }
            409 => Ok(Answered::Conflict),
            code => {
                let seconds = head.headers.get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
                Err(failed(code, &body, seconds))
            }
        }
    }
}

/// Pods by their names.
pub(super) type Pods = BTreeMap<String, Pod>;

/// A change of the pods that a selector selects.
#[derive(Debug)]
pub(super) enum Change {
    Put(Box<Pod>),
    Removed(Box<Pod>),
    /// Nothing has changed up to a version.
    Nothing(String),
}

impl Change {
    fn of(event: WatchEvent<Pod>) -> Result<Change, Trouble> {
        match event {
            WatchEvent::Added(pod) | WatchEvent::Modified(pod) => Ok(Change::Put(Box::new(pod))),
            WatchEvent::Deleted(pod) => Ok(Change::Removed(Box::new(pod))),
            WatchEvent::Bookmark(bookmark) => Ok(Change::Nothing(bookmark.metadata.resource_version)),
            WatchEvent::Error(status) => Err(trouble(kube::Error::Api(status))),
        }
    }

    /// Returns the version after this change, at which another watch continues.
    pub(super) fn version(&self) -> Option<&str> {
        match self {
            Change::Put(pod) | Change::Removed(pod) => pod.metadata.resource_version.as_deref(),
            Change::Nothing(version) => Some(version),
        }
    }
}

/// The changes that a watch reports.
pub(super) trait Changes: Stream<Item = Result<Change, Trouble>> + Send {}

impl<S: Stream<Item = Result<Change, Trouble>> + Send> Changes for S {}

/// A page of a list of pods.
#[derive(Deserialize)]
pub(super) struct Page {
    #[serde(default)]
    metadata: PageMetadata,
    pub(super) items: Vec<Pod>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct PageMetadata {
    #[serde(default)]
    resource_version: String,
    r#continue: Option<String>,
}

/// The body of an answer that is an error.
#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Failure {
    message: String,
    #[cfg(feature = "coordination")]
    reason: String,
    details: FailureDetails,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct FailureDetails {
    retry_after_seconds: u32,
}

impl Api {
    /// Lists the pods that a selector selects, and returns the version at which a watch continues.
    pub(super) async fn list(&self, selector: &str) -> Result<(Pods, String), Trouble> {
        let mut pods = Pods::new();
        let mut parameters = ListParams::default().labels(selector).limit(PAGE);
        loop {
            let request = self.request().list(&parameters).map_err(|error| refused(&error))?;
            let response = self.client.send(request.map(Body::from)).await.map_err(trouble)?;
            let (head, body) = response.into_parts();
            let body = Limited::new(body, MAX_PAGE_BYTES).collect().await;
            let body = body.map_err(|error| Trouble::Unreadable(chain(&*error)))?.to_bytes();
            if !head.status.is_success() {
                let seconds = head.headers.get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
                return Err(failed(head.status.as_u16(), &body, seconds));
            }
            let page: Page = serde_json::from_slice(&body).map_err(|error| Trouble::Unreadable(error.to_string()))?;
            pods.extend(page.items.into_iter().map(|pod| (pod.metadata.name.clone(), pod)));
            if pods.len() > ClusterSpec::MAX_TASKS {
                let problem = format!("more than {} pods have the labels {selector}", ClusterSpec::MAX_TASKS);
                return Err(Trouble::Status { code: 400, message: problem, retry_after: None });
            }
            match page.metadata.r#continue.filter(|token| !token.is_empty()) {
                Some(token) => parameters.continue_token = Some(token),
                None => return Ok((pods, page.metadata.resource_version)),
            }
        }
    }

    /// Begins a watch of the pods that a selector selects, from a version on. The server ends it after [`WATCH`].
    pub(super) async fn watch(&self, selector: &str, version: &str) -> Result<impl Changes + use<>, Trouble> {
        let parameters = WatchParams::default().labels(selector).timeout(WATCH.as_secs() as u32);
        let request = self.request().watch(&parameters, version).map_err(|error| refused(&error))?;
        let events = self.client.request_events::<Pod>(request).await.map_err(trouble)?;
        Ok(events.map(|event| Change::of(event.map_err(trouble)?)))
    }

    fn request(&self) -> Request {
        Request::new(format!("/api/v1/namespaces/{}/pods", self.namespace))
    }
}

fn refused(error: &dyn StdError) -> Trouble {
    Trouble::Status { code: 400, message: chain(error), retry_after: None }
}

/// Returns the failure that an answer describes: a `Status` as JSON, or text.
pub(super) fn failed(code: u16, body: &[u8], retry_after: Option<u64>) -> Trouble {
    let failure = serde_json::from_slice::<Failure>(body).ok().filter(|failure| !failure.message.is_empty());
    let asked = failure.as_ref().map(|failure| u64::from(failure.details.retry_after_seconds));
    let retry_after = retry_after.or(asked).filter(|seconds| *seconds > 0).map(Duration::from_secs);
    let message = match failure {
        Some(failure) => failure.message,
        None => String::from_utf8_lossy(&body[..body.len().min(MAX_TEXT_BYTES)]).into_owned(),
    };
    Trouble::Status { code, message, retry_after }
}

fn trouble(error: kube::Error) -> Trouble {
    match error {
        kube::Error::Api(status) => {
            let seconds = status.details.as_ref().map(|details| details.retry_after_seconds);
            let retry_after = seconds.filter(|seconds| *seconds > 0).map(|seconds| Duration::from_secs(seconds.into()));
            Trouble::Status { code: status.code, message: status.message, retry_after }
        }
        kube::Error::SerdeError(error) => Trouble::Unreadable(error.to_string()),
        kube::Error::FromUtf8(error) => Trouble::Unreadable(error.to_string()),
        kube::Error::ReadEvents(error) => Trouble::Connection(chain(&error)),
        kube::Error::Auth(error) => Trouble::Credentials(chain(&error)),
        kube::Error::Service(error) if error.is::<AuthError>() => Trouble::Credentials(chain(&*error)),
        kube::Error::Service(error) => Trouble::Connection(chain(&*error)),
        kube::Error::HyperError(error) => Trouble::Connection(chain(&error)),
        other => Trouble::Connection(chain(&other)),
    }
}

/// Returns the messages of an error and of its causes; a cause that its effect repeats is left out.
pub(super) fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let message = error.to_string();
        if !text.contains(&message) {
            text.push_str(": ");
            text.push_str(&message);
        }
        cause = error.source();
    }
    text
}

/// Pods of a page of a list.
const PAGE: u32 = 500;

/// Size limit of a page: 128 KiB for each pod.
const MAX_PAGE_BYTES: usize = PAGE as usize * 128 * 1024;

/// Size limit of an object; the API server takes no larger ones than 3 MiB.
#[cfg(feature = "coordination")]
const MAX_OBJECT_BYTES: usize = 4 << 20;

/// Bytes of an answer that are read for a message.
const MAX_TEXT_BYTES: usize = 2000;

/// Time after which the server is asked to end a watch.
pub(super) const WATCH: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_statuses_or_text() {
        let status = br#"{"kind": "Status", "message": "slow down", "details": {"retryAfterSeconds": 3}}"#;
        let of = |code, message: &str, seconds: Option<u64>| Trouble::Status {
            code,
            message: message.to_owned(),
            retry_after: seconds.map(Duration::from_secs),
        };
        assert_eq!(failed(429, status, None), of(429, "slow down", Some(3)));
        assert_eq!(failed(429, status, Some(7)), of(429, "slow down", Some(7)));
        assert_eq!(failed(503, b"try later", None), of(503, "try later", None));
        assert_eq!(failed(500, b"{}", Some(0)), of(500, "{}", None));
    }

    #[test]
    fn causes_are_named_once() {
        let inner = std::io::Error::other("refused");
        assert_eq!(chain(&std::io::Error::other(inner)), "refused");
    }
}
