//! Arrows between crates, and dependencies that few may have.

use super::DOCUMENT;
use super::table::{CrateRow, Entry, InsideRow, Layer, Tables};
use crate::workspace::{Dependency, Package, Workspace};

/// The differences between the manifests and the document, in words.
pub(super) fn problems(workspace: &Workspace, tables: &Tables) -> Vec<String> {
    let mut problems = Vec::new();
    for row in &tables.crates {
        if workspace.package(&row.name).is_none() {
            problems.push(format!("{DOCUMENT}:{}: there is no crate {}; take its row out", row.line, row.name));
        }
    }
    for package in &workspace.packages {
        let rows: Vec<&CrateRow> = tables.crates.iter().filter(|row| row.name == package.name).collect();
        match rows[..] {
            [row] => problems.extend(Check { workspace, tables, package, row }.problems()),
            [] => problems.push(format!("{} stands in no layer; give it a row in {DOCUMENT}", package.name)),
            _ => problems.push(format!("{} has {} rows in {DOCUMENT}; leave one", package.name, rows.len())),
        }
    }
    for row in tables.inside.iter().filter(|row| !is_used(workspace, row)) {
        let InsideRow { line, from, to } = row;
        problems.push(format!("{DOCUMENT}:{line}: {from} does not depend on {to}; take the row out"));
    }
    problems
}

/// One crate and its row.
struct Check<'a> {
    workspace: &'a Workspace,
    tables: &'a Tables,
    package: &'a Package,
    row: &'a CrateRow,
}

impl Check<'_> {
    fn problems(&self) -> Vec<String> {
        let mut problems = Vec::new();
        if self.package.is_published() == (self.row.layer == Layer::Lab) {
            let what = if self.package.is_published() { "is published" } else { "is not published" };
            problems.push(format!("{} {what}, but stands in {}", self.package.name, self.row.layer));
        }
        let (mut arrows, mut edges) = (Vec::new(), Vec::new());
        for dependency in &self.package.dependencies {
            let to = self.tables.row(&dependency.name).filter(|_| self.workspace.package(&dependency.name).is_some());
            if let Some(to) = to {
                problems.extend(self.arrow(dependency, to));
            }
            if !dependency.is_normal() {
                continue;
            }
            let is_ours = self.workspace.package(&dependency.name).is_some();
            if is_ours {
                arrows.push(dependency);
            }
            if let Some(kind) = self.tables.kind(&dependency.name) {
                if self.row.layer < kind.from {
                    let (name, layer, kind, from) = (&self.package.name, self.row.layer, &kind.kind, kind.from);
                    let what = format!("{name} ({layer}) depends on {}, a crate of the kind {kind}", dependency.name);
                    problems.push(format!("{what}, which only {from} and above may"));
                } else if !is_ours {
                    edges.push(dependency);
                }
            }
        }
        problems.extend(self.differences("depends on", &arrows, &self.row.arrows));
        problems.extend(self.differences("edges", &edges, &self.row.edges));
        problems
    }

    /// The problem, in words, with the direction of a dependency on a crate of the workspace.
    fn arrow(&self, dependency: &Dependency, to: &CrateRow) -> Option<String> {
        let from = self.row;
        let to_tests = !dependency.is_normal() && (to.layer == Layer::Lab || to.name == from.name);
        let is_lower = to.layer < from.layer || (to.layer, from.layer) == (Layer::Lab, Layer::Lab);
        let is_named =
            to.layer == from.layer && self.tables.inside.iter().any(|row| row.from == from.name && row.to == to.name);
        (!to_tests && !is_lower && !is_named).then(|| {
            let arrow = format!("{} ({}) depends on {} ({})", from.name, from.layer, to.name, to.layer);
            let allowed = if to.layer == from.layer { " or is a row of the arrows inside a layer" } else { "" };
            format!("{arrow}; an arrow leads to a lower layer{allowed}")
        })
    }

    /// How a cell of the row differs from the dependencies that belong there.
    fn differences(&self, cell: &str, found: &[&Dependency], allowed: &[Entry]) -> Vec<String> {
        let (mut problems, name) = (Vec::new(), &self.package.name);
        let place = format!("{DOCUMENT}:{}", self.row.line);
        for dependency in found {
            let features = self.package.features_of(&dependency.name);
            let behind = if dependency.optional { features.first().map(|it| (*it).to_owned()) } else { None };
            let should = Entry { name: dependency.name.clone(), behind };
            match allowed.iter().find(|entry| entry.name == dependency.name) {
                None => problems.push(format!("{place}: {name} depends on {should}, which \"{cell}\" does not name")),
                Some(entry) => {
                    let is_same = match &entry.behind {
                        Some(feature) => dependency.optional && features.contains(&feature.as_str()),
                        None => !dependency.optional,
                    };
                    if !is_same {
                        problems.push(format!("{place}: {entry} of {name} is, in its manifest, {should}"));
                    }
                }
            }
        }
        for entry in allowed.iter().filter(|entry| !found.iter().any(|found| found.name == entry.name)) {
            problems.push(format!("{place}: \"{cell}\" names {entry}, which {name} does not depend on; take it out"));
        }
        problems
    }
}

fn is_used(workspace: &Workspace, row: &InsideRow) -> bool {
    let package = workspace.package(&row.from);
    package.is_some_and(|package| package.dependencies.iter().any(|dependency| dependency.name == row.to))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layers::table;

    /// The problems of a workspace of these dependencies of `distribute-x` and of the crates `-y`, `-z` and `lab`.
    fn found(dependencies: &str, rows: &str) -> Vec<String> {
        let package = |name: &str, publish: &str, dependencies: &str| {
            format!(
                "{{\"name\":\"{name}\",\"manifest_path\":\"/w/{name}/Cargo.toml\",\"version\":\"0.1.0\",\
                \"publish\":{publish},\"features\":{{\"net\":[\"dep:tokio\"]}},\"dependencies\":[{dependencies}]}}"
            )
        };
        let packages = [
            package("distribute-x", "null", dependencies),
            package("distribute-y", "null", &depends("distribute-z", "null", false)),
            package("distribute-z", "null", ""),
            package("lab", "[]", &depends("distribute-y", "null", false)),
        ];
        let metadata = format!(
            "{{\"packages\":[{}],\"workspace_root\":\"/w\",\"target_directory\":\"/w/target\"}}",
            packages.join(",")
        );
        let rest = "| L1 | `distribute-y` | `distribute-z` | | |\n| L1 | `distribute-z` | | | |\n\
            | lab | `lab` | `distribute-y` | | |";
        let document = table::tests::document(&format!("{rows}\n{rest}"));
        problems(&Workspace::parse(&metadata).unwrap(), &Tables::parse(&document).unwrap())
    }

    fn depends(name: &str, kind: &str, optional: bool) -> String {
        format!("{{\"name\":\"{name}\",\"kind\":{kind},\"req\":\"*\",\"optional\":{optional}}}")
    }

    #[test]
    fn arrows_down_optional_edges_and_tests_from_the_lab_are_right() {
        let dependencies =
            [depends("distribute-y", "null", false), depends("tokio", "null", true), depends("lab", "\"dev\"", false)];
        let row = "| L2 | `distribute-x` | `distribute-y` | `tokio` behind `net` | |";
        assert_eq!(found(&dependencies.join(","), row), [""; 0]);
    }

    #[test]
    fn an_arrow_that_leads_up_or_across_is_reported() {
        let up = found(&depends("distribute-y", "null", false), "| L0 | `distribute-x` | `distribute-y` | | |");
        assert_eq!(up, ["distribute-x (L0) depends on distribute-y (L1); an arrow leads to a lower layer"]);
        let across = found(&depends("distribute-y", "null", false), "| L1 | `distribute-x` | `distribute-y` | | |");
        assert!(across[0].ends_with("or is a row of the arrows inside a layer"), "{across:?}");
        let lab = found(&depends("lab", "null", false), "| L8 | `distribute-x` | `lab` | | |");
        assert!(lab[0].starts_with("distribute-x (L8) depends on lab (lab)"), "{lab:?}");
        let tests = found(&depends("distribute-y", "\"dev\"", false), "| L0 | `distribute-x` | | | |");
        assert!(tests[0].starts_with("distribute-x (L0) depends on distribute-y (L1)"), "{tests:?}");
    }

    #[test]
    fn a_crate_stands_in_one_layer() {
        assert!(found("", "")[0].contains("distribute-x stands in no layer"));
        let row = "| L1 | `distribute-x` | | | |";
        assert!(found("", &format!("{row}\n{row}"))[0].contains("has 2 rows"));
        assert!(found("", &format!("{row}\n| L1 | `gone` | | | |"))[0].contains(":6: there is no crate gone"));
        assert!(found("", "| lab | `distribute-x` | | | |")[0].contains("is published, but stands in lab"));
    }

    #[test]
    fn a_row_names_every_arrow_and_no_other() {
        let unnamed = found(&depends("distribute-y", "null", false), "| L2 | `distribute-x` | | | |");
        assert!(unnamed[0].contains("depends on `distribute-y`, which \"depends on\" does not name"), "{unnamed:?}");
        let gone = found("", "| L2 | `distribute-x` | `distribute-y` | | |");
        assert!(gone[0].contains("names `distribute-y`, which distribute-x does not depend on"), "{gone:?}");
    }

    #[test]
    fn a_runtime_or_tensor_library_where_no_row_allows_it_is_reported() {
        let runtime = found(&depends("tokio", "null", false), "| L2 | `distribute-x` | | | |");
        assert!(runtime[0].contains("depends on `tokio`, which \"edges\" does not name"), "{runtime:?}");
        let always = found(&depends("tokio", "null", false), "| L2 | `distribute-x` | | `tokio` behind `net` | |");
        assert!(always[0].contains("`tokio` behind `net` of distribute-x is, in its manifest, `tokio`"), "{always:?}");
        let tensors = found(&depends("candle-nn", "null", false), "| L6 | `distribute-x` | | | |");
        assert!(tensors[0].contains("tensor library, which only L7 and above may"), "{tensors:?}");
        assert_eq!(found(&depends("candle-nn", "\"dev\"", false), "| L6 | `distribute-x` | | | |"), [""; 0]);
    }
}
