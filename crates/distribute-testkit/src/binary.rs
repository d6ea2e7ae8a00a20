//! Programs that cargo has built for this workspace.

use std::path::{Path, PathBuf};

use crate::Error;

/// Returns the path of a binary or example of this workspace, in the target folder and profile of the running test.
///
/// It builds nothing: cargo builds the binaries of a package, and examples with them, for its own integration tests;
/// other programs must be built first.
///
/// # Errors
/// [`Error::NotBuilt`] with the paths that were searched, [`Error::OwnPath`] if the test's own path is unknown.
pub fn target_binary(name: &str) -> Result<PathBuf, Error> {
    let own = std::env::current_exe().map_err(Error::OwnPath)?;
    find(&own, name)
}

/// Finds a program relative to the running test: test programs are in `PROFILE/deps`, doc tests elsewhere; the
/// profile's folder is the one that contains `deps`.
fn find(own: &Path, name: &str) -> Result<PathBuf, Error> {
    let file = format!("{name}{}", std::env::consts::EXE_SUFFIX);
    let profile = own.ancestors().skip(1).find(|folder| folder.join("deps").is_dir());
    let looked_at: Vec<_> =
        profile.into_iter().flat_map(|folder| [folder.join(&file), folder.join("examples").join(&file)]).collect();
    let found = looked_at.iter().find(|path| path.is_file()).cloned();
    found.ok_or_else(|| Error::NotBuilt { name: name.to_owned(), looked_at })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_found_beside_the_test_and_among_the_examples() {
        let base = std::env::temp_dir().join(format!("distribute-testkit-{}", std::process::id()));
        for folder in ["deps", "examples"] {
            std::fs::create_dir_all(base.join(folder)).unwrap();
        }
        std::fs::write(base.join("tool"), "").unwrap();
        std::fs::write(base.join("examples/mnist"), "").unwrap();
        let own = base.join("deps/test-0123");
        let found = [find(&own, "tool"), find(&own, "mnist"), find(&own, "absent")];
        std::fs::remove_dir_all(&base).unwrap();
        let [tool, example, absent] = found;
        assert_eq!(tool.unwrap(), base.join("tool"));
        assert_eq!(example.unwrap(), base.join("examples/mnist"));
        assert!(absent.unwrap_err().to_string().contains("cargo build --bin absent"));
    }
}
