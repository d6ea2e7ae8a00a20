//! Tensors that no process of a job should hold whole: they are put into a snapshot, and read from one, piece by piece.

use std::ops::Range;

use distribute_device::DType;
use distribute_strategy::Strategy;
use parking_lot::Mutex;

use super::manager::of_part;
use super::outflow::{Announced, Sink};
use super::snapshot::Snapshot;
use super::stored::{Stored, zeros};
use super::survey::BLOCK_BYTES;
use super::tensor_file::{self, Described};
use crate::{BoxError, Error, Result};

/// Takes the next bytes of a tensor, in row-major order of its elements.
pub type PutBytes<'a> = dyn FnMut(&[u8]) -> Result<()> + 'a;

impl Snapshot {
    /// Adds tensors to a file whose bytes come in pieces of any size. Every worker calls this, with the same tensors.
    ///
    /// `pieces` is called with the index of each tensor, in an order that the file format determines, and passes all of
    /// its bytes to the function that it gets. While a [`CheckpointManager`](super::CheckpointManager) saves parts that
    /// [`stream`](super::Checkpointed::streams), or under a strategy that shards, each piece is written as it comes:
    /// `pieces` is called on the chief alone, which waits for the disk and holds about three pieces. Otherwise each
    /// worker collects the tensors in memory.
    ///
    /// # Errors
    /// [`Error::PutTwice`] for a name that was put into the file already; [`Error::Part`] with the error of `pieces`,
    /// or if a tensor gets more or fewer bytes than it was announced with; the chief's error of writing the checkpoint
    /// so far, such as [`Error::File`] if the disk is full, and [`Error::Chief`] or [`Error::ChiefsDisk`] on the other
    /// workers; [`Error::Collective`] if a worker is missing or fails.
    ///
    /// # Examples
    /// ```
    /// use distribute_device::DType;
    /// use distribute_strategy::Strategy;
    /// use distribute_train::checkpoint::{MODEL, Snapshot};
    /// let strategy = Strategy::default_strategy()?;
    /// let mut snapshot = Snapshot::new(1);
    /// let tensors = [("table", DType::U8, &[2, 3][..])];
    /// snapshot.put_in_pieces(&strategy, MODEL, &tensors, |_, put| {
    ///     put(&[1, 2, 3, 4])?;
    ///     Ok(put(&[5, 6])?)
    /// })?;
    /// assert_eq!(snapshot.bytes(MODEL, "table")?, Some(vec![1, 2, 3, 4, 5, 6]));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn put_in_pieces(
        &mut self,
        strategy: &Strategy,
        file: &str,
        tensors: &[(&str, DType, &[usize])],
        mut pieces: impl FnMut(usize, &mut PutBytes<'_>) -> Result<(), BoxError>,
    ) -> Result<()> {
        let described = described(tensors)?;
        let noted = described.iter().try_for_each(|about| self.note_put(file, about.name));
        let Some(sink) = self.sink.as_mut().map(|sink| sink.get_mut()) else {
            noted?;
            for (index, about) in described.iter().enumerate() {
                let bytes = collected(about, |put| pieces(index, put))?;
                self.store(file, about.name, Stored { dtype: about.dtype, shape: about.shape.to_vec(), bytes });
            }
            return Ok(());
        };
        let outcome = match sink.writes() {
            true => noted.and_then(|()| passed_on(sink, file, &described, &mut pieces)),
            false => noted,
        };
        if let Err(error) = outcome {
            sink.fail(error);
        }
        // Also after an error, which this tells the others.
        sink.settle(strategy)
    }

    /// Returns the type and the shape of a file's tensor, of which nothing is read; `None` if there is none of this
    /// name.
    ///
    /// # Examples
    /// ```
    /// use distribute_device::DType;
    /// use distribute_train::checkpoint::{MODEL, Snapshot};
    /// let mut snapshot = Snapshot::new(1);
    /// snapshot.put_bytes(MODEL, "w", DType::U8, &[3], vec![1, 2, 3]);
    /// assert_eq!(snapshot.describe(MODEL, "w"), Some((DType::U8, &[3][..])));
    /// ```
    pub fn describe(&self, file: &str, name: &str) -> Option<(DType, &[usize])> {
        if let Some(source) = &self.source {
            return source.describe(file, name);
        }
        let Stored { dtype, shape, .. } = self.files.get(file)?.get(name)?;
        Some((*dtype, shape))
    }

    /// Returns a range of the bytes of a file's tensor, in pieces of at most 4 MiB. While a checkpoint is restored from
    /// files, each piece is read, and compared with its checksum, when it is asked for; every worker must ask for the
    /// same pieces in the same order.
    ///
    /// # Errors
    /// [`Error::Restore`] if there is no such tensor, or it has fewer bytes. Pieces are errors if they cannot be read:
    /// [`Error::Damaged`] if the file has changed since it was checked, [`Error::File`], [`Error::DiskHangs`],
    /// [`Error::ReadLate`] after the parts were loaded; with several workers [`Error::LoadOrder`] and
    /// [`Error::Collective`].
    ///
    /// # Examples
    /// ```
    /// use distribute_device::DType;
    /// use distribute_train::checkpoint::{MODEL, Snapshot};
    /// let mut snapshot = Snapshot::new(1);
    /// snapshot.put_bytes(MODEL, "w", DType::U8, &[5], vec![1, 2, 3, 4, 5]);
    /// let pieces: Result<Vec<Vec<u8>>, _> = snapshot.pieces(MODEL, "w", 1..4)?.collect();
    /// assert_eq!(pieces?.concat(), [2, 3, 4]);
    /// # Ok::<(), distribute_train::Error>(())
    /// ```
    pub fn pieces<'a>(&'a self, file: &'a str, name: &'a str, range: Range<usize>) -> Result<TensorPieces<'a>> {
        let wrong = |problem| Error::Restore { name: name.to_owned(), problem };
        let found = self.describe(file, name);
        let (dtype, shape) = found.ok_or_else(|| wrong(format!("the checkpoint's {file} has none of this name")))?;
        let bytes = bytes_of(dtype, shape).unwrap_or(0);
        if range.start > range.end || range.end > bytes {
            return Err(wrong(format!("it has {bytes} bytes, and bytes {range:?} are asked for")));
        }
        Ok(TensorPieces { snapshot: self, file, name, rest: range })
    }
}

/// Returns a part of the bytes of a tensor piece by piece; see [`Snapshot::pieces`].
#[derive(Debug)]
pub struct TensorPieces<'a> {
    snapshot: &'a Snapshot,
    file: &'a str,
    name: &'a str,
    rest: Range<usize>,
}

impl TensorPieces<'_> {
    /// Returns the number of bytes that have not been read yet.
    pub fn bytes_left(&self) -> usize {
        self.rest.len()
    }
}

impl Iterator for TensorPieces<'_> {
    type Item = Result<Vec<u8>>;

    fn next(&mut self) -> Option<Result<Vec<u8>>> {
        if self.rest.is_empty() {
            return None;
        }
        // Up to the end of a block, so that no block is read twice.
        let end = self.rest.end.min((self.rest.start / BLOCK_BYTES + 1) * BLOCK_BYTES);
        let now = std::mem::replace(&mut self.rest.start, end)..end;
        let read = match &self.snapshot.source {
            Some(source) => source.read_range(self.file, self.name, now),
            None => {
                let stored = self.snapshot.files.get(self.file).and_then(|tensors| tensors.get(self.name));
                let bytes = stored.and_then(|stored| stored.bytes.get(now)).map(<[u8]>::to_vec);
                bytes.ok_or_else(|| Error::Restore {
                    name: self.name.to_owned(),
                    problem: "it has fewer bytes than its shape says".to_owned(),
                })
            }
        };
        if read.is_err() {
            self.rest.start = self.rest.end;
        }
        Some(read)
    }
}

impl Sink {
    /// Returns the sink of a snapshot.
    pub(super) fn boxed(self) -> Box<Mutex<Sink>> {
        Box::new(Mutex::new(self))
    }
}

/// Describes tensors with their bytes.
fn described<'a>(tensors: &[(&'a str, DType, &'a [usize])]) -> Result<Vec<Described<'a>>> {
    let of = |(name, dtype, shape): &(&'a str, DType, &'a [usize])| {
        let bytes = bytes_of(*dtype, shape).ok_or_else(|| {
            Error::Part(format!("{name:?} of {dtype} {shape:?} is larger than any file; announce another shape").into())
        })?;
        Ok(Described { name, dtype: *dtype, shape, bytes })
    };
    tensors.iter().map(of).collect()
}

fn bytes_of(dtype: DType, shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(dtype.size_bytes(), |bytes, extent| bytes.checked_mul(*extent))
}

/// Collects a tensor in memory.
fn collected(about: &Described<'_>, pieces: impl FnOnce(&mut PutBytes<'_>) -> Result<(), BoxError>) -> Result<Vec<u8>> {
    let no_memory = |_| {
        let (name, bytes) = (about.name, about.bytes);
        Error::Part(format!("{name:?} has {bytes} bytes, for which there is no memory here").into())
    };
    let mut bytes = zeros(about.bytes).map_err(no_memory)?;
    let mut counted = Counted { about, given: 0 };
    let mut put = |piece: &[u8]| {
        let place = counted.next(piece)?;
        bytes[place].copy_from_slice(piece);
        Ok(())
    };
    pieces(&mut put).map_err(of_part)?;
    counted.end()?;
    Ok(bytes)
}

/// Passes tensors to the writer, file by file.
fn passed_on(
    sink: &mut Sink,
    group: &str,
    tensors: &[Described<'_>],
    pieces: &mut impl FnMut(usize, &mut PutBytes<'_>) -> Result<(), BoxError>,
) -> Result<()> {
    let files = files_of(tensors, sink.most_bytes());
    let count = files.len();
    for (number, file) in (1..).zip(files) {
        let of_file: Vec<Described<'_>> = file.iter().map(|index| tensors[*index]).collect();
        let (header, order) = tensor_file::header(&of_file).map_err(|problem| Error::Part(problem.into()))?;
        let names = of_file.iter().map(|about| about.name.to_owned()).collect();
        let bytes = of_file.iter().map(|about| about.bytes as u64).sum();
        let group = group.to_owned();
        sink.announce(Announced { group, names, header, bytes, place: (number, count) })?;
        for place in order {
            let mut counted = Counted { about: &of_file[place], given: 0 };
            let mut put = |piece: &[u8]| {
                counted.next(piece)?;
                // A piece that is much larger than others would be held more than once.
                piece.chunks(BLOCK_BYTES).try_for_each(|piece| sink.push_bytes(piece))
            };
            pieces(file[place], &mut put).map_err(of_part)?;
            counted.end()?;
        }
    }
    Ok(())
}

/// Cuts tensors, in the order of their names, into files of at most `most_bytes`, or of one tensor. Returns the indices
/// of each file's.
fn files_of(tensors: &[Described<'_>], most_bytes: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|index| tensors[*index].name);
    let (mut files, mut bytes) = (Vec::<Vec<usize>>::new(), 0usize);
    for index in order {
        let of_tensor = tensors[index].bytes;
        let starts = bytes > 0 && bytes.saturating_add(of_tensor) > most_bytes;
        bytes = if starts { of_tensor } else { bytes.saturating_add(of_tensor) };
        match files.last_mut().filter(|_| !starts) {
            Some(file) => file.push(index),
            None => files.push(vec![index]),
        }
    }
    files
}

/// Counts the bytes of a tensor that comes in pieces.
struct Counted<'a> {
    about: &'a Described<'a>,
    given: usize,
}

impl Counted<'_> {
    /// Returns the place of the next piece in the tensor.
    fn next(&mut self, piece: &[u8]) -> Result<Range<usize>> {
        let end = self.given.checked_add(piece.len()).filter(|end| *end <= self.about.bytes);
        let end = end.ok_or_else(|| self.unlike("more"))?;
        Ok(std::mem::replace(&mut self.given, end)..end)
    }

    fn end(&self) -> Result<()> {
        if self.given == self.about.bytes { Ok(()) } else { Err(self.unlike("fewer")) }
    }

    fn unlike(&self, how: &str) -> Error {
        let Described { name, dtype, shape, bytes } = self.about;
        let problem = format!("{name:?} was announced as {dtype} {shape:?}, and {how} than its {bytes} bytes were put");
        Error::Part(format!("{problem}; put all elements, each once").into())
    }
}
