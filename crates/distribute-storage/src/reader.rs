//! Objects as streams of bytes.

use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;

use bytes::Bytes;

use crate::runtime::Pending;
use crate::{Error, Location, Meta, Result};

/// The length in bytes of one request: some 10 ms of a connection of 10 Gbit/s, so that waiting for the first byte
/// weighs little.
const BLOCK_BYTES: u64 = 8 << 20;

/// Reads one version of an object, in blocks of 8 MiB; while it is read in order, the next block is already under way.
/// Holds at most two blocks in memory.
///
/// # Errors
/// [`Read`] and [`Seek`] return errors that [`Error::of`] recognises; [`Error::Changed`] if the object is replaced
/// meanwhile.
///
/// # Examples
/// ```
/// use std::io::{Read, Seek, SeekFrom};
/// use distribute_storage::{Location, ObjectReader};
///
/// let place = Location::open("memory://example/greeting")?;
/// place.write("hello world")?;
/// let mut reader = ObjectReader::open(&place)?;
/// reader.seek(SeekFrom::Start(6))?;
/// let mut text = String::new();
/// reader.read_to_string(&mut text)?;
/// assert_eq!(text, "world");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct ObjectReader {
    location: Location,
    version: Meta,
    position: u64,
    block: Block,
    next: Option<(Range<u64>, Pending<Bytes>)>,
}

/// Bytes from a position.
#[derive(Debug, Default)]
struct Block {
    start: u64,
    bytes: Bytes,
}

impl Block {
    fn from(&self, position: u64) -> Option<&[u8]> {
        let skipped = usize::try_from(position.checked_sub(self.start)?).ok()?;
        self.bytes.get(skipped..).filter(|rest| !rest.is_empty())
    }
}

impl ObjectReader {
    /// Opens the object in its present version.
    ///
    /// # Errors
    /// [`Error::NotFound`], and those of [`Location`].
    pub fn open(location: &Location) -> Result<ObjectReader> {
        let version = location.meta()?.ok_or_else(|| Error::NotFound { url: location.url() })?;
        Ok(ObjectReader::of(location, &version))
    }

    /// Reads this version of the object.
    pub(crate) fn of(location: &Location, version: &Meta) -> ObjectReader {
        let (location, version) = (location.clone(), version.clone());
        ObjectReader { location, version, position: 0, block: Block::default(), next: None }
    }

    /// Returns the length in bytes.
    pub fn byte_len(&self) -> u64 {
        self.version.bytes
    }

    /// Returns another reader of the same version, at its beginning.
    #[must_use]
    pub fn again(&self) -> ObjectReader {
        ObjectReader::of(&self.location, &self.version)
    }

    /// Reads a range without moving the position.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the object ends before the range, and those of [`Location::read_range`].
    pub fn read_range(&self, range: Range<u64>) -> Result<Bytes> {
        self.location.read_range(range, &self.version)
    }

    /// Fetches the block at the position, and starts on the one after it.
    fn fetch(&mut self) -> Result<()> {
        let is_in_order = self.position == self.block.start + self.block.bytes.len() as u64;
        let waiting = self.next.take().filter(|(range, _)| range.contains(&self.position));
        let (start, pending) = match waiting {
            Some((range, pending)) => (range.start, pending),
            None => (self.position, self.location.start_range(self.block_at(self.position), &self.version)?),
        };
        let end = self.block_at(start).end;
        if is_in_order && end < self.version.bytes {
            let range = self.block_at(end);
            self.next = Some((range.clone(), self.location.start_range(range, &self.version)?));
        }
        self.block = Block { start, bytes: pending.wait()? };
        Ok(())
    }

    fn block_at(&self, start: u64) -> Range<u64> {
        start..start.saturating_add(BLOCK_BYTES).min(self.version.bytes)
    }
}

impl Read for ObjectReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.position >= self.version.bytes || buffer.is_empty() {
            return Ok(0);
        }
        if self.block.from(self.position).is_none() {
            self.fetch()?;
        }
        let rest = self.block.from(self.position).unwrap_or_default();
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        self.position += count as u64;
        Ok(count)
    }
}

impl Seek for ObjectReader {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let position = match to {
            SeekFrom::Start(position) => Some(position),
            SeekFrom::End(offset) => self.version.bytes.checked_add_signed(offset),
            SeekFrom::Current(offset) => self.position.checked_add_signed(offset),
        };
        let before = || io::Error::new(io::ErrorKind::InvalidInput, "a position before the beginning was sought");
        self.position = position.ok_or_else(before)?;
        Ok(self.position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(name: &str, length: usize) -> (Location, Vec<u8>) {
        let place = Location::open(&format!("memory://reader/{name}")).unwrap();
        let bytes: Vec<u8> = (0..length).map(|at| (at % 251) as u8).collect();
        place.write(bytes.clone()).unwrap();
        (place, bytes)
    }

    #[test]
    fn any_length_is_read_in_order_and_by_parts() {
        let block = BLOCK_BYTES as usize;
        for length in [0, 1, block - 1, block, block + 1, 3 * block + 5] {
            let (place, bytes) = object("order", length);
            let mut read = Vec::new();
            let mut reader = ObjectReader::open(&place).unwrap();
            reader.read_to_end(&mut read).unwrap();
            assert!(read == bytes, "{length}");
            for at in [0, length / 2, length.saturating_sub(1), length, length + 7] {
                reader.seek(SeekFrom::Start(at as u64)).unwrap();
                let mut some = Vec::new();
                reader.by_ref().take(100).read_to_end(&mut some).unwrap();
                assert_eq!(some, bytes.get(at..(at + 100).min(length)).unwrap_or_default(), "{length} at {at}");
            }
        }
    }

    #[test]
    fn a_seek_goes_where_files_go() {
        let (place, bytes) = object("seek", 100);
        let mut reader = ObjectReader::open(&place).unwrap();
        assert_eq!(reader.seek(SeekFrom::End(-10)).unwrap(), 90);
        assert_eq!(reader.seek(SeekFrom::Current(-40)).unwrap(), 50);
        assert!(reader.seek(SeekFrom::Current(-51)).is_err());
        assert_eq!(reader.read_range(10..20).unwrap(), bytes[10..20]);
        assert_eq!(reader.read_range(100..100).unwrap(), "");
        assert!(matches!(reader.read_range(90..101), Err(Error::TooLarge { bytes: 101, most: 100, .. })));
    }

    #[test]
    fn a_replaced_object_is_not_mixed_with_the_earlier_one() {
        let (place, _) = object("replaced", 3 * BLOCK_BYTES as usize);
        let mut reader = ObjectReader::open(&place).unwrap();
        reader.read_exact(&mut [0; 10]).unwrap();
        place.write(vec![0; 3 * BLOCK_BYTES as usize]).unwrap();
        let error = std::io::copy(&mut reader, &mut std::io::sink()).unwrap_err();
        assert!(matches!(Error::of(&error), Some(Error::Changed { .. })), "{error}");
        assert!(matches!(ObjectReader::open(&place.join("none")), Err(Error::NotFound { .. })));
    }
}
