//! gRPC's messages, as they arrive in pieces.

use bytes::Bytes;
use prost::Message;

use super::encode::{GrpcMessage, encode};
use super::pieces::Pieces;
use crate::fuzz::Input;

/// A message as the services have them: fields, and a payload.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Sample {
    #[prost(uint32, tag = "1")]
    pub(crate) number: u32,
    #[prost(string, tag = "2")]
    pub(crate) name: String,
    #[prost(message, repeated, tag = "3")]
    pub(crate) inner: Vec<Sample>,
    #[prost(bytes = "bytes", tag = "15")]
    pub(crate) payload: Bytes,
}

impl GrpcMessage for Sample {
    fn take_payload(&mut self) -> Bytes {
        std::mem::take(&mut self.payload)
    }
}

/// Limit of a message.
const LIMIT_BYTES: usize = 4096 * 3;

/// The first byte chooses the length of the pieces. The messages are the same whatever it is.
pub(crate) fn pieces(bytes: &[u8]) -> bool {
    let mut input = Input(bytes);
    let size = usize::from(input.byte()) * 40;
    let (several, whole) = (taken(input.0, size.max(1)), taken(input.0, usize::MAX));
    assert_eq!(several, whole);
    for message in &several.0 {
        let again = encode(message.clone()).concat();
        // What it does not know of a message it leaves out.
        assert!(again.len() <= LIMIT_BYTES + 5);
        assert_eq!(taken(&again, 7), (vec![message.clone()], false));
    }
    !several.0.is_empty()
}

/// Returns the messages, and whether they ended with an error.
fn taken(bytes: &[u8], size: usize) -> (Vec<Sample>, bool) {
    let (mut pieces, mut messages) = (Pieces::default(), Vec::new());
    for piece in bytes.chunks(size) {
        pieces.push(Bytes::copy_from_slice(piece));
        loop {
            match pieces.message::<Sample>(LIMIT_BYTES) {
                Ok(Some(message)) => messages.push(message),
                Ok(None) => break,
                Err(_) => return (messages, true),
            }
        }
    }
    (messages, false)
}
