//! Log lines that do not disturb the bar.

use std::io::{self, Write};
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;

use super::reporter::{Screen, Surface};

/// Writes whole lines to standard error, above the bar if there is one.
///
/// It can be created before there is a bar, and outlives it. Clones write to the same place; each keeps an unfinished
/// line to itself until it is ended or the clone is dropped. As a subscriber's writer:
/// `tracing_subscriber::fmt().with_writer(LogWriter::stderr)`.
pub struct LogWriter {
    out: Arc<Mutex<Box<dyn Write + Send>>>,
    bar: BarSlot,
    pending: Vec<u8>,
}

impl LogWriter {
    /// Creates a writer to this process's standard error.
    #[must_use]
    pub fn stderr() -> Self {
        Self::new(Box::new(io::stderr()), BarSlot::of_stderr())
    }

    pub(crate) fn new(out: Box<dyn Write + Send>, bar: BarSlot) -> Self {
        Self { out: Arc::new(Mutex::new(out)), bar, pending: Vec::new() }
    }

    fn print(&mut self, lines: usize) -> io::Result<()> {
        let lines: Vec<u8> = self.pending.drain(..lines).collect();
        let mut result = Ok(());
        let mut print = || {
            let mut out = self.out.lock();
            result = out.write_all(&lines).and_then(|()| out.flush());
        };
        match &self.bar.screen() {
            Some(screen) => screen.lock().suspend(&mut print)?,
            None => print(),
        }
        result
    }
}

impl Clone for LogWriter {
    fn clone(&self) -> Self {
        Self { out: Arc::clone(&self.out), bar: self.bar.clone(), pending: Vec::new() }
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

    /// Unfinished lines are kept, since they would end up inside the bar.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for LogWriter {
    fn drop(&mut self) {
        if !self.pending.is_empty() {
            self.pending.push(b'\n');
            // An error of the log itself cannot be reported.
            let _ = self.print(self.pending.len());
        }
    }
}

impl std::fmt::Debug for LogWriter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogWriter").field("pending", &self.pending.len()).finish_non_exhaustive()
    }
}

/// The bar that is drawn on a terminal, if any, for log lines to suspend. The newest wins.
#[derive(Clone, Default)]
pub(crate) struct BarSlot(Arc<Mutex<Option<Weak<Surface>>>>);

impl BarSlot {
    /// Returns the slot of standard error, of which a process has only one.
    pub(crate) fn of_stderr() -> Self {
        static SLOT: LazyLock<BarSlot> = LazyLock::new(BarSlot::default);
        SLOT.clone()
    }

    pub(crate) fn set(&self, screen: &Screen) {
        *self.0.lock() = Some(Arc::downgrade(screen));
    }

    fn screen(&self) -> Option<Screen> {
        self.0.lock().as_ref()?.upgrade()
    }
}
