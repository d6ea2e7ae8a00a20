//! Messages in the bodies of HTTP/2 streams.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::HeaderMap;
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::body::Body;

use super::{MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES, QUEUED_MESSAGES, proto};

/// A message of the protocol.
pub(crate) trait Parcel: Message + Default + 'static {
    /// Takes the payload out, if there is one.
    fn take_payload(&mut self) -> Bytes {
        Bytes::new()
    }
}

macro_rules! parcels {
    ($($plain:ident),*; $($with_payload:ident),*) => {
        $(impl Parcel for proto::$plain {})*
        $(impl Parcel for proto::$with_payload {
            fn take_payload(&mut self) -> Bytes {
                std::mem::take(&mut self.payload)
            }
        })*
    };
}

parcels!(
    Done, AttendServer, ServerState, OptimizerOfShards, DescribeRequest, Description, PullRequest, PushReply,
    FenceRequest, LeaveRequest, AttendWorker, WorkerState, Resource;
    CreateShard, Elements, PushRequest, AssignRequest, Closure, Outcome
);

/// The tag of every payload: field 15, length-delimited.
const PAYLOAD_TAG: u8 = 15 << 3 | 2;

/// Size of the compression flag and the length.
const PREFIX_BYTES: usize = 5;

/// Payloads up to this size are copied after the other fields, which is cheaper than another chunk.
const SHORT_BYTES: usize = 4096;

/// Encodes a message as the bytes before the payload, and the payload, unless it is short.
fn encode(mut message: impl Parcel) -> [Bytes; 2] {
    let payload = message.take_payload();
    let of_payload = if payload.is_empty() { 0 } else { 1 + prost::length_delimiter_len(payload.len()) };
    let len = message.encoded_len() + of_payload;
    let short = if payload.len() <= SHORT_BYTES { payload.len() } else { 0 };
    let mut head = BytesMut::with_capacity(PREFIX_BYTES + len + short);
    head.put_u8(0);
    // An overlong message is refused by its receiver, whatever the number.
    head.put_u32(u32::try_from(len + payload.len()).unwrap_or(u32::MAX));
    // A buffer of bytes grows as needed.
    let _ = message.encode(&mut head);
    if !payload.is_empty() {
        head.put_u8(PAYLOAD_TAG);
        let _ = prost::encode_length_delimiter(payload.len(), &mut head);
    }
    if short > 0 {
        head.extend_from_slice(&payload);
        return [head.freeze(), Bytes::new()];
    }
    [head.freeze(), payload]
}

/// Splits a payload into the parts of several messages, each with whether more follow. There is always one part, which
/// may be empty.
pub(crate) fn parts_of(payload: Bytes) -> impl Iterator<Item = (Bytes, bool)> + Send {
    let mut rest = Some(payload);
    std::iter::from_fn(move || {
        let mut part = rest.take()?;
        if part.len() > MAX_PAYLOAD_BYTES {
            rest = Some(part.split_off(MAX_PAYLOAD_BYTES));
        }
        Some((part, rest.is_some()))
    })
}

/// The parts of a payload as they arrive. Only arrived parts use memory.
#[derive(Debug)]
pub(crate) struct Parts {
    limit_bytes: usize,
    len_bytes: usize,
    parts: Vec<Bytes>,
}

impl Parts {
    /// Creates an empty payload of at most `limit_bytes`.
    pub(crate) fn up_to(limit_bytes: usize) -> Parts {
        Parts { limit_bytes, len_bytes: 0, parts: Vec::new() }
    }

    /// Adds a part.
    ///
    /// # Errors
    /// `invalid_argument` if the payload becomes too long.
    pub(crate) fn push(&mut self, part: Bytes) -> Result<(), Status> {
        self.len_bytes = self.len_bytes.saturating_add(part.len());
        if self.len_bytes > self.limit_bytes {
            let (given, limit) = (self.len_bytes, self.limit_bytes);
            return Err(Status::invalid_argument(format!("{given} bytes have come, and at most {limit} are expected")));
        }
        if !part.is_empty() {
            self.parts.push(part);
        }
        Ok(())
    }

    /// Joins the payload, without a copy if it arrived in one part.
    pub(crate) fn join(mut self) -> Bytes {
        if self.parts.len() < 2 {
            return self.parts.pop().unwrap_or_default();
        }
        let mut joined = BytesMut::with_capacity(self.len_bytes);
        // Each part is freed as soon as it is copied.
        self.parts.drain(..).for_each(|part| joined.extend_from_slice(&part));
        joined.freeze()
    }
}

/// The sending half of a call's messages.
pub(crate) struct Outbox(mpsc::Sender<Result<Frame<Bytes>, Infallible>>);

/// Creates a queue of messages, and the body that they are sent in.
pub(crate) fn outbox() -> (Outbox, Body) {
    let (sender, frames) = mpsc::channel(2 * QUEUED_MESSAGES);
    (Outbox(sender), Body::new(StreamBody::new(ReceiverStream::new(frames))))
}

/// Creates a body of messages.
pub(super) fn body_of<M: Parcel>(messages: impl IntoIterator<Item = M, IntoIter: Send + 'static>) -> Body {
    let frames = messages.into_iter().flat_map(encode).filter(|bytes| !bytes.is_empty());
    Body::new(StreamBody::new(tokio_stream::iter(frames.map(|bytes| Ok::<_, Infallible>(Frame::data(bytes))))))
}

/// Creates a body of messages, followed by the status: that of the first error, if any. Each message is created when
/// there is room for it.
pub(super) fn reply_of<M: Parcel>(
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
    pub(crate) async fn send(&self, message: impl Parcel) -> bool {
        for bytes in encode(message) {
            if !bytes.is_empty() && self.0.send(Ok(Frame::data(bytes))).await.is_err() {
                return false;
            }
        }
        true
    }

    /// Queues a message if there is room at once; returns whether the reader still exists.
    pub(crate) fn offer(&self, message: impl Parcel) -> bool {
        let whole = encode(message).concat();
        !matches!(self.0.try_send(Ok(Frame::data(whole.into()))), Err(mpsc::error::TrySendError::Closed(_)))
    }

    /// Ends a reply.
    pub(super) async fn end(self, status: &Status) {
        // Fails only if the reader is gone.
        let _ = self.0.send(Ok(Frame::trailers(trailers(status)))).await;
    }

    /// Returns when the reader is gone.
    pub(crate) async fn closed(&self) {
        self.0.closed().await;
    }
}

/// The receiving half of a call's messages. Receiving is cancel safe: what has arrived is kept.
pub(crate) struct Inbox {
    body: Body,
    pieces: Pieces,
    limit_bytes: usize,
    timeout: Option<Duration>,
}

impl Inbox {
    /// Receives the answers to a call, whose caller limits its waits itself.
    pub(crate) fn of_answers(body: Body) -> Inbox {
        Inbox { body, pieces: Pieces::default(), limit_bytes: MAX_MESSAGE_BYTES, timeout: None }
    }

    /// Receives the requests of an admitted caller: no message may be longer than `limit_bytes`, and no frame may take
    /// longer than `timeout`.
    pub(crate) fn of_requests(body: Body, limit_bytes: usize, timeout: Duration) -> Inbox {
        Inbox { body, pieces: Pieces::default(), limit_bytes, timeout: Some(timeout) }
    }

    /// Returns the next message; `None` at the end.
    ///
    /// # Errors
    /// The other side's status; `unavailable` if the connection broke, `deadline_exceeded` if nothing arrived for too
    /// long, `invalid_argument` for an invalid or overlong message.
    pub(crate) async fn next<M: Parcel>(&mut self) -> Result<Option<M>, Status> {
        loop {
            if let Some(message) = self.pieces.message(self.limit_bytes)? {
                return Ok(Some(message));
            }
            let frame = match self.timeout {
                None => self.body.frame().await,
                Some(timeout) => tokio::time::timeout(timeout, self.body.frame()).await.map_err(|_| {
                    let seconds = timeout.as_secs_f64();
                    Status::deadline_exceeded(format!("nothing further has come of the call within {seconds:.1} s"))
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
    pub(crate) async fn one<M: Parcel>(&mut self) -> Result<M, Status> {
        self.next().await?.ok_or_else(|| Status::unavailable("the stream ended without a message"))
    }
}

/// The received bytes, in the chunks in which they arrived.
#[derive(Debug, Default)]
struct Pieces {
    pieces: VecDeque<Bytes>,
    /// Short chunks at the end, joined, so that a sender of single bytes does not cost a chunk for each.
    tail: BytesMut,
    len: usize,
}

impl Pieces {
    fn push(&mut self, piece: Bytes) {
        self.len += piece.len();
        if piece.len() <= SHORT_BYTES {
            self.tail.extend_from_slice(&piece);
        } else {
            self.settle();
            self.pieces.push_back(piece);
        }
    }

    fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes a chunk of the tail.
    fn settle(&mut self) {
        if !self.tail.is_empty() {
            self.pieces.push_back(self.tail.split().freeze());
        }
    }

    /// Returns the first message once it is complete. An overlong one is refused as soon as its length is known.
    fn message<M: Parcel>(&mut self, limit_bytes: usize) -> Result<Option<M>, Status> {
        if self.len < PREFIX_BYTES {
            return Ok(None);
        }
        let mut prefix = [0; PREFIX_BYTES];
        let bytes = self.pieces.iter().flat_map(|piece| piece.iter()).chain(&self.tail);
        prefix.iter_mut().zip(bytes).for_each(|(byte, from)| *byte = *from);
        let len = (&prefix[1..]).get_u32() as usize;
        if prefix[0] != 0 {
            return Err(Status::invalid_argument("these are no messages of this protocol"));
        }
        if len > limit_bytes {
            let problem = format!("a message of {len} bytes, where at most {limit_bytes} are taken");
            return Err(Status::invalid_argument(problem));
        }
        if self.len < PREFIX_BYTES + len {
            return Ok(None);
        }
        self.settle();
        self.advance(PREFIX_BYTES);
        M::decode(Buf::take(&mut *self, len)).map(Some).map_err(|error| Status::invalid_argument(error.to_string()))
    }
}

/// prost slices payloads out of it without a copy if they lie in one chunk.
impl Buf for Pieces {
    fn remaining(&self) -> usize {
        self.len
    }

    fn chunk(&self) -> &[u8] {
        self.pieces.front().map_or(&[], |piece| &piece[..])
    }

    fn advance(&mut self, mut count: usize) {
        self.len -= count;
        while let Some(front) = self.pieces.front_mut() {
            if front.len() > count {
                front.advance(count);
                return;
            }
            count -= front.len();
            self.pieces.pop_front();
        }
    }

    fn copy_to_bytes(&mut self, len: usize) -> Bytes {
        match self.pieces.front_mut() {
            Some(front) if front.len() > len => {
                self.len -= len;
                front.split_to(len)
            }
            Some(front) if front.len() == len => {
                self.len -= len;
                self.pieces.pop_front().unwrap_or_default()
            }
            _ => {
                let mut joined = BytesMut::with_capacity(len);
                joined.put(Buf::take(&mut *self, len));
                joined.freeze()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;

    use super::*;

    fn elements(shard: u32, len: usize) -> proto::Elements {
        let payload = (0..len).map(|at| (at * 7 + shard as usize) as u8).collect::<Vec<u8>>().into();
        proto::Elements { shard, version: 1 << 40, payload, ..proto::Elements::default() }
    }

    #[test]
    fn messages_are_what_the_library_would_write() {
        for len in [0, 1, 127, 128, 70_000] {
            let [head, payload] = encode(elements(3, len));
            let ours = [&head[PREFIX_BYTES..], &payload].concat();
            assert_eq!(payload.is_empty(), len <= SHORT_BYTES);
            assert_eq!(ours, elements(3, len).encode_to_vec(), "{len}");
        }
    }

    #[test]
    fn a_payload_in_one_piece_is_not_copied() {
        let [head, payload] = encode(elements(1, 5000));
        let mut pieces = Pieces::default();
        pieces.push(head);
        pieces.push(payload.clone());
        let message: proto::Elements = pieces.message(MAX_MESSAGE_BYTES).unwrap().unwrap();
        assert_eq!(message.payload.as_ptr(), payload.as_ptr());
    }

    #[test]
    fn what_is_no_message_is_refused() {
        for bytes in [&[1, 0, 0, 0, 1, 0][..], &[0, 0xff, 0xff, 0xff, 0xff], &[0, 0, 0, 0, 2, 0x7a, 9]] {
            let mut pieces = Pieces::default();
            pieces.push(Bytes::copy_from_slice(bytes));
            assert!(pieces.message::<proto::Elements>(MAX_MESSAGE_BYTES).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn a_message_that_is_too_long_is_refused_before_it_is_there() {
        let mut pieces = Pieces::default();
        pieces.push(Bytes::from_static(&[0, 0, 0, 4, 1]));
        let error = pieces.message::<proto::Done>(1024).unwrap_err();
        assert!(error.message().contains("1025 bytes, where at most 1024"), "{error}");
    }

    #[test]
    fn a_sender_of_single_bytes_costs_no_piece_for_each() {
        let mut pieces = Pieces::default();
        let bytes: Vec<u8> = encode(elements(1, 4000)).concat();
        for byte in &bytes {
            assert!(pieces.message::<proto::Elements>(MAX_MESSAGE_BYTES).unwrap().is_none());
            pieces.push(Bytes::copy_from_slice(std::slice::from_ref(byte)));
        }
        assert!(pieces.pieces.is_empty() && pieces.tail.capacity() < 3 * bytes.len());
        assert_eq!(pieces.message::<proto::Elements>(MAX_MESSAGE_BYTES).unwrap(), Some(elements(1, 4000)));
    }

    #[test]
    fn a_long_payload_goes_in_parts_and_comes_back() {
        for (len, count) in [(0, 1), (5, 1), (MAX_PAYLOAD_BYTES, 1), (MAX_PAYLOAD_BYTES + 1, 2)] {
            let payload = Bytes::from(vec![7u8; len]);
            let parts: Vec<(Bytes, bool)> = parts_of(payload.clone()).collect();
            assert!(parts.iter().rev().skip(1).all(|(_, more)| *more) && !parts.last().unwrap().1);
            assert_eq!(parts.len(), count);
            let mut back = Parts::up_to(len);
            parts.into_iter().for_each(|(part, _)| back.push(part).unwrap());
            assert!(back.push(Bytes::from_static(b"x")).is_err());
        }
        let mut back = Parts::up_to(3);
        back.push(Bytes::from_static(b"ab")).unwrap();
        back.push(Bytes::from_static(b"c")).unwrap();
        assert_eq!(back.join(), &b"abc"[..]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 128, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

        #[test]
        fn messages_arrive_whole_whatever_the_pieces(
            lens in prop::collection::vec(0usize..700, 0..8),
            cut in 1usize..900,
        ) {
            let sent: Vec<proto::Elements> = (0..).zip(&lens).map(|(shard, len)| elements(shard, *len)).collect();
            let bytes: Vec<u8> = sent.iter().cloned().flat_map(|message| encode(message).concat()).collect();
            let (mut pieces, mut got) = (Pieces::default(), Vec::<proto::Elements>::new());
            for piece in bytes.chunks(cut) {
                pieces.push(Bytes::copy_from_slice(piece));
                while let Some(message) = pieces.message(MAX_MESSAGE_BYTES).expect("messages") {
                    got.push(message);
                }
            }
            prop_assert!(pieces.is_empty());
            prop_assert_eq!(got, sent);
        }

        #[test]
        fn any_bytes_are_read_without_harm(bytes: Vec<u8>, cut in 1usize..50) {
            let mut pieces = Pieces::default();
            for piece in bytes.chunks(cut) {
                pieces.push(Bytes::copy_from_slice(piece));
                while let Ok(Some(_)) = pieces.message::<proto::Elements>(MAX_MESSAGE_BYTES) {}
            }
        }
    }
}
