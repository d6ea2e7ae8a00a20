//! Calls between tasks: who may make them, and how they are made and answered. Payloads are not copied, see
//! [`distribute_cluster::grpc`].

mod admission;
mod attendance;
mod call;
mod messages;
mod parts;
mod serve;

pub(crate) use admission::{Addressee, Identity, OwnJob};
pub(crate) use attendance::{Attendance, MIN_SILENCE, Pulse, beat_interval};
pub(crate) use call::Link;
pub(crate) use distribute_cluster::grpc::{GrpcMessage, Inbox, Outbox, is_lost};
pub(crate) use parts::{Parts, parts_of};
pub(crate) use serve::{Methods, reply, reply_all, reply_stream, service};

/// The messages.
#[expect(unreachable_pub, reason = "generated from the protocol files")]
pub(crate) mod proto {
    include!("../proto/distribute.v1.rs");
}

/// The protocol version, which two tasks must share.
pub(crate) const VERSION: u32 = 4;

/// Limit of the headers of a call.
pub(crate) const MAX_HEADERS_BYTES: u32 = 16 << 10;

/// Maximum HTTP/2 frame size: large, so that most payloads arrive in few chunks.
pub(crate) const HTTP_FRAME_BYTES: u32 = 2 << 20;

/// HTTP/2 flow-control window of one call; a connection has twice that.
pub(crate) const WINDOW_BYTES: u32 = 8 << 20;

/// Messages queued for sending in one call.
pub(crate) const QUEUED_MESSAGES: usize = 4;

/// Maximum size of a part of a payload. A multiple of every element's size.
pub(crate) const MAX_PAYLOAD_BYTES: usize = 32 << 20;

/// Limit of a message without a payload, and of the other fields of one with a payload.
pub(crate) const MAX_HEAD_BYTES: usize = 1 << 20;

/// Limit of a message that holds a few numbers and a text.
pub(crate) const SHORT_MESSAGE_BYTES: usize = 8 << 10;

/// Limit of a message with a payload.
pub(crate) const MAX_MESSAGE_BYTES: usize = MAX_PAYLOAD_BYTES + MAX_HEAD_BYTES;

/// Maximum number of rows in one request.
pub(crate) const MAX_ROWS: usize = MAX_HEAD_BYTES / 2 / size_of::<u64>();

/// Limit of the rows in the answer to one request, unless it is a single row. Whole shards are not limited, since they
/// are sent from where they are stored.
pub(crate) const MAX_ANSWER_BYTES: u64 = 256 << 20;

/// The path of a method of parameter servers.
macro_rules! ps {
    ($method:literal) => {
        concat!("/distribute.v1.ParameterServer/", $method)
    };
}
pub(crate) use ps;

/// The path of a method of servers of outer parameters.
macro_rules! outer {
    ($method:literal) => {
        concat!("/distribute.v1.OuterParameters/", $method)
    };
}
pub(crate) use outer;

/// The path of a method of workers.
macro_rules! worker {
    ($method:literal) => {
        concat!("/distribute.v1.Worker/", $method)
    };
}
pub(crate) use worker;
