//! All processes that descend from a command.

use std::fs;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::Error;

/// A marker in the environment that descendants inherit, so that they are found even if they moved to another process
/// group, session or parent.
///
/// Dropping a family that still has members kills them and panics.
///
/// # Examples
///
/// ```
/// use std::process::Command;
/// use std::time::Duration;
/// use distribute_testkit::Family;
///
/// let family = Family::new();
/// let mut shell = Command::new("sh").args(["-c", "true & exit"]).env(family.key(), family.value()).spawn().unwrap();
/// shell.wait().unwrap();
/// family.wait_gone(Duration::from_secs(10))?;
/// # Ok::<(), distribute_testkit::Error>(())
/// ```
#[derive(Debug)]
pub struct Family {
    value: String,
}

impl Family {
    /// Creates a family without members.
    #[must_use]
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        Self { value: format!("{}-{count}", std::process::id()) }
    }

    /// Returns the environment variable that marks members.
    #[must_use]
    pub fn key(&self) -> &'static str {
        "DISTRIBUTE_TESTKIT_FAMILY"
    }

    /// Returns the value that marks members of this family.
    #[must_use]
    pub fn value(&self) -> &str {
        &self.value
    }

    /// Returns the ids of the living members, without zombies.
    #[must_use]
    pub fn members(&self) -> Vec<u32> {
        let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
        let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        ids.filter(|id| self.has(*id)).collect()
    }

    /// Waits until no member is left.
    ///
    /// # Errors
    /// [`Error::Leftover`] with the members that are left at the deadline.
    pub fn wait_gone(&self, deadline: Duration) -> Result<(), Error> {
        let end = Instant::now() + deadline;
        let mut absent = 0;
        loop {
            let members = self.members();
            absent = if members.is_empty() { absent + 1 } else { 0 };
            // A process in the middle of an `exec` has no environment for a moment.
            if absent == 2 {
                return Ok(());
            }
            if absent == 0 && Instant::now() >= end {
                let processes: Vec<_> = members.into_iter().map(describe).collect();
                return Err(Error::Leftover { waited: deadline, processes: processes.join(", ") });
            }
            // There is no notification of the end of a process that is not a child.
            thread::sleep(POLL);
        }
    }

    /// Kills every member.
    pub fn kill(&self) {
        for pid in self.members().into_iter().filter_map(pid) {
            // Fails if the process has ended meanwhile.
            let _ = kill_process(pid, Signal::KILL);
        }
    }

    fn has(&self, id: u32) -> bool {
        let Ok(environment) = fs::read(format!("/proc/{id}/environ")) else { return false };
        let mark = format!("{}={}", self.key(), self.value);
        environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
    }
}

impl Default for Family {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Family {
    fn drop(&mut self) {
        // A process that was just killed still has its environment.
        if let Err(error) = self.wait_gone(SETTLE) {
            self.kill();
            assert!(thread::panicking(), "{error}");
        }
    }
}

fn pid(id: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(id).ok()?)
}

fn describe(id: u32) -> String {
    let line = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
    let line = String::from_utf8_lossy(&line).replace('\0', " ");
    format!("{id} ({})", line.trim_end())
}

const POLL: Duration = Duration::from_millis(5);

const SETTLE: Duration = Duration::from_millis(500);

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;
    use std::process::{Command, Stdio};

    use super::*;

    fn orphan(family: &Family) {
        let mut shell = Command::new("sh")
            .args(["-c", "sleep 60 & exit 0"])
            .env(family.key(), family.value())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        shell.wait().unwrap();
        let end = Instant::now() + Duration::from_secs(10);
        while !family.members().into_iter().any(|id| describe(id).contains("(sleep 60)")) {
            assert!(Instant::now() < end, "the orphan never came to run");
            thread::sleep(POLL);
        }
    }

    #[test]
    fn an_orphan_is_found_and_killed() {
        let family = Family::new();
        orphan(&family);
        assert_eq!(family.members().len(), 1);
        let text = family.wait_gone(Duration::from_millis(10)).unwrap_err().to_string();
        assert!(text.contains("(sleep 60)"), "{text}");
        family.kill();
        family.wait_gone(Duration::from_secs(10)).unwrap();
    }

    #[test]
    fn a_family_with_members_does_not_go_unnoticed() {
        let value = Family::new();
        let same = Family { value: value.value.clone() };
        orphan(&value);
        assert!(catch_unwind(move || drop(value)).is_err());
        same.wait_gone(Duration::from_secs(10)).unwrap();
    }
}
