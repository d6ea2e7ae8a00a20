//! A file system in memory that loses what was not synced.
//!
//! Names and bytes are kept twice: as processes see them, and as the disk holds them. A write changes the first alone;
//! syncing a file or a folder carries its changes over to the second. When the power fails, some of the rest is carried
//! over: of the changes of names those up to one of them, as a journal does it, or any of them; of a file's pages that
//! were not synced any, a part at the beginning, or none.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::io;
use std::path::{Component, Path, PathBuf};

use distribute_testkit::simulation::Random;
use rustix::io::Errno;

use super::scenario::{Fault, Trouble};

/// Numbers a file or folder.
pub(super) type Id = u64;

/// The number of the topmost folder.
const TOP: Id = 0;

/// Bytes of a page, the unit in which a disk takes them.
pub(super) const PAGE_BYTES: usize = 4096;

/// A defect of a program that uses the volume; the simulation finds each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Defect {
    /// Files are not synced.
    NoFileSync,
    /// Folders are not synced.
    NoFolderSync,
    /// Files are synced after their folder was renamed and the save has returned: when the next one begins.
    RenameBeforeSync,
    /// No file but the manifest is synced.
    ManifestSyncedAlone,
    /// Errors of syncing a file are ignored.
    SyncErrorIgnored,
    /// A checkpoint that was moved out of the way is removed where it is to be moved back.
    OldRemoved,
}

/// A file system, and what goes wrong with it.
#[derive(Debug)]
pub(super) struct Volume {
    files: BTreeMap<Id, File>,
    /// As processes see them.
    folders: BTreeMap<Id, Names>,
    /// As the disk holds them.
    held: BTreeMap<Id, Names>,
    /// Changes of names that the disk does not hold, the first one first.
    changes: Vec<Change>,
    next: Id,
    /// Whether changes of names reach the disk in their order, as in a journal.
    pub(super) ordered: bool,
    /// Whether two names can be exchanged.
    pub(super) exchanges: bool,
    pub(super) defect: Option<Defect>,
    faults: BTreeMap<u64, Fault>,
    /// By the number of operations that have changed names.
    after_renames: BTreeMap<u64, Fault>,
    renames: u64,
    /// Until which operation the disk is full.
    full_until: u64,
    /// The number of operations so far.
    pub(super) count: u64,
    /// How many operations have failed by a fault.
    pub(super) troubles: u64,
    /// The fault that has ended the processes.
    pub(super) ended: Option<Fault>,
    random: Random,
    pub(super) log: Vec<Logged>,
}

/// An operation, for the message of a failing test.
#[derive(Debug)]
pub(super) struct Logged {
    number: u64,
    verb: &'static str,
    path: PathBuf,
    fault: Option<Fault>,
}

impl fmt::Display for Logged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Logged { number, verb, path, fault } = self;
        write!(f, "{number} {verb} {}", path.display())?;
        fault.map_or(Ok(()), |fault| write!(f, " {fault:?}"))
    }
}

/// The names in a folder.
type Names = BTreeMap<OsString, Id>;

/// A change that is made as a whole: what names mean afterwards.
#[derive(Debug)]
struct Change(Vec<(Id, OsString, Option<Id>)>);

#[derive(Clone, Debug, Default)]
struct File {
    bytes: Vec<u8>,
    held: Vec<u8>,
    /// Pages that differ from what the disk holds, and will be written.
    dirty: BTreeSet<usize>,
    /// Whether it is synced later, by [`Defect::RenameBeforeSync`].
    late: bool,
}

impl Volume {
    pub(super) fn new(seed: u64, faults: &[(u64, Fault)], after_renames: &[(u64, Fault)]) -> Volume {
        let top = BTreeMap::from([(TOP, Names::new())]);
        Volume {
            files: BTreeMap::new(),
            folders: top.clone(),
            held: top,
            changes: Vec::new(),
            next: TOP + 1,
            ordered: true,
            exchanges: true,
            defect: None,
            faults: faults.iter().copied().collect(),
            after_renames: after_renames.iter().copied().collect(),
            renames: 0,
            full_until: 0,
            count: 0,
            troubles: 0,
            ended: None,
            random: Random::new(seed ^ 0x5eed),
            log: Vec::new(),
        }
    }

    /// Begins an operation: returns the trouble that it is in, if any.
    pub(super) fn begin(&mut self, verb: &'static str, path: &Path) -> io::Result<Option<Trouble>> {
        self.count += 1;
        if self.ended.is_some() {
            return Err(killed());
        }
        let after_rename = self.after_renames.remove(&self.renames);
        let fault = self.faults.remove(&self.count).or(after_rename);
        self.renames += u64::from(["rename to", "exchange"].contains(&verb));
        self.log.push(Logged { number: self.count, verb, path: path.to_owned(), fault });
        match fault {
            Some(Fault::Power | Fault::Kill) => {
                self.ended = fault;
                // A write is cut.
                if verb == "write" { Ok(Some(Trouble::Cut)) } else { Err(killed()) }
            }
            Some(Fault::Full { operations }) => {
                self.full_until = self.count + operations;
                Ok(Some(Trouble::Full))
            }
            Some(Fault::Error) => Ok(Some(Trouble::Error)),
            None if self.count < self.full_until => Ok(Some(Trouble::Full)),
            None => Ok(None),
        }
    }

    /// Ends all faults that are to come.
    pub(super) fn calm(&mut self) {
        self.faults.clear();
        self.after_renames.clear();
        self.full_until = 0;
    }

    /// Returns an error for an operation in trouble that needs room on the disk, if `room` says so.
    pub(super) fn fails(&mut self, trouble: Option<Trouble>, room: bool) -> io::Result<()> {
        let errno = match trouble {
            Some(Trouble::Error) => Errno::IO,
            Some(Trouble::Full) if room => Errno::NOSPC,
            Some(Trouble::Cut) => return Err(killed()),
            _ => return Ok(()),
        };
        self.troubles += 1;
        Err(errno.into())
    }

    /// Starts the machine or the processes again.
    pub(super) fn restart(&mut self) {
        if self.ended.take() == Some(Fault::Power) {
            self.lose_power();
        }
    }

    /// Carries a part of what was not synced over to the disk, and shows what it holds.
    fn lose_power(&mut self) {
        let changes = std::mem::take(&mut self.changes);
        let Volume { random, held, .. } = self;
        match self.ordered {
            true => {
                let most = random.between(0, changes.len() as u64 + 1) as usize;
                changes.iter().take(most).for_each(|change| change.apply(held));
            }
            false => {
                let percent = [0, 25, 50, 75, 100][random.between(0, 5) as usize];
                changes.iter().filter(|_| random.percent(percent)).for_each(|change| change.apply(held));
            }
        }
        self.folders = self.held.clone();
        for file in self.files.values_mut() {
            file.lose_power(random);
        }
    }

    /// Returns the number of what a path names.
    pub(super) fn find(&self, path: &Path) -> io::Result<Id> {
        let mut at = TOP;
        for part in path.components() {
            if let Component::Normal(name) = part {
                let names = self.folders.get(&at).ok_or(Errno::NOTDIR)?;
                at = *names.get(name).ok_or(Errno::NOENT)?;
            }
        }
        Ok(at)
    }

    /// Returns the folder that a path is in, and its name there.
    fn place(&self, path: &Path) -> io::Result<(Id, OsString)> {
        let above = self.find(path.parent().unwrap_or(Path::new("/")))?;
        let name = path.file_name().map(OsStr::to_owned).ok_or(Errno::INVAL)?;
        if !self.folders.contains_key(&above) {
            return Err(Errno::NOTDIR.into());
        }
        Ok((above, name))
    }

    fn change(&mut self, edits: Vec<(Id, OsString, Option<Id>)>) {
        let change = Change(edits);
        change.apply(&mut self.folders);
        self.changes.push(change);
    }

    pub(super) fn create(&mut self, path: &Path, is_folder: bool) -> io::Result<Id> {
        let (above, name) = self.place(path)?;
        if self.folders[&above].contains_key(&name) {
            return Err(Errno::EXIST.into());
        }
        let id = self.next;
        self.next += 1;
        match is_folder {
            // A new folder is empty on the disk, too, once it has a name there.
            true => {
                for file in self.files.values_mut().filter(|file| file.late) {
                    file.late = false;
                    file.sync();
                }
                self.folders.insert(id, Names::new());
                self.held.insert(id, Names::new());
            }
            false => drop(self.files.insert(id, File::default())),
        }
        self.change(vec![(above, name, Some(id))]);
        Ok(id)
    }

    pub(super) fn rename(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let (source, target) = (self.place(from)?, self.place(to)?);
        let id = self.find(from)?;
        if let Ok(other) = self.find(to) {
            match (self.folders.contains_key(&id), self.folders.get(&other)) {
                (true, Some(names)) if !names.is_empty() => return Err(Errno::NOTEMPTY.into()),
                (true, None) => return Err(Errno::NOTDIR.into()),
                (false, Some(_)) => return Err(Errno::ISDIR.into()),
                _ => {}
            }
        }
        if self.defect == Some(Defect::OldRemoved) && from.to_string_lossy().contains(".old-") {
            self.change(vec![(source.0, source.1, None)]);
            return Ok(());
        }
        self.change(vec![(source.0, source.1, None), (target.0, target.1, Some(id))]);
        Ok(())
    }

    pub(super) fn exchange(&mut self, one: &Path, other: &Path) -> io::Result<()> {
        if !self.exchanges {
            return Err(Errno::NOSYS.into());
        }
        let (first, second) = (self.place(one)?, self.place(other)?);
        let ids = (self.find(one)?, self.find(other)?);
        self.change(vec![(first.0, first.1, Some(ids.1)), (second.0, second.1, Some(ids.0))]);
        Ok(())
    }

    /// Removes a name: of a file, or of a folder, which is to be empty unless `whole`.
    pub(super) fn remove(&mut self, path: &Path, whole: bool) -> io::Result<()> {
        let (above, name) = self.place(path)?;
        let id = self.find(path)?;
        if let Some(names) = self.folders.get(&id)
            && !names.is_empty()
        {
            if !whole {
                return Err(Errno::NOTEMPTY.into());
            }
            for name in names.keys().cloned().collect::<Vec<_>>() {
                self.remove(&path.join(name), true)?;
            }
        }
        self.change(vec![(above, name, None)]);
        Ok(())
    }

    pub(super) fn is_folder(&self, id: Id) -> bool {
        self.folders.contains_key(&id)
    }

    /// Returns the names in a folder in the order in which its files were created, so that no random part of a name
    /// decides about it.
    pub(super) fn names(&self, id: Id) -> io::Result<Vec<OsString>> {
        let names = self.folders.get(&id).ok_or(Errno::NOTDIR)?;
        let mut names: Vec<(&OsString, Id)> = names.iter().map(|(name, id)| (name, *id)).collect();
        names.sort_by_key(|(_, id)| *id);
        Ok(names.into_iter().map(|(name, _)| name.clone()).collect())
    }

    pub(super) fn named(&self, folder: Id, name: &str) -> io::Result<Id> {
        let names = self.folders.get(&folder).ok_or(Errno::NOTDIR)?;
        Ok(*names.get(OsStr::new(name)).ok_or(Errno::NOENT)?)
    }

    /// Returns the bytes of a file; `None` of a folder.
    pub(super) fn bytes(&self, id: Id) -> Option<&[u8]> {
        self.files.get(&id).map(|file| &file.bytes[..])
    }

    /// Appends to a file. In trouble, a part of the bytes is written.
    pub(super) fn write(&mut self, id: Id, bytes: &[u8], trouble: Option<Trouble>) -> io::Result<()> {
        let full = trouble.is_some();
        let part = if full { self.random.between(0, bytes.len() as u64 + 1) as usize } else { bytes.len() };
        let Some(file) = self.files.get_mut(&id) else { return Err(Errno::BADF.into()) };
        let from = file.bytes.len() / PAGE_BYTES;
        file.bytes.extend_from_slice(&bytes[..part]);
        file.dirty.extend(from..file.bytes.len().div_ceil(PAGE_BYTES));
        self.fails(trouble, true)
    }

    /// Syncs a file. If that fails, its pages are taken for written nevertheless, and a later sync does not write them.
    pub(super) fn sync(&mut self, id: Id, path: &Path, trouble: Option<Trouble>) -> io::Result<()> {
        let Some(file) = self.files.get_mut(&id) else { return Err(Errno::BADF.into()) };
        if trouble.is_some() {
            file.dirty.clear();
        }
        let is_manifest = path.file_name().is_some_and(|name| name == "manifest.json");
        match self.defect {
            Some(Defect::NoFileSync) => {}
            Some(Defect::ManifestSyncedAlone) if !is_manifest => {}
            Some(Defect::RenameBeforeSync) => file.late = true,
            _ => file.sync(),
        }
        match (self.defect, self.fails(trouble, true)) {
            (Some(Defect::SyncErrorIgnored), _) => Ok(()),
            (_, outcome) => outcome,
        }
    }

    pub(super) fn sync_folder(&mut self, path: &Path) -> io::Result<()> {
        let id = self.find(path)?;
        if self.defect == Some(Defect::NoFolderSync) {
            return Ok(());
        }
        let of_folder = |change: &Change| change.0.iter().any(|(folder, ..)| *folder == id);
        let Volume { held, changes, ordered, .. } = self;
        // A journal is written up to here.
        let last = changes.iter().rposition(of_folder).map_or(0, |last| last + 1);
        let mut place = 0;
        changes.retain(|change| {
            let goes = if *ordered { place < last } else { of_folder(change) };
            place += 1;
            if goes {
                change.apply(held);
            }
            !goes
        });
        Ok(())
    }

    /// Changes a bit of a file that is held by the disk; returns whether there is one.
    pub(super) fn rot(&mut self, path: &Path) -> bool {
        let Ok(id) = self.find(path) else { return false };
        let Volume { files, random, .. } = self;
        let Some(file) = files.get_mut(&id).filter(|file| !file.bytes.is_empty() && file.dirty.is_empty()) else {
            return false;
        };
        let (byte, bit) = (random.between(0, file.bytes.len() as u64) as usize, random.between(0, 8));
        file.bytes[byte] ^= 1 << bit;
        file.held.clone_from(&file.bytes);
        true
    }

    /// Adds something to the log that is not an operation.
    pub(super) fn note(&mut self, verb: &'static str, path: &Path) {
        self.log.push(Logged { number: self.count, verb, path: path.to_owned(), fault: None });
    }

    pub(super) fn draw(&mut self, high: u64) -> u64 {
        self.random.between(0, high)
    }
}

impl Change {
    fn apply(&self, folders: &mut BTreeMap<Id, Names>) {
        for (folder, name, id) in &self.0 {
            let Some(names) = folders.get_mut(folder) else { continue };
            match id {
                Some(id) => drop(names.insert(name.clone(), *id)),
                None => drop(names.remove(name)),
            }
        }
    }
}

impl File {
    fn sync(&mut self) {
        self.held.resize(self.bytes.len(), 0);
        for page in std::mem::take(&mut self.dirty) {
            self.write_page(page);
        }
    }

    fn write_page(&mut self, page: usize) {
        let start = page * PAGE_BYTES;
        let end = (start + PAGE_BYTES).min(self.bytes.len());
        if end > self.held.len() {
            self.held.resize(end, 0);
        }
        self.held[start..end].copy_from_slice(&self.bytes[start..end]);
    }

    fn lose_power(&mut self, random: &mut Random) {
        let pages: Vec<usize> = std::mem::take(&mut self.dirty).into_iter().collect();
        self.late = false;
        if !pages.is_empty() {
            let before = self.held.len();
            // The length may be on the disk without the bytes.
            if random.percent(50) {
                self.held.resize(self.bytes.len(), 0);
            }
            let how = random.between(0, 4);
            let first = random.between(0, pages.len() as u64 + 1) as usize;
            for (place, page) in pages.into_iter().enumerate() {
                let written = match how {
                    0 => false,
                    1 => true,
                    2 => place < first,
                    _ => random.percent(50),
                };
                if written {
                    self.write_page(page);
                }
            }
            // What was never written may hold what another file has left.
            if how != 1 && self.held.len() > before && random.percent(25) {
                let left = self.held[before..].iter().position(|byte| *byte == 0).map(|place| before + place);
                left.into_iter().for_each(|place| self.held[place] = 0xa5);
            }
        }
        self.bytes.clone_from(&self.held);
    }
}

fn killed() -> io::Error {
    io::Error::other("the process is killed")
}
