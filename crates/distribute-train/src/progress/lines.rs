//! Lines for files and pipes: `key=value`, or one JSON object each.

use std::io::{self, Write};
use std::time::Duration;

use serde::ser::{Serialize, SerializeMap, Serializer};

use super::clock::Clock;
use super::protocol::{Event, Number, Status};
use super::render::Renderer;
use super::text::{self, Groups};

/// `key=value` lines for a log: one per epoch, and at most one every 30 seconds within it.
///
/// It writes no control byte except the line feed. The closing summary is not a log line and is not written here; it
/// belongs on standard output.
///
/// # Examples
///
/// ```
/// use distribute_train::progress::{Event, PlainRenderer, Renderer, Status, SystemClock};
///
/// let mut log = Vec::new();
/// let status = Status { epoch: 1, epochs: 5, step: 469, ..Status::default() };
/// PlainRenderer::new(&mut log, SystemClock::new()).render(&Event::Epoch(status))?;
/// assert!(String::from_utf8_lossy(&log).contains("Z INFO  epoch=1/5 step=469 "));
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct PlainRenderer<W> {
    writer: W,
    clock: Box<dyn Clock>,
    pace: Pace,
}

impl<W: Write + Send> PlainRenderer<W> {
    /// Creates a renderer that writes to `writer` and reads the time from `clock`.
    pub fn new(writer: W, clock: impl Clock + 'static) -> Self {
        Self { writer, clock: Box::new(clock), pace: Pace::default() }
    }

    /// Writes a warning between the lines of progress.
    pub(crate) fn warn(&mut self, text: &str) -> io::Result<()> {
        self.line("WARN ", &text::one_line(text))
    }

    fn line(&mut self, level: &str, text: &str) -> io::Result<()> {
        // One write per line, so that lines of several processes on one pipe do not mix.
        let line = format!("{} {level} {text}\n", timestamp(&*self.clock));
        self.writer.write_all(line.as_bytes())?;
        self.writer.flush()
    }
}

impl<W: Write + Send> Renderer for PlainRenderer<W> {
    fn render(&mut self, event: &Event) -> io::Result<()> {
        if matches!(event, Event::Vitals(_)) || !self.pace.admits(event, self.clock.elapsed()) {
            return Ok(());
        }
        match event {
            Event::Begin { title } => self.line("INFO ", &text::one_line(title)),
            Event::Step(status) | Event::Epoch(status) => self.line("INFO ", &plain(status)),
            Event::Vitals(_) | Event::End { .. } => Ok(()),
        }
    }
}

/// The same lines as [`PlainRenderer`], each a JSON object with the keys in a fixed order.
///
/// The end of the run is a line too; its `summary` holds the text of the closing block.
pub struct JsonRenderer<W> {
    writer: W,
    clock: Box<dyn Clock>,
    pace: Pace,
}

impl<W: Write + Send> JsonRenderer<W> {
    /// Creates a renderer that writes to `writer` and reads the time from `clock`.
    pub fn new(writer: W, clock: impl Clock + 'static) -> Self {
        Self { writer, clock: Box::new(clock), pace: Pace::default() }
    }
}

impl<W: Write + Send> Renderer for JsonRenderer<W> {
    fn render(&mut self, event: &Event) -> io::Result<()> {
        if matches!(event, Event::Vitals(_)) || !self.pace.admits(event, self.clock.elapsed()) {
            return Ok(());
        }
        let record = Record { time: timestamp(&*self.clock), event };
        let mut line = serde_json::to_vec(&record)?;
        line.push(b'\n');
        self.writer.write_all(&line)?;
        self.writer.flush()
    }
}

/// One JSON line. It is flat because log stores index top-level keys.
struct Record<'a> {
    time: String,
    event: &'a Event,
}

impl Serialize for Record<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("time", &self.time)?;
        map.serialize_entry("level", "INFO")?;
        match self.event {
            Event::Begin { title } => {
                map.serialize_entry("event", "begin")?;
                map.serialize_entry("title", title)?;
            }
            Event::Step(status) | Event::Epoch(status) => {
                let done = matches!(self.event, Event::Epoch(_));
                map.serialize_entry("event", if done { "epoch" } else { "step" })?;
                map.serialize_entry("epoch", &status.epoch)?;
                map.serialize_entry("epochs", &status.epochs)?;
                map.serialize_entry("step", &status.step)?;
                map.serialize_entry("steps", &status.steps)?;
                for (name, value) in &status.metrics {
                    map.serialize_entry(&text::key(name), &Number(*value))?;
                }
                map.serialize_entry("examples_per_s", &Number(status.examples_per_s))?;
                map.serialize_entry("elapsed_s", &Number(status.elapsed_s))?;
            }
            // The renderer drops it before.
            Event::Vitals(_) => {}
            Event::End { summary } => {
                map.serialize_entry("event", "end")?;
                map.serialize_entry("summary", summary)?;
            }
        }
        map.end()
    }
}

/// Passes all events except steps, which pass once per [`STEP_INTERVAL`].
#[derive(Default)]
struct Pace {
    last: Option<Duration>,
}

impl Pace {
    fn admits(&mut self, event: &Event, now: Duration) -> bool {
        if let (Event::Step(_), Some(last)) = (event, self.last)
            && now.saturating_sub(last) < STEP_INTERVAL
        {
            return false;
        }
        self.last = Some(now);
        true
    }
}

fn plain(status: &Status) -> String {
    let groups = Groups::of(status);
    let mut line = format!("epoch={}/{} step={}", status.epoch, status.epochs, status.step);
    for (name, value) in groups.train.into_iter().chain(groups.validation) {
        line.push_str(&format!(" {}={}", text::key(name), text::number(value)));
    }
    line.push_str(&format!(" examples_per_s={:.0}", status.examples_per_s));
    for (name, value) in groups.shares {
        line.push_str(&format!(" {name}={value:.2}"));
    }
    line.push_str(&format!(" elapsed_s={:.1}", status.elapsed_s));
    line
}

fn timestamp(clock: &dyn Clock) -> String {
    humantime::format_rfc3339_seconds(clock.wall()).to_string()
}

/// Long enough to keep a day of training readable, short enough to show that it is alive.
const STEP_INTERVAL: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests;
