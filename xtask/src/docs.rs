//! `cargo xtask docs`: checks the links of all pages, and builds the site of docs/ where mdBook is installed.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use clap::Args;
use pulldown_cmark::{Event, Parser, Tag, TagEnd};

use crate::source;
use crate::workspace::Workspace;

#[derive(Args, Default)]
pub(crate) struct Flags {
    /// Checks the links, and builds nothing.
    #[arg(long)]
    check: bool,
}

/// The list of the site's pages.
const SUMMARY: &str = "docs/SUMMARY.md";

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let workspace = Workspace::load()?;
    let pages = Pages::read(&workspace.root)?;
    let problems = pages.problems();
    if !problems.is_empty() {
        return Err(format!("{} links lead nowhere:\n  {}", problems.len(), problems.join("\n  ")));
    }
    println!("{} links of {} pages lead somewhere", pages.links(), pages.0.len());
    if flags.check {
        return Ok(());
    }
    if !Command::new("mdbook").arg("--version").output().is_ok_and(|output| output.status.success()) {
        println!("skipped: the site: mdbook is not installed (cargo install mdbook)");
        return Ok(());
    }
    let site = workspace.target("book");
    let from = write_source(&workspace)?;
    let status = Command::new("mdbook").arg("build").arg(&from).arg("--dest-dir").arg(&site).status();
    match status {
        Ok(status) if status.success() => {
            println!("the site: {}", site.join("index.html").display());
            Ok(())
        }
        Ok(status) => Err(format!("mdbook build failed: {status}")),
        Err(error) => Err(format!("mdbook could not be started: {error}")),
    }
}

/// Copies docs/ for the site, where links to sources lead to the repository; returns the folder.
fn write_source(workspace: &Workspace) -> Result<PathBuf, String> {
    let (docs, copy) = (workspace.root.join("docs"), workspace.target("book-source"));
    let facade = workspace.package("distribute").and_then(|facade| facade.repository.as_deref());
    let repository = facade.ok_or("the manifest of distribute names no repository")?;
    let describe = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    if copy.exists() {
        fs::remove_dir_all(&copy).map_err(|error| describe(&copy, error))?;
    }
    for end in ["md", "svg", "toml"] {
        for path in source::files(&docs, end)? {
            let name = path.strip_prefix(&docs).unwrap_or(&path);
            let place = copy.join(name);
            fs::create_dir_all(place.parent().unwrap_or(&copy)).map_err(|error| describe(&place, error))?;
            let mut text = source::read(&path)?;
            if end == "md" {
                text = with_sources(&text, &Path::new("docs").join(name), repository);
            }
            fs::write(&place, text).map_err(|error| describe(&place, error))?;
        }
    }
    Ok(copy)
}

/// Returns the page with its links to what is not in docs/ as addresses in the repository.
fn with_sources(text: &str, page: &Path, repository: &str) -> String {
    let mut changed = text.to_owned();
    for (target, _) in links(text) {
        let Some(path) = target_of(page, &target).filter(|path| !path.starts_with("docs")) else { continue };
        let address = format!("]({repository}/blob/main/{})", path.display());
        changed = changed.replace(&format!("]({target})"), &address);
    }
    changed
}

/// All pages of the workspace by their paths in it, each with its links and headings.
struct Pages(BTreeMap<PathBuf, Page>);

struct Page {
    links: Vec<(String, usize)>,
    anchors: BTreeSet<String>,
    /// The targets that are there.
    found: BTreeSet<PathBuf>,
}

impl Pages {
    fn read(root: &Path) -> Result<Pages, String> {
        let mut pages = BTreeMap::new();
        for folder in ["docs", "crates"] {
            for path in source::files(&root.join(folder), "md")? {
                pages.insert(path.strip_prefix(root).unwrap_or(&path).to_owned(), source::read(&path)?);
            }
        }
        for name in ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"] {
            pages.insert(PathBuf::from(name), source::read(&root.join(name))?);
        }
        let page = |(path, text): (PathBuf, String)| {
            let page = Page::of(&path, &text, |target| root.join(target).exists());
            (path, page)
        };
        Ok(Pages(pages.into_iter().map(page).collect()))
    }

    fn links(&self) -> usize {
        self.0.values().map(|page| page.links.len()).sum()
    }

    /// Returns the links that lead nowhere, and the pages that the site leaves out, in words.
    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        for (path, page) in &self.0 {
            for (link, line) in &page.links {
                if let Some(problem) = self.problem(path, page, link) {
                    problems.push(format!("{}:{line}: {link} {problem}", path.display()));
                }
            }
        }
        let Some(summary) = self.0.get(Path::new(SUMMARY)) else {
            problems.push(format!("{SUMMARY} is not there"));
            return problems;
        };
        let listed: BTreeSet<PathBuf> =
            summary.links.iter().filter_map(|(link, _)| target_of(Path::new(SUMMARY), link)).collect();
        let pages = self.0.keys().filter(|path| path.starts_with("docs") && *path != Path::new(SUMMARY));
        let missing = pages.filter(|path| !listed.contains(*path));
        problems.extend(missing.map(|path| format!("{SUMMARY} does not list {}", path.display())));
        problems
    }

    fn problem(&self, path: &Path, page: &Page, link: &str) -> Option<&'static str> {
        if link.contains("://") || link.starts_with("mailto:") {
            return None;
        }
        let Some(target) = target_of(path, link) else { return Some("leaves the workspace") };
        if !page.found.contains(&target) {
            return Some("is not there");
        }
        let anchor = link.split_once('#')?.1;
        let known = self.0.get(&target).is_none_or(|page| page.anchors.contains(anchor));
        (!known).then_some("is not a heading of that page")
    }
}

impl Page {
    fn of(path: &Path, text: &str, exists: impl Fn(&Path) -> bool) -> Page {
        let links = links(text);
        let targets = links.iter().filter_map(|(link, _)| target_of(path, link));
        let found = targets.filter(|target| exists(target)).collect();
        Page { links, anchors: anchors(text), found }
    }
}

/// The links and pictures of a page, with their lines.
fn links(text: &str) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    for (event, place) in Parser::new_ext(text, pulldown_cmark::Options::ENABLE_TABLES).into_offset_iter() {
        if let Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) = event {
            found.push((dest_url.into_string(), text[..place.start].matches('\n').count() + 1));
        }
    }
    found
}

/// The anchors of a page's headings, as mdBook and code hosts make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let (mut found, mut heading) = (BTreeSet::new(), None);
    for event in Parser::new(text) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => found.extend(heading.take().as_deref().map(anchor)),
            Event::Text(part) | Event::Code(part) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&part);
                }
            }
            _ => {}
        }
    }
    found
}

fn anchor(heading: &str) -> String {
    let kept = heading.trim().chars().filter(|next| next.is_alphanumeric() || " -_".contains(*next));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

/// Returns the path in the workspace to which a link of a page leads; `None` if it leads out of it.
fn target_of(page: &Path, link: &str) -> Option<PathBuf> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let file = link.split('#').next().unwrap_or_default();
    if file.is_empty() {
        return Some(page.to_owned());
    }
    let mut target = PathBuf::new();
    for part in page.parent().unwrap_or(Path::new("")).join(file).components() {
        match part {
            Component::ParentDir => target.pop().then_some(())?,
            Component::CurDir => {}
            part => target.push(part),
        }
    }
    Some(target)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pages(pages: &[(&str, &str)], files: &[&str]) -> Pages {
        let exists = |target: &Path| {
            pages.iter().map(|(path, _)| *path).chain(files.iter().copied()).any(|path| target == Path::new(path))
        };
        Pages(pages.iter().map(|(path, text)| (PathBuf::from(path), Page::of(Path::new(path), text, exists))).collect())
    }

    #[test]
    fn links_that_lead_nowhere_are_named() {
        let text = "# A b\n[x](b.md#c-d) [y](../src/x.rs) [z](none.md)\n\n| a |\n|---|\n| [w](b.md#e) |\n\n\
                    ![p](p.svg) [v](https://example.org) `[u](none)` [t](../../out)";
        let summary = "[A](a.md)";
        let pages =
            pages(&[("docs/a.md", text), ("docs/b.md", "## C `d`!"), ("docs/SUMMARY.md", summary)], &["src/x.rs"]);
        assert_eq!(
            pages.problems(),
            [
                "docs/a.md:2: none.md is not there",
                "docs/a.md:6: b.md#e is not a heading of that page",
                "docs/a.md:8: p.svg is not there",
                "docs/a.md:8: ../../out leaves the workspace",
                "docs/SUMMARY.md does not list docs/b.md",
            ]
        );
    }

    #[test]
    fn links_to_sources_lead_to_the_repository_in_the_site() {
        let text = "[a](../crates/x.rs) and [b](c.md) and [a](../crates/x.rs)";
        let there = with_sources(text, Path::new("docs/a.md"), "https://example.org/r");
        let source = "[a](https://example.org/r/blob/main/crates/x.rs)";
        assert_eq!(there, format!("{source} and [b](c.md) and {source}"));
    }

    #[test]
    fn all_links_lead_somewhere() {
        let workspace = Workspace::load().unwrap();
        let problems = Pages::read(&workspace.root).unwrap().problems();
        assert!(problems.is_empty(), "{}", problems.join("\n"));
    }
}
