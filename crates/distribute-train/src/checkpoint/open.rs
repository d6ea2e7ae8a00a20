//! Opening a checkpoint that others may replace meanwhile, and naming what is damaged in it.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::Value;

use super::disk::{Disk, Entry, Folder};
use super::folder::unless_damaged;
use super::manifest::MANIFEST;
use crate::{Error, Result};

/// Looks at a checkpoint by `look`, again if another one has taken its place meanwhile; returns its folder too.
pub(super) fn retried<T>(disk: &Disk, path: &Path, look: impl Fn(&Folder) -> Result<T>) -> Result<(T, Folder)> {
    let open = |path: &Path| match disk.open_folder(path) {
        Ok(folder) => Ok(folder),
        Err(error) => {
            let problem = unless_damaged(path, error)?;
            Err(damaged(path, MANIFEST, problem))
        }
    };
    let mut folder = open(path)?;
    for _ in 0..LOOKS {
        let error = match look(&folder) {
            Err(error @ Error::Damaged { .. }) => error,
            outcome => return outcome.map(|found| (found, folder)),
        };
        // A checkpoint of the same step may have replaced it meanwhile, so that the first one's files are gone.
        match open(path) {
            Ok(now) if folder.is_another(&now) => folder = now,
            _ => return Err(error),
        }
    }
    look(&folder).map(|found| (found, folder))
}

/// How often a checkpoint is read again while others replace it.
const LOOKS: usize = 8;

/// Returns the error of a damaged file of a checkpoint.
pub(super) fn damaged(path: &Path, file: &str, problem: String) -> Error {
    Error::Damaged { path: path.join(file), problem }
}

/// Returns the error of a file that cannot be read: damaged, or to be read at another time.
pub(super) fn unreadable(path: &Path, file: &str, error: std::io::Error) -> Error {
    unless_damaged(&path.join(file), error).map_or_else(|error| error, |problem| damaged(path, file, problem))
}

/// Returns the error of a file of another length than that of the manifest.
pub(super) fn of_another_length(path: &Path, file: &str, length: u64, entry: &Entry) -> Error {
    damaged(path, file, format!("it has {length} bytes, and was written with {}", entry.bytes))
}

/// Returns the state in the file of it.
pub(super) fn state_of(text: &[u8]) -> Result<BTreeMap<String, Value>, String> {
    let mut value: Value = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    let state = value.get_mut("state").map(Value::take).unwrap_or_default();
    serde_json::from_value(state).map_err(|error| error.to_string())
}
