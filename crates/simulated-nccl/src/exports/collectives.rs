//! Operations between ranks.
#![expect(unsafe_code, reason = "functions of C, under the names of C")]

use std::ffi::{c_int, c_void};

use nccl_sys::{Code, Comm, DataType, RedOp, Stream};

use super::{DONE, enter, exports};
use crate::batch::stream_driver;
use crate::comm::Line;
use crate::failure::Failure;
use crate::operation::{Operation, Source, Target, What};
use crate::wire::{Call, Kind};
use crate::{group, registry};

/// The arguments that all operations have.
struct Arguments {
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: DataType,
    comm: Comm,
    stream: Stream,
}

exports! {
    fn ncclAllReduce(
        send: *const c_void, receive: *mut c_void, count: usize, data_type: DataType, op: RedOp, comm: Comm,
        stream: Stream
    ) {
        collective(Kind::AllReduce, op, 0, &Arguments { send, receive, count, data_type, comm, stream })
    }

    fn ncclBroadcast(
        send: *const c_void, receive: *mut c_void, count: usize, data_type: DataType, root: c_int, comm: Comm,
        stream: Stream
    ) {
        collective(Kind::Broadcast, RedOp::SUM, root, &Arguments { send, receive, count, data_type, comm, stream })
    }

    fn ncclBcast(buffer: *mut c_void, count: usize, data_type: DataType, root: c_int, comm: Comm, stream: Stream) {
        let arguments = Arguments { send: buffer, receive: buffer, count, data_type, comm, stream };
        collective(Kind::Broadcast, RedOp::SUM, root, &arguments)
    }

    fn ncclReduce(
        send: *const c_void, receive: *mut c_void, count: usize, data_type: DataType, op: RedOp, root: c_int,
        comm: Comm, stream: Stream
    ) {
        collective(Kind::Reduce, op, root, &Arguments { send, receive, count, data_type, comm, stream })
    }

    fn ncclReduceScatter(
        send: *const c_void, receive: *mut c_void, count: usize, data_type: DataType, op: RedOp, comm: Comm,
        stream: Stream
    ) {
        collective(Kind::ReduceScatter, op, 0, &Arguments { send, receive, count, data_type, comm, stream })
    }

    fn ncclAllGather(
        send: *const c_void, receive: *mut c_void, count: usize, data_type: DataType, comm: Comm, stream: Stream
    ) {
        collective(Kind::AllGather, RedOp::SUM, 0, &Arguments { send, receive, count, data_type, comm, stream })
    }

    fn ncclAlltoAll(
        send: *const c_void, receive: *mut c_void, count: usize, data_type: DataType, comm: Comm, stream: Stream
    ) {
        collective(Kind::AllToAll, RedOp::SUM, 0, &Arguments { send, receive, count, data_type, comm, stream })
    }

    fn ncclGather(
        send: *const c_void, receive: *mut c_void, count: usize, data_type: DataType, root: c_int, comm: Comm,
        stream: Stream
    ) {
        collective(Kind::Gather, RedOp::SUM, root, &Arguments { send, receive, count, data_type, comm, stream })
    }

    fn ncclScatter(
        send: *const c_void, receive: *mut c_void, count: usize, data_type: DataType, root: c_int, comm: Comm,
        stream: Stream
    ) {
        collective(Kind::Scatter, RedOp::SUM, root, &Arguments { send, receive, count, data_type, comm, stream })
    }

    fn ncclSend(send: *const c_void, count: usize, data_type: DataType, peer: c_int, comm: Comm, stream: Stream) {
        message(true, peer, &Arguments { send, receive: std::ptr::null_mut(), count, data_type, comm, stream })
    }

    fn ncclRecv(receive: *mut c_void, count: usize, data_type: DataType, peer: c_int, comm: Comm, stream: Stream) {
        message(false, peer, &Arguments { send: std::ptr::null(), receive, count, data_type, comm, stream })
    }
}

fn collective(kind: Kind, op: RedOp, root: c_int, arguments: &Arguments) -> Result<Code, Failure> {
    let comm = registry::get(arguments.comm)?;
    let member = comm.ready()?.clone();
    let ranks = member.place.ranks as usize;
    let is_root = rank(root, member.place.ranks, "root")? == member.place.rank;
    let (op, factor) = match kind {
        Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter => comm.reduction(op, arguments.data_type)?,
        _ => (op, None),
    };
    // The number of blocks of `count` elements that this rank sends and receives.
    let (sent, received) = match kind {
        Kind::AllReduce => (1, 1),
        Kind::Reduce => (1, usize::from(is_root)),
        Kind::Broadcast => (usize::from(is_root), 1),
        Kind::ReduceScatter => (ranks, 1),
        Kind::AllGather => (1, ranks),
        Kind::AllToAll => (ranks, ranks),
        Kind::Gather => (1, if is_root { ranks } else { 0 }),
        Kind::Scatter => (if is_root { ranks } else { 0 }, 1),
    };
    let (send, receive) = (arguments.source(sent, comm.device)?, arguments.target(received, comm.device)?);
    if arguments.count == 0 {
        return DONE;
    }
    let captured = arguments.is_captured();
    let key = comm.key(Line::Collective, captured);
    let (data_type, count) = (arguments.data_type, arguments.count as u64);
    let call = Call { kind, data_type: data_type.0, op: op.0, root, count };
    let what = What::Collective(call);
    let operation = Operation { comm, member, what, key, captured, data_type, count, send, receive, factor };
    group::enqueue(arguments.stream, operation)
}

fn message(sends: bool, peer: c_int, arguments: &Arguments) -> Result<Code, Failure> {
    let comm = registry::get(arguments.comm)?;
    let member = comm.ready()?.clone();
    let peer = rank(peer, member.place.ranks, "peer")?;
    let (sent, received) = (usize::from(sends), usize::from(!sends));
    let (send, receive) = (arguments.source(sent, comm.device)?, arguments.target(received, comm.device)?);
    if arguments.count == 0 {
        return DONE;
    }
    let captured = arguments.is_captured();
    let (what, line) =
        if sends { (What::Send(peer), Line::Send(peer)) } else { (What::Receive(peer), Line::Receive(peer)) };
    let key = comm.key(line, captured);
    let (data_type, count) = (arguments.data_type, arguments.count as u64);
    let operation = Operation { comm, member, what, key, captured, data_type, count, send, receive, factor: None };
    group::enqueue(arguments.stream, operation)
}

impl Arguments {
    fn source(&self, blocks: usize, device: c_int) -> Result<Source, Failure> {
        let bytes = self.bytes(blocks)?;
        self.check("sendbuff", self.send, bytes, device)?;
        Ok(Source { address: self.send.cast(), bytes })
    }

    fn target(&self, blocks: usize, device: c_int) -> Result<Target, Failure> {
        let bytes = self.bytes(blocks)?;
        self.check("recvbuff", self.receive, bytes, device)?;
        Ok(Target { address: self.receive.cast(), bytes })
    }

    /// Checks the memory that a rank on a device passes, if any of it is used.
    fn check(&self, name: &str, memory: *const c_void, bytes: usize, device: c_int) -> Result<(), Failure> {
        match stream_driver(self.stream) {
            _ if bytes == 0 => Ok(()),
            _ if memory.is_null() => Err(Failure::argument(format!("{name} argument is NULL"))),
            Some(driver) => driver.check_memory(name, memory, device),
            None => Ok(()),
        }
    }

    fn bytes(&self, blocks: usize) -> Result<usize, Failure> {
        let data_type = self.data_type.0;
        let size = self.data_type.size_bytes().ok_or_else(|| Failure::argument(format!("invalid type {data_type}")))?;
        let bytes = size.checked_mul(self.count).and_then(|bytes| bytes.checked_mul(blocks));
        bytes.filter(|bytes| isize::try_from(*bytes).is_ok()).ok_or_else(|| Failure::argument("invalid count"))
    }

    fn is_captured(&self) -> bool {
        stream_driver(self.stream).is_some_and(|driver| driver.is_capturing(self.stream))
    }
}

fn rank(rank: c_int, ranks: u32, what: &str) -> Result<u32, Failure> {
    let valid = u32::try_from(rank).ok().filter(|rank| *rank < ranks);
    valid.ok_or_else(|| Failure::argument(format!("invalid {what} {rank} (ranks are 0 to {})", ranks - 1)))
}
