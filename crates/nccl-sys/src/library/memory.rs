//! Registered memory and custom reductions.

use std::ffi::c_void;
use std::ptr;

use super::{Comm, Library, Progress};
use crate::{DataType, Error, RedOp, ScalarResidence};

impl Library {
    /// Calls `ncclRedOpCreatePreMulSum`: creates a sum of elements that each rank first multiplies by its own `scalar`.
    /// It is valid for this communicator and data type only, until [`red_op_destroy`](Self::red_op_destroy).
    ///
    /// # Errors
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; `scalar` points to an element, on the host for
    /// [`ScalarResidence::HOST_IMMEDIATE`], else in device memory, where it lives until operations that use it have
    /// ended.
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

    /// Calls `ncclRedOpDestroy`: frees a reduction; operations already issued are not affected.
    ///
    /// # Errors
    /// [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; the reduction belongs to this communicator.
    pub unsafe fn red_op_destroy(&self, op: RedOp, comm: Comm) -> Result<(), Error> {
        let _: Progress = call!(self, ncclRedOpDestroy(op, comm))?;
        Ok(())
    }

    /// Calls `ncclCommRegister`: allows NCCL to send from and receive into a buffer without a copy. Returns the handle
    /// for [`comm_deregister`](Self::comm_deregister). Since 2.19.
    ///
    /// # Errors
    /// [`Error::Missing`] with an older NCCL: registration is optional. [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; the buffer of `size` bytes lives until it is deregistered.
    pub unsafe fn comm_register(&self, comm: Comm, buffer: *mut c_void, size: usize) -> Result<*mut c_void, Error> {
        let mut handle = ptr::null_mut();
        let _: Progress = call!(self, ncclCommRegister(comm, buffer, size, &mut handle))?;
        Ok(handle)
    }

    /// Calls `ncclCommDeregister`: ends a registration. Since 2.19.
    ///
    /// # Errors
    /// [`Error::Missing`] with an older NCCL, [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The requirements of [`Library`]; `handle` belongs to this communicator, and no operation uses the buffer.
    pub unsafe fn comm_deregister(&self, comm: Comm, handle: *mut c_void) -> Result<(), Error> {
        let _: Progress = call!(self, ncclCommDeregister(comm, handle))?;
        Ok(())
    }

    /// Calls `ncclMemAlloc`: allocates memory of the current device that is suitable for every kind of registration.
    /// Since 2.19.
    ///
    /// # Errors
    /// [`Error::Missing`] with an older NCCL: allocate with CUDA instead. [`Error::Call`] if there is no device or not
    /// enough memory.
    pub fn mem_alloc(&self, size: usize) -> Result<*mut c_void, Error> {
        let mut memory = ptr::null_mut();
        let _: Progress = call!(self, ncclMemAlloc(&mut memory, size))?;
        Ok(memory)
    }

    /// Calls `ncclMemFree`: frees memory of [`mem_alloc`](Self::mem_alloc). Since 2.19.
    ///
    /// # Errors
    /// [`Error::Missing`] with an older NCCL, [`Error::Call`] if NCCL returns an error.
    ///
    /// # Safety
    /// The memory was allocated by [`mem_alloc`](Self::mem_alloc) and is no longer used.
    pub unsafe fn mem_free(&self, memory: *mut c_void) -> Result<(), Error> {
        let _: Progress = call!(self, ncclMemFree(memory))?;
        Ok(())
    }
}
