//! The output and state of a task, which other threads can wait on.

use std::io::Read;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use parking_lot::{Condvar, Mutex, MutexGuard};

/// The state shared by the threads that watch a task and the test that waits for it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Capture(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    /// The number of open streams.
    pub(crate) open: u32,
    pub(crate) exited: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Stream {
    Stdout,
    Stderr,
}

impl Capture {
    /// Reads a stream to its end on a separate thread.
    pub(crate) fn follow(
        &self,
        name: String,
        stream: Stream,
        mut reader: impl Read + Send + 'static,
    ) -> std::io::Result<()> {
        self.update(|state| state.open += 1);
        let capture = self.clone();
        let read = move || {
            let mut buffer = [0; 8192];
            while let Ok(count @ 1..) = reader.read(&mut buffer) {
                capture.update(|state| state.of(stream).extend_from_slice(&buffer[..count]));
            }
            capture.update(|state| state.open -= 1);
        };
        let spawned = thread::Builder::new().name(name).spawn(read);
        spawned.map(drop).inspect_err(|_| self.update(|state| state.open -= 1))
    }

    pub(crate) fn update<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let value = change(&mut self.lock());
        self.0.changed.notify_all();
        value
    }

    /// Returns the first value that `look` finds, or `None` if it finds none before `end`.
    pub(crate) fn wait<T>(&self, end: Instant, mut look: impl FnMut(&State) -> Option<T>) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(answer) = look(&state) {
                return Some(answer);
            }
            let left = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())?;
            self.0.changed.wait_for(&mut state, left);
        }
    }

    /// Returns everything printed so far, standard output first.
    pub(crate) fn printed(&self) -> String {
        let state = self.lock();
        let both = [&state.stdout, &state.stderr].map(|bytes| String::from_utf8_lossy(bytes).into_owned());
        both.concat()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock()
    }
}

impl State {
    /// Returns the first complete line that contains `text`, on either stream.
    pub(crate) fn line_with(&self, text: &str) -> Option<String> {
        let finished = |bytes: &[u8]| {
            let end = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
            String::from_utf8_lossy(&bytes[..end]).into_owned()
        };
        let found = |bytes| finished(bytes).lines().find(|line| line.contains(text)).map(str::to_owned);
        found(&self.stdout).or_else(|| found(&self.stderr))
    }

    fn of(&mut self, stream: Stream) -> &mut Vec<u8> {
        match stream {
            Stream::Stdout => &mut self.stdout,
            Stream::Stderr => &mut self.stderr,
        }
    }
}
