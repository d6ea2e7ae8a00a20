//! `cargo xtask powerset`: checks each published crate alone with each feature, with each two of them, with none and
//! with all, so that no part of it needs a feature which it does not ask for.
//!
//! In a build of the whole workspace features unify: what one crate turns on, all have. Here each crate is built alone.

use std::collections::BTreeSet;
use std::process::Command;
use std::time::Instant;

use clap::Args;

use crate::source;
use crate::workspace::{Package, Workspace};

#[derive(Args, Default)]
pub(crate) struct Flags {
    /// Checks this crate only.
    #[arg(long, value_name = "CRATE")]
    package: Option<String>,
    /// Prints what would be checked, and checks nothing.
    #[arg(long)]
    list: bool,
}

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let workspace = Workspace::load()?;
    let mut failed = Vec::new();
    for package in workspace.published(flags.package.as_deref())? {
        for feature in package.nvcc_features() {
            println!("skipped: {} with {feature}, which needs NVIDIA's compiler nvcc", package.name);
        }
        for features in plan(package, &conditions(package)?) {
            let name = format!("{} with {}", package.name, if features.is_empty() { "no feature" } else { &features });
            if flags.list {
                println!("{name}");
                continue;
            }
            let began = Instant::now();
            let passed = check(&workspace, package, &features)?;
            let verdict = if passed { "passed" } else { "FAILED" };
            println!("{verdict}: {name} ({:.0} s)", began.elapsed().as_secs_f64());
            if !passed {
                failed.push(name);
            }
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("these crates do not build alone:\n  {}", failed.join("\n  "))),
    }
}

/// Lists of features to check a crate with, separated by commas; the shortest of those that turn the same on.
fn plan(package: &Package, conditions: &BTreeSet<String>) -> Vec<String> {
    let features = package.buildable_features();
    let passes_on = |name: &str| passes_on(package, name, conditions);
    let mut sets = vec![vec![]];
    sets.extend(features.iter().map(|feature| vec![*feature]));
    for (place, first) in features.iter().enumerate() {
        // What only other crates see is combined where it is seen, when those are checked.
        let others = features[place + 1..].iter().filter(|second| !(passes_on(first) && passes_on(second)));
        sets.extend(others.map(|second| vec![*first, *second]));
    }
    if package.features.contains_key("default") {
        sets.push(vec!["default"]);
    }
    sets.push(features);
    let mut seen = BTreeSet::new();
    sets.retain(|set| seen.insert(package.closure(set)));
    sets.iter().map(|set| set.join(",")).collect()
}

/// Whether a feature turns features of other crates on and does nothing else.
fn passes_on(package: &Package, feature: &str, conditions: &BTreeSet<String>) -> bool {
    let values = package.features.get(feature);
    let only_others =
        values.is_some_and(|values| values.iter().all(|value| value.contains('/') && !value.contains('?')));
    only_others && !conditions.contains(feature)
}

/// The features that a crate's sources ask about.
fn conditions(package: &Package) -> Result<BTreeSet<String>, String> {
    let mut found = BTreeSet::new();
    for path in source::files(package.folder(), "rs")? {
        let text = source::read(&path)?;
        let after = text.split("feature = \"").skip(1);
        found.extend(after.filter_map(|rest| rest.split_once('"')).map(|(name, _)| name.to_owned()));
    }
    Ok(found)
}

fn check(workspace: &Workspace, package: &Package, features: &str) -> Result<bool, String> {
    let mut cargo = Command::new("cargo");
    cargo.args(["check", "--quiet", "--locked", "--package", &package.name, "--no-default-features"]);
    cargo.args(["--features", features]).arg("--target-dir").arg(workspace.target("powerset"));
    cargo.env("RUSTFLAGS", "-D warnings");
    let status = cargo.status().map_err(|error| format!("cargo check could not be started: {error}"))?;
    Ok(status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn planned(features: &str, conditions: &[&str]) -> Vec<String> {
        let workspace = Workspace::of(&[("x", &format!("\"features\":{features}"))]);
        plan(&workspace.packages[0], &conditions.iter().map(|name| (*name).to_owned()).collect())
    }

    #[test]
    fn each_two_features_are_checked_once_with_none_and_all() {
        let features = r#"{"default":["a"],"a":["dep:q"],"b":[],"c":["dep:r"]}"#;
        assert_eq!(planned(features, &[]), ["", "a", "b", "c", "a,b", "a,c", "b,c", "a,b,c"]);
        // The default of these is a combination of its own.
        let features = r#"{"default":["a","b","c"],"a":["dep:q"],"b":["dep:r"],"c":["dep:s"],"d":["dep:t"]}"#;
        assert!(planned(features, &[]).contains(&"default".to_owned()));
    }

    #[test]
    fn features_that_turn_others_on_are_not_combined_with_them() {
        let features = r#"{"a":["dep:q"],"full":["a","b"],"b":["dep:r"]}"#;
        assert_eq!(planned(features, &[]), ["", "a", "b", "full", "a,b"]);
    }

    #[test]
    fn two_features_of_other_crates_are_combined_only_where_a_source_asks() {
        let features = r#"{"a":["y/a"],"b":["y/b"],"c":["z/c"]}"#;
        assert_eq!(planned(features, &[]), ["", "a", "b", "c", "a,b,c"]);
        assert_eq!(planned(features, &["a"]), ["", "a", "b", "c", "a,b", "a,c", "a,b,c"]);
    }

    #[test]
    fn what_needs_nvcc_is_left_out() {
        assert_eq!(planned(r#"{"a":[],"candle-cuda":["a"]}"#, &[]), ["", "a"]);
    }

    #[test]
    fn features_that_sources_ask_about_are_found() {
        let workspace = Workspace::load().unwrap();
        let conditions = conditions(workspace.package("distribute").unwrap()).unwrap();
        assert!(conditions.contains("candle") && conditions.contains("logging"));
    }
}
