//! The stacks of a task's processes, as text.

use std::fmt::Write;
use std::fs;

use super::threads::{Thread, threads};
use super::unwind::{Frame, Tracer};

/// The frames of a thread, or why there are none.
type Frames = Result<Vec<Frame>, String>;

/// Says why there are no stacks on other systems.
pub(super) const NOT_HERE: &str = "stacks are read on Linux only; use a debugger";

/// Describes a process and those of its group, which are what a shell or `cargo run` has started.
pub(super) fn describe(leader: i32) -> String {
    let mut text = String::new();
    for pid in group(leader) {
        one(&mut text, pid);
    }
    if text.is_empty() {
        text = format!("process {leader} has ended\n");
    }
    text
}

/// Returns the processes of a group, its leader first, at most [`MOST_PROCESSES`].
fn group(leader: i32) -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return vec![leader] };
    let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok());
    let mut group: Vec<i32> = ids.filter(|pid| *pid != leader && group_of(*pid) == Some(leader)).collect();
    group.sort_unstable();
    group.insert(0, leader);
    group.truncate(MOST_PROCESSES);
    group
}

/// Returns the process group of a process.
fn group_of(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name, in parentheses, may contain anything.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(2)?.parse().ok()
}

fn one(text: &mut String, pid: i32) {
    let threads = threads(pid);
    if threads.is_empty() {
        return;
    }
    let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let command = String::from_utf8_lossy(&command).trim_end_matches('\0').replace('\0', " ");
    let _ = writeln!(text, "process {pid}: {}", command.chars().take(LONGEST).collect::<String>());
    let mut tracer = Tracer::new(pid);
    let mut seen: Vec<(Vec<Thread>, Frames)> = Vec::new();
    for thread in threads {
        let frames = tracer.frames(thread.id);
        // The threads of a pool wait at the same place.
        match seen.iter_mut().find(|(others, known)| *known == frames && others[0].waits_like(&thread)) {
            Some((others, _)) => others.push(thread),
            None => seen.push((vec![thread], frames)),
        }
    }
    let mut problems: Vec<String> = Vec::new();
    for (threads, frames) in &seen {
        let _ = writeln!(text, "  {}", heading(threads));
        match frames {
            Ok(frames) => frames.iter().for_each(|frame| {
                let _ = writeln!(text, "    {frame}");
            }),
            Err(problem) if !problems.contains(problem) => problems.push(problem.clone()),
            Err(_) => {}
        }
    }
    for problem in problems {
        let _ = writeln!(text, "  no frames: {problem}");
    }
}

/// Names some threads, and says what the first of them does.
fn heading(threads: &[Thread]) -> String {
    let named: Vec<String> =
        threads.iter().take(4).map(|thread| format!("{:?} ({})", thread.name, thread.id)).collect();
    let more = if threads.len() > 4 { format!(" and {} more", threads.len() - 4) } else { String::new() };
    let noun = if threads.len() == 1 { "thread" } else { "threads" };
    format!("{noun} {}{more}, {}", named.join(", "), threads[0].activity())
}

const MOST_PROCESSES: usize = 16;

/// Length limit of a command line, in characters.
const LONGEST: usize = 200;
