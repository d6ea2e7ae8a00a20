//! `cargo xtask prose`: finds wording that the house's style rules out, in comments, documents and messages, and lines
//! that are too long.

mod text;
mod tics;

use std::path::{Path, PathBuf};

use clap::Args;

use crate::source;
use crate::workspace::Workspace;

#[derive(Args, Default)]
pub(crate) struct Flags {
    /// Looks at this crate only.
    #[arg(value_name = "CRATE")]
    only: Option<String>,
}

/// A habit of wording, or a line too long, at its place.
#[derive(Debug, PartialEq)]
struct Finding {
    line: usize,
    what: &'static str,
    instead: &'static str,
}

/// Fails with every finding.
pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let workspace = Workspace::load()?;
    let findings = find(&workspace, flags.only.as_deref())?;
    match findings.len() {
        0 => {
            println!("prose: nothing found");
            Ok(())
        }
        found => Err(format!(
            "{found} wordings that comments, documents and messages should not have:\n{}",
            findings.join("\n")
        )),
    }
}

/// All findings, each in words with its file and line.
fn find(workspace: &Workspace, only: Option<&str>) -> Result<Vec<String>, String> {
    if let Some(only) = only.filter(|only| workspace.package(only).is_none()) {
        return Err(format!("{only:?} is not a crate of the workspace"));
    }
    let mut findings = Vec::new();
    for package in workspace.packages.iter().filter(|package| only.is_none_or(|only| package.name == only)) {
        // Generated code has its comments from the protocol files.
        let generated = package.folder().join("proto");
        for path in source::files(package.folder(), "rs")?.into_iter().filter(|path| !path.starts_with(&generated)) {
            let text = source::read(&path)?;
            findings.extend(shown(workspace, &path, text::in_source(&text)));
            if has_messages(&path) {
                findings.extend(shown(workspace, &path, text::in_messages(&text)));
            }
        }
        let readme = package.folder().join("README.md");
        if readme.is_file() {
            findings.extend(shown(workspace, &readme, text::in_document(&source::read(&readme)?)));
        }
    }
    if only.is_none() {
        let mut documents = source::files(&workspace.root.join("docs"), "md")?;
        documents.extend(["README.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(|name| workspace.root.join(name)));
        for path in documents {
            findings.extend(shown(workspace, &path, text::in_document(&source::read(&path)?)));
        }
    }
    Ok(findings)
}

/// Whether the strings of a source are read by users, as opposed to those of tests and of the list of wordings.
fn has_messages(path: &Path) -> bool {
    let is_test =
        |part: &std::path::Component<'_>| ["tests", "tests.rs"].map(Some).contains(&part.as_os_str().to_str());
    !path.ends_with("prose/tics.rs") && !path.components().any(|part| is_test(&part))
}

fn shown(workspace: &Workspace, path: &Path, findings: Vec<Finding>) -> Vec<String> {
    let path: PathBuf = path.strip_prefix(&workspace.root).unwrap_or(path).to_owned();
    let shown = |Finding { line, what, instead }| format!("  {}:{line}: {what}; {instead}", path.display());
    findings.into_iter().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_documents_have_no_wording_that_is_ruled_out() {
        run(&Flags::default()).unwrap_or_else(|problem| panic!("{problem}"));
    }

    #[test]
    fn an_unknown_crate_is_a_sentence() {
        let problem = run(&Flags { only: Some("distribute-nothing".to_owned()) }).unwrap_err();
        assert!(problem.contains("is not a crate of the workspace"), "{problem}");
    }
}
