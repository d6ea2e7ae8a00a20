//! The files of a checkpoint: written beside, synced, renamed; read back and compared with their checksums.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::snapshot::{Snapshot, Stored, tensors_of};
use crate::{Error, Result};

/// What `manifest.json` says.
#[derive(Serialize, Deserialize)]
struct Manifest {
    step: u64,
    files: BTreeMap<String, Entry>,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    bytes: u64,
    crc32c: u32,
}

const MANIFEST: &str = "manifest.json";
const STATE: &str = "state.json";
const LATEST: &str = "latest";
const PREFIX: &str = "step-";
const TEMPORARY: &str = ".tmp-";

/// Writes a snapshot; its folder.
pub(super) fn write(root: &Path, snapshot: &Snapshot, max_shard_bytes: usize) -> Result<PathBuf> {
    let name = format!("{PREFIX}{:08}", snapshot.step);
    let (path, beside) = (root.join(&name), root.join(format!("{name}{TEMPORARY}{}", std::process::id())));
    let failed = |source| Error::File { path: beside.clone(), source };
    let outcome = (|| {
        fs::create_dir_all(&beside).map_err(failed)?;
        let mut files = BTreeMap::new();
        for (file, tensors) in &snapshot.files {
            write_tensors(&beside, file, tensors, max_shard_bytes, &mut files)?;
        }
        let state = json!({ "step": snapshot.step, "state": snapshot.state });
        files.insert(STATE.to_owned(), write_json(&beside.join(STATE), &state)?);
        let manifest = Manifest { step: snapshot.step, files };
        write_json(&beside.join(MANIFEST), &json!(manifest))?;
        sync(&beside)?;
        // One of the same step may be there, of a run that went this way before.
        if path.exists() {
            fs::remove_dir_all(&path).map_err(failed)?;
        }
        fs::rename(&beside, &path).map_err(failed)?;
        sync(root)?;
        point(root, &name)
    })();
    if outcome.is_err() {
        drop(fs::remove_dir_all(&beside));
    }
    outcome.map(|()| path)
}

/// Names the newest one.
fn point(root: &Path, name: &str) -> Result<()> {
    let beside = root.join(format!("{LATEST}{TEMPORARY}{}", std::process::id()));
    write_bytes(&beside, format!("{name}\n").as_bytes())?;
    let path = root.join(LATEST);
    fs::rename(&beside, &path).map_err(|source| Error::File { path, source })
}

fn write_tensors(
    folder: &Path,
    file: &str,
    tensors: &BTreeMap<String, Stored>,
    max_shard_bytes: usize,
    files: &mut BTreeMap<String, Entry>,
) -> Result<()> {
    let mut shards: Vec<Vec<(&String, &Stored)>> = vec![Vec::new()];
    let mut bytes = 0;
    for (name, stored) in tensors {
        if bytes > 0 && bytes + stored.bytes.len() > max_shard_bytes {
            shards.push(Vec::new());
            bytes = 0;
        }
        bytes += stored.bytes.len();
        if let Some(shard) = shards.last_mut() {
            shard.push((name, stored));
        }
    }
    let count = shards.len();
    let mut map = BTreeMap::new();
    for (index, shard) in (1..).zip(shards) {
        let name = match count {
            1 => format!("{file}.safetensors"),
            _ => format!("{file}-{index:05}-of-{count:05}.safetensors"),
        };
        map.extend(shard.iter().map(|(tensor, _)| ((*tensor).clone(), name.clone())));
        let path = folder.join(&name);
        let text = safetensors::serialize(shard, None);
        let text = text.map_err(|error| Error::Damaged { path: path.clone(), problem: error.to_string() })?;
        files.insert(name, write_bytes(&path, &text)?);
    }
    if count > 1 {
        let total: usize = tensors.values().map(|stored| stored.bytes.len()).sum();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": map });
        let name = format!("{file}.safetensors.index.json");
        files.insert(name.clone(), write_json(&folder.join(name), &index)?);
    }
    Ok(())
}

fn write_json(path: &Path, value: &Value) -> Result<Entry> {
    let mut text =
        serde_json::to_vec_pretty(value).map_err(|source| Error::State { key: "state".to_owned(), source })?;
    text.push(b'\n');
    write_bytes(path, &text)
}

fn write_bytes(path: &Path, bytes: &[u8]) -> Result<Entry> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|source| Error::File { path: path.to_owned(), source })?;
    Ok(Entry { bytes: bytes.len() as u64, crc32c: crc32c::crc32c(bytes) })
}

fn sync(folder: &Path) -> Result<()> {
    File::open(folder)
        .and_then(|folder| folder.sync_all())
        .map_err(|source| Error::File { path: folder.to_owned(), source })
}

/// The checkpoints of a folder, the newest first.
pub(super) fn list(root: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    let entries = match fs::read_dir(root) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
        Err(source) => return Err(Error::File { path: root.to_owned(), source }),
    };
    for entry in entries {
        let path = entry.map_err(|source| Error::File { path: root.to_owned(), source })?.path();
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if let Some(step) = name.strip_prefix(PREFIX).and_then(|step| step.parse().ok()) {
            found.push((step, path));
        }
    }
    found.sort_by_key(|(step, _)| std::cmp::Reverse(*step));
    Ok(found)
}

/// Removes all checkpoints, and the folder if it is empty then.
pub(super) fn remove_all(root: &Path) -> Result<()> {
    remove_temporary(root);
    for (_, path) in list(root)? {
        fs::remove_dir_all(&path).map_err(|source| Error::File { path, source })?;
    }
    drop(fs::remove_file(root.join(LATEST)));
    drop(fs::remove_dir(root));
    Ok(())
}

/// Removes what processes that were killed have left half-written.
pub(super) fn remove_temporary(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let (step, latest) = (name.starts_with(PREFIX), name.starts_with(LATEST));
        if name.contains(TEMPORARY) && (step || latest) {
            drop(if step { fs::remove_dir_all(entry.path()) } else { fs::remove_file(entry.path()) });
        }
    }
}

/// Reads a checkpoint, and compares every file with the manifest.
pub(super) fn read(folder: &Path) -> Result<Snapshot> {
    let damaged = |file: &str, problem: String| Error::Damaged { path: folder.join(file), problem };
    let text = fs::read(folder.join(MANIFEST)).map_err(|error| damaged(MANIFEST, error.to_string()))?;
    let manifest: Manifest = serde_json::from_slice(&text).map_err(|error| damaged(MANIFEST, error.to_string()))?;
    let mut snapshot = Snapshot::new(manifest.step);
    for (name, entry) in &manifest.files {
        let bytes = fs::read(folder.join(name)).map_err(|error| damaged(name, error.to_string()))?;
        if bytes.len() as u64 != entry.bytes {
            return Err(damaged(name, format!("it has {} bytes, and was written with {}", bytes.len(), entry.bytes)));
        }
        if crc32c::crc32c(&bytes) != entry.crc32c {
            return Err(damaged(name, "its checksum is not the one that was written".to_owned()));
        }
        if name == STATE {
            let mut value: Value = serde_json::from_slice(&bytes).map_err(|error| damaged(name, error.to_string()))?;
            let state = serde_json::from_value(value["state"].take());
            snapshot.state = state.map_err(|error| damaged(name, error.to_string()))?;
        } else if let Some(stem) = name.strip_suffix(".safetensors") {
            let file = stem.split_once("-0").map_or(stem, |(file, _)| file);
            let tensors = tensors_of(&bytes).map_err(|problem| damaged(name, problem))?;
            snapshot.files.entry(file.to_owned()).or_default().extend(tensors);
        }
    }
    Ok(snapshot)
}
