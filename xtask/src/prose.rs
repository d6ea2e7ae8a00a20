//! `cargo xtask prose`: counts habits of wording that the house's style rules out, and lines that are too long, and
//! holds each crate to the number it had, which `xtask/prose.json` lists.

mod text;
mod tics;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::Args;

use crate::source;
use crate::workspace::Workspace;

#[derive(Args, Default)]
pub(crate) struct Flags {
    /// Prints each finding of all crates, or of this one.
    #[arg(long, value_name = "CRATE", num_args = 0..=1)]
    list: Option<Option<String>>,
    /// Lowers the numbers in xtask/prose.json to what is found now.
    #[arg(long)]
    lower: bool,
}

/// A habit of wording, or a line too long, at its place.
#[derive(Debug, PartialEq)]
struct Finding {
    line: usize,
    what: &'static str,
    instead: &'static str,
}

/// Findings by the part of the workspace, each with its file.
type Findings = BTreeMap<String, Vec<(PathBuf, Finding)>>;

/// How many findings each part of the workspace may have at most.
type Limits = BTreeMap<String, usize>;

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let workspace = Workspace::load()?;
    let findings = find(&workspace)?;
    if let Some(only) = &flags.list {
        return list(&findings, only.as_deref());
    }
    let path = workspace.root.join(LIMITS);
    let limits: Option<Limits> = match path.is_file() {
        true => Some(serde_json::from_str(&source::read(&path)?).map_err(|error| format!("{LIMITS}: {error}"))?),
        false => None,
    };
    if flags.lower {
        let text = serde_json::to_string_pretty(&lowered(&findings, limits.as_ref())).map_err(|it| it.to_string())?;
        return std::fs::write(&path, text + "\n").map_err(|error| format!("{LIMITS}: {error}"));
    }
    let limits = limits.ok_or_else(|| format!("{LIMITS} is not there; cargo xtask prose --lower writes it"))?;
    compare(&findings, &limits)
}

/// All findings; a part without any is there too.
fn find(workspace: &Workspace) -> Result<Findings, String> {
    let mut findings = Findings::new();
    for package in &workspace.packages {
        let mut all = Vec::new();
        for path in source::files(package.folder(), "rs")? {
            let found = text::in_source(&source::read(&path)?);
            all.extend(found.into_iter().map(|finding| (shown(workspace, &path), finding)));
        }
        findings.insert(package.name.clone(), all);
    }
    let mut documents = source::files(&workspace.root.join("docs"), "md")?;
    documents.extend(["README.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(|name| workspace.root.join(name)));
    let mut all = Vec::new();
    for path in documents {
        let found = text::in_document(&source::read(&path)?);
        all.extend(found.into_iter().map(|finding| (shown(workspace, &path), finding)));
    }
    findings.insert(DOCUMENTS.to_owned(), all);
    Ok(findings)
}

fn shown(workspace: &Workspace, path: &Path) -> PathBuf {
    path.strip_prefix(&workspace.root).unwrap_or(path).to_owned()
}

fn list(findings: &Findings, only: Option<&str>) -> Result<(), String> {
    if let Some(only) = only.filter(|only| !findings.contains_key(*only)) {
        let names: Vec<&str> = findings.keys().map(String::as_str).collect();
        return Err(format!("{only:?} is none of {}", names.join(", ")));
    }
    for (_, found) in findings.iter().filter(|(name, _)| only.is_none_or(|only| only == *name)) {
        for (path, Finding { line, what, instead }) in found {
            println!("{}:{line}: {what}; {instead}", path.display());
        }
    }
    Ok(())
}

/// Prints how much was found and how much is allowed; fails where more was found.
fn compare(findings: &Findings, limits: &Limits) -> Result<(), String> {
    println!("{:<28} {:>8} {:>8}", "crate", "found", "at most");
    let (mut problems, mut can_be_lowered) = (Vec::new(), false);
    for (name, found) in findings {
        let (found, limit) = (found.len(), limits.get(name).copied().unwrap_or(0));
        println!("{name:<28} {found:>8} {limit:>8}");
        can_be_lowered |= found < limit;
        if found > limit {
            problems.push(format!("{name} has {found}, at most {limit} are allowed (--list {name} shows them)"));
        }
    }
    for name in limits.keys().filter(|name| !findings.contains_key(*name)) {
        problems.push(format!("{LIMITS} names {name}, which is not there; take it out"));
    }
    if can_be_lowered {
        println!("note: numbers can be lowered: cargo xtask prose --lower");
    }
    match problems.is_empty() {
        true => Ok(()),
        false => Err(format!("more wording that docs and comments should not have:\n  {}", problems.join("\n  "))),
    }
}

/// The limits with each number lowered to what is found; the numbers found where there are none yet.
fn lowered(findings: &Findings, limits: Option<&Limits>) -> Limits {
    let limit = |name: &String, found: usize| match limits {
        Some(limits) => limits.get(name).copied().unwrap_or(0).min(found),
        None => found,
    };
    findings.iter().map(|(name, found)| (name.clone(), limit(name, found.len()))).collect()
}

const LIMITS: &str = "xtask/prose.json";

/// The name of the part that is not Rust.
const DOCUMENTS: &str = "documents";

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(count: usize) -> Findings {
        let finding = || (PathBuf::from("a.rs"), Finding { line: 1, what: "\"whom\"", instead: "" });
        Findings::from([("x".to_owned(), (0..count).map(|_| finding()).collect())])
    }

    fn limits(count: usize) -> Limits {
        Limits::from([("x".to_owned(), count)])
    }

    #[test]
    fn one_finding_more_than_allowed_fails() {
        assert_eq!(compare(&findings(2), &limits(2)), Ok(()));
        let problem = compare(&findings(3), &limits(2)).unwrap_err();
        assert!(problem.contains("x has 3, at most 2 are allowed"), "{problem}");
        assert!(compare(&findings(1), &Limits::new()).is_err());
        assert!(compare(&Findings::new(), &limits(1)).unwrap_err().contains("names x, which is not there"));
    }

    #[test]
    fn limits_are_lowered_and_never_raised() {
        assert_eq!(lowered(&findings(1), Some(&limits(2))), limits(1));
        assert_eq!(lowered(&findings(3), Some(&limits(2))), limits(2));
        assert_eq!(lowered(&findings(3), None), limits(3));
    }
}
