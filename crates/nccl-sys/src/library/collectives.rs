//! Operations between the ranks of a communicator. Each is enqueued on the stream, or recorded in an open group.

use std::ffi::{c_int, c_void};

use super::{Comm, Library, Progress, Stream};
use crate::{DataType, Error, RedOp};

impl Library {
    /// Calls `ncclAllReduce`: combines `count` elements of all ranks and returns the result to all of them. In place if
    /// both buffers are the same.
    ///
    /// # Errors
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; `send` and `receive` hold `count` elements.
    #[expect(clippy::too_many_arguments, reason = "they are NCCL's")]
    pub unsafe fn all_reduce(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        data_type: DataType,
        op: RedOp,
        comm: Comm,
        stream: Stream,
    ) -> Result<Progress, Error> {
        call!(self, ncclAllReduce(send, receive, count, data_type, op, comm, stream))
    }

    /// Calls `ncclBroadcast`: sends `count` elements of `root` to all ranks. In place if both buffers are the same.
    ///
    /// # Errors
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; `send` (on `root`) and `receive` hold `count` elements.
    #[expect(clippy::too_many_arguments, reason = "they are NCCL's")]
    pub unsafe fn broadcast(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        data_type: DataType,
        root: c_int,
        comm: Comm,
        stream: Stream,
    ) -> Result<Progress, Error> {
        call!(self, ncclBroadcast(send, receive, count, data_type, root, comm, stream))
    }

    /// Calls `ncclReduce`: combines `count` elements of all ranks and returns the result to `root`. In place if both
    /// buffers are the same.
    ///
    /// # Errors
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; `send` and (on `root`) `receive` hold `count` elements.
    #[expect(clippy::too_many_arguments, reason = "they are NCCL's")]
    pub unsafe fn reduce(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        data_type: DataType,
        op: RedOp,
        root: c_int,
        comm: Comm,
        stream: Stream,
    ) -> Result<Progress, Error> {
        call!(self, ncclReduce(send, receive, count, data_type, op, root, comm, stream))
    }

    /// Calls `ncclReduceScatter`: combines the elements of all ranks and returns to rank i the i-th block of
    /// `receive_count` elements. In place if `receive` is that block of `send`.
    ///
    /// # Errors
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; `send` holds `receive_count` elements per rank, `receive` holds `receive_count`
    /// elements.
    #[expect(clippy::too_many_arguments, reason = "they are NCCL's")]
    pub unsafe fn reduce_scatter(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        receive_count: usize,
        data_type: DataType,
        op: RedOp,
        comm: Comm,
        stream: Stream,
    ) -> Result<Progress, Error> {
        call!(self, ncclReduceScatter(send, receive, receive_count, data_type, op, comm, stream))
    }

    /// Calls `ncclAllGather`: returns the elements of all ranks to all ranks, in rank order. In place if `send` is the
    /// rank's own block of `receive`.
    ///
    /// # Errors
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; `send` holds `send_count` elements, `receive` holds `send_count` elements per
    /// rank.
    pub unsafe fn all_gather(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        send_count: usize,
        data_type: DataType,
        comm: Comm,
        stream: Stream,
    ) -> Result<Progress, Error> {
        call!(self, ncclAllGather(send, receive, send_count, data_type, comm, stream))
    }

    /// Calls `ncclAlltoAll`: returns to rank j the j-th block of `count` elements of every rank, in rank order. Never
    /// in place. Since 2.28.
    ///
    /// # Errors
    /// [`Error::Missing`] with an older NCCL: use [`send`](Self::send) and [`recv`](Self::recv) in a group instead.
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; both buffers hold `count` elements per rank.
    pub unsafe fn all_to_all(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        data_type: DataType,
        comm: Comm,
        stream: Stream,
    ) -> Result<Progress, Error> {
        call!(self, ncclAlltoAll(send, receive, count, data_type, comm, stream))
    }

    /// Calls `ncclGather`: returns the elements of all ranks to `root`, in rank order. Since 2.28.
    ///
    /// # Errors
    /// [`Error::Missing`] with an older NCCL: use [`send`](Self::send) and [`recv`](Self::recv) in a group instead.
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; `send` holds `count` elements, `receive` (on `root`) holds `count` elements per
    /// rank.
    #[expect(clippy::too_many_arguments, reason = "they are NCCL's")]
    pub unsafe fn gather(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        data_type: DataType,
        root: c_int,
        comm: Comm,
        stream: Stream,
    ) -> Result<Progress, Error> {
        call!(self, ncclGather(send, receive, count, data_type, root, comm, stream))
    }

    /// Calls `ncclScatter`: sends the i-th block of `count` elements of `root` to rank i. Since 2.28.
    ///
    /// # Errors
    /// [`Error::Missing`] with an older NCCL: use [`send`](Self::send) and [`recv`](Self::recv) in a group instead.
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; `send` (on `root`) holds `count` elements per rank, `receive` holds `count`
    /// elements.
    #[expect(clippy::too_many_arguments, reason = "they are NCCL's")]
    pub unsafe fn scatter(
        &self,
        send: *const c_void,
        receive: *mut c_void,
        count: usize,
        data_type: DataType,
        root: c_int,
        comm: Comm,
        stream: Stream,
    ) -> Result<Progress, Error> {
        call!(self, ncclScatter(send, receive, count, data_type, root, comm, stream))
    }

    /// Calls `ncclSend`: sends `count` elements to `peer`, which must receive as many. Sends and receives that depend
    /// on each other must be in one group.
    ///
    /// # Errors
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; `send` holds `count` elements.
    pub unsafe fn send(
        &self,
        send: *const c_void,
        count: usize,
        data_type: DataType,
        peer: c_int,
        comm: Comm,
        stream: Stream,
    ) -> Result<Progress, Error> {
        call!(self, ncclSend(send, count, data_type, peer, comm, stream))
    }

    /// Calls `ncclRecv`: receives `count` elements from `peer`, which must send as many.
    ///
    /// # Errors
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; `receive` holds `count` elements.
    pub unsafe fn recv(
        &self,
        receive: *mut c_void,
        count: usize,
        data_type: DataType,
        peer: c_int,
        comm: Comm,
        stream: Stream,
    ) -> Result<Progress, Error> {
        call!(self, ncclRecv(receive, count, data_type, peer, comm, stream))
    }
}
