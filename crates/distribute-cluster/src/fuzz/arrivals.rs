//! Connections whose bytes arrive in pieces.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io::{ErrorKind, Result as IoResult};
use std::pin::Pin;
use std::task::{Context, Poll};

use prost::Message;
use tokio::io::{AsyncRead, ReadBuf};

use super::Input;
use crate::frames::{Preamble, Receiver};

/// A stream that yields its bytes in these pieces, and then its end.
struct Arrivals<'a>(VecDeque<&'a [u8]>);

impl AsyncRead for Arrivals<'_> {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<IoResult<()>> {
        if let Some(piece) = self.0.pop_front() {
            let (now, later) = piece.split_at(piece.len().min(buffer.remaining()));
            buffer.put_slice(now);
            if !later.is_empty() {
                self.0.push_front(later);
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// Returns the messages of a connection, whose pieces the first byte of the input gives a length, and the error at
/// their end. The messages are the same whatever the pieces, and are encoded to what is decoded again.
pub(crate) fn messages<M: Message + Default + PartialEq + Clone + Debug>(
    mut input: Input<'_>,
    preamble: Preamble,
    limit_bytes: usize,
) -> (Vec<M>, ErrorKind) {
    let size = usize::from(input.byte()).max(1);
    let runtime = runtime();
    let received = |pieces: VecDeque<&[u8]>| {
        let mut receiver = Receiver::new(Arrivals(pieces), preamble, limit_bytes);
        let mut messages: Vec<M> = Vec::new();
        let ended = loop {
            // Nothing waits: the stream is always ready.
            match runtime.block_on(receiver.whole::<M>()) {
                Ok(message) => messages.push(message),
                Err(error) => break error.kind(),
            }
        };
        (messages, ended)
    };
    let (messages, ended) = received(input.0.chunks(size).collect());
    let whole = received([input.0].into());
    assert!(whole == (messages.clone(), ended), "{whole:?} in one piece; {messages:?} and {ended} in several");
    assert!(matches!(ended, ErrorKind::UnexpectedEof | ErrorKind::InvalidData), "{ended}");
    for message in &messages {
        assert_eq!(M::decode(&*message.encode_to_vec()).as_ref(), Ok(message));
    }
    (messages, ended)
}

/// Returns a runtime of this thread.
pub(crate) fn runtime() -> tokio::runtime::Runtime {
    let builder = &mut tokio::runtime::Builder::new_current_thread();
    builder.enable_time().build().expect("a runtime of one thread needs nothing")
}

/// Returns a connection's bytes with these messages, before them the length of the pieces.
#[cfg(test)]
pub(crate) fn connection<M: Message>(size: u8, preamble: Preamble, messages: &[M]) -> Vec<u8> {
    let mut bytes = [&[size], &preamble[..]].concat();
    for message in messages {
        bytes.extend((message.encoded_len() as u32).to_be_bytes());
        bytes.extend(message.encode_to_vec());
    }
    bytes
}
