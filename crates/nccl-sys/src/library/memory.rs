//! Memory that NCCL knows, and reductions of one's own.

use std::ffi::c_void;
use std::ptr;

use super::{Comm, Library, Progress};
use crate::{DataType, Error, RedOp, ScalarResidence};

impl Library {
    /// `ncclRedOpCreatePreMulSum`: a sum of elements that each rank multiplies by its own `scalar` first. For this
    /// communicator and data type only; the communicator holds it until [`red_op_destroy`](Self::red_op_destroy).
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; `scalar` points to an element, on the host for [`ScalarResidence::HOST_IMMEDIATE`], else in
    /// memory of the device, where it stays until operations that use it have ended.
    pub unsafe fn red_op_create_pre_mul_sum(
        &self,
        scalar: *const c_void,
        data_type: DataType,
        residence: ScalarResidence,
        comm: Comm,
    ) -> Result<RedOp, Error> {
        let mut op = RedOp::SUM;
        let _: Progress =
            call!(self, ncclRedOpCreatePreMulSum(&mut op, scalar.cast_mut(), data_type, residence, comm))?;
        Ok(op)
    }

    /// `ncclRedOpDestroy`: frees a reduction; operations already issued are not touched.
    ///
    /// # Errors
    /// [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; the reduction is one of this communicator.
    pub unsafe fn red_op_destroy(&self, op: RedOp, comm: Comm) -> Result<(), Error> {
        let _: Progress = call!(self, ncclRedOpDestroy(op, comm))?;
        Ok(())
    }

    /// `ncclCommRegister`: lets NCCL send from and receive into a buffer without a copy. Returns what
    /// [`comm_deregister`](Self::comm_deregister) takes. From 2.19 on.
    ///
    /// # Errors
    /// [`Error::Missing`]: go on without. [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; the buffer of `size` bytes stays until it is deregistered.
    pub unsafe fn comm_register(&self, comm: Comm, buffer: *mut c_void, size: usize) -> Result<*mut c_void, Error> {
        let mut handle = ptr::null_mut();
        let _: Progress = call!(self, ncclCommRegister(comm, buffer, size, &mut handle))?;
        Ok(handle)
    }

    /// `ncclCommDeregister`: ends a registration. From 2.19 on.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Call`].
    ///
    /// # Safety
    /// As [`Library`] says; `handle` is one of this communicator, and no operation uses the buffer.
    pub unsafe fn comm_deregister(&self, comm: Comm, handle: *mut c_void) -> Result<(), Error> {
        let _: Progress = call!(self, ncclCommDeregister(comm, handle))?;
        Ok(())
    }

    /// `ncclMemAlloc`: memory of the current device that suits every kind of registration. From 2.19 on.
    ///
    /// # Errors
    /// [`Error::Missing`]: allocate with CUDA. [`Error::Call`] without a device, or without so much memory.
    pub fn mem_alloc(&self, size: usize) -> Result<*mut c_void, Error> {
        let mut memory = ptr::null_mut();
        let _: Progress = call!(self, ncclMemAlloc(&mut memory, size))?;
        Ok(memory)
    }

    /// `ncclMemFree`: frees what [`mem_alloc`](Self::mem_alloc) gave. From 2.19 on.
    ///
    /// # Errors
    /// [`Error::Missing`], [`Error::Call`].
    ///
    /// # Safety
    /// The memory is of [`mem_alloc`](Self::mem_alloc), and nothing uses it any more.
    pub unsafe fn mem_free(&self, memory: *mut c_void) -> Result<(), Error> {
        let _: Progress = call!(self, ncclMemFree(memory))?;
        Ok(())
    }
}
