//! A terminal that shows one screen, which is drawn again and again.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use console::Term;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// The terminal, as long as it is this program's. Dropping it restores what was shown before.
pub(super) struct Screen {
    term: Term,
    before: Termios,
    ended: Arc<AtomicBool>,
}

impl Screen {
    /// Takes over the terminal: keys are read one by one and are not shown.
    pub(super) fn open() -> io::Result<Screen> {
        let ended = Arc::new(AtomicBool::new(false));
        for signal in [SIGHUP, SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, Arc::clone(&ended))?;
        }
        let before = tcgetattr(io::stdin())?;
        let mut modes = before.clone();
        // Signals by keys stay, such as Ctrl-C.
        modes.local_modes.remove(LocalModes::ICANON | LocalModes::ECHO);
        tcsetattr(io::stdin(), OptionalActions::Now, &modes)?;
        let screen = Screen { term: Term::buffered_stdout(), before, ended };
        screen.write(BEGIN)?;
        screen.term.hide_cursor()?;
        screen.term.flush()?;
        Ok(screen)
    }

    /// Draws a text, of which what fits is shown.
    pub(super) fn draw(&self, text: &str) -> io::Result<()> {
        let (rows, columns) = self.term.size();
        let rows = usize::from(rows).max(2) - 1;
        let lines: Vec<&str> = text.lines().collect();
        self.term.move_cursor_to(0, 0)?;
        let fit = if lines.len() > rows { rows - 1 } else { lines.len() };
        for line in &lines[..fit] {
            self.write(&console::truncate_str(line, columns.into(), "…"))?;
            self.write(REST_OF_LINE)?;
        }
        if fit < lines.len() {
            self.write(&format!("… {} more lines; a larger window or --once shows them", lines.len() - fit))?;
            self.write(REST_OF_LINE)?;
        }
        self.term.clear_to_end_of_screen()?;
        self.write("q quits")?;
        self.term.flush()
    }

    /// Waits for a time; returns whether the user wants to quit before it is over.
    pub(super) fn quits_within(&self, time: Duration) -> io::Result<bool> {
        let begun = Instant::now();
        while let Some(left) = time.checked_sub(begun.elapsed()) {
            // A signal interrupts the wait; this is the precaution if it arrives just before.
            let slice = left.min(Duration::from_millis(200));
            let slice = Timespec { tv_sec: 0, tv_nsec: slice.as_nanos() as _ };
            let stdin = io::stdin();
            let mut keys = [PollFd::from_borrowed_fd(stdin.as_fd(), PollFlags::IN)];
            let ready = match poll(&mut keys, Some(&slice)) {
                Ok(ready) => ready > 0,
                Err(rustix::io::Errno::INTR) => false,
                Err(error) => return Err(error.into()),
            };
            if self.ended.load(Ordering::Relaxed) {
                return Ok(true);
            }
            if ready {
                let mut key = [0; 16];
                match rustix::io::read(stdin.as_fd(), &mut key) {
                    // The terminal is gone.
                    Ok(0) => return Ok(true),
                    Ok(count) if key[..count].iter().any(|key| matches!(key, b'q' | b'Q' | 3 | 4)) => return Ok(true),
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(false)
    }

    fn write(&self, text: &str) -> io::Result<()> {
        (&self.term).write_all(text.as_bytes())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // Errors are those of a terminal that is gone.
        let _ = self.term.show_cursor().and_then(|()| self.write(END)).and_then(|()| self.term.flush());
        let _ = tcsetattr(io::stdin(), OptionalActions::Now, &self.before);
    }
}

/// The terminal's second screen, as editors use it: what was shown before comes back at the end.
const BEGIN: &str = "\u{1b}[?1049h";
const END: &str = "\u{1b}[?1049l";

/// Clears what an earlier, longer line has left, and ends the line.
const REST_OF_LINE: &str = "\u{1b}[K\r\n";
