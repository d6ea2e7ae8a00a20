//! Event files that TensorBoard shows.
//!
//! # Examples
//! ```
//! use distribute_train::tensorboard::{EventWriter, Image};
//! # let folder = tempfile::tempdir()?;
//! let mut train = EventWriter::create(folder.path().join("train"))?;
//! for step in 0..3 {
//!     train.scalar("epoch_loss", step, 1.0 / (step + 1) as f64)?;
//! }
//! train.histogram("fc1.weight", 2, [-0.5, 0.25, 0.25, 1.0])?;
//! train.text("notes", 2, "the learning rate is **0.1**")?;
//! train.image("digit", 2, &Image::new([2, 2, 1], &[0, 255, 255, 0])?)?;
//! train.flush()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Source
//! `tensorflow/core/util/event.proto`, `framework/summary.proto`, `histogram.proto` and `tensor.proto`; files are
//! TFRecord files.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use distribute_input::read::TfRecordWriter;
use prost::Message;

use self::sink::Sink;
use crate::objects;
use crate::{Error, Result};

mod image;
mod sink;
mod wire;
#[cfg(feature = "checkpoint")]
pub(crate) mod xplane;

pub use image::Image;

/// Writes one event file, which belongs to one run in TensorBoard's list, such as `train` or `validation`.
///
/// Under several workers only the chief creates one.
///
/// With the feature `object-store`, the folder may be a URL such as `s3://bucket/run/logs`. Stores cannot append: the
/// file is uploaded again as a whole by [`flush`](EventWriter::flush), at most every 30 s, and when the writer is
/// closed or dropped. Beyond 8 MiB another file is begun, so that uploads stay small.
#[derive(Debug)]
pub struct EventWriter {
    path: PathBuf,
    folder: PathBuf,
    records: TfRecordWriter<Sink>,
    /// The bytes of events in the file, and the size beyond which another one is begun.
    bytes: usize,
    most_bytes: Option<usize>,
    /// Whether a histogram has left out values.
    has_left_out: bool,
}

impl EventWriter {
    /// Creates a file in a folder, which is created if it does not exist. A resumed run creates another file;
    /// TensorBoard joins those of a folder.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be created.
    pub fn create(folder: impl AsRef<Path>) -> Result<EventWriter> {
        let folder = objects::resolved(folder.as_ref().to_owned());
        let wrong = |source| Error::File { path: folder.clone(), source };
        let is_store = objects::of(&folder).map_err(wrong)?.is_some();
        if !is_store {
            fs::create_dir_all(&folder).map_err(wrong)?;
        }
        let (path, sink) = EventWriter::begin(&folder)?;
        let most_bytes = is_store.then_some(sink::MOST_BYTES);
        Ok(EventWriter { path, folder, records: TfRecordWriter::new(sink), bytes: 0, most_bytes, has_left_out: false })
    }

    /// Creates a file with its first event.
    fn begin(folder: &Path) -> Result<(PathBuf, Sink)> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = if host.trim().is_empty() { "localhost" } else { host.trim() };
        let (seconds, process) = (now() as u64, std::process::id());
        let version = encoded(0, wire::What::FileVersion("brain.Event:2".to_owned()));
        let mut first = TfRecordWriter::new(Vec::new());
        let first = first.write(&version).and_then(|()| first.finish());
        let first = first.map_err(|source| Error::File { path: folder.to_owned(), source })?;
        loop {
            let count = COUNT.fetch_add(1, Ordering::Relaxed);
            let path = folder.join(format!("events.out.tfevents.{seconds:010}.{host}.{process}.{count}"));
            match Sink::create(&path, &first) {
                Ok(sink) => return Ok((path, sink)),
                // A container that was restarted within a second has the same name and process id.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(source) => return Err(Error::File { path, source }),
            }
        }
    }

    /// Writes a number of a step, such as a loss.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be written.
    pub fn scalar(&mut self, tag: &str, step: u64, value: f64) -> Result<()> {
        self.value(tag, step, wire::Kind::SimpleValue(value as f32), None)
    }

    /// Writes a histogram of the values of a step, such as those of a parameter. Each bucket is a tenth wider than the
    /// one before, to both sides of 0. Values that are NaN or infinite are left out, with a warning the first time.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be written.
    pub fn histogram(&mut self, tag: &str, step: u64, values: impl IntoIterator<Item = f64>) -> Result<()> {
        let (histogram, left_out) = histogram(values);
        if left_out > 0 && !std::mem::replace(&mut self.has_left_out, true) {
            crate::warning::warn(&format!(
                "the histogram {tag:?} of step {step} lacks {left_out} values that are NaN or infinite; later \
                 histograms in {} lack them too, without a warning",
                self.folder.display()
            ));
        }
        self.value(tag, step, wire::Kind::Histo(histogram), None)
    }

    /// Writes a text of a step, such as a sample of what a model generates. TensorBoard renders Markdown.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be written.
    ///
    /// # Source
    /// `tf.summary.text`.
    pub fn text(&mut self, tag: &str, step: u64, text: &str) -> Result<()> {
        self.value(tag, step, wire::Kind::Tensor(wire::Tensor::of_text(text)), Some(wire::Metadata::of_text()))
    }

    /// Writes an image of a step, such as an input that is misclassified.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be written.
    ///
    /// # Source
    /// `tf.summary.image`.
    pub fn image(&mut self, tag: &str, step: u64, image: &Image) -> Result<()> {
        self.value(tag, step, wire::Kind::Image(image.to_wire()), None)
    }

    /// Writes buffered events to the file; to an object of a store, if the last upload was 30 s ago.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be written.
    pub fn flush(&mut self) -> Result<()> {
        let path = &self.path;
        self.records.flush().map_err(|source| Error::File { path: path.clone(), source })
    }

    /// Writes all events to the file or the object.
    ///
    /// # Errors
    /// [`Error::File`] if it cannot be written.
    pub fn close(self) -> Result<()> {
        let path = self.path;
        self.records.finish().and_then(Sink::close).map_err(|source| Error::File { path, source })
    }

    fn value(&mut self, tag: &str, step: u64, kind: wire::Kind, metadata: Option<wire::Metadata>) -> Result<()> {
        let value = wire::Value { tag: tag.to_owned(), metadata, kind: Some(kind) };
        self.write(step, wire::What::Summary(wire::Summary { value: vec![value] }))
    }

    fn write(&mut self, step: u64, what: wire::What) -> Result<()> {
        let event = encoded(step, what);
        if self.most_bytes.is_some_and(|most| self.bytes >= most) {
            let (path, sink) = EventWriter::begin(&self.folder)?;
            let (full, path) = (
                std::mem::replace(&mut self.records, TfRecordWriter::new(sink)),
                std::mem::replace(&mut self.path, path),
            );
            self.bytes = 0;
            full.finish().and_then(Sink::close).map_err(|source| Error::File { path, source })?;
        }
        self.bytes += event.len();
        let outcome: io::Result<()> = self.records.write(&event);
        outcome.map_err(|source| Error::File { path: self.path.clone(), source })
    }
}

fn encoded(step: u64, what: wire::What) -> Vec<u8> {
    let step = i64::try_from(step).unwrap_or(i64::MAX);
    wire::Event { wall_time: now(), step, what: Some(what) }.encode_to_vec()
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Returns the histogram of finite values, and the number of others.
fn histogram(values: impl IntoIterator<Item = f64>) -> (wire::Histogram, u64) {
    let limits = limits();
    let mut counts = vec![0.0; limits.len()];
    let mut all = wire::Histogram { min: f64::INFINITY, max: f64::NEG_INFINITY, ..wire::Histogram::default() };
    let mut left_out = 0;
    for value in values {
        if !value.is_finite() {
            left_out += 1;
            continue;
        }
        all.min = all.min.min(value);
        all.max = all.max.max(value);
        all.num += 1.0;
        all.sum += value;
        all.sum_squares += value * value;
        counts[limits.partition_point(|limit| *limit <= value).min(limits.len() - 1)] += 1.0;
    }
    if all.num == 0.0 {
        return (wire::Histogram::default(), left_out);
    }
    // Empty buckets at both ends are left out.
    let first = counts.iter().position(|count| *count > 0.0).unwrap_or(0);
    let last = counts.iter().rposition(|count| *count > 0.0).unwrap_or(0);
    all.bucket_limit = limits[first..=last].to_vec();
    all.bucket = counts[first..=last].to_vec();
    (all, left_out)
}

/// Returns the upper ends of the buckets, ascending.
fn limits() -> Vec<f64> {
    let mut positive = vec![1e-12];
    while let Some(last) = positive.last().copied().filter(|last| *last < 1e20) {
        positive.push(last * 1.1);
    }
    let negative = positive.iter().rev().map(|limit| -limit);
    negative.chain([0.0]).chain(positive.iter().copied()).chain([f64::MAX]).collect()
}

#[cfg(test)]
mod tests;
