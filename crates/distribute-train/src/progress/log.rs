//! Log lines that leave the bar alone.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use super::reporter::{Screen, lock};

/// Writes whole lines to standard error, above the bar where there is one.
///
/// Clones write to the same place; each keeps an unfinished line to itself until it is ended or
/// the clone is dropped. As a subscriber's writer:
/// `tracing_subscriber::fmt().with_writer(move || log.clone())`.
pub struct LogWriter {
    out: Arc<Mutex<Box<dyn Write + Send>>>,
    screen: Option<Screen>,
    pending: Vec<u8>,
}

impl LogWriter {
    pub(crate) fn new(out: Box<dyn Write + Send>, screen: Option<Screen>) -> Self {
        Self { out: Arc::new(Mutex::new(out)), screen, pending: Vec::new() }
    }

    fn print(&mut self, lines: usize) -> io::Result<()> {
        let lines: Vec<u8> = self.pending.drain(..lines).collect();
        let mut result = Ok(());
        let mut print = || {
            let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
            result = out.write_all(&lines).and_then(|()| out.flush());
        };
        match &self.screen {
            Some(screen) => lock(screen).suspend(&mut print)?,
            None => print(),
        }
        result
    }
}

impl Clone for LogWriter {
    fn clone(&self) -> Self {
        Self { out: Arc::clone(&self.out), screen: self.screen.clone(), pending: Vec::new() }
    }
}

impl Write for LogWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.pending.extend_from_slice(bytes);
        if let Some(end) = self.pending.iter().rposition(|byte| *byte == b'\n') {
            self.print(end + 1)?;
        }
        Ok(bytes.len())
    }

    /// Unfinished lines stay: written now, they would end up inside the bar.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for LogWriter {
    fn drop(&mut self) {
        if !self.pending.is_empty() {
            self.pending.push(b'\n');
            // A log that cannot be written has nobody to complain to.
            let _ = self.print(self.pending.len());
        }
    }
}

impl std::fmt::Debug for LogWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogWriter").field("pending", &self.pending.len()).finish_non_exhaustive()
    }
}
