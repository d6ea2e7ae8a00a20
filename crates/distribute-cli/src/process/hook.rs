//! The part of a task's start between fork and exec.
#![expect(unsafe_code, reason = "the standard library offers the moment between fork and exec only as an unsafe call")]

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use rustix::process::{getpid, getppid};

use crate::guardian::registration;

/// Ties a task to the launcher, so that it does not outlive it.
///
/// This is done twice, because neither way is sufficient. The kernel kills the task itself at once when the launcher
/// dies, even without the guardian, but not the processes that the task has started, which do not inherit the request.
/// The guardian kills the whole process group, including the program behind a shell or `cargo run`, but could be killed
/// as well. The task registers itself with the guardian before its program runs, so that the group is never unknown.
pub(super) fn tie_to_launcher(command: &mut Command, guardian: Arc<OwnedFd>) {
    let launcher = getpid();
    let hook = move || {
        #[cfg(target_os = "linux")]
        rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
        // Where the kernel lets a process be traced by its ancestors only (Yama, scope 1), also by the launcher's
        // children, for `distribute top --stacks`. Other kernels refuse the request, and do not need it.
        #[cfg(target_os = "linux")]
        let _ = rustix::process::set_ptracer(rustix::process::PTracer::ProcessID(launcher));
        // The launcher may have died before the request took effect.
        if getppid() != Some(launcher) {
            return Err(io::Error::from(io::ErrorKind::BrokenPipe));
        }
        let message = registration(getpid());
        // Shorter than PIPE_BUF, so it is written as a whole or not at all.
        rustix::io::write(&*guardian, &message)?;
        Ok(())
    };
    // SAFETY: the hook only makes system calls (prctl, getppid, getpid, write) and builds its message on the stack; it
    // neither allocates nor takes a lock. The descriptor is open, since the hook owns a share of it.
    unsafe { command.pre_exec(hook) };
}
