//! What a child does between fork and exec.
#![expect(unsafe_code, reason = "the standard library offers the moment between fork and exec only as an unsafe call")]

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Signal, getpid, getppid, set_parent_process_death_signal};

/// Makes the child die when the thread that starts it ends: a killed test program leaves no tasks.
pub(crate) fn die_with_parent(command: &mut Command) {
    let parent = getpid();
    let hook = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // The parent may have died before the request took effect.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::Error::from(io::ErrorKind::BrokenPipe)) }
    };
    // SAFETY: the hook makes two system calls, prctl and getppid; it neither allocates nor takes a lock.
    unsafe { command.pre_exec(hook) };
}
