//! Files of text, for the examples that read them.

use std::path::{Path, PathBuf};

use distribute::Error;

/// Reads files, or the project's documentation if there are none.
pub(crate) fn read(paths: &[PathBuf]) -> distribute::Result<Vec<String>> {
    let mut paths = paths.to_vec();
    if paths.is_empty() {
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
        paths.push(root.join("README.md"));
        find(&root.join("docs"), &mut paths);
        paths.sort();
    }
    let read = |path: &PathBuf| {
        std::fs::read_to_string(path).map_err(|error| {
            let path = path.display();
            Error::program(format!("{path} cannot be read ({error}); give files of text with --text PATH PATH"))
        })
    };
    paths.iter().map(read).collect()
}

/// Finds the Markdown files in a folder and its subfolders.
fn find(folder: &Path, paths: &mut Vec<PathBuf>) {
    for path in std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
        if path.is_dir() {
            find(&path, paths);
        } else if path.extension().is_some_and(|extension| extension == "md") {
            paths.push(path);
        }
    }
}
