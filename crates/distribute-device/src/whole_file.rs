//! Files that appear whole, and whose content is checked when it is read.

use std::fs::{self, File};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read};
use std::path::Path;

use sha2::{Digest, Sha256};

/// The kind and version of a file: its first bytes. A checksum (SHA-256) and the content follow.
pub(crate) type Magic = [u8; 8];

/// The number of bytes before the content.
pub(crate) const HEADER: usize = size_of::<Magic>() + 32;

/// The extension of a file that is being written.
pub(crate) const PART: &str = "part";

/// Reads the content of a file that [`write_checked`] wrote; `None` if there is no such file.
///
/// # Errors
/// A clause that says why the file cannot be used: it cannot be read, has more than `limit_bytes` bytes, is of another
/// kind, or is damaged. A file that was written just before the machine lost power may be shorter, or zeroes.
pub(crate) fn read_checked(file: &Path, magic: &Magic, limit_bytes: u64) -> Result<Option<Vec<u8>>, String> {
    let text = |error: io::Error| error.to_string();
    let mut opened = match File::open(file) {
        Ok(opened) => opened,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(text(error)),
    };
    let len_bytes = opened.metadata().map_err(text)?.len();
    if len_bytes > limit_bytes || len_bytes < HEADER as u64 {
        return Err(format!("{len_bytes} bytes are not the size of a program"));
    }
    let mut bytes = Vec::new();
    let reserved = usize::try_from(len_bytes).map(|len_bytes| bytes.try_reserve_exact(len_bytes));
    if !matches!(reserved, Ok(Ok(()))) {
        return Err(format!("{len_bytes} bytes of memory could not be allocated"));
    }
    // No more than was reserved, should another process write to it.
    opened.by_ref().take(len_bytes).read_to_end(&mut bytes).map_err(text)?;
    let (header, content) = bytes.split_at_checked(HEADER).ok_or("the file was cut")?;
    if header[..magic.len()] != *magic || header[magic.len()..] != *Sha256::digest(content) {
        return Err("the checksum is wrong".to_owned());
    }
    Ok(Some(content.to_vec()))
}

/// Writes a file with the checksum of its content, under another name, and renames it, so that nothing reads a part of
/// it. If that fails, nothing is left behind.
///
/// The file is not synced: a crash of the machine may leave a damaged one, which [`read_checked`] refuses.
pub(crate) fn write_checked(file: &Path, magic: &Magic, content: &[u8]) -> io::Result<()> {
    write_whole(file, &[magic.as_slice(), &Sha256::digest(content), content].concat())
}

fn write_whole(file: &Path, bytes: &[u8]) -> io::Result<()> {
    // Random: devices of a process may need the same file at once, and processes of several containers that share the
    // folder may have the same number.
    let part = file.with_extension(format!("{:016x}.{PART}", RandomState::new().hash_one(file)));
    let written = fs::write(&part, bytes).and_then(|()| fs::rename(&part, file));
    if written.is_err() {
        let _ = fs::remove_file(&part);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAGIC: Magic = *b"DTEST\0\0\x01";

    #[test]
    fn a_part_of_a_process_of_the_same_number_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("program.cubin");
        let part = |number| file.with_extension(format!("{}-{number}.{PART}", std::process::id()));
        (0..1000).for_each(|number| fs::write(part(number), "begun").unwrap());
        write_checked(&file, &MAGIC, b"whole").unwrap();
        assert_eq!(read_checked(&file, &MAGIC, 100).unwrap().unwrap(), b"whole");
        assert!((0..1000).all(|number| fs::read(part(number)).is_ok_and(|bytes| bytes == b"begun")));
    }

    #[test]
    fn a_file_that_is_cut_damaged_or_of_another_kind_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("program");
        assert_eq!(read_checked(&file, &MAGIC, 100), Ok(None));
        write_checked(&file, &MAGIC, b"whole").unwrap();
        let bytes = fs::read(&file).unwrap();
        assert!(read_checked(&file, b"DTEST\0\0\x02", 100).is_err());
        assert!(read_checked(&file, &MAGIC, bytes.len() as u64 - 1).is_err());
        for len in 0..bytes.len() {
            fs::write(&file, &bytes[..len]).unwrap();
            assert!(read_checked(&file, &MAGIC, 100).is_err(), "{len} bytes");
            let mut zeroed = bytes.clone();
            zeroed[len..].fill(0);
            fs::write(&file, zeroed).unwrap();
            assert!(read_checked(&file, &MAGIC, 100).is_err(), "zeroes from byte {len}");
        }
    }
}
