//! The archives that `cargo package` makes of crates.

use std::fs;
use std::io::{Cursor, Read};
use std::path::{Component, Path, PathBuf};

use flate2::read::GzDecoder;

use super::full_name;
use crate::workspace::Package;

/// The archive that `cargo package` made of a crate.
#[derive(Debug)]
pub(super) struct Archive {
    path: PathBuf,
    /// The files with their contents, by their paths in the package's own folder.
    pub(super) files: Vec<(PathBuf, Vec<u8>)>,
    /// The size of all files.
    pub(super) bytes: u64,
    pub(super) packed_bytes: u64,
}

impl Archive {
    /// Reads the package of a crate from the target folder in which it was packed.
    ///
    /// A package without the licences or the README is an error, and so is one with a source that includes a file from
    /// outside of the package, which would not be there.
    pub(super) fn read(package: &Package, target: &Path) -> Result<Archive, String> {
        let path = target.join("package").join(full_name(package)).with_added_extension("crate");
        let packed = fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let archive = Archive::of(path, &packed)?;
        let problems: Vec<String> = archive.missing().chain(archive.stray_includes()).collect();
        match problems.is_empty() {
            true => Ok(archive),
            false => Err(format!("the package of {} is not complete:\n  {}", package.name, problems.join("\n  "))),
        }
    }

    fn of(path: PathBuf, packed: &[u8]) -> Result<Archive, String> {
        let describe = |error: std::io::Error| format!("{}: {error}", path.display());
        let (mut files, mut bytes) = (Vec::new(), 0);
        for entry in tar::Archive::new(GzDecoder::new(Cursor::new(packed))).entries().map_err(describe)? {
            let mut entry = entry.map_err(describe)?;
            // The first part is the name of the package.
            let name: PathBuf = entry.path().map_err(describe)?.components().skip(1).collect();
            let mut contents = Vec::new();
            entry.read_to_end(&mut contents).map_err(describe)?;
            bytes += contents.len() as u64;
            files.push((name, contents));
        }
        Ok(Archive { path, files, bytes, packed_bytes: packed.len() as u64 })
    }

    /// Writes the files into a folder, as changed now: cargo packs all with one date, which builds would take for old.
    pub(super) fn unpack(&self, folder: &Path) -> Result<(), String> {
        for (name, contents) in &self.files {
            let path = folder.join(name);
            let describe = |error: std::io::Error| format!("{}: {error}", path.display());
            fs::create_dir_all(path.parent().unwrap_or(folder)).map_err(describe)?;
            fs::write(&path, contents).map_err(describe)?;
        }
        Ok(())
    }

    /// The folder's name in which the files belong.
    pub(super) fn name(&self) -> &Path {
        Path::new(self.path.file_stem().unwrap_or_default())
    }

    fn has(&self, name: &Path) -> bool {
        self.files.iter().any(|(file, _)| file == name)
    }

    fn missing(&self) -> impl Iterator<Item = String> {
        NEEDED.into_iter().filter(|name| !self.has(Path::new(name))).map(|name| format!("it has no {name}"))
    }

    /// Files that sources include and that the package does not have, behind any feature.
    fn stray_includes(&self) -> impl Iterator<Item = String> {
        let sources = self.files.iter().filter(|(name, _)| name.extension().is_some_and(|end| end == "rs"));
        sources.flat_map(|(name, contents)| {
            let text = String::from_utf8_lossy(contents);
            let found: Vec<String> = included(&text).map(str::to_owned).collect();
            let folder = name.parent().unwrap_or(Path::new(""));
            let stray = found.into_iter().filter(|file| !joined(folder, file).is_some_and(|file| self.has(&file)));
            stray.map(|file| format!("{} includes {file:?}, which is not in it", name.display())).collect::<Vec<_>>()
        })
    }
}

/// The files that a source includes, as it names them.
fn included(text: &str) -> impl Iterator<Item = &str> {
    let calls = INCLUDING.iter().flat_map(|call| text.split(call).skip(1));
    calls.filter_map(|rest| Some(rest.split_once('"')?.0))
}

/// A path from a folder without its steps upwards; `None` where it leaves the package.
fn joined(folder: &Path, path: &str) -> Option<PathBuf> {
    let mut joined = PathBuf::new();
    for part in folder.join(path).components() {
        match part {
            Component::ParentDir => joined.pop().then_some(())?,
            Component::CurDir => {}
            part => joined.push(part),
        }
    }
    Some(joined)
}

const NEEDED: [&str; 4] = ["Cargo.toml", "LICENSE-APACHE", "LICENSE-MIT", "README.md"];

const INCLUDING: [&str; 3] = ["include!(\"", "include_bytes!(\"", "include_str!(\""];

#[cfg(test)]
mod tests {
    use super::*;

    fn archive(files: &[(&str, &str)]) -> Archive {
        let files = files.iter().map(|(name, text)| (PathBuf::from(name), text.as_bytes().to_vec())).collect();
        Archive { path: PathBuf::from("x-0.1.0.crate"), files, bytes: 0, packed_bytes: 0 }
    }

    #[test]
    fn files_that_sources_include_are_in_the_package() {
        let within = format!("{}../proto/a.rs\")", INCLUDING[0]);
        assert_eq!(archive(&[("src/lib.rs", &within), ("proto/a.rs", "")]).stray_includes().count(), 0);
        for (place, call) in
            [("../../README.md", INCLUDING[2]), ("none.bin", INCLUDING[1]), ("/etc/hosts", INCLUDING[2])]
        {
            let stray: Vec<String> =
                archive(&[("src/lib.rs", &format!("{call}{place}\")"))]).stray_includes().collect();
            assert_eq!(stray, [format!("src/lib.rs includes {place:?}, which is not in it")]);
        }
    }

    #[test]
    fn what_a_registry_shows_is_in_the_package() {
        let missing: Vec<String> =
            archive(&[("Cargo.toml", ""), ("README.md", ""), ("LICENSE-MIT", "")]).missing().collect();
        assert_eq!(missing, ["it has no LICENSE-APACHE"]);
    }

    #[test]
    fn an_archive_is_read_and_unpacked() {
        let mut builder = tar::Builder::new(flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast()));
        let mut header = tar::Header::new_gnu();
        header.set_size(5);
        builder.append_data(&mut header, "x-0.1.0/src/lib.rs", &b"fn f("[..]).unwrap();
        let packed = builder.into_inner().unwrap().finish().unwrap();
        let archive = Archive::of(PathBuf::from("x-0.1.0.crate"), &packed).unwrap();
        assert_eq!((archive.name(), archive.bytes), (Path::new("x-0.1.0"), 5));
        let folder = tempfile::tempdir().unwrap();
        archive.unpack(folder.path()).unwrap();
        assert_eq!(fs::read_to_string(folder.path().join("src/lib.rs")).unwrap(), "fn f(");
    }
}
