//! Follows one stream of one task.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use crossbeam_channel::Sender;
use parking_lot::Mutex;

use super::lines::{self, Splitter};
use super::{Output, Stream};

/// The last lines that a task printed, on either stream.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tail(Arc<Mutex<VecDeque<String>>>);

impl Tail {
    /// Returns the lines, oldest first.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.lock().iter().cloned().collect()
    }

    fn push(&self, lines: &[String]) {
        let mut tail = self.lock();
        for line in &lines[lines.len().saturating_sub(TAIL)..] {
            if tail.len() == TAIL {
                tail.pop_front();
            }
            tail.push_back(lines::clean(line, false).into_owned());
        }
    }

    fn lock(&self) -> parking_lot::MutexGuard<'_, VecDeque<String>> {
        self.0.lock()
    }
}

/// The destinations of a stream.
#[derive(Debug)]
pub(crate) struct Follow {
    /// The task; `None` if the lines need no mark.
    pub(crate) rank: Option<usize>,
    pub(crate) stream: Stream,
    pub(crate) tail: Tail,
    /// The log for its unchanged bytes.
    pub(crate) log: Option<(PathBuf, File)>,
    /// The channel for its lines, if they are shown.
    pub(crate) show: Option<Sender<Output>>,
    /// Messages to the user.
    pub(crate) note: Sender<String>,
    /// Dropped when the stream has ended.
    pub(crate) done: Sender<()>,
}

impl Follow {
    /// Reads the stream to its end on a thread of its own.
    pub(crate) fn start(self, name: String, reader: impl Read + Send + 'static) -> io::Result<()> {
        thread::Builder::new().name(name).spawn(move || self.run(reader)).map(drop)
    }

    fn run(mut self, mut reader: impl Read) {
        let mut splitter = Splitter::default();
        let mut buffer = vec![0; 64 * 1024];
        loop {
            match reader.read(&mut buffer) {
                Ok(0) => break,
                Ok(count) => {
                    self.keep(&buffer[..count]);
                    self.pass_on(splitter.push(&buffer[..count]));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        self.pass_on(Vec::from_iter(splitter.finish()));
        drop(self.done);
    }

    fn keep(&mut self, bytes: &[u8]) {
        if let Some((path, file)) = &mut self.log
            && let Err(error) = file.write_all(bytes)
        {
            // Fails only while the launcher is ending.
            let _ = self.note.send(format!("the log {} ends here: {error}", path.display()));
            self.log = None;
        }
    }

    fn pass_on(&self, lines: Vec<String>) {
        if lines.is_empty() {
            return;
        }
        self.tail.push(&lines);
        if let Some(show) = &self.show {
            // Blocks while the user's terminal or pipe is slow, as the task itself would.
            let _ = show.send(Output::Lines { rank: self.rank, stream: self.stream, lines });
        }
    }
}

/// Enough to see a panic message or the end of a backtrace.
const TAIL: usize = 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tail_keeps_the_last_lines() {
        let tail = Tail::default();
        let lines = |range: std::ops::Range<u32>| range.map(|n| format!("\x1b[31mline {n}")).collect::<Vec<_>>();
        tail.push(&lines(0..7));
        tail.push(&lines(7..25));
        tail.push(&lines(25..27));
        let expected: Vec<_> = (17..27).map(|n| format!("line {n}")).collect();
        assert_eq!(tail.lines(), expected);
    }
}
