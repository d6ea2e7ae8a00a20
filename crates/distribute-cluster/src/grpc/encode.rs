//! Messages as bytes, the payload apart.

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;

/// A message of a service, whose payload, if it has one, is written and read without a copy.
pub trait GrpcMessage: Message + Default + 'static {
    /// The number of the payload's field, 1 to 15; no other field has a higher one.
    const PAYLOAD_FIELD: u8 = 15;

    /// Takes the payload out; empty if there is none.
    fn take_payload(&mut self) -> Bytes {
        Bytes::new()
    }
}

/// Size of the compression flag and the length.
pub(super) const PREFIX_BYTES: usize = 5;

/// Payloads up to this size are copied after the other fields, which is cheaper than another piece.
pub(super) const SHORT_BYTES: usize = 4096;

/// Encodes a message, with gRPC's prefix, as the bytes before the payload, and the payload, unless it is short.
pub fn encode<M: GrpcMessage>(mut message: M) -> [Bytes; 2] {
    // The tag of a length-delimited field.
    let payload_tag = const {
        assert!(M::PAYLOAD_FIELD >= 1 && M::PAYLOAD_FIELD <= 15, "the tag of the payload's field must be one byte");
        M::PAYLOAD_FIELD << 3 | 2
    };
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
        head.put_u8(payload_tag);
        let _ = prost::encode_length_delimiter(payload.len(), &mut head);
    }
    if short > 0 {
        head.extend_from_slice(&payload);
        return [head.freeze(), Bytes::new()];
    }
    [head.freeze(), payload]
}
