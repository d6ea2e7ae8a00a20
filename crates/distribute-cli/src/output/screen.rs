//! The only thread that writes to the launcher's own standard output and error.

use std::io::{self, IsTerminal, Write};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use console::{Color, Style};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded, never, select, unbounded};
use distribute_train::progress::{
    BarRenderer, Event, JsonRenderer, PlainRenderer, Renderer, SystemClock, colors_allowed, terminal_width,
};

use super::lines::clean;
use super::standard::Standard;
use super::{Output, Stream};
use crate::environment;
use crate::job::Task;

/// How lines are shown.
#[derive(Debug)]
pub(crate) struct Look {
    prefixes: Vec<(String, Style)>,
    timestamps: bool,
    colors: [bool; 2],
    terminal: [bool; 2],
}

impl Look {
    /// Returns what suits the launcher's standard output and error: whether each is a terminal, and supports colours.
    pub(crate) fn from_streams(tasks: &[Task], timestamps: bool) -> Self {
        let colors = [console::colors_enabled(), colors_allowed()];
        let terminal = [io::stdout().is_terminal(), io::stderr().is_terminal()];
        Self::new(tasks, timestamps, colors, terminal)
    }

    fn new(tasks: &[Task], timestamps: bool, colors: [bool; 2], terminal: [bool; 2]) -> Self {
        let width = tasks.iter().map(|task| task.to_string().len()).max().unwrap_or(0);
        let style = |task: &Task| Style::new().fg(COLORS[task.rank % COLORS.len()]);
        let prefixes = tasks.iter().map(|task| (format!("{task:<width$} │"), style(task))).collect();
        Self { prefixes, timestamps, colors, terminal }
    }

    /// Formats lines of a task for writing.
    fn text(&self, rank: Option<usize>, stream: Stream, lines: &[String], now: SystemTime) -> String {
        let colors = self.colors[stream as usize];
        let mark = rank.and_then(|rank| self.prefixes.get(rank));
        let prefix = mark.map(|(prefix, style)| style.clone().force_styling(colors).apply_to(prefix).to_string());
        let time = match self.timestamps && prefix.is_some() {
            true => format!("{} ", humantime::format_rfc3339_millis(now)),
            false => String::new(),
        };
        let mut text = String::new();
        for line in lines {
            text.push_str(&time);
            let line = clean(line, colors);
            if let Some(prefix) = &prefix {
                text.push_str(prefix);
                text.push_str(if line.is_empty() { "" } else { " " });
            }
            text.push_str(&line);
            text.push('\n');
        }
        text
    }
}

/// The drawing thread.
#[derive(Debug)]
pub(crate) struct Screen {
    output: Sender<Output>,
    notes: Sender<String>,
    close: Sender<()>,
    /// Disconnected when everything is written.
    done: Receiver<()>,
}

impl Screen {
    /// Starts the thread. Progress is a bar if standard error is a terminal, else lines, with `json` as JSON objects.
    pub(crate) fn start(look: Look, json: bool) -> io::Result<Self> {
        let (output, outputs) = bounded(64);
        let (notes, noted) = unbounded();
        let (close, closed) = bounded(1);
        let (finished, done) = bounded(0);
        let dumb = environment::is("TERM", "dumb");
        let renderer: Box<dyn Renderer> = if look.terminal[1] && !dumb {
            Box::new(BarRenderer::new(Standard(io::stderr()), terminal_width).with_colors(look.colors[1]))
        } else if json {
            Box::new(JsonRenderer::new(Standard(io::stderr()), SystemClock::new()))
        } else {
            Box::new(PlainRenderer::new(Standard(io::stderr()), SystemClock::new()))
        };
        let draw = move || {
            Drawing { look, renderer, broken: [false; 2], writing: Duration::ZERO }.run(&outputs, &noted, &closed);
            drop(finished);
        };
        thread::Builder::new().name("screen".into()).spawn(draw)?;
        Ok(Self { output, notes, close, done })
    }

    /// Returns the channel for lines and progress. It is short, so that a slow terminal slows the tasks down rather
    /// than filling the memory.
    pub(crate) fn output(&self) -> Sender<Output> {
        self.output.clone()
    }

    /// Returns the channel for the launcher's own messages. Sending never blocks.
    pub(crate) fn notes(&self) -> Sender<String> {
        self.notes.clone()
    }

    /// Writes everything that was sent. The receiver is disconnected once that is done.
    pub(crate) fn close(self) -> Receiver<()> {
        // Fails only if the thread has ended.
        let _ = self.close.send(());
        self.done
    }
}

struct Drawing {
    look: Look,
    renderer: Box<dyn Renderer>,
    /// Streams whose reader is gone. The job continues: it should not end with the user's `head`.
    broken: [bool; 2],
    /// The time spent in writing, in which a slow reader may block it.
    writing: Duration,
}

impl Drawing {
    fn run(mut self, outputs: &Receiver<Output>, notes: &Receiver<String>, closed: &Receiver<()>) {
        let none = never();
        let mut open = true;
        while open {
            let mut notes = notes;
            if self.broken[1] {
                notes = &none;
            }
            select! {
                recv(outputs) -> output => match output {
                    Ok(output) => self.show(output),
                    Err(_) => open = false,
                },
                recv(notes) -> note => match note {
                    Ok(note) => self.note(&note),
                    Err(_) => open = false,
                },
                recv(closed) -> _ => open = false,
            }
        }
        self.show_rest(outputs, LAST);
        notes.try_iter().for_each(|note| self.note(&note));
        let _ = self.renderer.close();
    }

    /// Shows what tasks had written when they ended. Threads that still hold a sender have exceeded their deadline
    /// already.
    ///
    /// A process that has left its task's group may still write, and without end. What the tasks have left behind is
    /// within pipes and the channel, and takes a fraction of the limit; the time in which a slow terminal or pager
    /// blocks does not count, so that none of it is lost.
    fn show_rest(&mut self, outputs: &Receiver<Output>, limit: Duration) {
        let begun = Instant::now();
        self.writing = Duration::ZERO;
        for output in outputs.try_iter() {
            self.show(output);
            if begun.elapsed().saturating_sub(self.writing) > limit {
                return;
            }
        }
    }

    fn show(&mut self, output: Output) {
        match output {
            Output::Lines { rank, stream, lines } => {
                let text = self.look.text(rank, stream, &lines, SystemTime::now());
                self.print(stream, &text);
            }
            Output::Report(text) => self.print(Stream::Stderr, &text),
            Output::Progress(event) => {
                let begun = Instant::now();
                if !self.broken[Stream::Stderr as usize] && self.renderer.render(&event).is_err() {
                    self.broken[Stream::Stderr as usize] = true;
                }
                self.writing += begun.elapsed();
                if let Event::End { summary } = event {
                    let lines: Vec<_> = summary.lines().map(|line| format!("{}\n", clean(line, false))).collect();
                    self.print(Stream::Stdout, &lines.concat());
                }
            }
        }
    }

    fn note(&mut self, note: &str) {
        let style = Style::new().dim().force_styling(self.look.colors[Stream::Stderr as usize]);
        let line = format!("{}\n", style.apply_to(format_args!("distribute: {note}")));
        self.print(Stream::Stderr, &line);
    }

    /// Writes above the bar if both are on a terminal.
    fn print(&mut self, stream: Stream, text: &str) {
        if self.broken[stream as usize] {
            return;
        }
        let begun = Instant::now();
        let mut written = Ok(());
        let mut write = || {
            written = match stream {
                Stream::Stdout => write(&mut Standard(io::stdout()), text),
                Stream::Stderr => write(&mut Standard(io::stderr()), text),
            };
        };
        if self.look.terminal[stream as usize] {
            // A bar that cannot be redrawn does not keep the text from being written.
            let _ = self.renderer.suspend(&mut write);
        } else {
            write();
        }
        self.writing += begun.elapsed();
        let Err(error) = written else { return };
        self.broken[stream as usize] = true;
        // A reader that is gone has read enough.
        if stream == Stream::Stdout && error.kind() != io::ErrorKind::BrokenPipe {
            self.note(&format!("standard output ends here: {error}; the job continues"));
        }
    }
}

fn write(writer: &mut impl Write, text: &str) -> io::Result<()> {
    writer.write_all(text.as_bytes())?;
    writer.flush()
}

/// How long the thread works, without its writes, on what was written before the end.
const LAST: Duration = Duration::from_secs(3);

/// Waits for a sender to be dropped; returns `false` if that takes too long.
pub(crate) fn ends_within(done: &Receiver<()>, deadline: Duration) -> bool {
    done.recv_timeout(deadline) != Err(RecvTimeoutError::Timeout)
}

/// Readable on light and dark backgrounds. Red is for errors.
const COLORS: [Color; 5] = [Color::Cyan, Color::Yellow, Color::Green, Color::Magenta, Color::Blue];

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::job::Roles;

    fn workers(workers: u32) -> Vec<Task> {
        Roles { workers, ..Roles::default() }.tasks(1)
    }

    fn lines(text: &str) -> Vec<String> {
        text.split('|').map(str::to_owned).collect()
    }

    #[test]
    fn lines_begin_with_their_task_in_a_fixed_width() {
        let look =
            Look::new(&Roles { chief: 1, workers: 1, ..Roles::default() }.tasks(1), false, [false; 2], [false; 2]);
        let text = |rank, text| look.text(Some(rank), Stream::Stdout, &lines(text), SystemTime::UNIX_EPOCH);
        assert_eq!(text(0, "hello|"), "chief-0  │ hello\nchief-0  │\n");
        assert_eq!(text(1, "\x1b[31mred"), "worker-0 │ red\n");
    }

    #[test]
    fn each_stream_has_colors_of_its_own() {
        let look = Look::new(&workers(2), false, [false, true], [false; 2]);
        let text = |rank, stream| look.text(Some(rank), stream, &lines("x"), SystemTime::UNIX_EPOCH);
        assert_eq!(text(0, Stream::Stdout), "worker-0 │ x\n");
        assert_eq!(text(0, Stream::Stderr), "\x1b[36mworker-0 │\x1b[0m x\n");
        assert_ne!(text(0, Stream::Stderr)[..5], text(1, Stream::Stderr)[..5]);
    }

    #[test]
    fn timestamps_come_first() {
        let look = Look::new(&workers(1), true, [false; 2], [false; 2]);
        let text = look.text(Some(0), Stream::Stdout, &lines("x"), SystemTime::UNIX_EPOCH);
        assert_eq!(text, "1970-01-01T00:00:00.000Z worker-0 │ x\n");
    }

    /// A terminal on which each write takes a while.
    struct Slow(Arc<AtomicUsize>);

    impl Renderer for Slow {
        fn render(&mut self, _: &Event) -> io::Result<()> {
            Ok(())
        }

        fn suspend(&mut self, _: &mut dyn FnMut()) -> io::Result<()> {
            self.0.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(20));
            Ok(())
        }
    }

    fn drawing(shown: &Arc<AtomicUsize>, broken: bool) -> Drawing {
        let look = Look::new(&workers(1), false, [false; 2], [true; 2]);
        let renderer = Box::new(Slow(Arc::clone(shown)));
        Drawing { look, renderer, broken: [broken; 2], writing: Duration::ZERO }
    }

    fn output() -> Output {
        Output::Lines { rank: Some(0), stream: Stream::Stdout, lines: lines("y") }
    }

    #[test]
    fn the_end_does_not_wait_for_a_process_that_writes_without_end() {
        let (sender, outputs) = bounded(64);
        let (_notes, noted) = unbounded();
        let (close, closed) = bounded(1);
        let (finished, done) = bounded::<()>(0);
        // Lines that take longer to clean than to send, so that the channel is never empty.
        let lines = vec!["\x07".repeat(1 << 14)];
        let output = move || Output::Lines { rank: Some(0), stream: Stream::Stdout, lines: lines.clone() };
        let writer = thread::spawn(move || while sender.send(output()).is_ok() {});
        close.send(()).unwrap();
        thread::spawn(move || {
            // Its reader is gone, so that nothing slows it down.
            drawing(&Arc::default(), true).run(&outputs, &noted, &closed);
            drop((outputs, finished));
        });
        assert!(ends_within(&done, Duration::from_secs(60)));
        writer.join().unwrap();
    }

    #[test]
    fn a_slow_terminal_loses_nothing_that_was_written() {
        let (sender, outputs) = unbounded();
        (0..10).for_each(|_| sender.send(output()).unwrap());
        let shown = Arc::default();
        drawing(&shown, false).show_rest(&outputs, Duration::from_millis(100));
        assert_eq!(shown.load(Ordering::Relaxed), 10);
    }
}
