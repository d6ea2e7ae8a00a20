//! Finds wordings in the comments of a source and in a document.

use super::Finding;
use super::tics::{FRAGMENTS, TICS};
use crate::source;

/// The findings of a Rust source: wordings of its comments, and lines too long.
pub(super) fn in_source(text: &str) -> Vec<Finding> {
    let mut findings: Vec<Finding> = blocks(text).iter().flat_map(Block::findings).collect();
    findings.extend(long_lines(text.lines().zip(1..)));
    findings.sort_by_key(|finding| finding.line);
    findings
}

/// The wordings in the messages of a Rust source: its string literals before its tests.
pub(super) fn in_messages(text: &str) -> Vec<Finding> {
    let program = text.split_once("#[cfg(test)]\nmod tests {").map_or(text, |(program, _)| program);
    // A single word is a name or a value.
    let messages = source::strings(program).into_iter().filter(|(_, message)| message.contains(' '));
    messages.flat_map(|(line, message)| wordings(&prose(message.split('\n').zip(line..)))).collect()
}

/// The findings of a Markdown document. Rows of tables cannot be wrapped, and code does not count.
pub(super) fn in_document(text: &str) -> Vec<Finding> {
    let prose = prose(text.lines().zip(1..));
    let mut findings = wordings(&prose);
    findings.extend(long_lines(text.lines().zip(1..).filter(|(line, _)| !line.starts_with('|'))));
    findings.sort_by_key(|finding| finding.line);
    findings
}

/// Comments on consecutive lines.
#[derive(Debug)]
struct Block<'a> {
    /// Whether it is documentation, as opposed to a comment in the code.
    is_doc: bool,
    /// The last line's number, and all lines without the slashes.
    lines: Vec<(&'a str, usize)>,
}

impl Block<'_> {
    fn findings(&self) -> Vec<Finding> {
        let prose = prose(self.lines.iter().copied());
        let mut findings = wordings(&prose);
        if self.is_doc {
            findings.extend(self.fragment());
            findings.extend(self.errors());
        }
        findings
    }

    /// Documentation that begins with a fragment.
    fn fragment(&self) -> Option<Finding> {
        let (first, line) = self.lines.first()?;
        let first = words(first).first().map(|word| word.to_lowercase())?;
        let (_, what, instead) = FRAGMENTS.iter().find(|(word, ..)| *word == first)?;
        Some(Finding { line: *line, what, instead })
    }

    /// A section on errors that names neither an error nor when it occurs.
    fn errors(&self) -> Option<Finding> {
        let heads = self.lines.iter().position(|(text, _)| text.trim() == "# Errors")?;
        let (_, line) = self.lines[heads];
        let section = self.lines[heads + 1..].iter().take_while(|(text, _)| !text.trim_start().starts_with("# "));
        let section = section.map(|(text, _)| text.trim()).collect::<Vec<_>>().join(" ");
        let words = words(&section);
        let is_fragment = words.len() < FEWEST_WORDS || ["As", "Those"].contains(words.first().unwrap_or(&""));
        let instead = "name each variant and when it occurs: [`Error::X`] if …";
        is_fragment.then_some(Finding { line, what: "# Errors is a fragment", instead })
    }
}

/// The comments of a source, those on consecutive lines together.
fn blocks(text: &str) -> Vec<Block<'_>> {
    let mut blocks: Vec<Block<'_>> = Vec::new();
    let mut last_kind = "";
    for (number, comment) in source::comments(text) {
        let kind = ["///", "//!", "/**", "/*!", "//", "/*"].into_iter().find(|kind| comment.starts_with(kind));
        let Some(kind) = kind else { continue };
        // An empty comment is a line too, or it would part the block.
        let lines = comment[kind.len()..].trim_end_matches("*/").split('\n').zip(number..);
        let continues = kind == last_kind
            && blocks.last().and_then(|block| block.lines.last()).is_some_and(|(_, last)| last + 1 == number);
        last_kind = kind;
        match blocks.last_mut().filter(|_| continues) {
            Some(block) => block.lines.extend(lines),
            None => blocks.push(Block { is_doc: kind.len() == 3, lines: lines.collect() }),
        }
    }
    blocks
}

/// The lines without examples and without what stands in backquotes, each with its number.
fn prose<'a>(lines: impl Iterator<Item = (&'a str, usize)>) -> Vec<(String, usize)> {
    let (mut prose, mut is_example) = (Vec::new(), false);
    for (text, line) in lines {
        if text.trim_start().starts_with("```") {
            is_example = !is_example;
        } else if !is_example {
            let outside: Vec<&str> = text.split('`').step_by(2).collect();
            // What was there parts the words around it.
            prose.push((outside.join(" . "), line));
        }
    }
    prose
}

fn wordings(prose: &[(String, usize)]) -> Vec<Finding> {
    let lower: Vec<(String, usize)> = prose.iter().map(|(text, line)| (text.to_lowercase(), *line)).collect();
    let words: Vec<(&str, usize)> =
        lower.iter().flat_map(|(text, line)| words(text).into_iter().map(|word| (word, *line))).collect();
    let only: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
    let of_tic = |tic: &'static super::tics::Tic| {
        let places = tic.places(&only);
        let finding = |at: usize| Finding { line: words[at].1, what: tic.what, instead: tic.instead };
        places.into_iter().map(finding).collect::<Vec<_>>()
    };
    TICS.iter().flat_map(of_tic).collect()
}

/// The words of a text, and the marks that part sentences.
fn words(text: &str) -> Vec<&str> {
    let (mut words, mut rest) = (Vec::new(), text);
    while let Some(first) = rest.chars().next() {
        let in_word = |next: char| next.is_alphanumeric() || next == '_' || next == '\'';
        let len = rest.find(|next| !in_word(next)).unwrap_or(rest.len());
        match len {
            0 if ";.:,".contains(first) => words.push(&rest[..1]),
            0 => {}
            _ => words.push(&rest[..len]),
        }
        rest = &rest[len.max(first.len_utf8())..];
    }
    words
}

fn long_lines<'a>(lines: impl Iterator<Item = (&'a str, usize)>) -> Vec<Finding> {
    let long = lines.filter(|(text, _)| text.chars().count() > COLUMNS);
    long.map(|(_, line)| Finding { line, what: "a line of more than 120 columns", instead: "wrap it" }).collect()
}

const COLUMNS: usize = 120;

/// A section on errors needs a verb and a condition; full stops count.
const FEWEST_WORDS: usize = 5;

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<(usize, &'static str)> {
        in_source(text).into_iter().map(|finding| (finding.line, finding.what)).collect()
    }

    #[test]
    fn messages_are_prose_and_tests_are_not() {
        let test = "#[cfg(test)]\nmod tests {\n    const LINE: &str = \"nobody\";\n}";
        let text = format!("fn f() -> &'static str {{\n    \"start again to \\\n     go on\"\n}}\n{test}");
        let found: Vec<_> = in_messages(&text).into_iter().map(|finding| (finding.line, finding.what)).collect();
        assert_eq!(found, [(3, "\"go on\"")]);
    }

    #[test]
    fn an_empty_line_does_not_part_a_comment() {
        let text = "/// Returns it.\n///\n/// # Errors\n///\n/// Those of others.\nfn f() {}";
        assert_eq!(found(text), [(3, "# Errors is a fragment")]);
        let example = "/// Returns it.\n/// ```\n/// let nobody = 1;\n///\n/// let whoever = 2;\n/// ```\nfn f() {}";
        assert_eq!(found(example), []);
    }

    #[test]
    fn wordings_are_found_in_comments_over_the_end_of_a_line_too() {
        let text =
            "// Adds it; whether it was new.\nlet nobody = \"nobody\"; // Then it goes\n// on, and it is no GPU.";
        assert_eq!(found(text), [(1, "\"; whether\""), (2, "\"go on\""), (3, "\"is no\"")]);
    }

    #[test]
    fn examples_names_and_right_uses_are_not_found() {
        let text = "/// There is no `master`, and `MASTER_PORT` is no longer read; there are no others.\n\
            /// ```\n/// nobody(); // whom\n/// ```\nfn team() {}";
        assert_eq!(found(text), []);
    }

    #[test]
    fn fragments_of_documentation_are_found() {
        assert_eq!(found("/// Of logits and classes.\nfn f() {}"), [(1, "begins with \"Of\"")]);
        assert_eq!(found("/// Those of the caller.\nfn f() {}"), [(1, "begins with \"Those of\"")]);
        assert_eq!(found("// Of all ways the shortest.\nfn f() {}"), []);
        assert_eq!(found("/// Adds.\n///\n/// # Errors\n/// candle's.\nfn f() {}"), [(3, "# Errors is a fragment")]);
        assert_eq!(found("/// # Errors\n/// As [`Self::other`] for many reasons."), [(1, "# Errors is a fragment")]);
        assert_eq!(found("/// # Errors\n/// [`Error::Full`] if the store is full."), []);
    }

    #[test]
    fn long_lines_are_found_except_rows_of_tables() {
        let long = "x".repeat(121);
        assert_eq!(found(&format!("let a = 1;\n{long}")), [(2, "a line of more than 120 columns")]);
        assert_eq!(found(&"ä".repeat(120)), []);
        let document = in_document(&format!("{long}\n| {long} |\nNobody knows `nobody`.\n```\nwhom\n```"));
        let places: Vec<usize> = document.iter().map(|finding| finding.line).collect();
        assert_eq!(places, [1, 3]);
    }
}
