//! `cargo xtask layers`: holds what cargo and the sources say of the crates against the tables in docs/architecture.md.

mod arrows;
mod environment;
mod modules;
mod table;

use std::collections::BTreeSet;

use clap::Args;

use self::modules::Modules;
use self::table::{CrateRow, Tables};
use crate::source;
use crate::workspace::{Package, Workspace};

#[derive(Args, Default)]
pub(crate) struct Flags {
    /// Prints each crate's lines, modules and largest circle, and checks nothing.
    #[arg(long)]
    figures: bool,
    /// Prints which module uses which within the largest circle of this crate, and checks nothing.
    #[arg(long, value_name = "CRATE")]
    circle: Option<String>,
}

/// Prints a table of the crates, then fails with every difference between them and the document.
pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let workspace = Workspace::load()?;
    let sizes = workspace.packages.iter().map(Size::of).collect::<Result<Vec<_>, _>>()?;
    if let Some(name) = &flags.circle {
        let size = sizes.iter().find(|size| size.name == *name);
        let size = size.ok_or_else(|| format!("{name:?} is not a crate of the workspace"))?;
        size.arrows.iter().for_each(|(from, to)| println!("{from} -> {to}"));
        return Ok(());
    }
    if flags.figures {
        print(&sizes, None);
        return Ok(());
    }
    let tables = Tables::parse(&source::read(&workspace.root.join(DOCUMENT))?)?;
    print(&sizes, Some(&tables));
    let mut problems = arrows::problems(&workspace, &tables);
    for size in &sizes {
        problems.extend(circle_problem(size, tables.row(&size.name)));
    }
    for package in workspace.packages.iter().filter(|package| package.is_published()) {
        problems.extend(environment::problem(&package.name, &environment::readers(&package.folder().join("src"))?));
    }
    match problems.is_empty() {
        true => Ok(()),
        false => Err(format!("the crates are not as {DOCUMENT} has them:\n  {}", problems.join("\n  "))),
    }
}

/// How large a crate is, and how entangled.
struct Size {
    name: String,
    lines: usize,
    modules: usize,
    /// The largest set of modules each of which reaches every other one; empty where no two do.
    circle: BTreeSet<String>,
    /// Which module of the circle uses which other one.
    arrows: Vec<(String, String)>,
}

impl Size {
    fn of(package: &Package) -> Result<Size, String> {
        let folder = package.folder().join("src");
        let mut lines = 0;
        for path in source::files(&folder, "rs")? {
            lines += source::read(&path)?.lines().count();
        }
        let mut size =
            Size { name: package.name.clone(), lines, modules: 0, circle: BTreeSet::new(), arrows: Vec::new() };
        for root in modules::roots(&folder)? {
            let modules = Modules::read(&root)?;
            size.modules += modules.count();
            let largest = modules.circles().into_iter().max_by_key(BTreeSet::len).unwrap_or_default();
            if largest.len() > size.circle.len() {
                size.arrows = modules.arrows_within(&largest);
                size.circle = largest.iter().map(|module| modules::shown(module).to_owned()).collect();
            }
        }
        Ok(size)
    }
}

fn print(sizes: &[Size], tables: Option<&Tables>) {
    println!("{:<28} {:>5} {:>7} {:>8} {:>7} {:>8}", "crate", "layer", "lines", "modules", "circle", "at most");
    for size in sizes {
        let row = tables.and_then(|tables| tables.row(&size.name));
        let (layer, limit) = match row {
            Some(row) => (row.layer.to_string(), limit(Some(row)).to_string()),
            None => ("-".to_owned(), "-".to_owned()),
        };
        let Size { name, lines, modules, circle, .. } = size;
        println!("{name:<28} {layer:>5} {lines:>7} {modules:>8} {:>7} {limit:>8}", circle.len());
    }
    let lines: usize = sizes.iter().map(|size| size.lines).sum();
    println!("{:<28} {:>5} {lines:>7}", format!("{} crates", sizes.len()), "");
    for Size { name, circle, .. } in sizes.iter().filter(|size| !size.circle.is_empty()) {
        println!("{name}: {}", circle.iter().map(String::as_str).collect::<Vec<_>>().join(", "));
    }
    for size in sizes {
        let Some(row) = tables.and_then(|tables| tables.row(&size.name)) else { continue };
        if row.circle.is_some_and(|limit| size.circle.len() < limit) {
            let now = size.circle.len();
            let cell = if now <= LARGEST_CIRCLE { "be taken out".to_owned() } else { format!("be lowered to {now}") };
            println!("note: {DOCUMENT}:{}: the circle of {} can {cell}", row.line, size.name);
        }
    }
}

/// The problem, in words, where a crate's largest circle exceeds what its row allows.
fn circle_problem(size: &Size, row: Option<&CrateRow>) -> Option<String> {
    let (now, limit) = (size.circle.len(), limit(row));
    (now > limit).then(|| {
        let members: Vec<&str> = size.circle.iter().map(String::as_str).collect();
        let (name, members) = (&size.name, members.join(", "));
        format!("{name}: {now} modules use each other in a circle, at most {limit} may; cut one way of: {members}")
    })
}

fn limit(row: Option<&CrateRow>) -> usize {
    row.and_then(|row| row.circle).unwrap_or(LARGEST_CIRCLE)
}

const DOCUMENT: &str = "docs/architecture.md";

/// As many modules as a reader can hold in mind at once.
const LARGEST_CIRCLE: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_document_has_the_crates_as_they_are() {
        run(&Flags::default()).unwrap_or_else(|problem| panic!("{problem}"));
    }

    #[test]
    fn a_circle_that_grows_is_reported_and_one_within_its_limit_is_not() {
        let size = |modules: usize| Size {
            name: "distribute-x".to_owned(),
            lines: 0,
            modules,
            circle: (0..modules).map(|module| format!("m{module}")).collect(),
            arrows: Vec::new(),
        };
        assert_eq!(circle_problem(&size(5), None), None);
        let problem = circle_problem(&size(6), None).unwrap();
        assert!(problem.starts_with("distribute-x: 6 modules use each other in a circle, at most 5 may"), "{problem}");
        let row = Tables::parse(&table::tests::document("| L1 | `distribute-x` | | | 7 |")).unwrap();
        assert_eq!(circle_problem(&size(7), row.row("distribute-x")), None);
        assert!(circle_problem(&size(8), row.row("distribute-x")).is_some());
    }
}
