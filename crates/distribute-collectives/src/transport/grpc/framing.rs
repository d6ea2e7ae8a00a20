//! Frames in the bodies of HTTP/2 streams, by hand: a payload is copied once into the bytes that are sent, and handed
//! over in the pieces in which it arrives. tonic's own codec copies it once more on either side.
//!
//! # Source
//! The messages of `collective.proto` in the encoding of Protocol Buffers, with the prefixes of "gRPC over HTTP/2".

use std::io::IoSlice;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;

use super::wire::{Frame, frame::Kind};

/// A flag for compression and the length.
const PREFIX_BYTES: usize = 5;

/// Field 2 of a frame, with a length.
const DATA_TAG: u8 = 2 << 3 | 2;

/// Longest frame that holds no data.
const MAX_WORDS_BYTES: usize = 64 * 1024;

/// A frame that says something.
pub(super) fn words(kind: Kind) -> Bytes {
    let frame = Frame { kind: Some(kind) };
    let mut bytes = BytesMut::with_capacity(PREFIX_BYTES + frame.encoded_len());
    bytes.put_u8(0);
    bytes.put_u32(frame.encoded_len() as u32);
    // A buffer of bytes grows as needed.
    let _ = frame.encode(&mut bytes);
    bytes.freeze()
}

/// A frame of the first `len` bytes of `parts`, which are taken out of them.
pub(super) fn data(parts: &mut Vec<IoSlice<'_>>, len: usize) -> Bytes {
    let body = 1 + prost::length_delimiter_len(len) + len;
    let mut bytes = BytesMut::with_capacity(PREFIX_BYTES + body);
    bytes.put_u8(0);
    bytes.put_u32(body as u32);
    bytes.put_u8(DATA_TAG);
    let _ = prost::encode_length_delimiter(len, &mut bytes);
    let end = bytes.len() + len;
    let mut used = 0;
    for part in parts.iter_mut() {
        let taken = part.len().min(end - bytes.len());
        bytes.extend_from_slice(&part[..taken]);
        if taken < part.len() {
            part.advance(taken);
            break;
        }
        used += 1;
    }
    parts.drain(..used);
    bytes.freeze()
}

/// A part of a stream that has arrived: data, or a whole control message.
#[derive(Debug, PartialEq)]
pub(super) enum FramePart {
    /// A piece of data.
    Data(Bytes),
    /// A control message.
    Control(Kind),
}

/// The error of bytes that are not frames.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Malformed;

/// Takes frames out of the pieces in which they arrive.
#[derive(Debug, Default)]
pub(super) struct Unframer {
    /// The bytes so far of a prefix, of the beginning of a frame, or of a frame without data.
    head: BytesMut,
    /// Bytes of data still to come in the present frame.
    left: usize,
}

impl Unframer {
    /// Takes from `piece` until something is said; `None` when it is used up.
    pub(super) fn next(&mut self, piece: &mut Bytes) -> Result<Option<FramePart>, Malformed> {
        while !piece.is_empty() {
            if self.left > 0 {
                let data = piece.split_to(self.left.min(piece.len()));
                self.left -= data.len();
                return Ok(Some(FramePart::Data(data)));
            }
            let missing = self.missing()?;
            if missing > 0 {
                self.head.extend_from_slice(&piece.split_to(missing.min(piece.len())));
            }
            if self.missing()? == 0
                && let Some(said) = self.read_head()?
            {
                return Ok(Some(said));
            }
        }
        Ok(None)
    }

    /// Bytes that the head needs before it can be read.
    fn missing(&self) -> Result<usize, Malformed> {
        let head = &self.head[..];
        if head.len() <= PREFIX_BYTES {
            // The byte after the prefix tells data from words, where there is one.
            let empty = head.len() == PREFIX_BYTES && head[1..] == [0; 4];
            return Ok(if empty { 0 } else { PREFIX_BYTES + 1 - head.len() });
        }
        let whole = PREFIX_BYTES + self.body_len();
        if head[PREFIX_BYTES] == DATA_TAG {
            let length = &head[PREFIX_BYTES + 1..];
            let ended = length.last().is_some_and(|byte| byte & 0x80 == 0);
            return if length.len() > 5 { Err(Malformed) } else { Ok(usize::from(!ended)) };
        }
        if whole > MAX_WORDS_BYTES { Err(Malformed) } else { Ok(whole - head.len()) }
    }

    fn body_len(&self) -> usize {
        (&self.head[1..PREFIX_BYTES]).get_u32() as usize
    }

    /// The head is complete: words, or the beginning of data.
    fn read_head(&mut self) -> Result<Option<FramePart>, Malformed> {
        let body = self.body_len();
        let head = std::mem::take(&mut self.head);
        if head[0] != 0 {
            // Compression was not requested.
            return Err(Malformed);
        }
        let content = &head[PREFIX_BYTES..];
        if content.first() == Some(&DATA_TAG) {
            let len = prost::decode_length_delimiter(&content[1..]).map_err(|_| Malformed)?;
            if content.len() + len != body {
                return Err(Malformed);
            }
            self.left = len;
            return Ok(None);
        }
        let frame = Frame::decode(content).map_err(|_| Malformed)?;
        Ok(frame.kind.map(FramePart::Control))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use proptest::test_runner::RngSeed;

    use super::super::wire::{Hello, Left};
    use super::*;

    /// Returns the frames of bytes that arrive in pieces of this size, with the data of one frame joined.
    fn read(bytes: &[u8], pieces: usize) -> Result<(Vec<u8>, Vec<Kind>), Malformed> {
        let mut unframer = Unframer::default();
        let (mut data, mut words) = (Vec::new(), Vec::new());
        for piece in bytes.chunks(pieces) {
            let mut piece = Bytes::copy_from_slice(piece);
            while let Some(said) = unframer.next(&mut piece)? {
                match said {
                    FramePart::Data(bytes) => data.extend_from_slice(&bytes),
                    FramePart::Control(kind) => words.push(kind),
                }
            }
        }
        Ok((data, words))
    }

    #[test]
    fn data_are_what_the_library_would_write() {
        let payload: Vec<u8> = (0..300).map(|index| index as u8).collect();
        let ours = data(&mut vec![IoSlice::new(&payload)], 300);
        assert_eq!(ours, words(Kind::Data(Bytes::from(payload))));
    }

    #[test]
    fn frames_of_other_versions_are_passed_over() {
        // An empty frame, and one with an unknown field.
        let bytes = [0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 9 << 3, 1];
        assert_eq!(read(&bytes, 1), Ok((Vec::new(), Vec::new())));
    }

    #[test]
    fn what_is_too_long_or_inconsistent_is_malformed() {
        for bytes in [
            // Words of 4 GiB; compressed; data shorter than their frame; a length that never ends.
            [0, 0xff, 0xff, 0xff, 0xff, 0x1a, 1, 1, 1, 1, 1, 1],
            [1, 0, 0, 0, 2, 9 << 3, 1, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 9, DATA_TAG, 1, 7, 7, 7, 7, 7],
            [0, 0, 0, 0, 9, DATA_TAG, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
        ] {
            assert_eq!(read(&bytes, 3), Err(Malformed));
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

        #[test]
        fn frames_arrive_whole_whatever_the_pieces(
            lens in prop::collection::vec(0usize..700, 0..8),
            cut in 1usize..200,
            pieces in 1usize..900,
        ) {
            let mut bytes = words(Kind::Hello(Hello { nonce: vec![7; 16].into(), rank: 3 })).to_vec();
            let mut sent = Vec::new();
            for (index, len) in lens.iter().enumerate() {
                let payload: Vec<u8> = (0..*len).map(|at| (at * 7 + index) as u8).collect();
                let mut parts: Vec<IoSlice<'_>> = payload.chunks(cut).map(IoSlice::new).collect();
                bytes.extend_from_slice(&data(&mut parts, *len));
                prop_assert!(parts.is_empty());
                sent.extend_from_slice(&payload);
                bytes.extend_from_slice(&words(Kind::Waiting(index as u64)));
            }
            bytes.extend_from_slice(&words(Kind::Left(Left {})));
            let (data, words) = read(&bytes, pieces).expect("frames");
            prop_assert_eq!(data, sent);
            prop_assert_eq!(words.len(), lens.len() + 2);
        }

        #[test]
        fn any_bytes_are_read_without_harm(bytes: Vec<u8>, pieces in 1usize..50) {
            let _ = read(&bytes, pieces);
        }
    }
}
