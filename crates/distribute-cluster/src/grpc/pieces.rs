//! Received bytes, in the pieces in which they arrived.

use std::collections::VecDeque;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tonic::Status;

use super::encode::{GrpcMessage, PREFIX_BYTES, SHORT_BYTES};

/// Received bytes; messages are taken out of them.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    pieces: VecDeque<Bytes>,
    /// Short chunks at the end, joined, so that a sender of single bytes does not cost a chunk for each.
    tail: BytesMut,
    len: usize,
}

impl Pieces {
    pub(super) fn push(&mut self, piece: Bytes) {
        self.len += piece.len();
        if piece.len() <= SHORT_BYTES {
            self.tail.extend_from_slice(&piece);
        } else {
            self.settle();
            self.pieces.push_back(piece);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes a chunk of the tail.
    fn settle(&mut self) {
        if !self.tail.is_empty() {
            self.pieces.push_back(self.tail.split().freeze());
        }
    }

    /// Returns the first message once it is complete. An overlong one is refused as soon as its length is known.
    pub(super) fn message<M: GrpcMessage>(&mut self, limit_bytes: usize) -> Result<Option<M>, Status> {
        if self.len < PREFIX_BYTES {
            return Ok(None);
        }
        let mut prefix = [0; PREFIX_BYTES];
        let bytes = self.pieces.iter().flat_map(|piece| piece.iter()).chain(&self.tail);
        prefix.iter_mut().zip(bytes).for_each(|(byte, from)| *byte = *from);
        let len = (&prefix[1..]).get_u32() as usize;
        if prefix[0] != 0 {
            return Err(Status::invalid_argument("these are not messages of this protocol"));
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

    use prost::Message;

    use super::super::encode::encode;
    use super::*;

    const LIMIT: usize = 1 << 20;

    #[derive(Clone, PartialEq, Message)]
    struct Elements {
        #[prost(uint32, tag = "1")]
        shard: u32,
        #[prost(uint64, tag = "2")]
        version: u64,
        #[prost(bytes = "bytes", tag = "15")]
        payload: Bytes,
    }

    impl GrpcMessage for Elements {
        fn take_payload(&mut self) -> Bytes {
            std::mem::take(&mut self.payload)
        }
    }

    fn elements(shard: u32, len: usize) -> Elements {
        let payload = (0..len).map(|at| (at * 7 + shard as usize) as u8).collect::<Vec<u8>>().into();
        Elements { shard, version: 1 << 40, payload }
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
        let message: Elements = pieces.message(LIMIT).unwrap().unwrap();
        assert_eq!(message.payload.as_ptr(), payload.as_ptr());
    }

    #[test]
    fn what_is_no_message_is_refused() {
        for bytes in [&[1, 0, 0, 0, 1, 0][..], &[0, 0xff, 0xff, 0xff, 0xff], &[0, 0, 0, 0, 2, 0x7a, 9]] {
            let mut pieces = Pieces::default();
            pieces.push(Bytes::copy_from_slice(bytes));
            assert!(pieces.message::<Elements>(LIMIT).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn a_message_that_is_too_long_is_refused_before_it_is_there() {
        let mut pieces = Pieces::default();
        pieces.push(Bytes::from_static(&[0, 0, 0, 4, 1]));
        let error = pieces.message::<Elements>(1024).unwrap_err();
        assert!(error.message().contains("1025 bytes, where at most 1024"), "{error}");
    }

    #[test]
    fn a_sender_of_single_bytes_costs_no_piece_for_each() {
        let mut pieces = Pieces::default();
        let bytes: Vec<u8> = encode(elements(1, 4000)).concat();
        for byte in &bytes {
            assert!(pieces.message::<Elements>(LIMIT).unwrap().is_none());
            pieces.push(Bytes::copy_from_slice(std::slice::from_ref(byte)));
        }
        assert!(pieces.pieces.is_empty() && pieces.tail.capacity() < 3 * bytes.len());
        assert_eq!(pieces.message::<Elements>(LIMIT).unwrap(), Some(elements(1, 4000)));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 128, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

        #[test]
        fn messages_arrive_whole_whatever_the_pieces(
            lens in prop::collection::vec(0usize..700, 0..8),
            cut in 1usize..900,
        ) {
            let sent: Vec<Elements> = (0..).zip(&lens).map(|(shard, len)| elements(shard, *len)).collect();
            let bytes: Vec<u8> = sent.iter().cloned().flat_map(|message| encode(message).concat()).collect();
            let (mut pieces, mut got) = (Pieces::default(), Vec::<Elements>::new());
            for piece in bytes.chunks(cut) {
                pieces.push(Bytes::copy_from_slice(piece));
                while let Some(message) = pieces.message(LIMIT).expect("messages") {
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
                while let Ok(Some(_)) = pieces.message::<Elements>(LIMIT) {}
            }
        }
    }
}
