//! The tables of docs/architecture.md that the crates are held against.

use std::fmt;

/// All tables of the document that are law.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) crates: Vec<CrateRow>,
    pub(super) inside: Vec<InsideRow>,
    pub(super) kinds: Vec<KindRow>,
}

/// One crate: where it stands and what it may depend on.
#[derive(Debug)]
pub(super) struct CrateRow {
    pub(super) line: usize,
    pub(super) layer: Layer,
    pub(super) name: String,
    /// Crates of the workspace that it depends on.
    pub(super) arrows: Vec<Entry>,
    /// Other crates of a kind that few may depend on.
    pub(super) edges: Vec<Entry>,
    /// How many of its modules may use each other in a circle, where more may than elsewhere.
    pub(super) circle: Option<usize>,
}

/// A dependency that a row allows.
#[derive(Debug, PartialEq)]
pub(super) struct Entry {
    pub(super) name: String,
    /// The feature that turns it on, where it is optional.
    pub(super) behind: Option<String>,
}

/// An arrow that leads to no lower layer.
#[derive(Debug)]
pub(super) struct InsideRow {
    pub(super) line: usize,
    pub(super) from: String,
    pub(super) to: String,
}

/// A kind of dependencies, and the lowest layer that may have them.
#[derive(Debug)]
pub(super) struct KindRow {
    pub(super) kind: String,
    /// Names; one that ends with `*` stands for all that begin so.
    pub(super) patterns: Vec<String>,
    pub(super) from: Layer,
}

/// Where a crate stands; the lab, which nothing else may depend on, is above all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Layer {
    Numbered(u32),
    Lab,
}

impl Tables {
    pub(super) fn parse(document: &str) -> Result<Tables, String> {
        Ok(Tables {
            crates: rows(document, CRATES)?.into_iter().map(CrateRow::parse).collect::<Result<_, _>>()?,
            inside: rows(document, INSIDE)?.into_iter().map(InsideRow::parse).collect::<Result<_, _>>()?,
            kinds: rows(document, KINDS)?.into_iter().map(KindRow::parse).collect::<Result<_, _>>()?,
        })
    }

    pub(super) fn row(&self, name: &str) -> Option<&CrateRow> {
        self.crates.iter().find(|row| row.name == name)
    }

    /// The kind that a dependency is of, if few may have it.
    pub(super) fn kind(&self, name: &str) -> Option<&KindRow> {
        self.kinds.iter().find(|row| row.patterns.iter().any(|pattern| matches(pattern, name)))
    }
}

impl CrateRow {
    fn parse(row: Row<'_>) -> Result<CrateRow, String> {
        let circle = match row.cells[4] {
            "" => None,
            text => {
                Some(text.parse().map_err(|_| row.error(&format!("a circle of {text:?} modules is not a number")))?)
            }
        };
        Ok(CrateRow {
            line: row.line,
            layer: row.layer(0)?,
            name: row.name(1)?,
            arrows: row.entries(2)?,
            edges: row.entries(3)?,
            circle,
        })
    }
}

impl InsideRow {
    fn parse(row: Row<'_>) -> Result<InsideRow, String> {
        let [from, to] = &quoted(row.cells[0])[..] else {
            return Err(row.error("an arrow is written `from` → `to`"));
        };
        match row.cells[1].is_empty() {
            true => Err(row.error("an arrow that leads to no lower layer needs a reason")),
            false => Ok(InsideRow { line: row.line, from: from.clone(), to: to.clone() }),
        }
    }
}

impl KindRow {
    fn parse(row: Row<'_>) -> Result<KindRow, String> {
        Ok(KindRow { kind: row.cells[0].to_owned(), patterns: quoted(row.cells[1]), from: row.layer(2)? })
    }
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Layer::Numbered(number) => f.pad(&format!("L{number}")),
            Layer::Lab => f.pad("lab"),
        }
    }
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.behind {
            Some(feature) => write!(f, "`{}` behind `{feature}`", self.name),
            None => write!(f, "`{}`", self.name),
        }
    }
}

/// A row of a table.
struct Row<'a> {
    line: usize,
    cells: Vec<&'a str>,
}

impl Row<'_> {
    fn layer(&self, cell: usize) -> Result<Layer, String> {
        let text = self.cells[cell];
        let number = text.strip_prefix('L').and_then(|number| number.parse().ok());
        match (number, text) {
            (Some(number), _) => Ok(Layer::Numbered(number)),
            (None, "lab") => Ok(Layer::Lab),
            (None, _) => Err(self.error(&format!("{text:?} is not a layer; write L0, L1, … or lab"))),
        }
    }

    fn name(&self, cell: usize) -> Result<String, String> {
        match &quoted(self.cells[cell])[..] {
            [name] => Ok(name.clone()),
            _ => Err(self.error(&format!("{:?} is not one name in backquotes", self.cells[cell]))),
        }
    }

    fn entries(&self, cell: usize) -> Result<Vec<Entry>, String> {
        let entry = |text: &str| match &quoted(text)[..] {
            [name] => Ok(Entry { name: name.clone(), behind: None }),
            [name, feature] if text.contains("` behind `") => {
                Ok(Entry { name: name.clone(), behind: Some(feature.clone()) })
            }
            _ => Err(self.error(&format!("{text:?} is neither `crate` nor `crate` behind `feature`"))),
        };
        self.cells[cell].split(',').map(str::trim).filter(|text| !text.is_empty()).map(entry).collect()
    }

    fn error(&self, problem: &str) -> String {
        format!("docs/architecture.md:{}: {problem}", self.line)
    }
}

/// The rows of the table that has these heads.
fn rows<'a>(document: &'a str, heads: &[&str]) -> Result<Vec<Row<'a>>, String> {
    let mut lines = document.lines().zip(1..).skip_while(|(line, _)| cells(line) != heads);
    if lines.next().is_none() {
        return Err(format!("docs/architecture.md has no table with the columns {}", heads.join(", ")));
    }
    let rows = lines.skip(1).take_while(|(line, _)| line.starts_with('|'));
    rows.map(|(text, line)| {
        let row = Row { line, cells: cells(text) };
        if row.cells.len() == heads.len() { Ok(row) } else { Err(row.error("the row has not one cell per column")) }
    })
    .collect()
}

fn cells(line: &str) -> Vec<&str> {
    let inner = line.trim().strip_prefix('|').and_then(|line| line.strip_suffix('|'));
    inner.map_or_else(Vec::new, |inner| inner.split('|').map(str::trim).collect())
}

/// Returns the words in backquotes.
fn quoted(text: &str) -> Vec<String> {
    text.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

fn matches(pattern: &str, name: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(beginning) => name.starts_with(beginning),
        None => name == pattern,
    }
}

const CRATES: &[&str] = &["layer", "crate", "depends on", "edges", "circle"];

const INSIDE: &[&str] = &["arrow", "why"];

const KINDS: &[&str] = &["kind", "crates", "from"];

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A document with these rows of crates, an arrow inside a layer and two kinds of edges.
    pub(in crate::layers) fn document(rows: &str) -> String {
        format!(
            "# Architecture\n\n| layer | crate | depends on | edges | circle |\n|---|---|---|---|--:|\n{rows}\n\n\
            | arrow | why |\n|---|---|\n| `distribute-y` → `distribute-z` | its derives |\n\n\
            | kind | crates | from |\n|---|---|---|\n| async runtime | `tokio`, `tokio-*` | L0 |\n\
            | tensor library | `candle-*` | L7 |\n"
        )
    }

    #[test]
    fn rows_are_read_with_their_lines() {
        let tables = Tables::parse(&document("| lab | `x` | `y`, `z` behind `w` | `tokio` | 7 |")).unwrap();
        let [row] = &tables.crates[..] else { panic!() };
        assert_eq!((row.line, row.layer, row.name.as_str(), row.circle), (5, Layer::Lab, "x", Some(7)));
        assert_eq!(row.arrows.iter().map(Entry::to_string).collect::<Vec<_>>(), ["`y`", "`z` behind `w`"]);
        assert_eq!(tables.kind("tokio-stream").unwrap().kind, "async runtime");
        assert_eq!(tables.kind("tokio").unwrap().kind, "async runtime");
        assert_eq!(tables.kind("candle-nn").unwrap().from, Layer::Numbered(7));
        assert!(tables.kind("tokenizers").is_none());
    }

    #[test]
    fn rows_that_cannot_be_read_are_named() {
        let problem = |rows: &str| Tables::parse(&document(rows)).unwrap_err();
        assert!(problem("| L | `x` | | | |").contains(":5: \"L\" is not a layer"));
        assert!(problem("| L1 | x | | | |").contains("is not one name in backquotes"));
        assert!(problem("| L1 | `x` | y | | |").contains("neither `crate` nor"));
        assert!(problem("| L1 | `x` | | | five |").contains("is not a number"));
        assert!(problem("| L1 | `x` | | |").contains("one cell per column"));
        assert!(Tables::parse("# Architecture").unwrap_err().contains("layer, crate"));
    }
}
