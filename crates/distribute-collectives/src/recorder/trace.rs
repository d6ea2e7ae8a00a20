//! Records in the format of Perfetto and `chrome://tracing`.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde_json::{Value, json};

use super::{FlightRecord, RecordedState};
use crate::sync::lock;

/// Files that this process has started: later groups append to them; files of earlier runs are replaced.
static BEGUN: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

/// Appends a group's operations to the trace of the rank's name, which is the same in all of its groups: `trace.json`
/// becomes `trace.worker-0.DIGEST.json`.
///
/// The trace has a row per rank and group, spans of operations with their sizes, and a counter of the bandwidth.
///
/// # Source
/// The trace event format of Chromium: complete events (`X`), counters (`C`) and metadata (`M`), in JSON array form.
pub(super) fn append(path: &Path, record: &FlightRecord) -> io::Result<()> {
    let path = path.with_extension(format!("{}.json", super::in_file_name(&record.name)));
    let mut begun = lock(&BEGUN);
    let mut events: Vec<Value> = match begun.contains(&path) {
        true => serde_json::from_slice(&fs::read(&path)?)?,
        false => Vec::new(),
    };
    events.extend(self::events(record));
    super::write_json(&path, &events)?;
    begun.insert(path);
    Ok(())
}

fn events(record: &FlightRecord) -> Vec<Value> {
    // Processes and threads are numbers, of 31 bits; their names are separate records.
    let [pid, row] = [&record.name, &record.group].map(|name| super::digest(name) >> 33);
    let mut events = vec![
        json!({
            "ph": "M", "pid": pid, "name": "process_name",
            "args": {"name": record.name},
        }),
        json!({
            "ph": "M", "pid": pid, "tid": row, "name": "thread_name",
            "args": {"name": format!("group {}, rank {}", record.group, record.rank.0)},
        }),
    ];
    let micros = |seconds: f64| (record.began_s + seconds) * 1e6;
    for operation in &record.operations {
        let Some(finished) = operation.finished_s else { continue };
        let (start, duration) = (micros(operation.issued_s), (finished - operation.issued_s) * 1e6);
        events.push(json!({
            "ph": "X", "pid": pid, "tid": row, "ts": start, "dur": duration, "cat": "collective",
            "name": operation.kind,
            "args": {
                "sequence": operation.sequence, "call": operation.call, "bytes": operation.bytes,
                "transport": record.transport, "error": operation.error,
            },
        }));
        if operation.state == RecordedState::Done && operation.bytes > 0 && duration > 0.0 {
            let gb_s = operation.bytes as f64 / duration / 1e3;
            events.push(json!({
                "ph": "C", "pid": pid, "ts": start, "name": format!("{} GB/s", operation.kind), "args": {"GB/s": gb_s},
            }));
            events.push(json!({
                "ph": "C", "pid": pid, "ts": micros(finished), "name": format!("{} GB/s", operation.kind),
                "args": {"GB/s": 0},
            }));
        }
    }
    events
}
