//! The bar on a terminal: one physical line per epoch, redrawn in place.

use std::io::{self, Write};
use std::time::Duration;

use console::Style;

use super::clock::{Clock, SystemClock};
use super::protocol::{Event, Status};
use super::render::Renderer;
use super::text::{self, Groups};

/// Draws one line per epoch on a terminal.
///
/// The line is redrawn at most ten times a second with a carriage return and blanks, never with cursor movements, which
/// notebooks and the terminals of CI services do not support. What does not fit the width is left out from the right.
/// The closing summary is not drawn here; it belongs on standard output.
///
/// Dropping the renderer ends a line that is still open.
pub struct BarRenderer<W: Write> {
    writer: W,
    width: Box<dyn Fn() -> u16 + Send>,
    clock: Box<dyn Clock>,
    paint: Paint,
    /// The line on the screen that a redraw replaces, and the columns it fills.
    current: Option<(Status, usize)>,
    drawn_at: Option<Duration>,
}

impl<W: Write + Send> BarRenderer<W> {
    /// Creates a renderer without colours that draws on `writer` and asks `width` for the number of columns before each
    /// line, so that it follows a resized window.
    pub fn new(writer: W, width: impl Fn() -> u16 + Send + 'static) -> Self {
        Self {
            writer,
            width: Box::new(width),
            clock: Box::new(SystemClock::new()),
            paint: Paint::new(false),
            current: None,
            drawn_at: None,
        }
    }

    /// Sets whether to draw in colour.
    #[must_use]
    pub fn with_colors(mut self, colors: bool) -> Self {
        self.paint = Paint::new(colors);
        self
    }

    /// Reads the time from `clock`.
    #[must_use]
    pub fn with_clock(mut self, clock: impl Clock + 'static) -> Self {
        self.clock = Box::new(clock);
        self
    }

    fn draw(&mut self, status: &Status, done: bool) -> io::Result<()> {
        let columns = self.usable_columns();
        let line = Line::fitting(status, done, columns);
        let filled = line.columns();
        let before = self.current.as_ref().map_or(0, |(_, columns)| *columns).min(columns);
        let rest = " ".repeat(before.saturating_sub(filled));
        let end = if done { "\n" } else { "" };
        let text = format!("\r{}{rest}{end}", line.painted(&self.paint));
        self.current = (!done).then(|| (status.clone(), filled));
        self.drawn_at = Some(self.clock.elapsed());
        self.writer.write_all(text.as_bytes())?;
        self.writer.flush()
    }

    fn end_line(&mut self) -> io::Result<()> {
        if self.current.take().is_some() {
            self.writer.write_all(b"\n")?;
            self.writer.flush()?;
        }
        Ok(())
    }

    /// The last column stays free: writing there makes some terminals wrap.
    fn usable_columns(&self) -> usize {
        usize::from((self.width)()).saturating_sub(1)
    }

    fn due(&self) -> bool {
        self.drawn_at.is_none_or(|at| self.clock.elapsed().saturating_sub(at) >= REDRAW_INTERVAL)
    }
}

impl<W: Write + Send> Renderer for BarRenderer<W> {
    fn render(&mut self, event: &Event) -> io::Result<()> {
        match event {
            Event::Begin { title } => {
                self.end_line()?;
                for line in text::lines(&text::one_line(title), self.usable_columns()) {
                    self.writer.write_all(format!("{}\n", self.paint.title.apply_to(line)).as_bytes())?;
                }
                self.writer.flush()
            }
            Event::Step(status) if self.due() => self.draw(status, false),
            Event::Step(_) | Event::Vitals(_) => Ok(()),
            Event::Epoch(status) => self.draw(status, true),
            Event::End { .. } => self.end_line(),
        }
    }

    fn suspend(&mut self, print: &mut dyn FnMut()) -> io::Result<()> {
        let Some((status, filled)) = self.current.take() else {
            print();
            return Ok(());
        };
        let blank = format!("\r{}\r", " ".repeat(filled.min(self.usable_columns())));
        let cleared = self.writer.write_all(blank.as_bytes()).and_then(|()| self.writer.flush());
        print();
        cleared?;
        self.draw(&status, false)
    }

    fn close(&mut self) -> io::Result<()> {
        self.end_line()
    }
}

impl<W: Write> Drop for BarRenderer<W> {
    fn drop(&mut self) {
        if self.current.is_some() {
            // There is no caller to report an error to.
            let _ = self.writer.write_all(b"\n").and_then(|()| self.writer.flush());
        }
    }
}

/// Returns the number of columns of the terminal behind standard error; 80 if it is not a terminal.
#[must_use]
pub fn terminal_width() -> u16 {
    console::Term::stderr().size_checked().map_or(80, |(_rows, columns)| columns)
}

/// Returns whether standard error is a terminal that supports colours (`NO_COLOR`, `CLICOLOR` and `CLICOLOR_FORCE` are
/// respected).
#[must_use]
pub fn colors_allowed() -> bool {
    console::colors_enabled_stderr()
}

/// The parts of a line, measured before it is coloured.
struct Line {
    head: String,
    done: String,
    todo: String,
    tail: Vec<String>,
    groups: Vec<(bool, String)>,
}

impl Line {
    /// Returns the form that fits `columns`: the bar shrinks to make room for two metrics, then for one; after that the
    /// bar is dropped, and then parts are left out from the right.
    fn fitting(status: &Status, done: bool, columns: usize) -> Self {
        let mut line = Self::without_bar(status, done);
        if let Some(steps) = status.steps {
            let cells = line.cells(done, columns);
            (line.done, line.todo) = bar(status.step, steps, done, cells);
        }
        line.cut(columns);
        line
    }

    fn cells(&self, done: bool, columns: usize) -> usize {
        // A finished line is shorter by "ETA "; both get the same bar so that bars line up.
        let eta = if done { 4 } else { 0 };
        let room = |metrics: usize| {
            let metrics = self.groups.iter().take(metrics).map(Self::part_columns);
            let taken = self.fixed_columns() + eta + 1 + metrics.sum::<usize>();
            columns.saturating_sub(taken)
        };
        let fitting = |lengths: &[usize], room| lengths.iter().copied().find(|&n| n <= room);
        fitting(&CELLS[..4], room(2)).or_else(|| fitting(&CELLS, room(1))).unwrap_or(0)
    }

    fn without_bar(status: &Status, done: bool) -> Self {
        let digits = status.epochs.to_string().len();
        let head = format!("Epoch {:>digits$}/{}", status.epoch, status.epochs);
        let count = match status.steps {
            Some(steps) => {
                let digits = steps.to_string().len();
                format!(" {:>digits$}/{steps}", status.step)
            }
            None => format!(" {} steps", status.step),
        };
        let mut tail = vec![count, format!("  {}", clock_face(status, done))];
        tail.push(format!("  {} ex/s", text::rate(status.examples_per_s)));
        Self { head, done: String::new(), todo: String::new(), tail, groups: metric_parts(status) }
    }

    fn part_columns((first, text): &(bool, String)) -> usize {
        2 + 2 * usize::from(*first) + chars(text)
    }

    fn bar_columns(&self) -> usize {
        let cells = chars(&self.done) + chars(&self.todo);
        cells + usize::from(cells > 0)
    }

    fn fixed_columns(&self) -> usize {
        let tail: usize = self.tail.iter().map(|part| chars(part)).sum();
        chars(&self.head) + self.bar_columns() + tail
    }

    fn columns(&self) -> usize {
        self.fixed_columns() + self.groups.iter().map(Self::part_columns).sum::<usize>()
    }

    fn cut(&mut self, columns: usize) {
        while self.columns() > columns {
            if self.groups.pop().is_some() || self.tail.pop().is_some() {
                continue;
            }
            self.done.clear();
            self.todo.clear();
            self.head = self.head.chars().take(columns).collect();
            return;
        }
    }

    fn painted(&self, paint: &Paint) -> String {
        let mut text = self.head.clone();
        if self.bar_columns() > 0 {
            text.push_str(&format!(" {}{}", paint.done.apply_to(&self.done), paint.todo.apply_to(&self.todo)));
        }
        text.extend(self.tail.iter().map(String::as_str));
        for (first, part) in &self.groups {
            if *first {
                text.push_str(&format!(" {}", paint.todo.apply_to("│")));
                text.push_str(&format!(" {part}"));
            } else {
                text.push_str(&format!("  {part}"));
            }
        }
        text
    }
}

/// Returns metrics in order; `true` marks the first of a group that a rule separates.
fn metric_parts(status: &Status) -> Vec<(bool, String)> {
    let groups = Groups::of(status);
    let name_value = |(name, value): &(&str, f64)| format!("{} {}", text::one_line(name), text::number(*value));
    let name_share = |(name, value): &(&str, f64)| format!("{name} {}", text::percent(*value));
    let mut parts: Vec<_> = groups.train.iter().map(|metric| (false, name_value(metric))).collect();
    let validation = groups.validation.iter().map(name_value).enumerate();
    parts.extend(validation.map(|(at, text)| (at == 0, text)));
    let shares = groups.shares.iter().map(name_share).enumerate();
    parts.extend(shares.map(|(at, text)| (at == 0, text)));
    parts
}

/// Filled and empty cells; the tip of an unfinished bar is a half cell.
fn bar(step: u64, steps: u64, done: bool, cells: usize) -> (String, String) {
    let share = if steps == 0 { 0.0 } else { (step as f64 / steps as f64).clamp(0.0, 1.0) };
    let exact = if done && step >= steps { cells as f64 } else { share * cells as f64 };
    let whole = exact.floor() as usize;
    let tip = usize::from(exact > whole as f64);
    let full = "━".repeat(whole) + &"╸".repeat(tip);
    (full, "─".repeat(cells - whole - tip))
}

/// Time taken by a finished epoch, time left in a running one.
fn clock_face(status: &Status, done: bool) -> String {
    match status.steps {
        Some(steps) if !done && status.step > status.resumed => {
            let (made, left) = (status.step - status.resumed, steps.saturating_sub(status.step));
            format!("ETA {}", text::seconds(status.elapsed_s / made as f64 * left as f64))
        }
        _ => text::seconds(status.elapsed_s),
    }
}

fn chars(text: &str) -> usize {
    text.chars().count()
}

struct Paint {
    title: Style,
    done: Style,
    todo: Style,
}

impl Paint {
    fn new(colors: bool) -> Self {
        let style = || Style::new().force_styling(colors);
        Self { title: style().bold(), done: style().green(), todo: style().dim() }
    }
}

/// Ten a second: faster than the eye reads, slow enough for a serial line.
const REDRAW_INTERVAL: Duration = Duration::from_millis(100);

/// Lengths of the bar, tried in this order.
const CELLS: [usize; 5] = [20, 15, 10, 8, 5];

#[cfg(test)]
mod tests;
