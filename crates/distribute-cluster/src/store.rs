//! Stores of small values that all members of a job reach.

use std::fs;
use std::hash::{BuildHasher, RandomState};
use std::io::{Error as IoError, ErrorKind, Result as IoResult, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A store of small values that all members of a job reach; implement it for one of your own, such as Redis or etcd.
///
/// Keys are printable ASCII of at most 1024 bytes, values at most 1 MiB. Values of earlier jobs may be there:
/// [`StoreRendezvous`](crate::StoreRendezvous) tells them apart.
///
/// # Source
/// `torch.distributed.Store`; Gloo's `rendezvous::Store`.
pub trait Store: Send + Sync {
    /// Stores a value, replacing an earlier one with the same key. A reader gets one of the two, never a part.
    ///
    /// # Errors
    /// If the store cannot be reached or written.
    fn put(&self, key: &str, value: &[u8]) -> IoResult<()>;

    /// Returns the value of a key as soon as a member has put it; `None` if none has within `timeout`. A timeout of
    /// zero looks once.
    ///
    /// # Errors
    /// If the store cannot be reached or read.
    fn get(&self, key: &str, timeout: Duration) -> IoResult<Option<Vec<u8>>>;
}

/// A store in a folder that all members reach, such as one on NFS. Each value is a file.
///
/// The files of a job stay there; remove the folder when no job uses it any more.
///
/// # Examples
/// ```
/// use std::time::Duration;
/// use distribute_cluster::{FileStore, Store};
///
/// let folder = tempfile::tempdir()?;
/// let store = FileStore::new(folder.path().join("store"))?;
/// store.put("address", b"10.0.0.1:2222")?;
/// assert_eq!(store.get("address", Duration::ZERO)?.as_deref(), Some(&b"10.0.0.1:2222"[..]));
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Source
/// `torch.distributed.FileStore`, which keeps all values in one file under a lock; many network file systems have no
/// locks that hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileStore {
    folder: PathBuf,
}

impl FileStore {
    /// Creates a store in a folder, which is created if it is not there.
    ///
    /// # Errors
    /// If the folder cannot be created.
    pub fn new(folder: impl Into<PathBuf>) -> IoResult<FileStore> {
        let folder = folder.into();
        fs::create_dir_all(&folder).map_err(|error| about(&folder, &error))?;
        Ok(FileStore { folder })
    }

    /// Returns the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(file_name(key))
    }
}

impl Store for FileStore {
    fn put(&self, key: &str, value: &[u8]) -> IoResult<()> {
        let path = self.path(key);
        // A random name, so that the file appears whole under its own: processes of several containers may have the
        // same number.
        let own = format!(".{:016x}-{}", RandomState::new().hash_one(key), file_name(key));
        let own = self.folder.join(own.chars().take(MAX_NAME).collect::<String>());
        let written = fs::File::create(&own).and_then(|mut file| {
            file.write_all(value)?;
            file.sync_all()?;
            fs::rename(&own, &path)
        });
        written.map_err(|error| {
            // The first error is the one to report.
            let _ = fs::remove_file(&own);
            about(&path, &error)
        })
    }

    fn get(&self, key: &str, timeout: Duration) -> IoResult<Option<Vec<u8>>> {
        let (path, started) = (self.path(key), Instant::now());
        let mut pause = FIRST_PAUSE;
        loop {
            match fs::read(&path) {
                Ok(value) => return Ok(Some(value)),
                // A file that is replaced while it is read is stale on NFS.
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::StaleNetworkFileHandle) => {}
                Err(error) => return Err(about(&path, &error)),
            }
            let left = timeout.saturating_sub(started.elapsed());
            if left.is_zero() {
                return Ok(None);
            }
            std::thread::sleep(pause.min(left));
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }
}

/// The pause after the first look; each further pause is twice as long.
const FIRST_PAUSE: Duration = Duration::from_millis(1);

/// The longest pause between two looks.
const LAST_PAUSE: Duration = Duration::from_millis(50);

/// The longest file name, in bytes, that file systems take.
const MAX_NAME: usize = 255;

/// Returns the file name of a key: letters, digits, "-" and "_" stand for themselves, other bytes as "%" and two
/// digits. A long key is shortened to a digest of it.
fn file_name(key: &str) -> String {
    let mut name = String::with_capacity(key.len());
    for byte in key.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' => name.push(byte.into()),
            _ => name.push_str(&format!("%{byte:02X}")),
        }
    }
    // The prefix of an unfinished file is shorter than the difference.
    if name.len() > MAX_NAME - 64 {
        let mut digest = crate::job::Digest::new("key");
        digest.text(key);
        name = digest.finish().iter().map(|byte| format!("{byte:02x}")).collect();
    }
    name
}

fn about(path: &Path, error: &IoError) -> IoError {
    IoError::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_put_replaced_and_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::new(folder.path().join("a/b")).unwrap();
        assert_eq!(store.get("k", Duration::from_millis(5)).unwrap(), None);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| store.get("../k e/y", Duration::from_secs(10)).unwrap());
            store.put("../k e/y", b"1").unwrap();
            assert_eq!(waits.join().unwrap().as_deref(), Some(&b"1"[..]));
        });
        store.put("../k e/y", b"").unwrap();
        assert_eq!(store.get("../k e/y", Duration::ZERO).unwrap().as_deref(), Some(&b""[..]));
        let files: Vec<_> = fs::read_dir(store.folder()).unwrap().map(|file| file.unwrap().file_name()).collect();
        assert_eq!(files, ["%2E%2E%2Fk%20e%2Fy"]);
    }

    #[test]
    fn a_value_that_a_process_of_the_same_number_writes_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::new(folder.path()).unwrap();
        // As another container may have begun it.
        let begun = format!(".{}-{:?}-k", std::process::id(), std::thread::current().id());
        fs::write(folder.path().join(&begun), "a part").unwrap();
        store.put("k", b"whole").unwrap();
        assert_eq!(store.get("k", Duration::ZERO).unwrap().as_deref(), Some(&b"whole"[..]));
        assert_eq!(fs::read(folder.path().join(&begun)).unwrap(), b"a part");
    }

    #[test]
    fn long_keys_have_files_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::new(folder.path()).unwrap();
        let keys = ["a", "b"].map(|end| "k".repeat(1023) + end);
        for key in &keys {
            store.put(key, key.as_bytes()).unwrap();
        }
        for key in &keys {
            assert_eq!(store.get(key, Duration::ZERO).unwrap().as_deref(), Some(key.as_bytes()));
        }
    }

    #[test]
    fn what_cannot_be_written_is_an_error_with_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let store = FileStore::new(folder.path().join("gone")).unwrap();
        fs::remove_dir(store.folder()).unwrap();
        let error = store.put("k", b"v").unwrap_err();
        assert!(error.kind() == ErrorKind::NotFound && error.to_string().contains("gone/k: "), "{error}");
    }
}
