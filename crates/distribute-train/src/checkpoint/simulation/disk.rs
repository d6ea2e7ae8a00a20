//! The simulated file system as checkpoints use it, by one or several processes that take turns.

use std::ffi::OsString;
use std::fmt;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use distribute_testkit::simulation::Random;
use parking_lot::{Condvar, Mutex};

use super::super::disk::Disk;
use super::super::disk::files::{FileSystem, NewFile, OpenFile, OpenFolder};
use super::volume::{Id, Volume};

/// A volume as one process uses it.
#[derive(Clone)]
pub(super) struct Simulated {
    volume: Arc<Mutex<Volume>>,
    /// The turns that the process takes with others, and its number among them.
    turns: Option<(Arc<Turns>, usize)>,
}

impl fmt::Debug for Simulated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Simulated")
    }
}

impl Simulated {
    pub(super) fn disk(volume: &Arc<Mutex<Volume>>, turns: Option<(Arc<Turns>, usize)>) -> Disk {
        Disk::of(Arc::new(Simulated { volume: volume.clone(), turns }))
    }

    /// Makes an operation when it is this process's turn; `room` says whether it needs room on the disk.
    fn step<T>(
        &self,
        (verb, path): (&'static str, &Path),
        room: bool,
        run: impl FnOnce(&mut Volume) -> io::Result<T>,
    ) -> io::Result<T> {
        if let Some((turns, process)) = &self.turns {
            turns.wait(*process);
        }
        let mut volume = self.volume.lock();
        let trouble = volume.begin(verb, path)?;
        volume.fails(trouble, room)?;
        run(&mut volume)
    }
}

impl FileSystem for Simulated {
    fn exists(&self, path: &Path) -> io::Result<bool> {
        self.step(("look for", path), false, |volume| Ok(volume.find(path).is_ok()))
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        self.step(("make", path), true, |volume| volume.create(path, true).map(drop))
    }

    fn create_file(&self, path: &Path) -> io::Result<Box<dyn NewFile>> {
        let id = self.step(("create", path), true, |volume| volume.create(path, false))?;
        Ok(Box::new(Written { files: self.clone(), id, path: path.to_owned() }))
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        self.step(("sync folder", path), true, |volume| volume.sync_folder(path))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.step(("rename to", to), true, |volume| volume.rename(from, to))
    }

    fn exchange(&self, one: &Path, other: &Path) -> io::Result<()> {
        self.step(("exchange", other), false, |volume| volume.exchange(one, other))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.step(("remove", path), false, |volume| volume.remove(path, true))
    }

    fn remove_file(&self, path: &Path) -> io::Result<()> {
        self.step(("remove", path), false, |volume| volume.remove(path, false))
    }

    fn remove_folder(&self, path: &Path) -> io::Result<()> {
        self.step(("remove", path), false, |volume| volume.remove(path, false))
    }

    fn names(&self, path: &Path) -> io::Result<Vec<OsString>> {
        self.step(("list", path), false, |volume| match volume.find(path) {
            Ok(id) => volume.names(id),
            Err(_) => Ok(Vec::new()),
        })
    }

    fn open_folder(&self, path: &Path) -> io::Result<Box<dyn OpenFolder>> {
        let id = self.step(("open", path), false, |volume| {
            let id = volume.find(path)?;
            if volume.is_folder(id) { Ok(id) } else { Err(io::ErrorKind::NotADirectory.into()) }
        })?;
        Ok(Box::new(Opened { files: self.clone(), id, path: path.to_owned() }))
    }
}

#[derive(Debug)]
struct Written {
    files: Simulated,
    id: Id,
    path: PathBuf,
}

impl Written {
    fn sync(&self) -> io::Result<()> {
        if let Some((turns, process)) = &self.files.turns {
            turns.wait(*process);
        }
        let mut volume = self.files.volume.lock();
        let trouble = volume.begin("sync", &self.path)?;
        volume.sync(self.id, &self.path, trouble)
    }
}

impl NewFile for Written {
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        if let Some((turns, process)) = &self.files.turns {
            turns.wait(*process);
        }
        let mut volume = self.files.volume.lock();
        let trouble = volume.begin("write", &self.path)?;
        volume.write(self.id, bytes, trouble)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.sync()
    }

    fn sync_all(&self) -> io::Result<()> {
        self.sync()
    }
}

#[derive(Debug)]
struct Opened {
    files: Simulated,
    id: Id,
    path: PathBuf,
}

impl OpenFolder for Opened {
    fn file(&self, name: &str) -> io::Result<(Box<dyn OpenFile>, Option<u64>)> {
        let path = self.path.join(name);
        let (id, length) = self.files.step(("open", &path), false, |volume| {
            let id = volume.named(self.id, name)?;
            Ok((id, volume.bytes(id).map(|bytes| bytes.len() as u64)))
        })?;
        Ok((Box::new(Reading { files: self.files.clone(), id, path, at: 0 }), length))
    }

    fn length(&self, name: &str) -> io::Result<Option<u64>> {
        self.files.step(("look at", &self.path.join(name)), false, |volume| {
            let id = volume.named(self.id, name)?;
            Ok(volume.bytes(id).map(|bytes| bytes.len() as u64))
        })
    }

    fn identity(&self) -> Option<(u64, u64)> {
        Some((0, self.id))
    }
}

struct Reading {
    files: Simulated,
    id: Id,
    path: PathBuf,
    at: u64,
}

impl Read for Reading {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let (id, at) = (self.id, self.at);
        let read = self.files.step(("read", &self.path), false, |volume| {
            let bytes = volume.bytes(id).unwrap_or_default();
            let rest = bytes.get(usize::try_from(at).unwrap_or(usize::MAX)..).unwrap_or_default();
            let read = rest.len().min(buffer.len());
            buffer[..read].copy_from_slice(&rest[..read]);
            Ok(read)
        })?;
        self.at += read as u64;
        Ok(read)
    }
}

impl Seek for Reading {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let SeekFrom::Start(at) = to else { return Err(io::ErrorKind::Unsupported.into()) };
        self.at = at;
        Ok(at)
    }
}

/// The turns of several processes, which are threads: one at a time makes its next operation, drawn by a seed when all
/// of them are at one.
#[derive(Debug)]
pub(super) struct Turns {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    random: Random,
    /// Whether each process waits for its turn; `None` if it has ended.
    waiting: Vec<Option<bool>>,
    turn: Option<usize>,
}

impl Turns {
    pub(super) fn new(processes: usize, seed: u64) -> Arc<Turns> {
        let waiting = vec![Some(false); processes];
        let state = State { random: Random::new(seed), waiting, turn: None };
        Arc::new(Turns { state: Mutex::new(state), changed: Condvar::new() })
    }

    /// Waits for the turn of a process.
    fn wait(&self, process: usize) {
        let mut state = self.state.lock();
        state.waiting[process] = Some(true);
        self.give(&mut state);
        self.changed.wait_while(&mut state, |state| state.turn != Some(process));
        state.turn = None;
        state.waiting[process] = Some(false);
    }

    /// Ends the turns of a process.
    pub(super) fn end(&self, process: usize) {
        let mut state = self.state.lock();
        state.waiting[process] = None;
        self.give(&mut state);
    }

    fn give(&self, state: &mut State) {
        if state.turn.is_some() || state.waiting.iter().flatten().any(|waits| !waits) {
            return;
        }
        let waiting: Vec<usize> =
            (0..state.waiting.len()).filter(|process| state.waiting[*process].is_some()).collect();
        if !waiting.is_empty() {
            state.turn = Some(waiting[state.random.between(0, waiting.len() as u64) as usize]);
            self.changed.notify_all();
        }
    }
}
