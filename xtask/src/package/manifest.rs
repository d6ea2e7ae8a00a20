//! Checks of the fields and files that a registry and its readers expect of a published crate.

use std::path::Path;

use super::readme;
use crate::source;
use crate::workspace::{Package, Workspace};

/// Returns what the published crates lack, in words.
pub(super) fn problems(workspace: &Workspace) -> Result<Vec<String>, String> {
    let mut problems = Vec::new();
    for package in workspace.published(None)? {
        let mut found = of_manifest(package);
        found.extend(of_files(workspace, package)?);
        problems.extend(found.into_iter().map(|problem| format!("{}: {problem}", package.name)));
    }
    let (ours, crates) = (workspace.root.join(README), workspace.root.join(FACADE).join(README));
    if readme::listing(&source::read(&ours)?) != readme::listing(&source::read(&crates)?) {
        problems.push(format!("{README} and {FACADE}/{README} have different listings; the second one is a test"));
    }
    Ok(problems)
}

fn of_manifest(package: &Package) -> Vec<String> {
    let mut problems = Vec::new();
    if !package.description.as_deref().is_some_and(|text| text.ends_with('.')) {
        problems.push("its description is not a sentence".to_owned());
    }
    for (field, value) in [
        ("license", &package.license),
        ("readme", &package.readme),
        ("repository", &package.repository),
        ("rust-version", &package.rust_version),
    ] {
        if value.is_none() {
            problems.push(format!("its manifest has no {field}"));
        }
    }
    for (field, values) in [("keywords", &package.keywords), ("categories", &package.categories)] {
        if !(1..=5).contains(&values.len()) {
            problems.push(format!("it has {} {field}; 1 to 5 are allowed", values.len()));
        }
    }
    let is_valid = |keyword: &str| {
        let begins = keyword.starts_with(|first: char| first.is_ascii_alphanumeric());
        let is_allowed = |next: char| next.is_ascii_alphanumeric() || "_-+".contains(next);
        begins && keyword.len() <= 20 && keyword.chars().all(is_allowed)
    };
    for keyword in package.keywords.iter().filter(|keyword| !is_valid(keyword)) {
        problems.push(format!("{keyword:?} is not a keyword of up to 20 letters, digits, \"_\", \"-\" and \"+\""));
    }
    for category in package.categories.iter().filter(|category| !CATEGORIES.contains(&category.as_str())) {
        problems.push(format!("{category:?} is none of the categories of crates.io that are known here"));
    }
    let hosted = package.hosted_docs();
    for feature in package.nvcc_features() {
        if hosted.all_features || hosted.features.iter().any(|hosted| package.closure(&[hosted]).contains(feature)) {
            problems.push(format!("docs.rs cannot build {feature}, which needs nvcc"));
        }
    }
    for feature in hosted.features.iter().filter(|name| !package.features.contains_key(*name)) {
        problems.push(format!("docs.rs is to build the feature {feature:?}, which it does not have"));
    }
    problems
}

fn of_files(workspace: &Workspace, package: &Package) -> Result<Vec<String>, String> {
    let (folder, mut problems) = (package.folder(), Vec::new());
    for name in LICENCES {
        // Copies, since a link may not survive a checkout or a copy.
        let is_copy = folder.join(name).is_file()
            && source::read(&folder.join(name))? == source::read(&workspace.root.join(name))?;
        if !is_copy {
            problems.push(format!("its {name} is not a copy of the workspace's"));
        }
    }
    let path = folder.join(README);
    if !path.is_file() {
        problems.push(format!("it has no {README}"));
        return Ok(problems);
    }
    let text = source::read(&path)?;
    problems.extend(readme::problems(package, &text).into_iter().map(|problem| format!("{README} {problem}")));
    let library = folder.join("src/lib.rs");
    if library.is_file() {
        if readme::listing(&text).is_none() {
            problems.push(format!("{README} has no example in Rust"));
        }
        if !source::read(&library)?.contains(DOCTEST) {
            problems.push(format!("src/lib.rs does not test the examples of {README}: it lacks {DOCTEST:?}"));
        }
    }
    problems.extend(links(folder, &text).map(|link| format!("{README} leads to {link:?}, which is not there")));
    Ok(problems)
}

/// Links to files of the workspace that do not exist.
fn links<'a>(folder: &'a Path, text: &'a str) -> impl Iterator<Item = &'a str> {
    let targets = text.split("](").skip(1).filter_map(|rest| Some(rest.split_once(')')?.0));
    let files = targets.filter(|target| !target.contains("://"));
    files.filter(move |target| !folder.join(target.split('#').next().unwrap_or(target)).exists())
}

const README: &str = "README.md";

const LICENCES: [&str; 2] = ["LICENSE-APACHE", "LICENSE-MIT"];

/// The crate whose README has the listing of the workspace's own.
const FACADE: &str = "crates/distribute";

/// Has the documentation tests of a crate include those of its README.
const DOCTEST: &str = "#[cfg(doctest)]\n#[doc = include_str!(\"../README.md\")]";

/// Categories that crates.io knows (<https://crates.io/category_slugs>), as far as they are used here.
const CATEGORIES: [&str; 16] = [
    "algorithms",
    "asynchronous",
    "command-line-utilities",
    "compilers",
    "concurrency",
    "data-structures",
    "development-tools::debugging",
    "external-ffi-bindings",
    "filesystem",
    "hardware-support",
    "mathematics",
    "memory-management",
    "network-programming",
    "parser-implementations",
    "rust-patterns",
    "science",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_crates_of_this_workspace_are_ready_to_be_published() {
        let problems = problems(&Workspace::load().unwrap()).unwrap();
        assert!(problems.is_empty(), "{}", problems.join("\n"));
    }

    fn manifest(fields: &str) -> Vec<String> {
        let features = r#""features":{"candle-cuda":[],"all":["candle-cuda"]}"#;
        let right = r#""license":"MIT","readme":"README.md","repository":"https://example.org","rust_version":"1.95""#;
        of_manifest(&Workspace::of(&[("x", &format!("{features},{right},{fields}"))]).packages[0])
    }

    #[test]
    fn fields_that_a_registry_would_refuse_are_named() {
        let right = "\"description\":\"A crate.\",\"keywords\":[\"c++\"],\"categories\":[\"science\"]";
        assert_eq!(manifest(right), [""; 0]);
        let wrong = "\"description\":\"A crate\",\"keywords\":[\"two words\"],\"categories\":[\"sciences\"]";
        let problems = manifest(wrong);
        let [description, keyword, category] = &problems[..] else { panic!("{problems:?}") };
        assert!(description.contains("not a sentence") && keyword.contains("two words"), "{problems:?}");
        assert!(category.contains("\"sciences\" is none of the categories"), "{category}");
    }

    #[test]
    fn hosted_documentation_leaves_out_what_needs_nvcc() {
        let right = "\"description\":\"A crate.\",\"keywords\":[\"a\"],\"categories\":[\"science\"]";
        for hosted in ["\"all-features\":true", "\"features\":[\"all\"]"] {
            let problems = manifest(&format!("{right},\"metadata\":{{\"docs\":{{\"rs\":{{{hosted}}}}}}}"));
            assert_eq!(problems, ["docs.rs cannot build candle-cuda, which needs nvcc"]);
        }
    }

    #[test]
    fn links_to_nothing_are_found() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
        let text = "[a](src/main.rs#x), [b](https://example.org/b), [c](src/none.rs)";
        assert_eq!(links(folder, text).collect::<Vec<_>>(), ["src/none.rs"]);
    }
}
