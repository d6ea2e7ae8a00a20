//! The READMEs of crates: what they say of features, and the listing of the workspace's own.

use std::collections::BTreeSet;

use crate::workspace::Package;

/// The first Rust program of a document, without its fences.
pub(super) fn listing(document: &str) -> Option<&str> {
    let (_, program) = document.split_once("```rust")?;
    // Attributes, such as `ignore`.
    let (_, program) = program.split_once('\n')?;
    Some(program.split_once("```")?.0)
}

/// The differences between a crate's features and the table under "Features" of its README, in words.
pub(super) fn problems(package: &Package, text: &str) -> Vec<String> {
    let mut problems = Vec::new();
    if !text.starts_with(&format!("# {}\n", package.name)) {
        problems.push("does not begin with the crate's name as its heading".to_owned());
    }
    let is_public = |name: &&str| *name != "default" && !name.starts_with("__");
    let features: BTreeSet<&str> = package.features.keys().map(String::as_str).filter(is_public).collect();
    let defaults = package.closure(&["default"]);
    let mut described = BTreeSet::new();
    for (names, default) in rows(text) {
        for name in names {
            described.insert(name);
            let is_default = if defaults.contains(name) { "yes" } else { "no" };
            if !features.contains(name) {
                problems.push(format!("describes the feature `{name}`, which the crate does not have"));
            } else if default != is_default {
                problems.push(format!("says {default:?} of whether `{name}` is a default; it must say {is_default:?}"));
            }
        }
    }
    for name in features.difference(&described) {
        problems.push(format!("does not describe the feature `{name}` in a table under \"## Features\""));
    }
    problems
}

/// The rows of the table under "Features": the features that they name, and whether these are defaults.
fn rows(text: &str) -> impl Iterator<Item = (Vec<&str>, &str)> {
    let lines = text.lines().skip_while(|line| *line != "## Features").skip(1);
    lines.take_while(|line| !line.starts_with("## ")).filter_map(|line| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let ["", names, default, _, ""] = cells[..] else { return None };
        let names: Vec<&str> = names.split('`').skip(1).step_by(2).collect();
        (!names.is_empty()).then_some((names, default))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Workspace;

    fn problems_of(table: &str) -> Vec<String> {
        let features = r#""features":{"default":["a"],"a":["b"],"b":[],"c":[],"__d":[]}"#;
        let workspace = Workspace::of(&[("x", features)]);
        problems(&workspace.packages[0], &format!("# x\n\n## Features\n\n{table}\n\n## Read on\n\n| `z` | no | |"))
    }

    #[test]
    fn a_table_with_all_features_and_their_defaults_is_right() {
        let table = "| feature | default | meaning |\n|---|---|---|\n| `a`, `b` | yes | |\n| `c` | no | |";
        assert_eq!(problems_of(table), [""; 0]);
    }

    #[test]
    fn features_that_a_table_lacks_invents_or_turns_on_are_named() {
        let problems = problems_of("| `a` | no | |\n| `e` | no | |\n| `b` | yes | |");
        let [default, invented, missing] = &problems[..] else { panic!("{problems:?}") };
        assert!(default.contains("whether `a` is a default; it must say \"yes\""), "{default}");
        assert!(invented.contains("the feature `e`, which the crate does not have"), "{invented}");
        assert!(missing.contains("does not describe the feature `c`"), "{missing}");
    }

    #[test]
    fn a_listing_is_the_first_program() {
        assert_eq!(listing("a\n```\nx\n```\n```rust\nfn main() {}\n```\n```rust\n```"), Some("fn main() {}\n"));
        assert_eq!(listing("```rust\nfn main() {}"), None);
    }
}
