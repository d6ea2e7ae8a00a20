//! A process that outlives a killed launcher just long enough to kill its tasks.
//!
//! It runs this same program, with only a pipe from the launcher, over which it learns the tasks' process groups.
//! However the launcher ends, the pipe ends with it; the guardian then kills the groups that have not been reported as
//! gone. After a normal end there are none.

use std::collections::BTreeSet;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use rustix::process::{Pid, Signal, kill_process_group};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};

/// The launcher's end of the pipe.
#[derive(Debug)]
pub(crate) struct Guardian {
    pipe: Arc<OwnedFd>,
}

impl Guardian {
    /// Starts the guardian in a process group of its own, since signals to the launcher's group must not reach it.
    pub(crate) fn start() -> io::Result<Self> {
        // Not a path, since the file may have been replaced by a newer build.
        let program = if cfg!(target_os = "linux") { "/proc/self/exe".into() } else { std::env::current_exe()? };
        let mut command = Command::new(program);
        command.arg0("distribute").arg("guardian").current_dir("/").process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let pipe = command.spawn()?.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
        Ok(Self { pipe: Arc::new(pipe.into()) })
    }

    /// Returns the pipe, for tasks to register themselves.
    pub(crate) fn pipe(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.pipe)
    }

    /// Removes a group that is gone; its id may be reused from now on.
    pub(crate) fn forget(&self, group: Pid) {
        // Fails only if the guardian is gone.
        let _ = rustix::io::write(&*self.pipe, &message(b'-', group));
    }
}

/// Returns the message by which a task registers itself. It does not allocate, so it is safe between fork and exec.
pub(crate) fn registration(group: Pid) -> [u8; 5] {
    message(b'+', group)
}

/// Runs the guardian.
pub(crate) fn watch() -> ExitCode {
    // These signals are for the launcher; if they ended the guardian first, orphans would remain.
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        // The guardian works without the handler, too.
        let _ = signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)));
    }
    for group in left_over(io::stdin().lock()) {
        let _ = kill_process_group(group, Signal::KILL);
    }
    ExitCode::SUCCESS
}

/// Reads the pipe to its end; returns the groups that were registered and not removed.
fn left_over(mut pipe: impl Read) -> Vec<Pid> {
    let mut groups = BTreeSet::new();
    let mut message = [0; 5];
    while pipe.read_exact(&mut message).is_ok() {
        let [kind, id @ ..] = message;
        let id = i32::from_ne_bytes(id);
        match kind {
            b'+' => groups.insert(id),
            _ => groups.remove(&id),
        };
    }
    // 1 would mean all processes.
    groups.into_iter().filter(|id| *id > 1).filter_map(Pid::from_raw).collect()
}

fn message(kind: u8, group: Pid) -> [u8; 5] {
    let [a, b, c, d] = group.as_raw_nonzero().get().to_ne_bytes();
    [kind, a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pid(id: i32) -> Pid {
        Pid::from_raw(id).unwrap()
    }

    #[test]
    fn what_was_not_forgotten_is_left_over() {
        let pipe = [registration(pid(71)), registration(pid(72)), message(b'-', pid(71)), registration(pid(73))];
        assert_eq!(left_over(&pipe.concat()[..]), [pid(72), pid(73)]);
        assert_eq!(left_over(&pipe.concat()[..18]), [pid(72)]);
    }

    #[test]
    fn nonsense_kills_nobody() {
        let ids = [0_i32, 1, -5].map(|id| [&b"+"[..], &id.to_ne_bytes()].concat());
        assert_eq!(left_over(&ids.concat()[..]), []);
    }
}
