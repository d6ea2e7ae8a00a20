//! Calls between tasks by gRPC, without copying payloads into or out of messages. Cargo feature `grpc`.
//!
//! The transport of collectives and the services of parameter servers use it. A message's payload is its last field,
//! so a sender writes the other fields, the payload's length, and then the payload from its own memory; a receiver
//! slices it out of the pieces in which it arrives. tonic's own codec copies it once more on either side.
//!
//! # Source
//! "gRPC over HTTP/2", and the encoding of Protocol Buffers.

use std::future::poll_fn;

use http::HeaderMap;
use tonic::Status;
use tonic::body::Body;
use tonic::transport::Channel;
use tower_service::Service as _;

mod encode;
mod inbox;
mod incoming;
mod outbox;
mod pieces;

pub use encode::{GrpcMessage, encode};
pub use inbox::Inbox;
pub use outbox::{Outbox, body_of, outbox, reply_of};

/// Begins a call of the method at `path`; returns the body of the reply once the other side has begun it.
///
/// # Errors
/// The other side's status; `unavailable` if it cannot be reached or does not answer as a gRPC server.
pub async fn call(channel: &mut Channel, path: &str, headers: HeaderMap, body: Body) -> Result<Body, Status> {
    let mut request = http::Request::post(path)
        .version(http::Version::HTTP_2)
        .header("te", "trailers")
        .header("content-type", CONTENT_TYPE)
        .body(body)
        .map_err(|error| Status::internal(error.to_string()))?;
    request.headers_mut().extend(headers);
    poll_fn(|context| channel.poll_ready(context)).await.map_err(unreachable)?;
    let reply = channel.call(request).await.map_err(unreachable)?;
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

const CONTENT_TYPE: &str = "application/grpc";

fn unreachable(error: tonic::transport::Error) -> Status {
    // The innermost cause tells most: "connection refused".
    let mut cause: &dyn std::error::Error = &error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    Status::unavailable(cause.to_string())
}
