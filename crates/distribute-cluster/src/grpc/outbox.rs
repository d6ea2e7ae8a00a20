//! The messages of a call on their way out.

use std::convert::Infallible;

use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;
use http_body_util::StreamBody;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::body::Body;

use super::encode::{GrpcMessage, encode};

/// The sending half of a call's messages.
pub struct Outbox(mpsc::Sender<Result<Frame<Bytes>, Infallible>>);

/// Creates a queue of at least `messages` messages, and the body that they are sent in.
pub fn outbox(messages: usize) -> (Outbox, Body) {
    // A message and its payload are queued apart.
    let (sender, frames) = mpsc::channel(2 * messages.max(1));
    (Outbox(sender), Body::new(StreamBody::new(ReceiverStream::new(frames))))
}

/// Creates a body of messages.
pub fn body_of<M: GrpcMessage>(messages: impl IntoIterator<Item = M, IntoIter: Send + 'static>) -> Body {
    let frames = messages.into_iter().flat_map(encode).filter(|bytes| !bytes.is_empty());
    Body::new(StreamBody::new(tokio_stream::iter(frames.map(|bytes| Ok::<_, Infallible>(Frame::data(bytes))))))
}

/// Creates a body of messages, followed by the status: that of the first error, if any. Each message is created when
/// there is room for it.
pub fn reply_of<M: GrpcMessage>(
    messages: impl IntoIterator<Item = Result<M, Status>, IntoIter: Send + 'static>,
) -> Body {
    let mut messages = messages.into_iter();
    let mut ended = false;
    let frames = std::iter::from_fn(move || {
        if ended {
            return None;
        }
        let next = messages.next();
        ended = !matches!(next, Some(Ok(_)));
        Some(match next {
            Some(Ok(message)) => encode(message).map(Frame::data).into(),
            Some(Err(status)) => vec![Frame::trailers(trailers(&status))],
            None => vec![Frame::trailers(trailers(&Status::ok("")))],
        })
    });
    let frames = frames.flatten().filter(|frame: &Frame<Bytes>| frame.data_ref().is_none_or(|data| !data.is_empty()));
    Body::new(StreamBody::new(tokio_stream::iter(frames.map(Ok::<_, Infallible>))))
}

fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    // This fails only for a status whose text no header can hold.
    let _ = status.add_header(&mut trailers);
    trailers
}

impl Outbox {
    /// Queues a message as soon as there is room; returns whether the reader still exists.
    pub async fn send(&self, message: impl GrpcMessage) -> bool {
        for bytes in encode(message) {
            if !bytes.is_empty() && self.0.send(Ok(Frame::data(bytes))).await.is_err() {
                return false;
            }
        }
        true
    }

    /// Queues a message if there is room at once; returns whether the reader still exists.
    pub fn offer(&self, message: impl GrpcMessage) -> bool {
        let whole = encode(message).concat();
        !matches!(self.0.try_send(Ok(Frame::data(whole.into()))), Err(mpsc::error::TrySendError::Closed(_)))
    }

    /// Ends a reply.
    pub async fn end(self, status: &Status) {
        // Fails only if the reader is gone.
        let _ = self.0.send(Ok(Frame::trailers(trailers(status)))).await;
    }

    /// Returns when the reader is gone.
    pub async fn closed(&self) {
        self.0.closed().await;
    }
}
