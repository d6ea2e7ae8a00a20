//! Calls between tasks by gRPC, without copying payloads into or out of messages. Cargo feature `grpc`.
//!
//! The transport of collectives, the services of parameter servers and the data service use it. A message's payload is
//! its last field, so a sender writes the other fields, the payload's length, and then the payload from its own memory;
//! a receiver slices it out of the pieces in which it arrives. tonic's own codec copies it once more on either side.
//!
//! # Source
//! "gRPC over HTTP/2", and the encoding of Protocol Buffers.

use std::future::poll_fn;

use http::HeaderMap;
use tonic::body::Body;
use tonic::transport::Channel;
use tonic::{Code, Status};
use tower_service::Service as _;

mod encode;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;
mod inbox;
mod incoming;
mod outbox;
mod pieces;
mod secured;
mod service;

pub use encode::{GrpcMessage, encode};
pub use inbox::Inbox;
pub use outbox::{Outbox, body_of, outbox, reply_of};
pub use secured::{Credentials, channel, connected};
pub use service::{GrpcService, Routed};

use crate::secret::Problem;
use secured::Unproved;

/// Begins a call of the method at `path`; returns the body of the reply once the other side has begun it.
///
/// # Errors
/// The other side's status; `unavailable` if it cannot be reached or does not answer as a gRPC server;
/// `unauthenticated` if it and this process do not have the same secret.
pub async fn call(channel: &mut Channel, path: &str, headers: HeaderMap, body: Body) -> Result<Body, Status> {
    let mut request = http::Request::post(path)
        .version(http::Version::HTTP_2)
        .header("te", "trailers")
        .header("content-type", CONTENT_TYPE)
        .body(body)
        .map_err(|error| Status::internal(error.to_string()))?;
    request.headers_mut().extend(headers);
    poll_fn(|context| channel.poll_ready(context)).await.map_err(|error| status_of(&error))?;
    let reply = channel.call(request).await.map_err(|error| status_of(&error))?;
    match Status::from_header_map(reply.headers()) {
        Some(refused) => Err(refused),
        None if reply.status().is_success() => Ok(reply.into_body()),
        None => Err(Status::unavailable(format!("it answered {}", reply.status()))),
    }
}

/// Creates the reply to a call, or the one that carries the error.
pub fn reply(outcome: Result<Body, Status>) -> http::Response<Body> {
    let reply = outcome.and_then(|body| {
        http::Response::builder()
            .header("content-type", CONTENT_TYPE)
            .body(body)
            .map_err(|error| Status::internal(error.to_string()))
    });
    reply.unwrap_or_else(Status::into_http)
}

/// Returns whether the status suggests that the other process is gone, rather than that it refused.
pub fn is_lost(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled | Code::Unknown)
}

const CONTENT_TYPE: &str = "application/grpc";

/// Returns the status of a call or connection that failed: `unauthenticated` if the two sides do not have the same
/// secret and `permission_denied` if they belong to different jobs, so that later attempts fail alike, else
/// `unavailable`.
pub fn status_of(error: &tonic::transport::Error) -> Status {
    // The innermost cause tells most: "connection refused".
    let mut cause: &dyn std::error::Error = error;
    loop {
        match cause.downcast_ref::<Unproved>() {
            Some(unproved @ Unproved { problem: Problem::Other { .. }, .. }) => {
                let remedy = "give all processes of a job the same DISTRIBUTE_JOB_ID, those of a data service the same \
                              DISTRIBUTE_DATA_SERVICE_ID, and each job ports of its own";
                return Status::permission_denied(format!("{}; {remedy}", unproved.problem));
            }
            Some(unproved) => return Status::unauthenticated(unproved.to_string()),
            None => {}
        }
        match cause.source() {
            Some(source) => cause = source,
            None => return Status::unavailable(cause.to_string()),
        }
    }
}
