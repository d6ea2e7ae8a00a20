//! Files that appear whole.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fs, io, process};

/// Writes a file under another name and renames it, so that nothing reads a part of it. If that fails, nothing is left
/// behind.
pub(crate) fn write_whole(file: &Path, bytes: &[u8]) -> io::Result<()> {
    // Unique in the process, whose devices may need the same file at once, by the number, and among processes by
    // theirs.
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let part = file.with_extension(format!("{}-{number}.{PART}", process::id()));
    let written = fs::write(&part, bytes).and_then(|()| fs::rename(&part, file));
    if written.is_err() {
        let _ = fs::remove_file(&part);
    }
    written
}

/// The extension of a file that is being written.
pub(crate) const PART: &str = "part";
