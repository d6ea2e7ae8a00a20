//! Memory, reductions and messages.
#![expect(unsafe_code, reason = "functions of C, under the names of C")]

use std::ffi::{c_char, c_int, c_void};
use std::slice;

use nccl_sys::{Code, Comm, DataType, RedOp, ScalarResidence};

use super::{DONE, enter, exports};
use crate::comm::Reduction;
use crate::cuda::cuda;
use crate::failure::{self, Failure};
use crate::operation::{Factor, Source};
use crate::{registry, settings};

exports! {
    fn ncclGetVersion(version: *mut c_int) {
        // SAFETY: the caller has passed a valid destination.
        unsafe { version.write(settings::version().code()) };
        DONE
    }

    fn ncclRedOpCreatePreMulSum(
        op: *mut RedOp, scalar: *const c_void, data_type: DataType, residence: ScalarResidence, comm: Comm
    ) {
        let comm = registry::get(comm)?;
        comm.ready()?;
        let bytes = data_type.size_bytes().ok_or_else(|| Failure::argument("invalid type"))?;
        if op.is_null() || scalar.is_null() {
            return Err(Failure::argument("op or scalar argument is NULL"));
        }
        let address = scalar.cast();
        let factor = match residence {
            ScalarResidence::DEVICE => Factor::Memory(Source { address, bytes }),
            // SAFETY: the caller has passed an element of that type.
            _ => Factor::Value(unsafe { slice::from_raw_parts(address, bytes) }.to_vec()),
        };
        let made = comm.add_reduction(Reduction { data_type, factor });
        // SAFETY: the caller has passed a valid destination.
        unsafe { op.write(made) };
        DONE
    }

    fn ncclRedOpDestroy(op: RedOp, comm: Comm) {
        registry::get(comm)?.remove_reduction(op)?;
        DONE
    }

    fn ncclCommRegister(comm: Comm, buffer: *mut c_void, size: usize, handle: *mut *mut c_void) {
        registry::get(comm)?.ready()?;
        if buffer.is_null() || size == 0 || handle.is_null() {
            return Err(Failure::argument("a buffer without memory, or no place for its handle"));
        }
        // SAFETY: the caller has passed a valid destination.
        unsafe { handle.write(buffer) };
        DONE
    }

    fn ncclCommDeregister(comm: Comm, _handle: *mut c_void) {
        registry::get(comm)?;
        DONE
    }

    fn ncclMemAlloc(memory: *mut *mut c_void, size: usize) {
        let allocated = match cuda() {
            Some(cuda) => cuda.allocate(size)?,
            // SAFETY: any size may be requested.
            None => unsafe { libc::malloc(size.max(1)) },
        };
        if allocated.is_null() || memory.is_null() {
            return Err(Failure::new(Code::SYSTEM_ERROR, "no memory"));
        }
        // SAFETY: the caller has passed a valid destination.
        unsafe { memory.write(allocated) };
        DONE
    }

    fn ncclMemFree(memory: *mut c_void) {
        match cuda() {
            Some(cuda) => cuda.free(memory)?,
            // SAFETY: the caller passes memory of `ncclMemAlloc`.
            None => unsafe { libc::free(memory) },
        }
        DONE
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetErrorString(code: Code) -> *const c_char {
    let text = match code {
        Code::SUCCESS => c"no error",
        Code::UNHANDLED_CUDA_ERROR => c"unhandled cuda error (a simulation)",
        Code::SYSTEM_ERROR => c"unhandled system error (a simulation)",
        Code::INTERNAL_ERROR => c"internal error (a simulation)",
        Code::INVALID_ARGUMENT => c"invalid argument (a simulation)",
        Code::INVALID_USAGE => c"invalid usage (a simulation)",
        Code::REMOTE_ERROR => c"remote process exited or there was a network error (a simulation)",
        Code::IN_PROGRESS => c"NCCL operation in progress (a simulation)",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn ncclGetLastError(_comm: Comm) -> *const c_char {
    failure::last()
}
