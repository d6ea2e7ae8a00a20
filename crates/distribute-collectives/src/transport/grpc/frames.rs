//! The frames of a stream.

use std::io::IoSlice;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use distribute_cluster::grpc::GrpcMessage;

pub(super) use super::wire::Frame;
use super::wire::frame::Kind;
use super::{Bell, FRAME_BYTES, lock};

/// Limit of a frame of data: the other fields take a few bytes.
pub(super) const MAX_FRAME_BYTES: usize = FRAME_BYTES + 64;

/// Limit of a frame that holds no data.
pub(super) const MAX_CONTROL_BYTES: usize = 64 * 1024;

impl GrpcMessage for Frame {
    const PAYLOAD_FIELD: u8 = 2;

    fn take_payload(&mut self) -> Bytes {
        match self.kind.take() {
            Some(Kind::Data(bytes)) => bytes,
            control => {
                self.kind = control;
                Bytes::new()
            }
        }
    }
}

/// Creates a frame with a control message.
pub(super) fn control(kind: Kind) -> Frame {
    Frame { kind: Some(kind) }
}

/// Frames of data that no socket has taken yet, and buffers for the next ones: memory that the system gives anew costs
/// more than to fill it.
pub(super) struct Unsent {
    frames: AtomicUsize,
    buffers: Mutex<Vec<Vec<u8>>>,
    bell: Arc<Bell>,
}

/// Most buffers that are kept for the next frames.
const KEPT_BUFFERS: usize = 2;

impl Unsent {
    /// None, of a member with this bell, which rings whenever there is one less.
    pub(super) fn new(bell: &Arc<Bell>) -> Arc<Unsent> {
        Arc::new(Unsent { frames: AtomicUsize::new(0), buffers: Mutex::default(), bell: bell.clone() })
    }

    pub(super) fn count(&self) -> usize {
        self.frames.load(Ordering::Acquire)
    }
}

/// The bytes of a frame; dropped when a socket has taken them, or none will.
struct Payload {
    bytes: Vec<u8>,
    unsent: Arc<Unsent>,
}

impl AsRef<[u8]> for Payload {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        let mut buffers = lock(&self.unsent.buffers);
        if buffers.len() < KEPT_BUFFERS {
            buffers.push(std::mem::take(&mut self.bytes));
        }
        drop(buffers);
        self.unsent.frames.fetch_sub(1, Ordering::Release);
        self.unsent.bell.ring();
    }
}

/// Creates a frame of the first `len` bytes of `parts`, which are taken out of them.
pub(super) fn data(parts: &mut Vec<IoSlice<'_>>, len: usize, unsent: &Arc<Unsent>) -> Frame {
    let mut bytes = lock(&unsent.buffers).pop().unwrap_or_default();
    bytes.clear();
    bytes.reserve_exact(len);
    let mut used = 0;
    for part in parts.iter_mut() {
        let taken = part.len().min(len - bytes.len());
        bytes.extend_from_slice(&part[..taken]);
        if taken < part.len() {
            part.advance(taken);
            break;
        }
        used += 1;
    }
    parts.drain(..used);
    unsent.frames.fetch_add(1, Ordering::Relaxed);
    let payload = Payload { bytes, unsent: unsent.clone() };
    Frame { kind: Some(Kind::Data(Bytes::from_owner(payload))) }
}

#[cfg(test)]
mod tests {
    use distribute_cluster::grpc::encode;
    use prost::Message;

    use super::super::wire::{Hello, Here, Left};
    use super::*;

    fn none() -> Arc<Unsent> {
        Unsent::new(&Arc::default())
    }

    #[test]
    fn frames_are_what_the_library_would_write() {
        for len in [1, 127, 128, 300, 70_000] {
            let payload: Vec<u8> = (0..len).map(|index| index as u8).collect();
            let frame = data(&mut payload.chunks(100).map(IoSlice::new).collect(), len, &none());
            assert_eq!(frame, Frame { kind: Some(Kind::Data(payload.into())) });
            assert_eq!(encode(frame.clone()).concat()[5..], frame.encode_to_vec());
        }
        let hello = Hello { nonce: vec![7; 16].into(), rank: 3, version: 2 };
        for kind in [Kind::Hello(hello), Kind::Here(Here {}), Kind::Waiting(1), Kind::Left(Left {})] {
            let frame = control(kind);
            assert_eq!(encode(frame.clone()).concat()[5..], frame.encode_to_vec());
        }
    }

    #[test]
    fn data_end_within_a_part() {
        let mut parts = vec![IoSlice::new(b"abc"), IoSlice::new(b""), IoSlice::new(b"defg")];
        let unsent = none();
        let [first, second] = [5, 2].map(|len| data(&mut parts, len, &unsent).take_payload());
        assert!(parts.is_empty());
        assert_eq!((&first[..], &second[..]), (&b"abcde"[..], &b"fg"[..]));
        assert_eq!(unsent.count(), 2);
        // A part of it is still held.
        let rest = first.slice(3..);
        drop((first, second));
        assert_eq!((unsent.count(), lock(&unsent.buffers).len()), (1, 1));
        drop(rest);
        assert_eq!((unsent.count(), lock(&unsent.buffers).len()), (0, 2));
        // The buffer of the next frame has been that of another.
        let again = data(&mut vec![IoSlice::new(b"xyz")], 3, &unsent).take_payload();
        assert_eq!((&again[..], lock(&unsent.buffers).len()), (&b"xyz"[..], 1));
    }
}
