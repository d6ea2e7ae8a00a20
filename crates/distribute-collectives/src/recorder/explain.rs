//! Diagnosis of a failed group from the records of its ranks.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use super::{FlightRecord, RecordedOperation, RecordedState};

/// Diagnoses a failed group: names the rank that made a different call, fell behind, or left no record.
///
/// # Examples
/// ```
/// use distribute_collectives::{FlightRecord, explain};
///
/// # let folder = std::env::temp_dir().join(format!("explain-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder)?;
/// let records = FlightRecord::read_all(&folder)?;          // the folder in DISTRIBUTE_FLIGHT_DIR
/// println!("{}", explain(&records));
/// # std::fs::remove_dir(&folder)?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn explain(records: &[FlightRecord]) -> String {
    let mut groups: BTreeMap<&str, Vec<&FlightRecord>> = BTreeMap::new();
    for record in records {
        groups.entry(&record.group).or_default().push(record);
    }
    if groups.is_empty() {
        return "no records: set DISTRIBUTE_FLIGHT_DIR to a folder, and run the job again; every rank of a group that \
                fails writes rank_NNNNN.GROUP.json there\n"
            .to_owned();
    }
    groups.into_iter().map(|(name, records)| explain_group(name, &records)).collect()
}

/// The number of ranks that a verdict lists.
const MAX_LISTED: usize = 64;

fn explain_group(name: &str, records: &[&FlightRecord]) -> String {
    let world_size = records.iter().map(|record| record.world_size).max().unwrap_or(0);
    let mut text = format!("group {name:?}, {} of {world_size} ranks left a record\n", records.len());
    let there: BTreeSet<usize> = records.iter().map(|record| record.rank.index()).collect();
    let missing = world_size.saturating_sub(there.range(..world_size).count());
    // The size is that of a file, and may be any number.
    let silent = (0..world_size).filter(|rank| !there.contains(rank)).take(MAX_LISTED.min(missing));
    let mut silent: Vec<String> = silent.map(|rank| format!("rank {rank}")).collect();
    if missing > silent.len() {
        silent.push(format!("{} more", missing - silent.len()));
    }
    for record in records {
        let last = record.operations.last();
        let state = last.map_or("has called nothing".to_owned(), |last| match last.state {
            RecordedState::Done => format!("has finished {}", last.call),
            RecordedState::Issued => format!("is in {}", last.call),
            RecordedState::Failed => format!("failed in {}", last.call),
        });
        let _ = writeln!(text, "  rank {} ({}) {state}", record.rank.0, record.name);
    }
    let verdict = if !silent.is_empty() {
        format!("{} left no record: killed, or never started", silent.join(", "))
    } else if let Some((operation, there)) = first_difference(records) {
        format!("the calls part at #{}: {}", operation, there.join("; "))
    } else {
        behind(records)
    };
    let _ = writeln!(text, "verdict: {verdict}");
    if let Some(failure) = records.iter().find_map(|record| record.failure.as_ref()) {
        let _ = writeln!(text, "first error on record: {failure}");
    }
    text
}

/// Finds the first operation in which ranks made different calls, and returns these.
fn first_difference(records: &[&FlightRecord]) -> Option<(u64, Vec<String>)> {
    let mut calls: BTreeMap<u64, Vec<(&FlightRecord, &RecordedOperation)>> = BTreeMap::new();
    for record in records {
        for operation in &record.operations {
            calls.entry(operation.sequence).or_default().push((record, operation));
        }
    }
    let differs =
        |all: &[(&FlightRecord, &RecordedOperation)]| all.iter().any(|(_, other)| other.call != all[0].1.call);
    calls.into_iter().find(|(_, all)| differs(all)).map(|(sequence, all)| {
        let said = all.iter().map(|(record, operation)| format!("{} calls {}", record.name, operation.call));
        (sequence, said.collect())
    })
}

/// Names the ranks that are behind the others, if all have made the same calls.
fn behind(records: &[&FlightRecord]) -> String {
    let reached = |record: &FlightRecord| record.operations.last().map_or(-1, |last| last.sequence as i64);
    let most = records.iter().map(|record| reached(record)).max().unwrap_or(-1);
    let late: Vec<String> = records
        .iter()
        .filter(|record| reached(record) < most)
        .map(|record| format!("{} has not called #{}", record.name, reached(record) + 1))
        .collect();
    match late.is_empty() {
        true => "all ranks have called the same operations; look at the error for who was slow or lost".to_owned(),
        false => late.join("; "),
    }
}
