//! `cargo xtask api`: the public items of each published crate as lines, compared with those under docs/api.
//!
//! They come from rustdoc's JSON, which the pinned toolchain writes where `RUSTC_BOOTSTRAP` allows it, with all
//! features but those that need NVIDIA's compiler. The builds have a target folder of their own, since build scripts
//! run again where that variable changes.

mod items;
mod print;
mod since;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use clap::Args;
use serde_json::Value;

use self::items::Line;
use crate::source;
use crate::workspace::{Package, Workspace};

#[derive(Args, Default)]
pub(crate) struct Flags {
    /// Looks at this crate only.
    #[arg(long, value_name = "CRATE")]
    package: Option<String>,
    /// Writes docs/api anew from what the crates have now.
    #[arg(long)]
    write: bool,
    /// Prints the public items instead of comparing them.
    #[arg(long)]
    print: bool,
    /// Compares docs/api with that of a revision of git, and the version with the changes; builds nothing.
    #[arg(long, value_name = "REVISION", conflicts_with_all = ["package", "write", "print"])]
    since: Option<String>,
}

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let workspace = Workspace::load()?;
    if let Some(revision) = &flags.since {
        return since::run(&workspace, revision);
    }
    let folder = workspace.root.join(FOLDER);
    let mut problems = Vec::new();
    let published = workspace.published(flags.package.as_deref())?;
    // A program has no public items.
    for package in published.into_iter().filter(|package| package.folder().join("src/lib.rs").is_file()) {
        let lines = items::lines(&document(&workspace, package)?)?;
        println!("{}", counts(&package.name, &lines));
        if flags.print {
            lines.iter().for_each(|line| println!("{}", line.text));
            continue;
        }
        let path = folder.join(format!("{}.txt", package.name));
        if flags.write {
            let text: String = lines.iter().map(|line| format!("{}\n", line.text)).collect();
            std::fs::create_dir_all(&folder).map_err(|error| format!("{FOLDER}: {error}"))?;
            std::fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
        } else if path.is_file() {
            problems.extend(differences(&package.name, &source::read(&path)?, &lines));
        } else if folder.is_dir() {
            problems.push(format!("{FOLDER} has no {}.txt; cargo xtask api --write makes it", package.name));
        }
    }
    if flags.package.is_none() && !flags.print {
        problems.extend(strays(&workspace, &folder)?);
    }
    if !folder.is_dir() && !flags.print {
        println!("skipped: {FOLDER} is not there to compare with; cargo xtask api --write makes it");
    }
    match problems.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "the public items changed; where that is meant, cargo xtask api --write renews {FOLDER}:\n{}",
            problems.join("\n")
        )),
    }
}

/// Runs rustdoc on a crate's library and reads what it wrote.
fn document(workspace: &Workspace, package: &Package) -> Result<Value, String> {
    let target = workspace.target("api");
    let mut cargo = Command::new("cargo");
    cargo.args(["rustdoc", "--quiet", "--locked", "--lib", "--package", &package.name]);
    cargo.args(["--features", &package.buildable_features().join(",")]).arg("--target-dir").arg(&target);
    cargo.args(["--", "-Z", "unstable-options", "--output-format", "json"]).env("RUSTC_BOOTSTRAP", "1");
    match cargo.status() {
        Ok(status) if status.success() => {}
        Ok(status) => return Err(format!("cargo rustdoc of {} failed: {status}", package.name)),
        Err(error) => return Err(format!("cargo rustdoc could not be started: {error}")),
    }
    let path = target.join("doc").join(format!("{}.json", package.name.replace('-', "_")));
    serde_json::from_str(&source::read(&path)?).map_err(|error| format!("{}: {error}", path.display()))
}

/// How much of a crate is public, in words.
fn counts(name: &str, lines: &[Line]) -> String {
    let items = lines.iter().filter(|line| line.is_item).count();
    let mut counts = format!("{name}: {items} public items");
    let module = name.replace('-', "_");
    let below = |path: &str| {
        let prefix = format!("{module}::{path}::");
        lines.iter().filter(|line| line.path.starts_with(&prefix) && line.is_item).count()
    };
    for (of, path, what) in [("distribute", "prelude", "names in its prelude"), GROUP] {
        if name == of {
            counts += &format!(", {} {what}", below(path));
        }
    }
    counts
}

/// Lines that a snapshot has and the crate has not, and the other way round.
fn differences(name: &str, snapshot: &str, lines: &[Line]) -> Vec<String> {
    let now: Vec<&str> = lines.iter().map(|line| line.text.as_str()).collect();
    let now = now.join("\n");
    let (gone, new) = differences_of(snapshot, &now);
    let gone = gone.into_iter().map(|line| format!("  {name}: - {line}"));
    gone.chain(new.into_iter().map(|line| format!("  {name}: + {line}"))).collect()
}

/// Lines that the first text alone has, and lines that the second alone has.
fn differences_of<'a>(before: &'a str, now: &'a str) -> (Vec<&'a str>, Vec<&'a str>) {
    let (before, now): (BTreeSet<&str>, BTreeSet<&str>) = (before.lines().collect(), now.lines().collect());
    (before.difference(&now).copied().collect(), now.difference(&before).copied().collect())
}

/// Snapshots of crates that are not published.
fn strays(workspace: &Workspace, folder: &Path) -> Result<Vec<String>, String> {
    let published = workspace.published(None)?;
    let is_stray = |name: &str| !published.iter().any(|package| package.name == name);
    let files = source::files(folder, "txt")?;
    let names = files.iter().filter_map(|path| path.file_stem()).map(|name| name.to_string_lossy().into_owned());
    let strays = names.filter(|name| is_stray(name));
    Ok(strays.map(|name| format!("  {FOLDER}/{name}.txt is of no published crate; remove it")).collect())
}

const FOLDER: &str = "docs/api";

const GROUP: (&str, &str, &str) = ("distribute-collectives", "ProcessGroup", "methods of ProcessGroup");

#[cfg(test)]
mod tests {
    use super::*;

    fn line(path: &str, text: &str) -> Line {
        Line { path: path.to_owned(), text: text.to_owned(), is_item: !text.starts_with("impl") }
    }

    #[test]
    fn items_that_come_go_or_change_are_reported() {
        let lines = [line("x::f", "pub fn x::f(u32)"), line("x::g", "pub fn x::g()")];
        assert_eq!(differences("x", "pub fn x::f(u32)\npub fn x::g()\n", &lines), [""; 0]);
        let found = differences("x", "pub fn x::f(u8)\npub fn x::g()\n", &lines);
        assert_eq!(found, ["  x: - pub fn x::f(u8)", "  x: + pub fn x::f(u32)"]);
    }

    #[test]
    fn names_of_the_prelude_and_methods_of_groups_are_counted() {
        let lines = [
            line("distribute::prelude", "pub mod distribute::prelude"),
            line("distribute::prelude::Run", "pub use distribute::prelude::Run"),
        ];
        assert_eq!(counts("distribute", &lines), "distribute: 2 public items, 1 names in its prelude");
        let lines = [
            line("distribute_collectives::ProcessGroup::rank", "pub fn distribute_collectives::ProcessGroup::rank()"),
            line("distribute_collectives::ProcessGroup::", "impl Clone for distribute_collectives::ProcessGroup"),
        ];
        assert!(counts("distribute-collectives", &lines).ends_with("1 public items, 1 methods of ProcessGroup"));
    }
}
