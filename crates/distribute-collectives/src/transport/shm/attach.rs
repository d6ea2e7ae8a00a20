//! Bytes from another process's memory.
#![expect(unsafe_code, reason = "the system call is offered as a C function only")]

use std::io;

/// Copies bytes at `address` of process `pid` into `into`; how many.
pub(super) fn fetch(pid: i32, address: u64, into: &mut [u8]) -> io::Result<usize> {
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let remote = libc::iovec { iov_base: address as usize as *mut libc::c_void, iov_len: into.len() };
    // SAFETY: the local vector describes `into`, which is borrowed exclusively. The remote address is looked up in the
    // other process by the kernel, which answers EFAULT where there is no such memory.
    let read = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    match usize::try_from(read) {
        Ok(0) => Err(io::Error::other("the peer's memory cannot be read any more")),
        Ok(read) => Ok(read),
        Err(_) => Err(io::Error::last_os_error()),
    }
}
