//! Saving a model that no process holds whole: tensors go to the writer one by one, as they are gathered.
//!
//! The chief's thread passes each tensor to the thread that writes, which fills one file after another in memory and
//! writes it when it is full. Tensors that come in pieces are announced, so that their files are written as the pieces
//! come, and held in no memory. Names of files contain their number, which is known when the last one is written: until
//! then they have temporary names, or those that they get if nothing else is added to their group.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, SyncSender};
use std::time::{Duration, Instant};

use distribute_strategy::Strategy;
use serde_json::Value;

use super::disk::Disk;
use super::draft::{Draft, SaveOptions, ensure_folder};
use super::folder::{self, Retention};
use super::names::{check_group, file_name};
use super::stored::Stored;
use super::task::{Awaited, LOOK, Task, everywhere};
use super::tensor_file::Described;
use crate::{Error, Result};

/// A snapshot's end of the way to the writer. Workers other than the chief have no writer, and drop their tensors.
#[derive(Debug, Default)]
pub(super) struct Sink {
    pieces: Option<SyncSender<Piece>>,
    /// A message for each piece that the writer has taken.
    taken: Option<Receiver<()>>,
    task: Option<Task<()>>,
    /// Whether the last piece has not been taken.
    is_full: bool,
    /// The chief's error, before the other workers know it.
    failure: Option<Error>,
    /// The error that all workers know.
    told: Option<String>,
    /// The most bytes of a file whose tensors come in pieces.
    most_bytes: usize,
}

/// The writer's end.
#[derive(Debug)]
pub(super) struct Inlet {
    pieces: Receiver<Piece>,
    taken: SyncSender<()>,
}

#[derive(Debug)]
enum Piece {
    /// A tensor whose name the group does not have yet, as the snapshot has checked.
    Tensor {
        group: String,
        name: String,
        stored: Stored,
    },
    File(Announced),
    Bytes(Vec<u8>),
    End {
        state: BTreeMap<String, Value>,
    },
}

/// A file whose tensors come in pieces, in the order of the file.
#[derive(Debug)]
pub(super) struct Announced {
    pub(super) group: String,
    pub(super) names: Vec<String>,
    pub(super) header: Vec<u8>,
    /// The bytes of the tensors.
    pub(super) bytes: u64,
    /// Its number among the files that are announced together, from 1, and their number.
    pub(super) place: (usize, usize),
}

impl Sink {
    /// Starts the chief's writer. Files whose tensors come in pieces have at most `most_bytes`, or one tensor.
    pub(super) fn start(
        disk: &Disk,
        what: String,
        (patience, most_bytes): (Duration, usize),
        work: impl FnOnce(&Disk, &Inlet) -> Result<()> + Send + 'static,
    ) -> Sink {
        let ((pieces, receiver), (send, taken)) = (mpsc::sync_channel(1), mpsc::sync_channel(1));
        let inlet = Inlet { pieces: receiver, taken: send };
        let mut sink = Sink::default();
        sink.most_bytes = most_bytes;
        let task = Task::start(disk, what, patience, move |disk| work(disk, &inlet));
        (sink.pieces, sink.taken, sink.task) = (Some(pieces), Some(taken), Some(task));
        sink
    }

    /// Passes a tensor to the writer, and waits for room before; drops it if the writer has failed, which the next call
    /// of [`Sink::settle`] tells.
    pub(super) fn push(&mut self, group: &str, name: &str, stored: Stored) {
        if self.pieces.is_none() {
            return;
        }
        let piece = Piece::Tensor { group: group.to_owned(), name: name.to_owned(), stored };
        if let Err(error) = self.pass(piece) {
            self.fail(error);
        }
    }

    /// Returns whether there is a writer.
    pub(super) fn writes(&self) -> bool {
        self.pieces.is_some()
    }

    /// Returns the most bytes of a file whose tensors come in pieces.
    pub(super) fn most_bytes(&self) -> usize {
        self.most_bytes
    }

    /// Announces a file whose bytes follow in order, by [`Sink::push_bytes`]. Waits for room before.
    pub(super) fn announce(&mut self, file: Announced) -> Result<()> {
        self.pass(Piece::File(file))
    }

    /// Passes the next bytes of the announced file to the writer, and waits for room before.
    pub(super) fn push_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.pass(Piece::Bytes(bytes.to_vec()))
    }

    /// Ends with an error of this worker, which the next call of [`Sink::settle`] tells.
    pub(super) fn fail(&mut self, error: Error) {
        self.pieces = None;
        self.failure.get_or_insert(error);
    }

    /// Waits until the writer has taken the last tensor. Every worker calls this, and gets an error if the chief has
    /// one.
    pub(super) fn settle(&mut self, strategy: &Strategy) -> Result<()> {
        if let Some(told) = &self.told {
            return Err(Error::Part(told.clone().into()));
        }
        let is_writer = self.pieces.is_some();
        let room = match self.failure.take() {
            Some(error) => Err(error),
            None => Ok(is_writer.then_some(Room(&mut *self))),
        };
        let outcome = everywhere(strategy, room).map(drop);
        if let Err(error) = &outcome {
            (self.pieces, self.told) = (None, Some(error.to_string()));
        }
        outcome
    }

    /// Ends with the state, or with this worker's error, which all workers get. Every worker calls this. Returns the
    /// rest of the writer's work on the chief.
    pub(super) fn end(
        mut self,
        strategy: &Strategy,
        outcome: Result<BTreeMap<String, Value>>,
    ) -> Result<Option<Task<()>>> {
        let state = match outcome {
            Ok(state) => state,
            // All know it already.
            Err(error) if self.told.is_some() => return Err(error),
            Err(error) => {
                self.fail(error);
                BTreeMap::new()
            }
        };
        self.settle(strategy)?;
        if let Some(pieces) = self.pieces.take() {
            // This fails only if the writer has failed meanwhile, which its task tells.
            drop(pieces.send(Piece::End { state }));
        }
        Ok(self.task.take())
    }

    /// Sends a piece as soon as the writer has taken the last one.
    fn pass(&mut self, piece: Piece) -> Result<()> {
        Room(self).wait()?;
        self.send(piece)
    }

    /// Sends a piece when there is room.
    fn send(&mut self, piece: Piece) -> Result<()> {
        self.is_full = true;
        match self.pieces.as_ref().map(|pieces| pieces.send(piece)) {
            Some(Ok(())) => Ok(()),
            _ => Err(self.ended()),
        }
    }

    /// Returns the error with which the writer has ended.
    fn ended(&mut self) -> Error {
        let outcome = self.task.take().map_or(Ok(()), Task::wait);
        outcome.err().unwrap_or_else(|| Error::Part("the writer of a checkpoint has ended early".into()))
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        // The writer removes what it has written if it has not got the end.
        self.pieces = None;
        if let Some(task) = self.task.take() {
            drop(task.wait());
        }
    }
}

/// The wait until the writer has taken the last piece.
struct Room<'a>(&'a mut Sink);

impl Awaited for Room<'_> {
    type Value = ();

    fn poll(self, limit: Duration) -> Result<Result<()>, Self> {
        let until = Instant::now() + limit;
        while self.0.is_full {
            let left = until.saturating_duration_since(Instant::now());
            let heard = self
                .0
                .taken
                .as_ref()
                .map_or(Err(RecvTimeoutError::Disconnected), |taken| taken.recv_timeout(left.min(LOOK)));
            match heard {
                Ok(()) => self.0.is_full = false,
                Err(RecvTimeoutError::Disconnected) => return Ok(Err(self.0.ended())),
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(error) = self.0.task.as_ref().and_then(Task::hangs) {
                        return Ok(Err(error));
                    }
                    if Instant::now() >= until {
                        return Err(self);
                    }
                }
            }
        }
        Ok(Ok(()))
    }
}

impl Inlet {
    /// Returns the next piece; `None` if the snapshot was dropped before its end.
    fn next(&self, disk: &Disk) -> Option<Piece> {
        disk.rest();
        let piece = self.pieces.recv().ok();
        // From here on, the time of the next operation counts.
        disk.begin("taking tensors for", Path::new("a checkpoint"));
        // The snapshot may have been dropped meanwhile.
        let _ = self.taken.try_send(());
        piece
    }
}

/// Writes a checkpoint as its tensors come, into a folder that its run has claimed, records it as the newest, and
/// removes old ones.
pub(super) fn save(
    disk: &Disk,
    root: &Path,
    inlet: &Inlet,
    (step, options): (u64, &SaveOptions),
    keep: &Retention,
) -> Result<()> {
    ensure_folder(disk, root, options)?;
    let written = Draft::begin(disk, root, step, options)?.filled(|draft| {
        let mut files = Files { step, groups: BTreeMap::new(), held: 0, most: options.max_shard_bytes };
        loop {
            match inlet.next(disk) {
                Some(Piece::Tensor { group, name, stored }) => files.add(draft, group, name, stored)?,
                Some(Piece::File(announced)) => files.receive(draft, disk, inlet, announced)?,
                Some(Piece::End { state }) => return files.finish(draft).map(|()| state),
                Some(Piece::Bytes(_)) | None => return Err(given_up(step)),
            }
        }
    });
    written?;
    folder::prune(disk, root, keep)
}

/// The files of a checkpoint that are being filled: one of each group.
struct Files {
    step: u64,
    groups: BTreeMap<String, Group>,
    /// Bytes of tensors that are not written yet.
    held: usize,
    /// The most of them.
    most: usize,
}

#[derive(Default)]
struct Group {
    /// Tensors that are not written yet.
    tensors: BTreeMap<String, Stored>,
    held: usize,
    /// The numbers of the files of those that are, from 1.
    written: BTreeMap<String, usize>,
    /// The names of the files so far.
    files: Vec<String>,
    /// The bytes of all.
    bytes: usize,
}

impl Files {
    fn add(&mut self, draft: &mut Draft<'_>, group: String, name: String, stored: Stored) -> Result<()> {
        let bytes = stored.bytes.len();
        while self.held > 0 && self.held + bytes > self.most {
            self.write_fullest(draft)?;
        }
        let file = self.group(&group)?;
        file.tensors.insert(name, stored);
        (file.held, file.bytes) = (file.held + bytes, file.bytes + bytes);
        self.held += bytes;
        Ok(())
    }

    /// Writes a file as its bytes come.
    fn receive(&mut self, draft: &mut Draft<'_>, disk: &Disk, inlet: &Inlet, announced: Announced) -> Result<()> {
        let Announced { group, names, header, bytes, place: (number, count) } = announced;
        let step = self.step;
        let file = self.group(&group)?;
        let next = file.files.len() + 1;
        let name = if next == number { file_name(&group, number, count) } else { unnamed(&group, next) };
        let mut writing = draft.begin_file(&name)?;
        writing.push(&header)?;
        let mut left = bytes;
        while left > 0 {
            match inlet.next(disk) {
                Some(Piece::Bytes(piece)) if piece.len() as u64 <= left => {
                    writing.push(&piece)?;
                    left -= piece.len() as u64;
                }
                _ => return Err(given_up(step)),
            }
        }
        draft.add(&name, writing.finish()?);
        file.note(name, names);
        file.bytes += bytes as usize;
        Ok(())
    }

    fn group(&mut self, name: &str) -> Result<&mut Group> {
        if !self.groups.contains_key(name) {
            check_group(name)?;
        }
        Ok(self.groups.entry(name.to_owned()).or_default())
    }

    fn write_fullest(&mut self, draft: &mut Draft<'_>) -> Result<()> {
        let Some((name, group)) = self.groups.iter_mut().max_by_key(|(_, group)| group.held) else { return Ok(()) };
        self.held -= group.held;
        group.write(draft, unnamed(name, group.files.len() + 1))
    }

    fn finish(self, draft: &mut Draft<'_>) -> Result<()> {
        for (name, mut group) in self.groups {
            let count = group.files.len() + usize::from(!group.tensors.is_empty());
            for (index, file) in (1..).zip(&group.files) {
                let lasting = file_name(&name, index, count);
                if *file != lasting {
                    draft.rename(file, lasting)?;
                }
            }
            if !group.tensors.is_empty() {
                group.write(draft, file_name(&name, count, count))?;
            }
            if count > 1 {
                let file = |(tensor, index)| (tensor, file_name(&name, index, count));
                draft.write_index(&name, &group.written.into_iter().map(file).collect(), group.bytes)?;
            }
        }
        Ok(())
    }
}

impl Group {
    /// Writes the tensors held to the next file, and frees them.
    fn write(&mut self, draft: &mut Draft<'_>, file: String) -> Result<()> {
        let tensors: Vec<(Described<'_>, &[u8])> =
            self.tensors.iter().map(|(name, stored)| (stored.described(name), &stored.bytes[..])).collect();
        draft.write_tensors(&file, &tensors)?;
        let written = std::mem::take(&mut self.tensors).into_keys().collect();
        self.note(file, written);
        self.held = 0;
        Ok(())
    }

    /// Records a file that was written.
    fn note(&mut self, file: String, tensors: Vec<String>) {
        self.files.push(file);
        self.written.extend(tensors.into_iter().map(|name| (name, self.files.len())));
    }
}

/// The error of a snapshot that was dropped before its end.
fn given_up(step: u64) -> Error {
    Error::Part(format!("the checkpoint of step {step} was given up").into())
}

/// The name of a file whose number of files is not known yet.
fn unnamed(group: &str, index: usize) -> String {
    format!("{group}-{index:05}.part")
}
