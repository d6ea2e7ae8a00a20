//! Event files that TensorBoard shows.
//!
//! # Examples
//! ```
//! use distribute_train::tensorboard::EventWriter;
//! # let folder = tempfile::tempdir()?;
//! let mut train = EventWriter::create(folder.path().join("train"))?;
//! for step in 0..3 {
//!     train.scalar("epoch_loss", step, 1.0 / (step + 1) as f64)?;
//! }
//! train.histogram("fc1.weight", 2, [-0.5, 0.25, 0.25, 1.0])?;
//! train.flush()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Source
//! `tensorflow/core/util/event.proto`, `framework/summary.proto` and `histogram.proto`; files are TFRecord files.

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

mod sink;

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
        Ok(EventWriter { path, folder, records: TfRecordWriter::new(sink), bytes: 0, most_bytes })
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
        self.value(tag, step, wire::Kind::SimpleValue(value as f32))
    }

    /// Writes a histogram of the values of a step, such as those of a parameter. Each bucket is a tenth wider than the
    /// one before, to both sides of 0.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be written.
    pub fn histogram(&mut self, tag: &str, step: u64, values: impl IntoIterator<Item = f64>) -> Result<()> {
        self.value(tag, step, wire::Kind::Histo(histogram(values)))
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

    fn value(&mut self, tag: &str, step: u64, kind: wire::Kind) -> Result<()> {
        let value = wire::Value { tag: tag.to_owned(), kind: Some(kind) };
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

fn histogram(values: impl IntoIterator<Item = f64>) -> wire::Histogram {
    let limits = limits();
    let mut counts = vec![0.0; limits.len()];
    let mut all = wire::Histogram { min: f64::INFINITY, max: f64::NEG_INFINITY, ..wire::Histogram::default() };
    for value in values.into_iter().filter(|value| value.is_finite()) {
        all.min = all.min.min(value);
        all.max = all.max.max(value);
        all.num += 1.0;
        all.sum += value;
        all.sum_squares += value * value;
        counts[limits.partition_point(|limit| *limit <= value).min(limits.len() - 1)] += 1.0;
    }
    if all.num == 0.0 {
        return wire::Histogram::default();
    }
    // Empty buckets at both ends are left out.
    let first = counts.iter().position(|count| *count > 0.0).unwrap_or(0);
    let last = counts.iter().rposition(|count| *count > 0.0).unwrap_or(0);
    all.bucket_limit = limits[first..=last].to_vec();
    all.bucket = counts[first..=last].to_vec();
    all
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

/// The fields of the messages that are written.
mod wire {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Event {
        #[prost(double, tag = "1")]
        pub(super) wall_time: f64,
        #[prost(int64, tag = "2")]
        pub(super) step: i64,
        #[prost(oneof = "What", tags = "3, 5")]
        pub(super) what: Option<What>,
    }

    #[derive(Clone, PartialEq, prost::Oneof)]
    pub(super) enum What {
        #[prost(string, tag = "3")]
        FileVersion(String),
        #[prost(message, tag = "5")]
        Summary(Summary),
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Summary {
        #[prost(message, repeated, tag = "1")]
        pub(super) value: Vec<Value>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Value {
        #[prost(string, tag = "1")]
        pub(super) tag: String,
        #[prost(oneof = "Kind", tags = "2, 5")]
        pub(super) kind: Option<Kind>,
    }

    #[derive(Clone, PartialEq, prost::Oneof)]
    pub(super) enum Kind {
        #[prost(float, tag = "2")]
        SimpleValue(f32),
        #[prost(message, tag = "5")]
        Histo(Histogram),
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Histogram {
        #[prost(double, tag = "1")]
        pub(super) min: f64,
        #[prost(double, tag = "2")]
        pub(super) max: f64,
        #[prost(double, tag = "3")]
        pub(super) num: f64,
        #[prost(double, tag = "4")]
        pub(super) sum: f64,
        #[prost(double, tag = "5")]
        pub(super) sum_squares: f64,
        #[prost(double, repeated, tag = "6")]
        pub(super) bucket_limit: Vec<f64>,
        #[prost(double, repeated, tag = "7")]
        pub(super) bucket: Vec<f64>,
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use distribute_testkit::skipped;

    use super::*;

    fn written() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(folder.path().join("train")).unwrap();
        for step in 0..4 {
            writer.scalar("epoch_loss", step, 1.0 / (step + 1) as f64).unwrap();
        }
        writer.histogram("fc1.weight", 3, [-0.5, 0.0, 0.25, 0.25, 1.0, f64::NAN]).unwrap();
        writer.flush().unwrap();
        let path = writer.path.clone();
        (folder, path)
    }

    #[test]
    fn buckets_count_every_finite_value_once() {
        let all = histogram([-0.5, 0.0, 0.25, 0.25, 1.0, f64::NAN, 1e300, -1e300]);
        assert_eq!((all.num, all.min, all.max), (7.0, -1e300, 1e300));
        assert_eq!(all.bucket.iter().sum::<f64>(), 7.0);
        assert_eq!(all.bucket.len(), all.bucket_limit.len());
        assert!(all.bucket_limit.is_sorted());
        assert_eq!(histogram([f64::NAN]), wire::Histogram::default());
    }

    #[test]
    fn events_can_be_read_back() {
        use distribute_input::Dataset;
        use distribute_input::read::{ReadOptions, TfRecords};
        let (_folder, path) = written();
        let records = Dataset::from_files([path]).read(TfRecords, ReadOptions::default());
        let events: Vec<wire::Event> =
            records.iter().map(|record| wire::Event::decode(&record.unwrap()[..]).unwrap()).collect();
        assert_eq!(events.len(), 6);
        assert_eq!(events[0].what, Some(wire::What::FileVersion("brain.Event:2".to_owned())));
        let Some(wire::What::Summary(summary)) = &events[4].what else { panic!("{:?}", events[4]) };
        assert_eq!((events[4].step, summary.value[0].tag.as_str()), (3, "epoch_loss"));
        assert_eq!(summary.value[0].kind, Some(wire::Kind::SimpleValue(0.25)));
    }

    #[cfg(feature = "object-store")]
    #[test]
    fn a_store_gets_files_of_limited_size_with_all_events() {
        use distribute_storage::Location;
        let folder = Location::open("memory://events/train").unwrap();
        let mut writer = EventWriter::create("memory://events/train").unwrap();
        writer.most_bytes = Some(1000);
        let events = |name: &str| {
            let bytes = folder.join(name).read(1 << 20).unwrap();
            let mut rest = &bytes[..];
            let mut events = Vec::new();
            while !rest.is_empty() {
                let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
                events.push(wire::Event::decode(&rest[12..12 + length]).unwrap());
                rest = &rest[16 + length..];
            }
            events
        };
        for step in 0..100 {
            writer.scalar("loss", step, 0.5).unwrap();
        }
        writer.close().unwrap();
        let names: Vec<String> = folder.list().unwrap().into_iter().map(|entry| entry.name).collect();
        assert!(names.len() > 2 && names.iter().all(|name| name.contains("tfevents")), "{names:?}");
        let mut steps = Vec::new();
        for name in &names {
            let all = events(name);
            assert_eq!(all[0].what, Some(wire::What::FileVersion("brain.Event:2".to_owned())));
            steps.extend(all[1..].iter().map(|event| event.step));
        }
        steps.sort_unstable();
        assert_eq!(steps, (0..100).collect::<Vec<i64>>());
    }

    #[test]
    fn tensorboard_reads_them() {
        let python = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/peers/tf/bin/python");
        let installed = Command::new(python).args(["-c", "import tensorboard"]).output();
        if !installed.is_ok_and(|output| output.status.success()) {
            return skipped(
                "TensorBoard is not installed \
                 (python3 -m venv target/peers/tf && target/peers/tf/bin/pip install tensorboard)",
            );
        }
        let (folder, _) = written();
        let script = "import sys; from tensorboard.backend.event_processing.event_accumulator import EventAccumulator; \
                      events = EventAccumulator(sys.argv[1]); events.Reload(); \
                      print([(e.step, e.value) for e in events.Scalars('epoch_loss')]); \
                      h = events.Histograms('fc1.weight')[0].histogram_value; print(h.num, h.min, h.max, h.sum, \
                      sum(h.bucket))";
        let output = Command::new(python).args(["-c", script]).arg(folder.path().join("train")).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stdout).into_owned();
        let expected = "[(0, 1.0), (1, 0.5), (2, 0.3333333432674408), (3, 0.25)]\n5.0 -0.5 1.0 1.0 5.0\n";
        assert_eq!(printed, expected, "{}", String::from_utf8_lossy(&output.stderr));
    }
}
