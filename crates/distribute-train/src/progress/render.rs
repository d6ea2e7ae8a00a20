//! The trait that every form of output implements.

use std::io;

use super::protocol::Event;

/// Writes events as text to one destination.
pub trait Renderer: Send {
    /// Shows one event; the renderer decides how much of it, and how often.
    ///
    /// # Errors
    /// The destination's I/O error if it cannot be written.
    fn render(&mut self, event: &Event) -> io::Result<()>;

    /// Clears the destination for other output, runs `print`, and restores what was there. `print` must end its last
    /// line.
    ///
    /// # Errors
    /// The destination's I/O error if it cannot be written; `print` has run nevertheless.
    fn suspend(&mut self, print: &mut dyn FnMut()) -> io::Result<()> {
        print();
        Ok(())
    }

    /// Leaves the destination at the start of a line; called once, after the last event.
    ///
    /// # Errors
    /// The destination's I/O error if it cannot be written.
    fn close(&mut self) -> io::Result<()> {
        Ok(())
    }
}
