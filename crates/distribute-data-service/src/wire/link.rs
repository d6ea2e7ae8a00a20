//! Calls to another process.

use std::time::Duration;

use distribute_cluster::grpc::{self, GrpcMessage, Inbox, body_of};
use http::HeaderMap;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use super::admission::Identity;
use super::{MAX_HEAD_BYTES, MAX_HEADERS_BYTES, WINDOW_BYTES};

/// A connection to a process, opened on first use and again after it broke. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    channel: Channel,
    headers: HeaderMap,
}

impl Link {
    /// Creates a link to `host:port`. A connection without any sign of life for `silence` counts as broken.
    ///
    /// # Errors
    /// `invalid_argument` if the address is invalid.
    pub(crate) fn new(address: &str, identity: &Identity, silence: Duration) -> Result<Link, Status> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| Status::invalid_argument(error.to_string()))?
            .tcp_nodelay(true)
            .connect_timeout(silence)
            .http2_keep_alive_interval(silence / 2)
            .keep_alive_timeout(silence / 2)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(2 * WINDOW_BYTES)
            .http2_max_header_list_size(MAX_HEADERS_BYTES);
        let channel = grpc::channel(&endpoint, identity.credentials().as_ref());
        Ok(Link { channel, headers: identity.headers()? })
    }

    /// Sends a message and waits for the answer.
    ///
    /// # Errors
    /// The other side's status; `unavailable` if it cannot be reached, `deadline_exceeded` after `timeout`.
    pub(crate) async fn call<R: GrpcMessage>(
        &self,
        path: &'static str,
        request: impl GrpcMessage,
        timeout: Duration,
    ) -> Result<R, Status> {
        let answer = async { self.begin(path, request, MAX_HEAD_BYTES).await?.one().await };
        tokio::time::timeout(timeout, answer).await.unwrap_or_else(|_| Err(late(timeout)))
    }

    /// Sends a message and returns the stream of answers, each of which has at most `limit_bytes`.
    ///
    /// # Errors
    /// The other side's status; `unavailable` if it cannot be reached, `deadline_exceeded` after `timeout`.
    pub(crate) async fn ask(
        &self,
        path: &'static str,
        request: impl GrpcMessage,
        limit_bytes: usize,
        timeout: Duration,
    ) -> Result<Inbox, Status> {
        let begun = tokio::time::timeout(timeout, self.begin(path, request, limit_bytes)).await;
        begun.unwrap_or_else(|_| Err(late(timeout))).map(|inbox| inbox.with_timeout(timeout))
    }

    async fn begin(&self, path: &'static str, request: impl GrpcMessage, limit_bytes: usize) -> Result<Inbox, Status> {
        let reply = grpc::call(&mut self.channel.clone(), path, self.headers.clone(), body_of([request])).await?;
        Ok(Inbox::new(reply, limit_bytes))
    }
}

fn late(timeout: Duration) -> Status {
    Status::deadline_exceeded(format!("no answer within {:.1} s", timeout.as_secs_f64()))
}
