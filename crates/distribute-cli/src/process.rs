//! Starting the tasks' processes.

mod hook;

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{ChildStderr, ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, WaitOptions, WaitStatus};

use crate::guardian::Guardian;
use crate::outcome::Exit;

/// A started task.
#[derive(Debug)]
pub(crate) struct Process {
    /// Its id, which is also the id of its process group.
    pub(crate) pid: Pid,
    pub(crate) stdout: ChildStdout,
    pub(crate) stderr: ChildStderr,
}

/// Starts a task in a process group of its own, which is registered with the guardian before its program runs. A
/// variable without a value is removed from the environment.
///
/// The task dies with the calling thread, which must therefore be the launcher's main thread.
pub(crate) fn spawn(
    program: &[OsString],
    env: Vec<(&'static str, Option<String>)>,
    guardian: &Guardian,
) -> io::Result<Process> {
    let Some((program, args)) = program.split_first() else { return Err(io::ErrorKind::InvalidInput.into()) };
    let mut command = Command::new(program);
    // No standard input: tasks would compete for it, and reading from a terminal would stop them.
    for (name, value) in env {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.process_group(0);
    hook::tie_to_launcher(&mut command, guardian.pipe());
    let mut child = command.spawn()?;
    let pid = Pid::from_child(&child);
    // The child is reaped by `reap`, together with orphans of its own children.
    match (child.stdout.take(), child.stderr.take()) {
        (Some(stdout), Some(stderr)) => Ok(Process { pid, stdout, stderr }),
        _ => Err(io::Error::other("the child has no pipes")),
    }
}

/// Makes orphaned descendants children of the launcher rather than of process 1, so that it is notified when they end.
pub(crate) fn adopt_orphans() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    Ok(())
}

/// Returns a child that has ended, if any. As process 1 of a container this also reaps unrelated processes.
pub(crate) fn reap() -> Option<(Pid, Exit)> {
    loop {
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some((pid, status))) => match exit(status) {
                Some(exit) => return Some((pid, exit)),
                None => continue,
            },
            Err(rustix::io::Errno::INTR) => continue,
            Ok(None) | Err(_) => return None,
        }
    }
}

fn exit(status: WaitStatus) -> Option<Exit> {
    let code = status.exit_status().map(Exit::Code);
    code.or_else(|| status.terminating_signal().map(Exit::Signal))
}

/// Returns whether a process group has a member. Its id is not reused as long as it has one.
pub(crate) fn group_lives(group: Pid) -> bool {
    rustix::process::test_kill_process_group(group) != Err(rustix::io::Errno::SRCH)
}

/// Sends a signal to a process group, which may have no member left.
pub(crate) fn signal_group(group: Pid, signal: i32) {
    if let Some(signal) = Signal::from_named_raw(signal) {
        let _ = rustix::process::kill_process_group(group, signal);
    }
}

/// Sends a signal to a process that has not been reaped.
pub(crate) fn signal_process(pid: Pid, signal: i32) {
    if let Some(signal) = Signal::from_named_raw(signal) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}
