//! Calls between dispatcher, data workers and consumers: who may make them, and how they are made and answered.

mod admission;
mod link;
mod serve;

use bytes::Bytes;

pub(crate) use admission::Identity;
pub(crate) use distribute_cluster::grpc::{GrpcMessage, Inbox, Outbox, is_lost, outbox};
pub(crate) use link::Link;
pub(crate) use serve::{Methods, reply, serve};

/// The messages.
#[expect(unreachable_pub, reason = "generated from the protocol files")]
pub(crate) mod proto {
    include!("../proto/distribute.v1.rs");
}

impl GrpcMessage for proto::Registration {}
impl GrpcMessage for proto::Registered {}
impl GrpcMessage for proto::LocateRequest {}
impl GrpcMessage for proto::Located {}
impl GrpcMessage for proto::ReadRequest {}

impl GrpcMessage for proto::Chunk {
    fn take_payload(&mut self) -> Bytes {
        std::mem::take(&mut self.payload)
    }
}

/// The protocol version, which two processes must share.
pub(crate) const VERSION: u32 = 1;

/// Limit of the headers of a call.
pub(crate) const MAX_HEADERS_BYTES: u32 = 16 << 10;

/// HTTP/2 flow-control window of one call: what is under way of a split besides what its reader holds.
pub(crate) const WINDOW_BYTES: u32 = 1 << 20;

/// Limit of a message without a payload, and of the other fields of one with a payload.
pub(crate) const MAX_HEAD_BYTES: usize = 1 << 20;

/// The path of a method of the dispatcher.
macro_rules! dispatcher {
    ($method:literal) => {
        concat!("/distribute.v1.DataDispatcher/", $method)
    };
}
pub(crate) use dispatcher;

/// The path of the method of data workers.
pub(crate) const READ: &str = "/distribute.v1.DataWorker/Read";
