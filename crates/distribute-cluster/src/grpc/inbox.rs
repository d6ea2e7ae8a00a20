//! The messages of a call as they arrive.

use std::time::Duration;

use http_body_util::BodyExt;
use tonic::Status;
use tonic::body::Body;

use super::encode::GrpcMessage;
use super::pieces::Pieces;

/// The receiving half of a call's messages. Receiving is cancel safe: what has arrived is kept.
pub struct Inbox {
    body: Body,
    pieces: Pieces,
    limit_bytes: usize,
    timeout: Option<Duration>,
}

impl Inbox {
    /// Receives messages of at most `limit_bytes`, for as long as each takes.
    pub fn new(body: Body, limit_bytes: usize) -> Inbox {
        Inbox { body, pieces: Pieces::default(), limit_bytes, timeout: None }
    }

    /// Limits the time until the next piece of a message arrives.
    pub fn with_timeout(self, timeout: Duration) -> Inbox {
        Inbox { timeout: Some(timeout), ..self }
    }

    /// Changes the limit of the messages to come, such as once the sender is identified.
    pub fn limit(&mut self, limit_bytes: usize) {
        self.limit_bytes = limit_bytes;
    }

    /// Returns the next message; `None` at the end.
    ///
    /// # Errors
    /// The other side's status; `unavailable` if the connection broke, `deadline_exceeded` if nothing arrived for too
    /// long, `invalid_argument` for an invalid or overlong message.
    pub async fn next<M: GrpcMessage>(&mut self) -> Result<Option<M>, Status> {
        loop {
            if let Some(message) = self.pieces.message(self.limit_bytes)? {
                return Ok(Some(message));
            }
            let frame = match self.timeout {
                None => self.body.frame().await,
                Some(timeout) => tokio::time::timeout(timeout, self.body.frame()).await.map_err(|_| {
                    let seconds = timeout.as_secs_f64();
                    Status::deadline_exceeded(format!("nothing further of the call arrived within {seconds:.1} s"))
                })?,
            };
            match frame {
                None if self.pieces.is_empty() => return Ok(None),
                None => return Err(Status::unavailable("the stream ended within a message")),
                // The library's error has no further details.
                Some(Err(_)) => return Err(Status::unavailable("its process ended or its connection broke")),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(bytes) => self.pieces.push(bytes),
                    Err(frame) => {
                        let status = frame.trailers_ref().and_then(Status::from_header_map);
                        return match status.filter(|status| status.code() != tonic::Code::Ok) {
                            Some(status) => Err(status),
                            None => Ok(None),
                        };
                    }
                },
            }
        }
    }

    /// Returns the only message.
    ///
    /// # Errors
    /// The errors of [`next`](Inbox::next), and `unavailable` if there is no message.
    pub async fn one<M: GrpcMessage>(&mut self) -> Result<M, Status> {
        self.next().await?.ok_or_else(|| Status::unavailable("the stream ended without a message"))
    }
}
