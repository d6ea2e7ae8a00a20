//! Registers, which decide generations where no majority is needed.

use std::fs::{self, File, TryLockError};
use std::io::{Error as IoError, ErrorKind, Read, Result as IoResult, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use self::steps::Steps;
use super::generation::Generation;
use super::wire::MAX_MESSAGE_BYTES;
use crate::job::{Digest, hex};
use crate::{Error, JobId, Result};

#[cfg_attr(test, path = "register/counted.rs")]
#[cfg_attr(not(test), path = "register/steps.rs")]
mod steps;

/// A place that holds the newest generation of a job, and that all of its processes reach: a compare-and-swap. It is
/// the only authority of its job, so that a single survivor can continue. Implement it for a database of your own, such
/// as etcd or a table of SQL.
///
/// Calls may block; each runs on a thread of its own, and at most one at a time for a process. They should end within
/// seconds.
///
/// # Source
/// The compare-and-swap register of M. Herlihy, "Wait-Free Synchronization" (1991), which solves consensus among any
/// number of processes.
pub trait Register: Send + Sync {
    /// Returns the newest generation; `None` if none was decided.
    ///
    /// # Errors
    /// If the register cannot be reached, or holds what is not a generation.
    fn read(&self) -> Result<Option<Generation>>;

    /// Stores a generation if the register holds the one before it (for generation 1: none), and returns the newest
    /// generation: this one, or the one that was there. The comparison and the store are one step, and what is returned
    /// outlasts a crash.
    ///
    /// # Errors
    /// If the register cannot be reached, holds what is not a generation, or holds an older one than the one before
    /// `next`. The generation may be stored nevertheless if the answer was lost.
    fn decide(&self, next: &Generation) -> Result<Generation>;

    /// Records that the job has ended, so that processes which come too late learn it. May be called several times.
    /// Default: does nothing, and they wait for members until their `join_timeout`.
    ///
    /// # Errors
    /// If the register cannot be reached.
    fn end(&self) -> Result<()> {
        Ok(())
    }

    /// Returns whether the job has ended. Default: false.
    ///
    /// # Errors
    /// If the register cannot be reached.
    fn has_ended(&self) -> Result<bool> {
        Ok(false)
    }
}

/// A register in a file of a folder that all processes reach. The folder's file system must have file locks that hold
/// on all machines, as local ones, NFS 4 and Lustre do.
///
/// The file belongs to one job, whose identity is in its name, and stays there after the job. A job that is started
/// again as a whole under the same [`JobId`] finds members there that no longer exist, and ends with [`Error::TooFew`],
/// or with [`Error::JobEnded`] if they have ended well: remove the files first, or give each start an identity of its
/// own, for instance with the number in `DISTRIBUTE_RESTART_COUNT`.
///
/// # Examples
/// ```
/// use distribute_cluster::{FileRegister, JobId, Register};
///
/// let folder = tempfile::tempdir()?;
/// let register = FileRegister::new(folder.path(), &JobId::new("mnist")?)?;
/// assert!(register.read()?.is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct FileRegister {
    path: PathBuf,
    steps: Steps,
}

impl FileRegister {
    /// How long a call waits for the file's lock.
    pub const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

    /// Creates the register of a job in a folder, which is created if it is not there.
    ///
    /// # Errors
    /// [`Error::Store`] if the folder cannot be created.
    pub fn new(folder: impl Into<PathBuf>, job: &JobId) -> Result<FileRegister> {
        let folder = folder.into();
        let path = folder.join(format!("elastic-{}.generation", hex(&job.to_bytes())));
        let register = FileRegister { path, steps: Steps::default() };
        register.create(&folder).map_err(|source| register.failed("creating its folder", source))?;
        Ok(register)
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Creates a folder and its missing parents, one after the other, each once the disk holds the name of the one
    /// above; that of the last one that is there may not be synced yet.
    fn create(&self, folder: &Path) -> IoResult<()> {
        let folders: Vec<&Path> = folder.ancestors().filter(|folder| !folder.as_os_str().is_empty()).collect();
        let there = folders.iter().position(|folder| folder.is_dir()).unwrap_or(folders.len());
        for folder in folders.iter().take(there + 1).rev() {
            match fs::create_dir(folder) {
                Err(error) if !folder.is_dir() => return Err(error),
                _ => {}
            }
            let above = folder.parent().map(|above| if above.as_os_str().is_empty() { Path::new(".") } else { above });
            if let Some(above) = above.filter(|_| cfg!(unix)) {
                // A folder without read permission cannot be synced.
                drop(File::open(above).and_then(|above| above.sync_all()));
            }
        }
        Ok(())
    }

    fn failed(&self, what: &str, source: IoError) -> Error {
        Error::Store { task: format!("register {}", self.path.display()), what: what.to_owned(), source }
    }

    /// Reads the file, which is replaced as a whole.
    fn load(&self) -> IoResult<Option<Generation>> {
        self.steps.before("open", &self.path)?;
        let file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        // The process that stored it may have been killed before it had synced the name.
        self.sync_names()?;
        let mut bytes = Vec::new();
        file.take(MAX_FILE_BYTES as u64 + 1).read_to_end(&mut bytes)?;
        decode(&bytes).map(Some)
    }

    /// Replaces the file, so that a reader or a crash finds the one before or this one.
    fn store(&self, next: &Generation) -> IoResult<()> {
        let unfinished = self.path.with_extension("unfinished");
        self.steps.before("create", &unfinished)?;
        let mut file = File::create(&unfinished)?;
        self.steps.before("write", &unfinished)?;
        file.write_all(&encode(&next.to_bytes()))?;
        self.steps.before("sync", &unfinished)?;
        file.sync_all()?;
        self.steps.before("rename", &self.path)?;
        fs::rename(&unfinished, &self.path)?;
        self.sync_names()
    }

    /// Syncs the names in the folder.
    fn sync_names(&self) -> IoResult<()> {
        // Other systems cannot open folders.
        let Some(folder) = self.path.parent().filter(|_| cfg!(unix)) else { return Ok(()) };
        self.steps.before("sync folder", folder)?;
        File::open(folder)?.sync_all()
    }

    /// Takes the lock, which ends with the file that is returned.
    fn lock(&self, timeout: Duration) -> IoResult<File> {
        let file = File::options().create(true).truncate(false).write(true).open(self.path.with_extension("lock"))?;
        let started = Instant::now();
        let mut pause = Duration::from_millis(1);
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::Error(error)) => return Err(error),
                Err(TryLockError::WouldBlock) if started.elapsed() >= timeout => {
                    let text = format!("another process has held the lock for {} s", timeout.as_secs_f64());
                    return Err(IoError::new(ErrorKind::TimedOut, text));
                }
                Err(TryLockError::WouldBlock) => std::thread::sleep(pause),
            }
            pause = (pause * 2).min(Duration::from_millis(50));
        }
    }

    fn decide_within(&self, next: &Generation, timeout: Duration) -> Result<Generation> {
        let what = format!("deciding generation {}", next.number);
        let lock = self.lock(timeout).map_err(|error| self.failed(&what, error))?;
        // NFS keeps names for some time; opening their folder asks the server again.
        self.sync_names().map_err(|error| self.failed(&what, error))?;
        let held = self.load().map_err(|error| self.failed(&what, error))?;
        let number = held.as_ref().map_or(0, |held| held.number);
        let decided = match held {
            Some(held) if number >= next.number => held,
            _ if number + 1 < next.number => {
                let text = format!("it holds generation {number}, although the one before {} was decided", next.number);
                return Err(self.failed(&what, IoError::new(ErrorKind::InvalidData, text)));
            }
            _ => {
                self.store(next).map_err(|error| self.failed(&what, error))?;
                next.clone()
            }
        };
        drop(lock);
        Ok(decided)
    }
}

impl Register for FileRegister {
    fn read(&self) -> Result<Option<Generation>> {
        self.load().map_err(|error| self.failed("reading it", error))
    }

    fn decide(&self, next: &Generation) -> Result<Generation> {
        self.decide_within(next, FileRegister::LOCK_TIMEOUT)
    }

    fn end(&self) -> Result<()> {
        let failed = |error| self.failed("recording the job's end", error);
        let path = self.path.with_extension("ended");
        let create = || {
            self.steps.before("create", &path)?;
            File::create(&path)?.sync_all()?;
            self.sync_names()
        };
        create().map_err(failed)
    }

    fn has_ended(&self) -> Result<bool> {
        let looked = self.path.with_extension("ended").try_exists();
        let looked = looked.and_then(|has_ended| if has_ended { self.sync_names().map(|()| true) } else { Ok(false) });
        looked.map_err(|error| self.failed("looking for the job's end", error))
    }
}

/// Begins the file.
const MAGIC: [u8; 8] = *b"distreg1";

const SUM_BYTES: usize = 16;

/// Size limit of the file.
const MAX_FILE_BYTES: usize = MAX_MESSAGE_BYTES + MAGIC.len() + SUM_BYTES;

/// Returns the generation in the content of the file.
pub(super) fn decode(bytes: &[u8]) -> IoResult<Generation> {
    let damaged = |problem: &str| {
        let text = format!("the file is damaged: {problem}; restore it, or remove it if the job is over");
        IoError::new(ErrorKind::InvalidData, text)
    };
    if bytes.len() > MAX_FILE_BYTES {
        return Err(damaged("it is too long"));
    }
    let body = bytes.strip_prefix(&MAGIC).ok_or_else(|| damaged("it does not begin as a register"))?;
    let (sum, body) = body.split_at_checked(SUM_BYTES).ok_or_else(|| damaged("it is too short"))?;
    if sum != checksum(body) {
        return Err(damaged("its checksum differs"));
    }
    Generation::from_bytes(body).map_err(|_| damaged("it holds no generation"))
}

/// Returns the content of the file with the bytes of a generation.
pub(super) fn encode(body: &[u8]) -> Vec<u8> {
    [&MAGIC[..], &checksum(body), body].concat()
}

fn checksum(body: &[u8]) -> [u8; SUM_BYTES] {
    let mut digest = Digest::new("register");
    digest.number(body.len() as u64);
    body.iter().for_each(|byte| digest.number((*byte).into()));
    digest.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elastic::generation::{Candidate, Change};

    /// Returns the generation that the disk holds after these steps, if the power fails then: a name is there once its
    /// folder is synced, or was before; what it names then was synced before.
    fn held(steps: &[(&'static str, PathBuf)], before: Option<u64>, decided: u64) -> Option<u64> {
        let renamed = steps.iter().position(|(step, _)| *step == "rename");
        let synced = steps.iter().rposition(|(step, _)| *step == "sync folder");
        match (renamed, synced) {
            (Some(renamed), Some(synced)) if renamed < synced => Some(decided),
            _ => before,
        }
    }

    #[test]
    fn what_a_register_has_answered_outlasts_a_crash_of_the_process_that_stored_it() {
        let [first, second, other] = generations();
        for at in 1.. {
            let folder = tempfile::tempdir().unwrap();
            let new = || FileRegister::new(folder.path(), &JobId::new("j").unwrap()).unwrap();
            new().decide(&first).unwrap();
            let killed = new();
            killed.steps.kill_at(at);
            let outcome = killed.decide(&second);
            let steps = killed.steps.taken();
            // What is written is synced before it gets its name.
            let place = |step: &str| steps.iter().position(|(of, _)| *of == step);
            assert!(place("rename").is_none() || place("sync") < place("rename"), "{steps:?}");
            assert!(outcome.is_err() || held(&steps, Some(1), 2) == Some(2), "{at}: {steps:?}");
            // The power fails after another process has read the register, or has tried to decide.
            for decides in [false, true] {
                let next = new();
                let answer = if decides { next.decide(&other).unwrap() } else { next.read().unwrap().unwrap() };
                let all = [steps.clone(), next.steps.taken()].concat();
                assert_eq!(held(&all, Some(1), 2), Some(answer.number), "{at}, decides {decides}: {all:?}");
            }
            if outcome.is_ok() {
                assert!(at > 5, "{steps:?}");
                return;
            }
        }
    }

    #[test]
    fn the_file_is_looked_up_anew_under_the_lock() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second, _] = generations();
        for next in [first, second] {
            let register = FileRegister::new(folder.path(), &JobId::new("j").unwrap()).unwrap();
            register.decide(&next).unwrap();
            let steps = register.steps.taken();
            assert!(matches!(steps.as_slice(), [("sync folder", _), ("open", _), ..]), "{steps:?}");
        }
    }

    #[test]
    fn the_end_of_a_job_outlasts_a_crash() {
        let folder = tempfile::tempdir().unwrap();
        let register = FileRegister::new(folder.path().join("a/b"), &JobId::new("j").unwrap()).unwrap();
        register.end().unwrap();
        let steps = register.steps.taken();
        assert!(matches!(steps.as_slice(), [("create", _), ("sync folder", _)]), "{steps:?}");
        assert!(register.has_ended().unwrap());
    }

    fn generations() -> [Generation; 3] {
        let candidate = |identity: u128| Candidate { identity, control: "a:1".to_owned(), service: "a:2".to_owned() };
        let add = |identity| Change { added: vec![candidate(identity)], ..Change::default() };
        let first = Generation::of_seeds(&[]).apply(&add(1)).unwrap();
        let second = first.apply(&add(2)).unwrap();
        let other = first.apply(&add(3)).unwrap();
        [first, second, other]
    }

    #[test]
    fn each_number_is_decided_once_however_many_try() {
        let folder = tempfile::tempdir().unwrap();
        let register = FileRegister::new(folder.path().join("a"), &JobId::new("j").unwrap()).unwrap();
        let [first, second, other] = generations();
        let error = register.decide(&second).unwrap_err().to_string();
        assert!(error.contains("deciding generation 2") && error.contains("it holds generation 0"), "{error}");
        assert_eq!(register.decide(&first).unwrap(), first);
        let winners: Vec<Generation> = std::thread::scope(|scope| {
            let tries = [&second, &other, &second, &other].map(|next| scope.spawn(|| register.decide(next).unwrap()));
            tries.map(|thread| thread.join().unwrap()).to_vec()
        });
        assert!(winners.iter().all(|winner| *winner == winners[0]), "{winners:?}");
        assert_eq!(register.read().unwrap().as_ref(), Some(&winners[0]));
        // One that comes late gets what is there.
        assert_eq!(register.decide(&first).unwrap(), winners[0]);
        // Another job has a file of its own.
        let stranger = FileRegister::new(folder.path().join("a"), &JobId::new("k").unwrap()).unwrap();
        assert_eq!(stranger.read().unwrap(), None);
    }

    #[test]
    fn damage_and_a_held_lock_are_sentences() {
        let folder = tempfile::tempdir().unwrap();
        let register = FileRegister::new(folder.path(), &JobId::new("j").unwrap()).unwrap();
        let [first, second, _] = generations();
        register.decide(&first).unwrap();
        let good = fs::read(register.path()).unwrap();
        for place in 0..good.len() {
            let mut bytes = good.clone();
            bytes[place] ^= 1;
            fs::write(register.path(), bytes).unwrap();
            let error = register.decide(&second).unwrap_err().to_string();
            assert!(error.contains("the file is damaged: "), "byte {place}: {error}");
            fs::write(register.path(), &good[..place]).unwrap();
            assert!(register.read().is_err(), "{place} bytes");
        }
        fs::write(register.path(), &good).unwrap();
        let lock = register.lock(Duration::ZERO).unwrap();
        let error = register.decide_within(&second, Duration::from_millis(20)).unwrap_err().to_string();
        assert!(error.contains("another process has held the lock for 0.02 s"), "{error}");
        drop(lock);
        assert_eq!(register.decide(&second).unwrap(), second);
    }
}
