//! Bytes from another process's memory.
#![expect(unsafe_code, reason = "the system call is offered as a C function only")]

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::super::nonce::Nonce;

/// Time for which a process id is taken to mean the same process without another check. A system has to start as many
/// processes as it has ids, tens of thousands at least, before it gives one to another.
const TRUSTED: Duration = Duration::from_millis(10);

/// Another process, whose memory this one may read, and which is known to be the one that was met.
pub(super) struct Attached {
    pid: Pid,
    /// Ready when the process has ended.
    process: OwnedFd,
    /// When it was last seen alive, so that its id was its own.
    seen: Instant,
}

impl Attached {
    /// Attaches to a process where it has this nonce at this address; `None` where it has not, or must not be read.
    pub(super) fn new(pid: i32, address: u64, expected: Nonce) -> Option<Attached> {
        let pid = Pid::from_raw(pid)?;
        let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        let mut attached = Attached { pid, process, seen: Instant::now().checked_sub(TRUSTED)? };
        let mut bytes = [0; Nonce::LEN];
        let read = attached.fetch(address, &mut bytes).ok()?;
        let words = expected.words().map(u64::to_ne_bytes).concat();
        (read == bytes.len() && bytes[..] == words[..]).then_some(attached)
    }

    /// Copies bytes at `address` of the process into `into`; returns how many.
    ///
    /// # Errors
    /// [`io::Error`] if the system refuses the read, or if the process has ended, since its id may then be another's.
    pub(super) fn fetch(&mut self, address: u64, into: &mut [u8]) -> io::Result<usize> {
        let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
        let remote = libc::iovec { iov_base: address as usize as *mut libc::c_void, iov_len: into.len() };
        // SAFETY: the local vector describes `into`, which is borrowed exclusively. The remote address is looked up in
        // the other process by the kernel, which answers EFAULT where there is no such memory.
        let read = unsafe { libc::process_vm_readv(self.pid.as_raw_nonzero().get(), &local, 1, &remote, 1, 0) };
        let read = match usize::try_from(read) {
            Ok(0) => Err(io::Error::other("the peer's memory cannot be read any more")),
            Ok(read) => Ok(read),
            Err(_) => Err(io::Error::last_os_error()),
        }?;
        // Alive after the copy, it was alive, under this id, during the copy.
        if self.seen.elapsed() > TRUSTED {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            if poll(&mut [PollFd::new(&self.process, PollFlags::IN)], Some(&now))? != 0 {
                return Err(io::Error::other("its process has ended"));
            }
            self.seen = Instant::now();
        }
        Ok(read)
    }
}
