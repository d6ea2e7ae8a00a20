//! `distribute new`: a crate that trains at once, written without a network.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::args::New;
use crate::error::Error;

/// The program of a new crate, with its name at `@NAME@`.
const PROGRAM: &str = include_str!("new/main.rs.txt");

/// The versions of candle that the facade works with.
const CANDLE: &str = "0.11";

/// Writes the crate; returns what to do next.
///
/// # Errors
/// [`Error::Name`] if the folder's name is not the name of a crate, [`Error::Write`] if the folder exists or cannot be
/// written.
pub(crate) fn run(args: &New) -> Result<String, Error> {
    let name = name_of(&args.folder)?;
    let source = match &args.source {
        None => format!("version = \"{}\"", env!("CARGO_PKG_VERSION")),
        Some(workspace) => {
            let facade = workspace.join("crates/distribute");
            let facade = fs::canonicalize(&facade).map_err(|source| Error::Write { path: facade, source })?;
            format!("path = {facade:?}")
        }
    };
    fs::create_dir_all(args.folder.parent().unwrap_or(Path::new(""))).map_err(|error| failed(&args.folder, error))?;
    // Fails if the folder exists: nothing is overwritten.
    fs::create_dir(&args.folder).map_err(|error| failed(&args.folder, error))?;
    fs::create_dir(args.folder.join("src")).map_err(|error| failed(&args.folder, error))?;
    for (file, text) in [
        ("Cargo.toml", manifest(name, &source)),
        ("src/main.rs", PROGRAM.replace("@NAME@", name)),
        (".gitignore", "/target\n".to_owned()),
    ] {
        let path = args.folder.join(file);
        fs::write(&path, text).map_err(|error| failed(&path, error))?;
    }
    Ok(format!(
        "created {}\n\n  cd {}\n  cargo run --release\n  cargo run --release -- CPU:0,CPU:1\n  \
         distribute run -n 2 -- target/release/{name}\n",
        args.folder.display(),
        args.folder.display()
    ))
}

fn manifest(name: &str, source: &str) -> String {
    format!(
        "[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[dependencies]\n\
         candle-core = {{ version = \"{CANDLE}\", default-features = false }}\n\
         candle-nn = {{ version = \"{CANDLE}\", default-features = false }}\n\
         distribute = {{ {source} }}\n\n# A workspace of its own, wherever it lies.\n[workspace]\n"
    )
}

/// Returns the last part of a path, which must be the name of a crate.
fn name_of(folder: &Path) -> Result<&str, Error> {
    let name = folder.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let begins = name.starts_with(|first: char| first.is_ascii_alphabetic());
    let is_valid = begins && name.chars().all(|next| next.is_ascii_alphanumeric() || "-_".contains(next));
    // The names of the crates that it depends on.
    let is_taken = ["candle-core", "candle-nn", "distribute"].contains(&name);
    match is_valid && !is_taken {
        true => Ok(name),
        false => Err(Error::Name { given: folder.display().to_string() }),
    }
}

fn failed(path: &Path, source: std::io::Error) -> Error {
    let path: PathBuf = path.to_owned();
    match source.kind() {
        ErrorKind::AlreadyExists => Error::Exists { path },
        _ => Error::Write { path, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(folder: PathBuf) -> New {
        New { folder, source: None }
    }

    #[test]
    fn a_crate_is_written_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/my-training");
        let next = run(&new(path.clone())).unwrap();
        assert!(next.contains("distribute run -n 2 -- target/release/my-training"), "{next}");
        let manifest = fs::read_to_string(path.join("Cargo.toml")).unwrap();
        let lines =
            ["name = \"my-training\"", concat!("distribute = { version = \"", env!("CARGO_PKG_VERSION"), "\" }")];
        assert!(lines.iter().all(|line| manifest.contains(line)), "{manifest}");
        let program = fs::read_to_string(path.join("src/main.rs")).unwrap();
        assert!(program.contains("target/release/my-training`") && !program.contains('@'), "{program}");
        // A lost worker ends it with a code that job managers restart; all workers have the same data.
        assert!(program.contains("distribute::exit(run())") && !program.contains("rand"), "{program}");
        fs::write(path.join("src/main.rs"), "mine").unwrap();
        let error = run(&new(path.clone())).unwrap_err();
        assert!(matches!(error, Error::Exists { .. }), "{error}");
        assert_eq!(fs::read_to_string(path.join("src/main.rs")).unwrap(), "mine");
    }

    #[test]
    fn names_that_no_crate_can_have_are_refused() {
        for given in ["7seas", "a b", "..", "/", "distribute", "ä"] {
            let error = run(&new(PathBuf::from(given))).unwrap_err();
            assert!(matches!(error, Error::Name { .. }), "{given}: {error}");
        }
    }
}
