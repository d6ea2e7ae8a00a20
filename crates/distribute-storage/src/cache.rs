//! Copies of objects in a local folder.

use std::collections::HashMap;
use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use distribute_types::{FNV128, fnv1a_128};
use parking_lot::Mutex;

use crate::{Error, Location, Meta, ObjectReader, Result};

/// A local folder with copies of objects, for data that is read in several passes. Several processes may share it.
///
/// A copy belongs to one version of an object: the store is asked for the present one each time, and a copy of another
/// version or length is not used. The copies that were not used for the longest time are removed when there is no room.
/// The limit is kept by each process; processes that fill a shared folder at the same moment may exceed it by what they
/// fetch. Nothing else in the folder is touched.
///
/// # Examples
/// ```
/// use distribute_storage::{Cache, Location};
///
/// # let folder = tempfile::tempdir()?;
/// let cache = Cache::new(folder.path(), 1 << 30)?;
/// let object = Location::open("memory://example/data/a.txt")?;
/// object.write("1\n2\n")?;
/// let copy = cache.fetch(&object)?.expect("it is smaller than the cache");
/// assert_eq!(std::fs::read_to_string(copy.path())?, "1\n2\n");
/// assert!(copy.path().ends_with("data/a.txt"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Cache {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    folder: PathBuf,
    most_bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// How many readers use each copy.
    in_use: HashMap<String, usize>,
    /// The bytes of copies that are being fetched.
    coming: u64,
}

/// A copy, which stays until this is dropped.
#[derive(Debug)]
pub struct Cached {
    path: PathBuf,
    key: String,
    shared: Arc<Shared>,
}

impl Cached {
    /// Returns the local file. Its name and that of its folder are the object's.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Cached {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        if let Some(count) = state.in_use.get_mut(&self.key) {
            *count -= 1;
            if *count == 0 {
                state.in_use.remove(&self.key);
            }
        }
    }
}

impl Cache {
    /// Creates a cache in a folder, which is created if it does not exist, of at most `most_bytes`.
    ///
    /// # Errors
    /// [`Error::Cache`] if the folder cannot be created.
    pub fn new(folder: impl Into<PathBuf>, most_bytes: u64) -> Result<Cache> {
        let folder = folder.into();
        fs::create_dir_all(&folder).map_err(|source| Error::Cache { path: folder.clone(), source })?;
        Ok(Cache { shared: Arc::new(Shared { folder, most_bytes, state: Mutex::default() }) })
    }

    /// Returns a copy of the present version of an object, which is fetched if there is none; `None` if it does not fit
    /// with the copies that are in use.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Cache`] if the folder cannot be written, and those of [`Location`].
    pub fn fetch(&self, object: &Location) -> Result<Option<Cached>> {
        let version = object.meta()?.ok_or_else(|| Error::NotFound { url: object.url() })?;
        let key = key_of(object, &version);
        let path = self.shared.folder.join(&key).join(name_of(object));
        let copy = Cached { path: path.clone(), key: key.clone(), shared: Arc::clone(&self.shared) };
        {
            let mut state = self.shared.state.lock();
            // From now on it is not removed to make room; undone when `copy` is dropped.
            *state.in_use.entry(key.clone()).or_default() += 1;
            if self.shared.is_there(&path, &version) {
                return Ok(Some(copy));
            }
            let there = self.shared.make_room(&state, version.bytes)?;
            if !there {
                drop(state);
                return Ok(None);
            }
            state.coming += version.bytes;
        }
        let outcome = self.shared.bring(object, &version, &key);
        self.shared.state.lock().coming -= version.bytes;
        outcome.map(|()| Some(copy))
    }
}

impl Shared {
    /// Returns whether the copy exists and has the object's length, and records that it is used.
    fn is_there(&self, path: &Path, version: &Meta) -> bool {
        let is_whole = fs::metadata(path).is_ok_and(|about| about.is_file() && about.len() == version.bytes);
        if is_whole {
            // Only the order of removal depends on it.
            drop(File::options().append(true).open(path).and_then(|file| file.set_modified(SystemTime::now())));
        }
        is_whole
    }

    /// Removes copies that are not in use, the longest unused first, until `bytes` more fit; returns whether they do.
    fn make_room(&self, state: &State, bytes: u64) -> Result<bool> {
        let of_folder = |source| Error::Cache { path: self.folder.clone(), source };
        let mut copies = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(of_folder)? {
            let entry = entry.map_err(of_folder)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            let (key, is_part) = name.split_once(PART).map_or((name.as_str(), false), |(key, _)| (key, true));
            if key.len() != 32 || !key.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                continue;
            }
            let (bytes, used) = size_of(&entry.path());
            // The folder itself is older than the first of its files, which another reader is about to create.
            let changed = entry.metadata().and_then(|about| about.modified()).map_or(used, |begun| begun.max(used));
            let is_abandoned = SystemTime::now().duration_since(changed).is_ok_and(|age| age > ABANDONED);
            if is_part && is_abandoned {
                drop(fs::remove_dir_all(entry.path()));
            } else if !is_part {
                copies.push((used, bytes, key.to_owned(), entry.path()));
            }
        }
        copies.sort();
        let mut held: u64 = copies.iter().map(|(_, bytes, ..)| bytes).sum::<u64>() + state.coming;
        for (_, copy_bytes, key, path) in copies {
            if held.saturating_add(bytes) <= self.most_bytes {
                break;
            }
            if !state.in_use.contains_key(&key) && fs::remove_dir_all(&path).is_ok() {
                held -= copy_bytes;
            }
        }
        Ok(held.saturating_add(bytes) <= self.most_bytes)
    }

    /// Fetches a copy under another name, and renames it when it is whole.
    fn bring(&self, object: &Location, version: &Meta, key: &str) -> Result<()> {
        // Random, since processes of several containers that share the folder may have the same number.
        let part = self.folder.join(format!("{key}{PART}{:016x}", RandomState::new().hash_one(key)));
        let outcome = self.write(object, version, &part);
        let outcome = outcome.and_then(|()| {
            let place = self.folder.join(key);
            // No other reader's copy comes between a look at the place and what is done about it.
            let _state = self.state.lock();
            let outcome = match fs::rename(&part, &place) {
                Ok(()) => Ok(()),
                // Another reader was faster.
                Err(_) if self.is_there(&place.join(name_of(object)), version) => Ok(()),
                // A copy of another length, which something has cut.
                Err(_) => fs::remove_dir_all(&place).and_then(|()| fs::rename(&part, &place)),
            };
            outcome.map_err(|source| Error::Cache { path: place, source })
        });
        // Fails if it has been renamed.
        drop(fs::remove_dir_all(&part));
        outcome
    }

    fn write(&self, object: &Location, version: &Meta, part: &Path) -> Result<()> {
        let path = part.join(name_of(object));
        let wrong = |source: io::Error| match source.downcast::<Error>() {
            Ok(error) => error,
            Err(source) => Error::Cache { path: path.clone(), source },
        };
        fs::create_dir_all(path.parent().unwrap_or(part)).map_err(wrong)?;
        let mut file = File::create_new(&path).map_err(wrong)?;
        let mut reader = ObjectReader::of(object, version);
        let got = io::copy(&mut reader, &mut file).map_err(wrong)?;
        if got != version.bytes {
            return Err(Error::Truncated { url: object.url(), got, expected: version.bytes });
        }
        Ok(())
    }
}

/// Returns the name of the folder of a copy.
fn key_of(object: &Location, version: &Meta) -> String {
    let about = format!("{object}\n{}\n{}", version.tag, version.bytes);
    format!("{:032x}", fnv1a_128(FNV128, about.into_bytes()))
}

/// Returns the object's name in its folder, since readers tell classes and formats by both.
fn name_of(object: &Location) -> PathBuf {
    let parts: Vec<String> = object.path.parts().map(|part| part.as_ref().to_owned()).collect();
    parts[parts.len().saturating_sub(2)..].iter().collect()
}

/// Returns the bytes of the files below a folder, and when one was last used.
fn size_of(folder: &Path) -> (u64, SystemTime) {
    let mut all = (0, SystemTime::UNIX_EPOCH);
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (bytes, used) = match entry.metadata() {
            Ok(about) if about.is_dir() => size_of(&entry.path()),
            Ok(about) => (about.len(), about.modified().unwrap_or(SystemTime::UNIX_EPOCH)),
            Err(_) => continue,
        };
        all = (all.0 + bytes, all.1.max(used));
    }
    all
}

/// Marks a copy that is being fetched.
const PART: &str = ".part-";

/// A copy that has not grown for this long belongs to a process that was killed.
const ABANDONED: Duration = Duration::from_secs(3600);

#[cfg(test)]
mod tests {
    use super::*;

    fn object(name: &str, content: &str) -> Location {
        let object = Location::open(&format!("memory://cache/{name}")).unwrap();
        object.write(content.to_owned()).unwrap();
        object
    }

    fn read(cache: &Cache, object: &Location) -> String {
        fs::read_to_string(cache.fetch(object).unwrap().unwrap().path()).unwrap()
    }

    /// Returns the number of copies in a folder.
    fn copies(folder: &Path) -> usize {
        fs::read_dir(folder).unwrap().count()
    }

    #[test]
    fn a_copy_is_used_as_long_as_the_object_is_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path(), 1000).unwrap();
        let place = object("same/a.txt", "one");
        assert_eq!(read(&cache, &place), "one");
        // Only the copy has these letters: it is used, and not fetched again.
        fs::write(cache.fetch(&place).unwrap().unwrap().path(), "uno").unwrap();
        assert_eq!(read(&cache, &place), "uno");
        // One of another length has been cut.
        fs::write(cache.fetch(&place).unwrap().unwrap().path(), "on").unwrap();
        assert_eq!(read(&cache, &place), "one");
        place.write("two").unwrap();
        assert_eq!(read(&cache, &place), "two");
        place.delete().unwrap();
        assert!(matches!(cache.fetch(&place), Err(Error::NotFound { .. })));
    }

    #[test]
    fn the_longest_unused_go_and_those_in_use_stay() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("mine"), "not a copy").unwrap();
        let cache = Cache::new(folder.path(), 10).unwrap();
        let objects: Vec<Location> =
            (0..4).map(|at| object(&format!("room/{at}"), &at.to_string().repeat(4))).collect();
        let held = cache.fetch(&objects[0]).unwrap().unwrap();
        let age = |copy: &Cached| {
            File::options().append(true).open(copy.path()).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        };
        age(&held);
        age(&cache.fetch(&objects[1]).unwrap().unwrap());
        assert_eq!(read(&cache, &objects[2]), "2222");
        assert!(held.path().exists());
        assert_eq!(copies(folder.path()), 3);
        let second = cache.fetch(&objects[2]).unwrap().unwrap();
        // No room is left: both are in use.
        assert!(cache.fetch(&objects[3]).unwrap().is_none());
        drop((held, second));
        assert_eq!(read(&cache, &objects[3]), "3333");
        assert!(cache.fetch(&object("room/large", &"x".repeat(11))).unwrap().is_none());
        assert_eq!(fs::read_to_string(folder.path().join("mine")).unwrap(), "not a copy");
    }

    #[test]
    fn a_copy_that_another_process_has_just_begun_stays() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path(), 1000).unwrap();
        let [begun, abandoned] = [1, 2].map(|id| folder.path().join(format!("{:032x}{PART}{id}-0", 0)));
        fs::create_dir(&begun).unwrap();
        fs::create_dir(&abandoned).unwrap();
        File::open(&abandoned).unwrap().set_modified(SystemTime::now() - 2 * ABANDONED).unwrap();
        assert_eq!(read(&cache, &object("begun/a", "one")), "one");
        assert!(begun.exists(), "it has no file yet");
        assert!(!abandoned.exists());
    }

    #[test]
    fn a_part_of_a_process_of_the_same_number_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let cache = Cache::new(folder.path(), 1000).unwrap();
        let place = object("shared/a.txt", "one");
        let key = key_of(&place, &place.meta().unwrap().unwrap());
        // As another container, or this one before it started again, may have begun them.
        let parts: Vec<PathBuf> = (0..1000)
            .map(|count| folder.path().join(format!("{key}{PART}{}-{count}", std::process::id())).join(name_of(&place)))
            .collect();
        for part in &parts {
            fs::create_dir_all(part.parent().unwrap()).unwrap();
            fs::write(part, "o").unwrap();
        }
        assert_eq!(read(&cache, &place), "one");
        assert!(parts.iter().all(|part| fs::read_to_string(part).unwrap() == "o"));
    }

    #[test]
    fn threads_that_fetch_the_same_get_whole_copies() {
        for round in 0..50 {
            let folder = tempfile::tempdir().unwrap();
            let cache = Cache::new(folder.path(), 1 << 20).unwrap();
            let place = object(&format!("threads/{round}"), &"a".repeat(10_000));
            std::thread::scope(|scope| {
                for _ in 0..8 {
                    scope.spawn(|| assert_eq!(read(&cache, &place).len(), 10_000));
                }
            });
            assert_eq!(copies(folder.path()), 1);
        }
    }
}
