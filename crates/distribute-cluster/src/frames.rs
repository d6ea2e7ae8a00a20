//! Messages on a connection, each after its length. Either side first sends a preamble of 8 bytes, by which the other
//! is told from what else may be at its address.

use std::io::{Error as IoError, ErrorKind, Result as IoResult};
use std::time::Duration;

use bytes::{Buf, BufMut, BytesMut};
use prost::Message;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::mpsc;

/// The first bytes in either direction.
pub(crate) type Preamble = [u8; 8];

/// Size of the length before a message.
const LENGTH_BYTES: usize = 4;

/// The receiving half of a connection.
pub(crate) struct Receiver<R> {
    stream: R,
    preamble: Preamble,
    buffer: BytesMut,
    known: bool,
    limit_bytes: usize,
}

impl<R: AsyncRead + Unpin> Receiver<R> {
    /// Receives messages of at most `limit_bytes`.
    pub(crate) fn new(stream: R, preamble: Preamble, limit_bytes: usize) -> Receiver<R> {
        Receiver { stream, preamble, buffer: BytesMut::new(), known: false, limit_bytes }
    }

    /// Changes the limit of the messages to come.
    pub(crate) fn limit(&mut self, limit_bytes: usize) {
        self.limit_bytes = limit_bytes;
    }

    /// Returns the next message, or `None` if only a part of it has arrived, which is a sign of life. Cancel safe.
    ///
    /// # Errors
    /// `UnexpectedEof` at the end of the connection, `InvalidData` for what is not of this protocol or too long.
    pub(crate) async fn next<M: Message + Default>(&mut self) -> IoResult<Option<M>> {
        if let Some(message) = self.take()? {
            return Ok(Some(message));
        }
        self.buffer.reserve(READ_BYTES);
        match self.stream.read_buf(&mut self.buffer).await? {
            0 => Err(ErrorKind::UnexpectedEof.into()),
            _ => self.take(),
        }
    }

    /// Returns the next message once it is complete.
    ///
    /// # Errors
    /// `UnexpectedEof` and `InvalidData`, as for [`next`](Receiver::next).
    pub(crate) async fn whole<M: Message + Default>(&mut self) -> IoResult<M> {
        loop {
            if let Some(message) = self.next().await? {
                return Ok(message);
            }
        }
    }

    /// Reads and discards until the connection ends.
    pub(crate) async fn drain(&mut self) {
        loop {
            self.buffer.clear();
            self.buffer.reserve(READ_BYTES);
            if !self.stream.read_buf(&mut self.buffer).await.is_ok_and(|bytes| bytes > 0) {
                return;
            }
        }
    }

    /// Takes a message out of what has arrived.
    fn take<M: Message + Default>(&mut self) -> IoResult<Option<M>> {
        if !self.known {
            let arrived = self.buffer.len().min(self.preamble.len());
            if self.buffer[..arrived] != self.preamble[..arrived] {
                return Err(IoError::new(ErrorKind::InvalidData, "it sent bytes that are not of this protocol"));
            }
            if arrived < self.preamble.len() {
                return Ok(None);
            }
            self.buffer.advance(self.preamble.len());
            self.known = true;
        }
        let Some(mut length) = self.buffer.get(..LENGTH_BYTES) else { return Ok(None) };
        let length = length.get_u32() as usize;
        if length > self.limit_bytes {
            let problem = format!("it sent a message of {length} bytes, at most {} are allowed", self.limit_bytes);
            return Err(IoError::new(ErrorKind::InvalidData, problem));
        }
        if self.buffer.len() < LENGTH_BYTES + length {
            return Ok(None);
        }
        self.buffer.advance(LENGTH_BYTES);
        M::decode(self.buffer.split_to(length).freeze())
            .map(Some)
            .map_err(|error| IoError::new(ErrorKind::InvalidData, error))
    }
}

/// Bytes that are read at a time, at least.
const READ_BYTES: usize = 8 << 10;

/// Sends messages until their queue ends, and then the end of the connection.
///
/// # Errors
/// If the connection broke, or took nothing for longer than `timeout`.
pub(crate) async fn send<W: AsyncWrite + Unpin, M: Message>(
    mut stream: W,
    preamble: Preamble,
    mut queue: mpsc::Receiver<M>,
    timeout: Duration,
) -> IoResult<()> {
    let mut buffer = BytesMut::new();
    buffer.put_slice(&preamble);
    while let Some(message) = queue.recv().await {
        put(&message, &mut buffer);
        while buffer.len() < READ_BYTES
            && let Ok(message) = queue.try_recv()
        {
            put(&message, &mut buffer);
        }
        while buffer.has_remaining() {
            let written = tokio::time::timeout(timeout, stream.write_buf(&mut buffer)).await;
            if written.map_err(|_| IoError::from(ErrorKind::TimedOut)).flatten()? == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
        }
        // TLS may keep the end of it.
        tokio::time::timeout(timeout, stream.flush())
            .await
            .map_err(|_| IoError::from(ErrorKind::TimedOut))
            .flatten()?;
        // A large reply's memory is not kept.
        buffer = BytesMut::new();
    }
    stream.shutdown().await
}

fn put(message: &impl Message, buffer: &mut BytesMut) {
    // An overlong message is refused by its receiver, whatever the number.
    buffer.put_u32(u32::try_from(message.encoded_len()).unwrap_or(u32::MAX));
    // A buffer of bytes grows as needed.
    let _ = message.encode(buffer);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;

    use super::*;
    use crate::messages::PutRequest;

    const PREAMBLE: Preamble = *b"distcoor";

    /// Returns the messages of bytes that arrive in pieces of this size, and the error at their end.
    fn received(bytes: &[u8], piece: usize, limit_bytes: usize) -> (Vec<PutRequest>, ErrorKind) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let (mut sender, stream) = tokio::io::duplex(piece);
            let mut receiver = Receiver::new(stream, PREAMBLE, limit_bytes);
            let send = async {
                // Fails where the receiver has refused what came before.
                let _ = sender.write_all(bytes).await;
                drop(sender);
            };
            let receive = async {
                let mut messages = Vec::new();
                loop {
                    match receiver.whole().await {
                        Ok(message) => messages.push(message),
                        Err(error) => {
                            drop(receiver);
                            return (messages, error.kind());
                        }
                    }
                }
            };
            tokio::join!(send, receive).1
        })
    }

    /// Returns the bytes that are sent for messages.
    fn sent(messages: &[PutRequest]) -> Vec<u8> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(async {
            let (outbox, queue) = mpsc::channel(messages.len().max(1));
            messages.iter().for_each(|message| outbox.try_send(message.clone()).expect("room"));
            drop(outbox);
            let mut bytes = Vec::new();
            send(&mut bytes, PREAMBLE, queue, Duration::from_secs(1)).await.expect("a buffer takes all");
            bytes
        })
    }

    fn message(bytes: usize) -> PutRequest {
        PutRequest { key: bytes.to_string(), value: vec![7; bytes].into() }
    }

    #[test]
    fn what_is_not_of_the_protocol_is_refused_at_once() {
        for bytes in [&b"PRI * HTTP/2.0\r\n\r\n"[..], b"d\0", b"distcoor\0\0\0\x02\xff\xff"] {
            assert_eq!(received(bytes, 64, 100), (Vec::new(), ErrorKind::InvalidData), "{bytes:?}");
        }
        // The length is refused before anything that it announces has arrived.
        assert_eq!(received(b"distcoor\0\0\0\x65", 64, 100), (Vec::new(), ErrorKind::InvalidData));
        assert_eq!(received(b"distcoor\0\0\0\x64", 64, 100), (Vec::new(), ErrorKind::UnexpectedEof));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

        #[test]
        fn messages_arrive_whole_whatever_the_pieces(
            lens in prop::collection::vec(0usize..20_000, 0..8),
            piece in 1usize..9000,
        ) {
            let messages: Vec<PutRequest> = lens.iter().map(|bytes| message(*bytes)).collect();
            prop_assert_eq!(received(&sent(&messages), piece, 30_000), (messages, ErrorKind::UnexpectedEof));
        }

        #[test]
        fn any_bytes_are_read_without_harm(bytes: Vec<u8>, piece in 1usize..50) {
            received(&bytes, piece, 1000);
            received(&[&PREAMBLE[..], &bytes].concat(), piece, 1000);
        }
    }
}
