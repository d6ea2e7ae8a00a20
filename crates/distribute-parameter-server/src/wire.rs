//! Calls between tasks: gRPC's framing over HTTP/2, with payloads that are neither copied into a message nor out of one.
//!
//! A message's payload is its last field, so a sender writes the rest, the payload's length, and then the payload from where
//! it lies; a receiver cuts it out of the pieces in which it arrives. tonic's own codec copies it once more on either side.
//!
//! # Source
//! "gRPC over HTTP/2", and the encoding of Protocol Buffers.

mod admission;
mod attendance;
mod call;
mod frame;
mod serve;

pub(crate) use admission::{Addressee, Identity};
pub(crate) use attendance::{Attendance, MIN_SILENCE, Pulse, beat_interval};
pub(crate) use call::{Link, is_lost};
pub(crate) use frame::{Inbox, Outbox, Parcel, Parts, parts_of};
pub(crate) use serve::{Methods, Router, reply, reply_all, reply_stream};

/// The messages.
#[expect(unreachable_pub, reason = "generated from the protocol files")]
pub(crate) mod proto {
    tonic::include_proto!("distribute.v1");
}

/// What two tasks must agree on.
pub(crate) const VERSION: u32 = 2;

/// Limit of the headers of a call.
pub(crate) const MAX_HEADERS_BYTES: u32 = 16 << 10;

/// What a receiver lets HTTP/2 send in one piece: most payloads then arrive in few.
pub(crate) const HTTP_FRAME_BYTES: u32 = 2 << 20;

/// What HTTP/2 lets a sender be ahead of its receiver, for one call and for all of a connection.
pub(crate) const WINDOW_BYTES: u32 = 8 << 20;

/// Messages that wait to be sent in one call.
const QUEUED_MESSAGES: usize = 4;

/// Payloads are sent in parts of at most this. A multiple of every element's size.
pub(crate) const MAX_PAYLOAD_BYTES: usize = 32 << 20;

/// Limit of a message that has no payload, and of what a message has besides its payload.
pub(crate) const MAX_HEAD_BYTES: usize = 1 << 20;

/// Limit of a message that holds a few numbers and a sentence.
pub(crate) const SHORT_MESSAGE_BYTES: usize = 8 << 10;

/// Limit of a message with a payload.
pub(crate) const MAX_MESSAGE_BYTES: usize = MAX_PAYLOAD_BYTES + MAX_HEAD_BYTES;

/// Rows that one request may name.
pub(crate) const MAX_ROWS: usize = MAX_HEAD_BYTES / 2 / size_of::<u64>();

/// Limit of the rows that the answer to one request holds, unless it is a single row. Whole shards are not limited: they are here
/// once, and are sent from where they are.
pub(crate) const MAX_ANSWER_BYTES: u64 = 256 << 20;

/// The path of a method of parameter servers.
macro_rules! ps {
    ($method:literal) => {
        concat!("/distribute.v1.ParameterServer/", $method)
    };
}
pub(crate) use ps;

/// The path of a method of workers.
macro_rules! worker {
    ($method:literal) => {
        concat!("/distribute.v1.Worker/", $method)
    };
}
pub(crate) use worker;
