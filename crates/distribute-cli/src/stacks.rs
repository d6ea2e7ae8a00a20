//! Stacks of the threads of a task: what `distribute top --stacks` shows.
//!
//! The launcher asks a process of its own for them, so that whatever goes wrong there does not concern the job. That
//! process stops one thread at a time, for as long as its frames are read, which takes less than a millisecond
//! for each.

mod process;
mod threads;
#[cfg(all(feature = "stacks", target_os = "linux", target_arch = "x86_64"))]
mod unwind;
#[cfg(not(all(feature = "stacks", target_os = "linux", target_arch = "x86_64")))]
#[path = "stacks/unwind_absent.rs"]
mod unwind;

use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, bounded};
use parking_lot::Mutex;

/// The processes of the tasks, as the launcher knows them, and their stacks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stacks(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    tasks: Mutex<Vec<Known>>,
    /// A process can be traced by one other only.
    busy: Mutex<()>,
}

#[derive(Debug)]
struct Known {
    /// As `worker:1`.
    name: String,
    at: At,
}

/// Where the process of a task is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    NotStarted,
    Here(i32),
    OtherHost,
    Ended,
}

impl Stacks {
    pub(crate) fn new(names: impl Iterator<Item = String>) -> Stacks {
        let tasks = names.map(|name| Known { name, at: At::NotStarted }).collect();
        Stacks(Arc::new(Inner { tasks: Mutex::new(tasks), busy: Mutex::default() }))
    }

    /// Records the process of a task, on this host or on another one.
    pub(crate) fn started(&self, rank: usize, pid: i32, is_here: bool) {
        self.set(rank, if is_here { At::Here(pid) } else { At::OtherHost });
    }

    /// Records that the process of a task has ended; its id may be used again.
    pub(crate) fn ended(&self, rank: usize) {
        self.set(rank, At::Ended);
    }

    fn set(&self, rank: usize, at: At) {
        if let Some(task) = self.0.tasks.lock().get_mut(rank) {
            task.at = at;
        }
    }

    /// Returns the stacks of a task, named as `worker:1` or `worker-1`.
    ///
    /// # Errors
    /// A sentence that says why there are none.
    pub(crate) fn of(&self, task: &str) -> Result<String, String> {
        let pid = {
            let tasks = self.0.tasks.lock();
            let is_named = |known: &&Known| known.name == task || known.name.replace(':', "-") == task;
            let Some(known) = tasks.iter().find(is_named) else {
                let names: Vec<&str> = tasks.iter().take(8).map(|known| known.name.as_str()).collect();
                return Err(format!("the job has no task {task:?}; its tasks are {}", names.join(", ")));
            };
            match known.at {
                At::Here(pid) => pid,
                At::NotStarted => return Err(format!("{task} has not been started")),
                At::Ended => return Err(format!("the process of {task} has ended")),
                At::OtherHost => {
                    return Err(format!(
                        "{task} runs on another host, and stacks are read on the task's own host only; there, a \
                         debugger shows them, such as gdb -p PID -batch -ex 'thread apply all bt'"
                    ));
                }
            }
        };
        let Some(_busy) = self.0.busy.try_lock_for(DUMP) else {
            return Err("the stacks of another task are being read; ask again".to_owned());
        };
        dump(pid).map_err(|problem| format!("the stacks of {task} cannot be read: {problem}"))
    }
}

/// Starts a process that reads the stacks of a task's processes, and returns what it prints.
fn dump(pid: i32) -> Result<String, String> {
    // Not a path, since the file may have been replaced by a newer build.
    let program = if cfg!(target_os = "linux") { "/proc/self/exe" } else { return Err(process::NOT_HERE.to_owned()) };
    let mut command = Command::new(program);
    command.arg0("distribute").args(["stacks", &pid.to_string()]).current_dir("/").process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let child = command.spawn().map_err(|error| format!("this program cannot be started again: {error}"))?;
    let mut out = child.stdout.ok_or("it has no output")?;
    let (send, receive) = bounded(1);
    let read = move || {
        let mut text = String::new();
        let outcome = out.by_ref().take(LONGEST).read_to_string(&mut text).map(|_| text);
        // Fails only if the answer came too late.
        let _ = send.send(outcome);
    };
    thread::Builder::new().name("stacks".into()).spawn(read).map_err(|error| format!("no thread: {error}"))?;
    // The main thread reaps the process, as all others.
    match receive.recv_timeout(DUMP) {
        Ok(Ok(text)) => match text.strip_suffix(END) {
            Some(text) => Ok(text.to_owned()),
            None => Err("the process that reads them has ended early".to_owned()),
        },
        Ok(Err(error)) => Err(error.to_string()),
        Err(RecvTimeoutError::Timeout) => Err(format!("not done within {} s", DUMP.as_secs())),
        Err(RecvTimeoutError::Disconnected) => Err("the thread that reads them has ended".to_owned()),
    }
}

/// The process of [`dump`]: prints the stacks of a task and of the processes that it has started.
pub(crate) fn print(pid: i32) -> ExitCode {
    // What is traced runs on when the tracer ends, so this process must end, whatever it waits for.
    let give_up = || {
        thread::sleep(DUMP - Duration::from_secs(2));
        std::process::exit(1);
    };
    if thread::Builder::new().name("give-up".into()).spawn(give_up).is_err() {
        return ExitCode::FAILURE;
    }
    let text = process::describe(pid) + END;
    match std::io::stdout().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// How long reading the stacks of a task may take.
const DUMP: Duration = Duration::from_secs(20);

/// Length limit of the output, in bytes.
const LONGEST: u64 = 8 << 20;

/// Ends the output, which may be cut off.
const END: &str = "\u{4}\n";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_task_without_a_process_here_is_refused_in_words() {
        let stacks = Stacks::new(["worker:0", "worker:1", "worker:2"].map(str::to_owned).into_iter());
        stacks.started(1, 4711, false);
        stacks.started(2, 4712, true);
        stacks.ended(2);
        for (task, words) in [
            ("worker:0", "has not been started"),
            ("worker-1", "runs on another host"),
            ("worker:2", "has ended"),
            ("ps:0", "no task \"ps:0\"; its tasks are worker:0, worker:1, worker:2"),
        ] {
            let refusal = stacks.of(task).unwrap_err();
            assert!(refusal.contains(words), "{refusal}");
        }
    }
}
