//! The threads of a process, as the kernel tells of them without any right but that of the process's user.

use std::fs;

/// A thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Thread {
    pub(super) id: i32,
    pub(super) name: String,
    /// The letter by which the kernel describes its state.
    state: char,
    /// The function of the kernel in which it waits, where the kernel tells.
    channel: Option<String>,
}

impl Thread {
    /// Returns whether another thread does the same, as far as the kernel tells.
    pub(super) fn waits_like(&self, other: &Thread) -> bool {
        (self.state, &self.channel) == (other.state, &other.channel)
    }

    /// Says what the thread does.
    pub(super) fn activity(&self) -> String {
        let activity = match self.state {
            'R' => "runs",
            'S' => "waits",
            'D' => "waits in the kernel, for a disk or a file system, and cannot be interrupted",
            'T' => "is stopped by a signal such as SIGSTOP",
            't' => "is stopped by a debugger",
            'Z' | 'X' => "has ended",
            _ => "is in a state that this program does not know",
        };
        match &self.channel {
            Some(channel) => format!("{activity} ({channel})"),
            None => activity.to_owned(),
        }
    }
}

/// Returns the threads of a process, the first one first, at most [`MOST`].
pub(super) fn threads(pid: i32) -> Vec<Thread> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let mut ids: Vec<i32> = ids.collect();
    ids.sort_unstable();
    ids.truncate(MOST);
    ids.into_iter().filter_map(|id| thread(pid, id)).collect()
}

fn thread(pid: i32, id: i32) -> Option<Thread> {
    let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/task/{id}/{name}")).ok();
    let stat = read("stat")?;
    let (head, tail) = stat.rsplit_once(')')?;
    let name = head.split_once('(').map_or("", |(_, name)| name).to_owned();
    let state = tail.trim_start().chars().next()?;
    // 0 means that it runs, or that the kernel does not tell.
    let channel = read("wchan").map(|text| text.trim().to_owned()).filter(|text| !text.is_empty() && text != "0");
    Some(Thread { id, name, state, channel })
}

const MOST: usize = 1024;

#[cfg(test)]
#[cfg(target_os = "linux")]
mod tests {
    use super::*;

    #[test]
    fn threads_are_named() {
        let (send, receive) = std::sync::mpsc::channel::<()>();
        let waiting = std::thread::Builder::new().name("a) b (c".into()).spawn(move || receive.recv());
        let own = i32::try_from(std::process::id()).unwrap();
        let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
        loop {
            let found = threads(own);
            if found.iter().any(|thread| thread.name == "a) b (c" && thread.activity().starts_with("waits")) {
                break;
            }
            assert!(std::time::Instant::now() < deadline, "{found:?}");
            std::thread::yield_now();
        }
        drop(send);
        waiting.unwrap().join().unwrap().unwrap_err();
        assert_eq!(threads(0), []);
    }
}
