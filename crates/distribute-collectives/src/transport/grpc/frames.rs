//! The frames of a stream.

use std::io::IoSlice;

use bytes::{Bytes, BytesMut};
use distribute_cluster::grpc::GrpcMessage;

use super::FRAME_BYTES;
pub(super) use super::wire::Frame;
use super::wire::frame::Kind;

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

/// Creates a frame of the first `len` bytes of `parts`, which are taken out of them.
pub(super) fn data(parts: &mut Vec<IoSlice<'_>>, len: usize) -> Frame {
    let mut bytes = BytesMut::with_capacity(len);
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
    Frame { kind: Some(Kind::Data(bytes.freeze())) }
}

#[cfg(test)]
mod tests {
    use distribute_cluster::grpc::encode;
    use prost::Message;

    use super::super::wire::{Hello, Here, Left};
    use super::*;

    #[test]
    fn frames_are_what_the_library_would_write() {
        for len in [1, 127, 128, 300, 70_000] {
            let payload: Vec<u8> = (0..len).map(|index| index as u8).collect();
            let frame = data(&mut payload.chunks(100).map(IoSlice::new).collect(), len);
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
        assert_eq!(data(&mut parts, 5).take_payload(), &b"abcde"[..]);
        assert_eq!(data(&mut parts, 2).take_payload(), &b"fg"[..]);
        assert!(parts.is_empty());
    }
}
