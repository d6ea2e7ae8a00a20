//! The flight recorder: the last calls of each rank.
//!
//! It is always on. It keeps the last operations in preallocated memory, and writes them as JSON if the environment
//! requests it: when the group fails, for `distribute explain`, and at the end, as a trace for Perfetto.

use std::fs;
use std::hash::{BuildHasher, DefaultHasher, Hasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::call::Call;
use crate::environment;
use crate::present::{EndedCall, PresentCall};
use crate::sync::lock;
use crate::{Error, Rank};

mod explain;
mod trace;

pub use explain::explain;

/// Number of operations that are kept, without and with a trace.
const KEPT: usize = 2_000;
const KEPT_FOR_TRACE: usize = 200_000;

/// Number of operations among which [`Recorder::present`] searches for one that has not ended, which bounds the time
/// for which it holds the lock.
const SEARCHED: u64 = 512;

/// The variable with the folder to which failing groups write their records.
const FLIGHT_DIR: &str = "DISTRIBUTE_FLIGHT_DIR";

/// The variable with the file of the trace; each rank adds its number to the name.
const TRACE: &str = "DISTRIBUTE_TRACE";

/// The last operations of one rank of a group, newest last.
///
/// # Source
/// The flight recorder of torch.distributed, which writes pickle files; these are JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct FlightRecord {
    /// The group's name.
    pub group: String,
    /// This rank's index.
    pub rank: Rank,
    /// This rank's name, such as `worker:1`.
    pub name: String,
    /// The number of ranks.
    pub world_size: usize,
    /// The transport between processes.
    pub transport: String,
    /// Time at which the group was formed, in seconds since 1970; the times of operations are relative to it.
    pub began_s: f64,
    /// The error with which the group ended, if it failed.
    pub failure: Option<String>,
    /// The operations.
    pub operations: Vec<RecordedOperation>,
}

/// One operation of a [`FlightRecord`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RecordedOperation {
    /// Position in the group's order of calls, from 0.
    pub sequence: u64,
    /// The kind: the name of the method.
    pub kind: String,
    /// The call as text, as errors print it; equal on ranks that agree.
    pub call: String,
    /// Bytes of this rank's values.
    pub bytes: u64,
    /// The operation's state on this rank.
    pub state: RecordedState,
    /// Seconds from the forming of the group to this rank's call.
    pub issued_s: f64,
    /// Seconds from the forming of the group to this rank's result; `None` before.
    pub finished_s: Option<f64>,
    /// The operation's error, if it failed.
    pub error: Option<String>,
}

/// The state of an operation on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum RecordedState {
    /// The operation was called and is not over.
    Issued,
    /// The operation completed.
    Done,
    /// The operation ended with an error.
    Failed,
}

/// One rank's recorder.
pub(crate) struct Recorder {
    ring: Mutex<Ring>,
    began: Instant,
    began_at: SystemTime,
    flight_dir: Option<PathBuf>,
    trace: Option<PathBuf>,
}

struct Ring {
    entries: Vec<Entry>,
    /// The number of operations so far; the next record is written at this position, modulo the length.
    count: u64,
    kept: usize,
    failure: Option<String>,
    /// Whether an operation of this rank has failed; later ones fail for the same reason.
    has_error: bool,
    /// Time for which this rank's threads were blocked in operations.
    waited: Duration,
}

struct Entry {
    call: Call,
    issued: Instant,
    /// Since when a thread of the rank is blocked in the operation; `None` while it runs in the background.
    blocked: Option<Instant>,
    finished: Option<Instant>,
    error: Option<String>,
}

/// Identifies the record of an operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordToken(u64);

/// The header of a record: the rank and the group that it belongs to.
pub(crate) struct Identity<'a> {
    pub(crate) group: &'a str,
    pub(crate) rank: Rank,
    pub(crate) name: &'a str,
    pub(crate) world_size: usize,
    pub(crate) transport: &'a str,
}

impl Recorder {
    pub(crate) fn from_env() -> Recorder {
        Recorder::new(environment::path(FLIGHT_DIR), environment::path(TRACE))
    }

    fn new(flight_dir: Option<PathBuf>, trace: Option<PathBuf>) -> Recorder {
        let kept = if trace.is_some() { KEPT_FOR_TRACE } else { KEPT };
        let entries = Vec::with_capacity(KEPT);
        let ring = Ring { entries, count: 0, kept, failure: None, has_error: false, waited: Duration::ZERO };
        Recorder { ring: Mutex::new(ring), began: Instant::now(), began_at: SystemTime::now(), flight_dir, trace }
    }

    /// Records that this rank has called an operation, and whether the caller is blocked until its end.
    pub(crate) fn issue(&self, call: Call, issued: Instant, blocks: bool) -> RecordToken {
        let entry = Entry { call, issued, blocked: blocks.then_some(issued), finished: None, error: None };
        let mut ring = lock(&self.ring);
        let token = ring.count;
        let place = (token % ring.kept as u64) as usize;
        match ring.entries.get_mut(place) {
            Some(old) => *old = entry,
            None => ring.entries.push(entry),
        }
        ring.count += 1;
        RecordToken(token)
    }

    /// Records that a thread waits from now on for an operation that was called earlier.
    pub(crate) fn block(&self, token: RecordToken, since: Instant) {
        let mut ring = lock(&self.ring);
        let (count, kept) = (ring.count, ring.kept as u64);
        if count - token.0 <= kept {
            ring.entries[(token.0 % kept) as usize].blocked = Some(since);
        }
    }

    /// Records how an operation has ended, and since when a thread was blocked in it, if one was.
    pub(crate) fn finish(
        &self,
        token: RecordToken,
        outcome: Result<(), &Error>,
        blocked_since: Option<Instant>,
        header: impl FnOnce() -> FlightHeader,
    ) {
        let now = Instant::now();
        let mut ring = lock(&self.ring);
        ring.waited += blocked_since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let (count, kept) = (ring.count, ring.kept as u64);
        let first_error = outcome.is_err() && !std::mem::replace(&mut ring.has_error, outcome.is_err());
        let error = outcome.err().map(ToString::to_string);
        if count - token.0 <= kept {
            let entry = &mut ring.entries[(token.0 % kept) as usize];
            entry.finished = Some(now);
            entry.error = error.clone();
        }
        if ring.failure.is_none() {
            ring.failure = error;
        }
        drop(ring);
        if first_error {
            self.write(header);
        }
    }

    /// Records that the group has failed, whatever this rank was doing, and writes the record to the folder that the
    /// environment names.
    pub(crate) fn fail(&self, error: &Error, header: impl FnOnce() -> FlightHeader) {
        lock(&self.ring).failure.get_or_insert_with(|| error.to_string());
        self.write(header);
    }

    /// Returns the number of calls so far, the call in which the rank is, and the last one that has ended.
    pub(crate) fn present(&self) -> (u64, Option<PresentCall>, Option<EndedCall>) {
        let now = Instant::now();
        let ago = |at: Instant| now.saturating_duration_since(at);
        let ring = lock(&self.ring);
        let first = ring.count.saturating_sub(SEARCHED.min(ring.kept as u64));
        let tokens = first..ring.count;
        let entries = || tokens.clone().filter_map(|token| ring.entries.get((token % ring.kept as u64) as usize));
        let calls = entries().next_back().map_or(0, |entry| entry.call.sequence + 1);
        // The oldest call that blocks; else the oldest one in the background.
        let pending = |entry: &&Entry| entry.finished.is_none();
        let blocking = entries().find(|entry| pending(entry) && entry.blocked.is_some());
        let call = blocking.or_else(|| entries().find(pending)).map(|entry| PresentCall {
            kind: entry.call.kind,
            sequence: entry.call.sequence,
            call: entry.call.to_string(),
            bytes: entry.bytes(),
            since: ago(entry.issued),
            blocked: entry.blocked.map(ago),
        });
        let ended = entries().rev().find_map(|entry| Some((entry, entry.finished?)));
        let last = ended.map(|(entry, at)| EndedCall { call: entry.call.to_string(), ago: ago(at) });
        (calls, call, last)
    }

    /// Returns the time for which this rank's threads were blocked in operations.
    pub(crate) fn waited(&self) -> Duration {
        lock(&self.ring).waited
    }

    fn write(&self, header: impl FnOnce() -> FlightHeader) {
        let Some(folder) = &self.flight_dir else { return };
        let record = self.record(header());
        // A process may have one rank in several groups, and other processes that rank in others.
        let path = folder.join(format!("rank_{:05}.{}.json", record.rank.0, in_file_name(&record.group)));
        if let Err(error) = write_json(&path, &record) {
            tracing::warn!("the flight record {} cannot be written: {error}", path.display());
        }
    }

    pub(crate) fn record(&self, header: FlightHeader) -> FlightRecord {
        let ring = lock(&self.ring);
        let seconds = |at: Instant| at.saturating_duration_since(self.began).as_secs_f64();
        let first = ring.count.saturating_sub(ring.kept as u64);
        let operations = (first..ring.count).filter_map(|token| {
            let entry = ring.entries.get((token % ring.kept as u64) as usize)?;
            Some(RecordedOperation {
                sequence: entry.call.sequence,
                kind: entry.call.kind.name().to_owned(),
                call: entry.call.to_string(),
                bytes: entry.bytes(),
                state: match (&entry.error, entry.finished) {
                    (Some(_), _) => RecordedState::Failed,
                    (None, Some(_)) => RecordedState::Done,
                    (None, None) => RecordedState::Issued,
                },
                issued_s: seconds(entry.issued),
                finished_s: entry.finished.map(seconds),
                error: entry.error.clone(),
            })
        });
        FlightRecord {
            group: header.group,
            rank: header.rank,
            name: header.name,
            world_size: header.world_size,
            transport: header.transport,
            began_s: self.began_at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            failure: ring.failure.clone(),
            operations: operations.collect(),
        }
    }

    /// Writes the trace, if the environment requests one.
    pub(crate) fn close(&self, header: impl FnOnce() -> FlightHeader) {
        let Some(path) = &self.trace else { return };
        let record = self.record(header());
        if let Err(error) = trace::append(path, &record) {
            tracing::warn!("the trace {} cannot be written: {error}", path.display());
        }
    }
}

impl Entry {
    /// Returns the bytes of the rank's values; a barrier has none.
    fn bytes(&self) -> u64 {
        self.call.count.saturating_mul(self.call.dtype.size_bytes() as u64)
    }
}

/// An owned [`Identity`].
pub(crate) struct FlightHeader {
    group: String,
    rank: Rank,
    name: String,
    world_size: usize,
    transport: String,
}

impl From<Identity<'_>> for FlightHeader {
    fn from(identity: Identity<'_>) -> FlightHeader {
        FlightHeader {
            group: identity.group.to_owned(),
            rank: identity.rank,
            name: identity.name.to_owned(),
            world_size: identity.world_size,
            transport: identity.transport.to_owned(),
        }
    }
}

impl FlightRecord {
    /// Reads the records that failing ranks have written to a folder, in rank order.
    ///
    /// # Errors
    /// An [`io::Error`] if the folder or a file cannot be read, or a file is not a record.
    pub fn read_all(folder: &Path) -> io::Result<Vec<FlightRecord>> {
        let mut records: Vec<FlightRecord> = Vec::new();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.starts_with("rank_") && name.ends_with(".json") {
                records.push(serde_json::from_slice(&fs::read(&path)?).map_err(io::Error::from)?);
            }
        }
        records.sort_by_key(|record| record.rank);
        Ok(records)
    }
}

/// Returns a number that stands for a text: the same in all processes of one program.
pub(crate) fn digest(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(text.as_bytes());
    hasher.finish()
}

/// Returns the part of a file's name that stands for a text: its beginning, for readers, and its digest.
fn in_file_name(text: &str) -> String {
    /// The number of characters that are kept for readers.
    const SHOWN: usize = 40;
    let plain = |character: char| character.is_ascii_alphanumeric() || "._-".contains(character);
    let shown = text.chars().take(SHOWN).map(|character| if plain(character) { character } else { '-' });
    format!("{}.{:016x}", shown.collect::<String>(), digest(text))
}

/// Writes to a temporary file, then renames it, so that readers find a complete file or none.
fn write_json(path: &Path, value: &impl Serialize) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    // Random: groups of one name may fail at the same moment, in several containers too, whose processes may have the
    // same number.
    let beside = path.with_extension(format!("{:016x}.tmp", RandomState::new().hash_one(path)));
    let bytes = serde_json::to_vec(value)?;
    fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, path)).inspect_err(|_| {
        // A folder that is full has no room for the rest of it either.
        let _ = fs::remove_file(&beside);
    })
}

#[cfg(test)]
mod tests;
