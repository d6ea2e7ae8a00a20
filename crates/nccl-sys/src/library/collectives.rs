//! Operations between the ranks of a communicator. Each is enqueued on the stream, or recorded in an open group.

use std::ffi::{c_int, c_void};

use super::{Comm, Library, Progress, Stream};
use crate::{DataType, Error, RedOp};

impl Library {
    /// `ncclAllReduce`: combines `count` elements of all ranks, and gives all of them the result. In place where both
    /// buffers are the same.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; `send` and `receive` hold `count` elements.
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

    /// `ncclBroadcast`: gives all ranks `count` elements of `root`. In place where both buffers are the same.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; `send` (on `root`) and `receive` hold `count` elements.
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

    /// `ncclReduce`: combines `count` elements of all ranks, and gives `root` the result. In place where both buffers are
    /// the same.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; `send` and (on `root`) `receive` hold `count` elements.
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

    /// `ncclReduceScatter`: combines the elements of all ranks, and gives rank i the i-th block of `receive_count`. In place
    /// where `receive` is that block of `send`.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; `send` holds `receive_count` elements for each rank, `receive` as many once.
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

    /// `ncclAllGather`: gives all ranks the elements of all, in the order of ranks. In place where `send` is the own block of
    /// `receive`.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; `send` holds `send_count` elements, `receive` as many for each rank.
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

    /// `ncclAlltoAll`: gives rank j the j-th block of `count` elements of every rank, in the order of ranks. Never in place.
    /// From 2.28 on.
    ///
    /// # Errors
    /// [`Error::Missing`]: use [`send`](Self::send) and [`recv`](Self::recv) in a group. [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; both buffers hold `count` elements for each rank.
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

    /// `ncclGather`: gives `root` the elements of all ranks, in their order. From 2.28 on.
    ///
    /// # Errors
    /// [`Error::Missing`]: use [`send`](Self::send) and [`recv`](Self::recv) in a group. [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; `send` holds `count` elements, `receive` (on `root`) as many for each rank.
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

    /// `ncclScatter`: gives rank i the i-th block of `count` elements of `root`. From 2.28 on.
    ///
    /// # Errors
    /// [`Error::Missing`]: use [`send`](Self::send) and [`recv`](Self::recv) in a group. [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; `send` (on `root`) holds `count` elements for each rank, `receive` as many once.
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

    /// `ncclSend`: sends `count` elements to `peer`, which receives as many. Several sends and receives that wait for each
    /// other belong in one group.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; `send` holds `count` elements.
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

    /// `ncclRecv`: receives `count` elements from `peer`, which sends as many.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; `receive` holds `count` elements.
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
