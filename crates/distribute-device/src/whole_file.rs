//! Files that appear whole.

use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::{fs, io};

/// Writes a file under another name and renames it, so that nothing reads a part of it. If that fails, nothing is left
/// behind.
pub(crate) fn write_whole(file: &Path, bytes: &[u8]) -> io::Result<()> {
    // Random: devices of a process may need the same file at once, and processes of several containers that share the
    // folder may have the same number.
    let part = file.with_extension(format!("{:016x}.{PART}", RandomState::new().hash_one(file)));
    let written = fs::write(&part, bytes).and_then(|()| fs::rename(&part, file));
    if written.is_err() {
        let _ = fs::remove_file(&part);
    }
    written
}

/// The extension of a file that is being written.
pub(crate) const PART: &str = "part";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_process_of_the_same_number_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("program.cubin");
        let part = |number| file.with_extension(format!("{}-{number}.{PART}", std::process::id()));
        (0..1000).for_each(|number| fs::write(part(number), "begun").unwrap());
        write_whole(&file, b"whole").unwrap();
        assert_eq!(fs::read(&file).unwrap(), b"whole");
        assert!((0..1000).all(|number| fs::read(part(number)).is_ok_and(|bytes| bytes == b"begun")));
    }
}
