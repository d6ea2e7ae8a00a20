//! The hook that a child runs between fork and exec.
#![expect(unsafe_code, reason = "the standard library offers the moment between fork and exec only as an unsafe call")]

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

/// Makes the child die when the thread that starts it ends, so that a killed test program leaves no tasks behind.
///
/// It also resets the signal disposition that this process inherits as a background job of a script or under `nohup`:
/// the child would otherwise ignore interrupts, and no test could interrupt it.
pub(crate) fn die_with_parent(command: &mut Command) {
    let parent = getpid();
    let hook = move || {
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT] {
            // SAFETY: sets the default disposition, which runs no code of ours.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the request took effect.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::Error::from(io::ErrorKind::BrokenPipe)) }
    };
    // SAFETY: the hook makes system calls only (sigaction, prctl, getppid); it neither allocates nor takes a lock.
    unsafe { command.pre_exec(hook) };
}
