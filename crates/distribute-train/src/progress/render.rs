//! The trait that every form of output implements.

use std::io;

use super::protocol::Event;

/// Turns events into text on one destination.
pub trait Renderer: Send {
    /// Shows one event; how much of it, and how often, is the renderer's choice.
    ///
    /// # Errors
    ///
    /// The destination refused the bytes.
    fn render(&mut self, event: &Event) -> io::Result<()>;

    /// Clears the way for other output on the same destination, runs `print`, and restores what
    /// was there. `print` must end its last line.
    ///
    /// # Errors
    ///
    /// The destination refused the bytes; `print` has run all the same.
    fn suspend(&mut self, print: &mut dyn FnMut()) -> io::Result<()> {
        print();
        Ok(())
    }

    /// Leaves the destination at the start of a line; called once, after the last event.
    ///
    /// # Errors
    ///
    /// The destination refused the bytes.
    fn close(&mut self) -> io::Result<()> {
        Ok(())
    }
}
