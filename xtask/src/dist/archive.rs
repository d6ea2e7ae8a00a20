//! Archives whose bytes depend on their files alone: no dates, no owners.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use sha2::{Digest, Sha256};
use tar::{Builder, Header};

/// An archive under construction, with one folder named like it.
pub(super) struct Archive {
    path: PathBuf,
    name: String,
    builder: Builder<GzEncoder<File>>,
}

impl Archive {
    pub(super) fn new(folder: &Path, name: &str) -> Result<Archive, String> {
        let path = folder.join(format!("{name}.tar.gz"));
        let file = File::create(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let builder = Builder::new(GzEncoder::new(file, Compression::best()));
        Ok(Archive { path, name: name.to_owned(), builder })
    }

    /// Adds a file under a name.
    pub(super) fn add(&mut self, name: &str, file: &Path, is_program: bool) -> Result<(), String> {
        let bytes = fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
        let mut header = Header::new_gnu();
        header.set_size(bytes.len() as u64);
        header.set_mode(if is_program { 0o755 } else { 0o644 });
        let name = format!("{}/{name}", self.name);
        let added = self.builder.append_data(&mut header, name, bytes.as_slice());
        added.map_err(|error| format!("{}: {error}", self.path.display()))
    }

    /// Completes the archive; returns its size, and its line for `sha256sum --check`.
    pub(super) fn finish(self) -> Result<(u64, String), String> {
        let describe = |error: std::io::Error| format!("{}: {error}", self.path.display());
        self.builder.into_inner().and_then(GzEncoder::finish).map_err(describe)?;
        let bytes = fs::read(&self.path).map_err(describe)?;
        let sum: String = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect();
        Ok((bytes.len() as u64, format!("{sum}  {}.tar.gz\n", self.name)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_files_give_the_same_archive() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("distribute");
        fs::write(&file, "a program").unwrap();
        let archive = || {
            let mut archive = Archive::new(folder.path(), "distribute-1").unwrap();
            archive.add("distribute", &file, true).unwrap();
            archive.finish().unwrap()
        };
        let (bytes, line) = archive();
        assert!(bytes > 0 && line.ends_with("  distribute-1.tar.gz\n") && line.len() == 64 + 22, "{line:?}");
        let changed = File::options().write(true).open(&file).unwrap();
        changed.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        assert_eq!(archive().1, line);
    }
}
