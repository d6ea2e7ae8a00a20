//! Whether the version is raised as the changes of public items since a release demand.

use std::path::Path;
use std::process::Command;

use super::{FOLDER, differences_of};
use crate::source;
use crate::workspace::Workspace;

/// Compares the snapshots of docs/api with those of a revision of git, such as a release's tag. Nothing is built: the
/// snapshots are kept up to date by the comparison with the crates.
pub(super) fn run(workspace: &Workspace, revision: &str) -> Result<(), String> {
    let (mut gone, mut new) = (0, 0);
    for path in source::files(&workspace.root.join(FOLDER), "txt")? {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let now = source::read(&path)?;
        let Some(before) = at(&workspace.root, revision, &format!("{FOLDER}/{name}"))? else {
            println!("{name}: a new crate");
            continue;
        };
        let (removed, added) = differences_of(&before, &now);
        removed.iter().for_each(|line| println!("- {line}"));
        added.iter().for_each(|line| println!("+ {line}"));
        gone += removed.len();
        new += added.len();
    }
    let manifest = at(&workspace.root, revision, "Cargo.toml")?.ok_or(format!("{revision} has no Cargo.toml"))?;
    let before = version_of(&manifest).ok_or(format!("Cargo.toml of {revision} names no version"))?;
    let now = workspace.package("distribute").and_then(|package| parsed(&package.version));
    let now = now.ok_or("the crate distribute has no version of three numbers")?;
    println!("{gone} lines are gone or changed, {new} are new or changed since {revision}");
    verdict(before, now, gone > 0)
}

/// A version's three numbers.
type Version = [u64; 3];

/// Fails where users of the earlier version would get a change that breaks their programs.
fn verdict(before: Version, now: Version, breaks: bool) -> Result<(), String> {
    let show = |version: Version| version.map(|number| number.to_string()).join(".");
    // Before 1.0.0 the second number is that of changes that break programs.
    let compatible = |version: Version| if version[0] == 0 { vec![0, version[1]] } else { vec![version[0]] };
    match breaks && compatible(before) == compatible(now) {
        false => Ok(()),
        true => {
            let next = if now[0] == 0 { [0, before[1] + 1, 0] } else { [before[0] + 1, 0, 0] };
            let (before, now, next) = (show(before), show(now), show(next));
            Err(format!("public items are gone, and {now} is compatible with {before}; the next version is {next}"))
        }
    }
}

/// The text of a file in a revision; `None` if it was not there.
fn at(root: &Path, revision: &str, file: &str) -> Result<Option<String>, String> {
    let git = |arguments: &[&str]| {
        let output = Command::new("git").arg("-C").arg(root).args(arguments).output();
        output.map_err(|error| format!("git could not be started: {error}"))
    };
    if !git(&["rev-parse", "--verify", "--quiet", &format!("{revision}^{{commit}}")])?.status.success() {
        return Err(format!("{revision:?} is not a revision of git here"));
    }
    let output = git(&["show", &format!("{revision}:{file}")])?;
    Ok(output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned()))
}

/// The version of the workspace in a manifest's text.
fn version_of(manifest: &str) -> Option<Version> {
    let (_, package) = manifest.split_once("[workspace.package]")?;
    let line = package.lines().find_map(|line| line.strip_prefix("version = \""))?;
    parsed(line.split_once('"')?.0)
}

fn parsed(version: &str) -> Option<Version> {
    let numbers: Vec<u64> = version.split('.').map(|number| number.parse().ok()).collect::<Option<_>>()?;
    numbers.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_breaks_programs_raises_the_version() {
        assert_eq!(verdict([0, 1, 0], [0, 1, 1], false), Ok(()));
        assert_eq!(verdict([0, 1, 0], [0, 2, 0], true), Ok(()));
        assert_eq!(verdict([1, 4, 0], [2, 0, 0], true), Ok(()));
        for (before, now, next) in [([0, 1, 0], [0, 1, 1], "0.2.0"), ([1, 4, 0], [1, 5, 0], "2.0.0")] {
            assert!(verdict(before, now, true).unwrap_err().ends_with(&format!("the next version is {next}")));
        }
    }

    #[test]
    fn the_workspaces_version_is_found() {
        let manifest = "[workspace]\nmembers = []\n\n[workspace.package]\nedition = \"2024\"\nversion = \"0.12.3\"\n";
        assert_eq!(version_of(manifest), Some([0, 12, 3]));
        assert_eq!(version_of("[package]\nversion = \"1\""), None);
    }
}
