//! Calls to another task.

use std::pin::pin;
use std::time::Duration;

use distribute_cluster::grpc::{self, GrpcMessage, Inbox, body_of, outbox};
use http::HeaderMap;
use tonic::Status;
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint};

use super::admission::Addressee;
use super::attendance::{Attendance, beats};
use super::{HTTP_FRAME_BYTES, MAX_HEADERS_BYTES, MAX_MESSAGE_BYTES, QUEUED_MESSAGES, WINDOW_BYTES};

/// A connection to a task, opened on first use and again after it broke. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    channel: Channel,
    /// The headers of all calls, which name the task that they are for.
    headers: HeaderMap,
    silence: Duration,
}

/// The answers to a call in progress.
pub(crate) struct Replies(Inbox);

impl Link {
    /// Creates a link to the addressee at `host:port`. A task that does not answer for `silence` counts as lost.
    ///
    /// # Errors
    /// `invalid_argument` if the address is invalid.
    pub(crate) fn new(address: &str, addressee: &Addressee, silence: Duration) -> Result<Link, Status> {
        let endpoint = Endpoint::from_shared(format!("http://{address}"))
            .map_err(|error| Status::invalid_argument(error.to_string()))?
            .tcp_nodelay(true)
            .connect_timeout(silence)
            .http2_keep_alive_interval(silence / 2)
            .keep_alive_timeout(silence / 2)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(WINDOW_BYTES)
            .initial_connection_window_size(2 * WINDOW_BYTES)
            .max_frame_size(HTTP_FRAME_BYTES)
            .http2_max_header_list_size(MAX_HEADERS_BYTES);
        let channel = grpc::channel(&endpoint, addressee.credentials().as_ref());
        Ok(Link { channel, headers: addressee.headers()?, silence })
    }

    /// Attends to the task, and sends heartbeats for as long as the attendance lasts; returns the task's state.
    ///
    /// # Errors
    /// The other side's status; `unavailable` if it cannot be reached, `deadline_exceeded` after `timeout`.
    pub(crate) async fn attend<Q: GrpcMessage, S: GrpcMessage>(
        &self,
        path: &'static str,
        first: Q,
        timeout: Duration,
    ) -> Result<(S, Attendance<S>), Status> {
        let begun = async {
            let (outbox, body) = outbox(QUEUED_MESSAGES);
            outbox.send(first).await;
            // Dropped with the attendance, which ends the call's body and thereby the call.
            let beats = beats::<Q>(outbox, self.silence);
            let mut states = self.begin(path, body).await?;
            let state = states.one::<S>().await?;
            Ok((state, Attendance::new(states, beats, self.silence)))
        };
        tokio::time::timeout(timeout, begun).await.unwrap_or_else(|_| Err(late(path, timeout)))
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
        let answer = async { self.begin(path, body_of([request])).await?.one().await };
        tokio::time::timeout(timeout, answer).await.unwrap_or_else(|_| Err(late(path, timeout)))
    }

    /// Sends messages and returns the stream of answers.
    ///
    /// # Errors
    /// The other side's status; `unavailable` if it cannot be reached, `deadline_exceeded` after `timeout`.
    pub(crate) async fn ask<M: GrpcMessage>(
        &self,
        path: &'static str,
        messages: Vec<M>,
        timeout: Duration,
    ) -> Result<Replies, Status> {
        let begun = self.begin(path, body_of(messages));
        let inbox = tokio::time::timeout(timeout, begun).await.unwrap_or_else(|_| Err(late(path, timeout)))?;
        Ok(Replies(inbox))
    }

    /// Sends messages as fast as they are read, and waits for the answer.
    ///
    /// # Errors
    /// The other side's status; `unavailable` if it cannot be reached, `deadline_exceeded` after `timeout`.
    pub(crate) async fn tell<M: GrpcMessage, R: GrpcMessage>(
        &self,
        path: &'static str,
        messages: Vec<M>,
        timeout: Duration,
    ) -> Result<R, Status> {
        let answer = async { self.begin(path, body_of(messages)).await?.one().await };
        tokio::time::timeout(timeout, answer).await.unwrap_or_else(|_| Err(late(path, timeout)))
    }

    /// Sends messages as `next` returns them, each of which the other side takes within `timeout`, and waits for the
    /// answer. One message is held at a time, apart from those on their way.
    ///
    /// # Errors
    /// The first error of `next`, after which the call is given up; inside, the other side's status, `unavailable` if
    /// it cannot be reached, `deadline_exceeded` after `timeout`.
    pub(crate) async fn send<M: GrpcMessage, R: GrpcMessage, E>(
        &self,
        path: &'static str,
        mut next: impl FnMut() -> Option<Result<M, E>>,
        timeout: Duration,
    ) -> Result<Result<R, Status>, E> {
        let (outbox, body) = outbox(1);
        let mut answer = pin!(async { self.begin(path, body).await?.one::<R>().await });
        while let Some(message) = next() {
            let message = message?;
            tokio::select! {
                biased;
                early = &mut answer => {
                    let early = early.and_then(|_| Err(Status::internal("it answered before it had everything")));
                    return Ok(early);
                }
                sent = tokio::time::timeout(timeout, outbox.send(message)) => match sent {
                    Ok(true) => {}
                    // The answer says why.
                    Ok(false) => break,
                    Err(_) => return Ok(Err(late(path, timeout))),
                },
            }
        }
        drop(outbox);
        Ok(tokio::time::timeout(timeout, answer).await.unwrap_or_else(|_| Err(late(path, timeout))))
    }

    async fn begin(&self, path: &'static str, body: Body) -> Result<Inbox, Status> {
        let reply = grpc::call(&mut self.channel.clone(), path, self.headers.clone(), body).await?;
        // Callers limit their waits themselves.
        Ok(Inbox::new(reply, MAX_MESSAGE_BYTES))
    }
}

impl Replies {
    /// Returns the next answer, within `timeout`; `None` at the end.
    ///
    /// # Errors
    /// The other side's status; `unavailable` if the connection broke, `deadline_exceeded` after `timeout`.
    pub(crate) async fn next<M: GrpcMessage>(&mut self, timeout: Duration) -> Result<Option<M>, Status> {
        let next = tokio::time::timeout(timeout, self.0.next()).await;
        next.unwrap_or_else(|_| Err(late("an answer", timeout)))
    }
}

fn late(path: &str, timeout: Duration) -> Status {
    let what = path.rsplit('/').next().unwrap_or(path);
    Status::deadline_exceeded(format!("{what}: no answer within {:.1} s", timeout.as_secs_f64()))
}
