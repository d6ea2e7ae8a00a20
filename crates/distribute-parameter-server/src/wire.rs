//! Calls between tasks: gRPC's framing over HTTP/2, with payloads that are neither copied into a message nor out of one.
//!
//! A message's payload is its last field, so a sender writes the rest, the payload's length, and then the payload from where
//! it lies; a receiver cuts it out of the pieces in which it arrives. tonic's own codec copies it once more on either side.
//!
//! # Source
//! "gRPC over HTTP/2", and the encoding of Protocol Buffers.

mod call;
mod frame;
mod serve;

pub(crate) use call::{Link, Replies, is_lost};
pub(crate) use frame::{Inbox, Outbox, Parcel};
pub(crate) use serve::{Methods, Router, check_version, reply, reply_all, reply_stream};

/// The messages.
#[expect(unreachable_pub, reason = "generated from the protocol files")]
pub(crate) mod proto {
    tonic::include_proto!("distribute.v1");
}

/// What two tasks must agree on.
pub(crate) const VERSION: u32 = 1;

/// What a receiver lets HTTP/2 send in one piece: most payloads then arrive in few.
pub(crate) const HTTP_FRAME_BYTES: u32 = 2 << 20;

/// What HTTP/2 lets a sender be ahead of its receiver, for one call and for all of a connection.
pub(crate) const WINDOW_BYTES: u32 = 8 << 20;

/// Messages that wait to be sent in one call.
const QUEUED_MESSAGES: usize = 4;

/// No message is longer; partitioners keep shards below it.
const MAX_MESSAGE_BYTES: usize = 2 << 30;

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
