//! The order in which crates can be published.

use crate::workspace::{Dependency, Package, Workspace};

/// The published crates, each after all crates of the workspace that its package names. `cargo package` leaves out
/// dependencies of tests that have a path and no version; those do not count.
pub(super) fn of_publication(workspace: &Workspace) -> Result<Vec<&Package>, String> {
    let mut left = workspace.published(None)?;
    let mut ordered: Vec<&Package> = Vec::new();
    while !left.is_empty() {
        let is_published = |name: &str| ordered.iter().any(|package| package.name == name);
        let is_ready = |package: &&Package| named(workspace, package).all(|dependency| is_published(&dependency.name));
        let Some(next) = left.iter().position(is_ready) else {
            let waits = |package: &&Package| {
                let others: Vec<&str> = named(workspace, package)
                    .map(|dependency| dependency.name.as_str())
                    .filter(|name| !is_published(name))
                    .collect();
                format!("{} needs {}", package.name, others.join(", "))
            };
            let waiting: Vec<String> = left.iter().map(waits).collect();
            return Err(format!(
                "these crates cannot be published, because each needs another of them, or one that is not published; \
                 give dependencies of tests a path and no version:\n  {}",
                waiting.join("\n  ")
            ));
        };
        ordered.push(left.remove(next));
    }
    Ok(ordered)
}

/// The crates of the workspace that the package names, itself excepted.
fn named<'a>(workspace: &Workspace, package: &'a Package) -> impl Iterator<Item = &'a Dependency> {
    package.dependencies.iter().filter(|dependency| {
        let is_own = dependency.name != package.name && workspace.package(&dependency.name).is_some();
        is_own && (dependency.has_version() || !dependency.is_for_tests())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The field of a crate with one dependency.
    fn on(name: &str, kind: &str, req: &str) -> String {
        let dependency = format!(r#"{{"name":"{name}","kind":{kind},"req":"{req}","optional":false}}"#);
        format!(r#""dependencies":[{dependency}]"#)
    }

    fn names(crates: &[(&str, &str)]) -> Result<Vec<String>, String> {
        let workspace = Workspace::of(crates);
        Ok(of_publication(&workspace)?.iter().map(|package| package.name.clone()).collect())
    }

    #[test]
    fn each_crate_comes_after_those_that_it_needs() {
        let (on_c, on_a) = (on("c", "null", "^0.1.0"), on("a", r#""dev""#, "*"));
        let crates = [("a", &*on_c), ("b", ""), ("c", &*on_a), ("lab", r#""publish":[]"#)];
        assert_eq!(names(&crates).unwrap(), ["b", "c", "a"]);
    }

    #[test]
    fn crates_that_wait_for_each_other_are_named() {
        let (on_b, on_a) = (on("b", "null", "^0.1.0"), on("a", r#""dev""#, "^0.1.0"));
        let problem = names(&[("a", &on_b), ("b", &on_a)]).unwrap_err();
        assert!(problem.ends_with("\n  a needs b\n  b needs a"), "{problem}");
    }

    #[test]
    fn a_crate_that_needs_one_of_the_lab_is_named() {
        for (kind, req) in [("null", "*"), (r#""dev""#, "^0.1.0")] {
            let problem = names(&[("a", &on("lab", kind, req)), ("lab", r#""publish":[]"#)]).unwrap_err();
            assert!(problem.ends_with("\n  a needs lab"), "{problem}");
        }
    }

    #[test]
    fn the_crates_of_this_workspace_have_an_order() {
        let workspace = Workspace::load().unwrap();
        assert!(of_publication(&workspace).is_ok_and(|crates| crates.len() > 10));
    }
}
