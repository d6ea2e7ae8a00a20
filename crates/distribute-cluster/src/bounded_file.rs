//! Files of bounded length, some of which only their owner may read.

use std::fs::{self, File};
use std::io::{Error as IoError, Read};
use std::path::Path;

use zeroize::Zeroizing;

/// Why a file was not read; displayed as what is wrong with it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unread {
    #[error("{0}")]
    Io(#[from] IoError),
    #[error("it is not a file")]
    NotAFile,
    #[error("others than its owner can read or change it (mode {0:04o})")]
    NotPrivate(u32),
}

/// Reads at most this many bytes of a file, which are overwritten when they are dropped. A private one is refused if
/// others than its owner can read or change it.
pub(crate) fn read(path: &Path, most: usize, is_private: bool) -> Result<Zeroizing<Vec<u8>>, Unread> {
    // Before it is opened: a pipe would wait for its writer.
    if !fs::metadata(path)?.is_file() {
        return Err(Unread::NotAFile);
    }
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    #[cfg(unix)]
    if is_private {
        use std::os::unix::fs::PermissionsExt;
        let mode = metadata.permissions().mode() & 0o777;
        if mode & 0o066 != 0 {
            return Err(Unread::NotPrivate(mode));
        }
    }
    #[cfg(not(unix))]
    let _ = is_private;
    // With room for all, and for the read that finds the end, so that no copy of a part stays in memory.
    let expected = usize::try_from(metadata.len()).unwrap_or(usize::MAX).min(most);
    let mut bytes = Zeroizing::new(Vec::with_capacity(expected + 32));
    file.take(most as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}
