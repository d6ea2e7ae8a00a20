//! YAML with comments: a tree that is written the same way each time.
//!
//! Texts that a user gave are quoted, always; only numbers and this program's own words are plain.

use std::fmt::Write;

/// A value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Node {
    /// A number or one of our own words, as it is.
    Plain(String),
    /// A text, in quotes.
    Text(String),
    /// Entries with comments.
    Map(Map),
    /// An item per line.
    List(Vec<Node>),
    /// A short list in one line.
    Inline(Vec<Node>),
}

/// Entries in the order in which they were added.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Map {
    entries: Vec<(String, Node, Option<String>)>,
}

impl Map {
    pub(super) fn new() -> Self {
        Self::default()
    }

    /// Adds an entry.
    pub(super) fn with(self, key: &str, value: impl Into<Node>) -> Self {
        self.add(key, value.into(), None)
    }

    /// Adds an entry below a comment.
    pub(super) fn noted(self, comment: &str, key: &str, value: impl Into<Node>) -> Self {
        self.add(key, value.into(), Some(comment.to_owned()))
    }

    /// Adds an entry if there is a value.
    pub(super) fn maybe<T: Into<Node>>(self, key: &str, value: Option<T>) -> Self {
        match value {
            Some(value) => self.with(key, value),
            None => self,
        }
    }

    /// Adds all entries of another map.
    pub(super) fn and(mut self, other: Map) -> Self {
        self.entries.extend(other.entries);
        self
    }

    /// Returns the map unless it is empty.
    pub(super) fn some(self) -> Option<Self> {
        (!self.entries.is_empty()).then_some(self)
    }

    fn add(mut self, key: &str, value: Node, comment: Option<String>) -> Self {
        self.entries.push((key.to_owned(), value, comment));
        self
    }
}

impl From<&'static str> for Node {
    fn from(own: &'static str) -> Self {
        Self::Plain(own.to_owned())
    }
}

impl From<String> for Node {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&String> for Node {
    fn from(text: &String) -> Self {
        Self::Text(text.clone())
    }
}

impl From<u32> for Node {
    fn from(number: u32) -> Self {
        Self::Plain(number.to_string())
    }
}

impl From<u64> for Node {
    fn from(number: u64) -> Self {
        Self::Plain(number.to_string())
    }
}

impl From<Map> for Node {
    fn from(map: Map) -> Self {
        Self::Map(map)
    }
}

impl From<Vec<Node>> for Node {
    fn from(items: Vec<Node>) -> Self {
        Self::List(items)
    }
}

/// Returns a list of texts in one line.
pub(super) fn texts<T: Into<String>>(items: impl IntoIterator<Item = T>) -> Node {
    Node::Inline(items.into_iter().map(|item| Node::Text(item.into())).collect())
}

/// Returns documents, each below its comment.
pub(super) fn documents(heading: &str, documents: &[Map]) -> String {
    let mut text = String::new();
    comment(heading, 0, &mut text);
    for (place, map) in documents.iter().enumerate() {
        if place > 0 {
            text.push_str("---\n");
        }
        entries(map, 0, &mut text);
    }
    text
}

fn entries(map: &Map, indent: usize, text: &mut String) {
    for (key, value, note) in &map.entries {
        if let Some(note) = note {
            comment(note, indent, text);
        }
        pad(indent, text);
        entry(key, value, indent, text);
    }
}

/// Writes an entry whose line has its indentation already.
fn entry(key: &str, value: &Node, indent: usize, text: &mut String) {
    text.push_str(&written_key(key));
    text.push(':');
    match value {
        Node::Map(map) if !map.entries.is_empty() => {
            text.push('\n');
            entries(map, indent + 2, text);
        }
        Node::List(list) if !list.is_empty() => {
            text.push('\n');
            items(list, indent + 2, text);
        }
        other => {
            text.push(' ');
            inline(other, text);
            text.push('\n');
        }
    }
}

fn items(list: &[Node], indent: usize, text: &mut String) {
    for item in list {
        let Node::Map(map) = item else {
            pad(indent, text);
            text.push_str("- ");
            inline(item, text);
            text.push('\n');
            continue;
        };
        for (place, (key, value, note)) in map.entries.iter().enumerate() {
            // The comment of the first entry is above the dash.
            if let Some(note) = note {
                comment(note, if place == 0 { indent } else { indent + 2 }, text);
            }
            pad(indent, text);
            text.push_str(if place == 0 { "- " } else { "  " });
            entry(key, value, indent + 2, text);
        }
    }
}

/// Writes a value in one line.
fn inline(node: &Node, text: &mut String) {
    match node {
        Node::Plain(plain) => text.push_str(plain),
        Node::Text(given) => text.push_str(&quoted(given)),
        Node::List(list) | Node::Inline(list) => {
            text.push('[');
            for (place, item) in list.iter().enumerate() {
                if place > 0 {
                    text.push_str(", ");
                }
                inline(item, text);
            }
            text.push(']');
        }
        Node::Map(map) => {
            text.push('{');
            for (place, (key, value, _)) in map.entries.iter().enumerate() {
                if place > 0 {
                    text.push_str(", ");
                }
                text.push_str(&written_key(key));
                text.push_str(": ");
                inline(value, text);
            }
            text.push('}');
        }
    }
}

/// Returns a key; those that YAML could read as something else are quoted. Readers of YAML 1.1 take `NO` for a boolean,
/// and `1e3` is a number.
fn written_key(key: &str) -> String {
    let is_word = key.starts_with(|first: char| first.is_ascii_alphabetic())
        && key.chars().all(|next| next.is_ascii_alphanumeric() || "-_./".contains(next));
    let lower = key.to_ascii_lowercase();
    let is_taken = ["y", "n", "yes", "no", "on", "off", "true", "false", "null"].contains(&lower.as_str());
    if is_word && !is_taken { key.to_owned() } else { quoted(key) }
}

/// Returns a text in quotes, which every reader of YAML 1.1 and 1.2 reads as that text.
fn quoted(text: &str) -> String {
    // JSON in a text is readable in single quotes, which know no other escape than their own.
    if text.contains('"') && text.bytes().all(|next| (b' '..=b'~').contains(&next)) {
        return format!("'{}'", text.replace('\'', "''"));
    }
    let mut quoted = String::from('"');
    for next in text.chars() {
        match next {
            '"' => quoted.push_str("\\\""),
            '\\' => quoted.push_str("\\\\"),
            '\n' => quoted.push_str("\\n"),
            '\t' => quoted.push_str("\\t"),
            // Control characters, line and paragraph separators, the byte order mark and what is not a character.
            '\0'..='\x1f' | '\x7f'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}' => {
                // Writing to a String does not fail.
                let _ = write!(quoted, "\\u{:04x}", next as u32);
            }
            _ => quoted.push(next),
        }
    }
    quoted.push('"');
    quoted
}

/// Writes a comment, a line or more.
fn comment(note: &str, indent: usize, text: &mut String) {
    for line in note.lines() {
        let (mut width, mut begun) = (0, false);
        for word in line.split(' ') {
            if begun && indent + 2 + width + 1 + word.len() > WIDTH {
                text.push('\n');
                begun = false;
            }
            if begun {
                text.push(' ');
                width += 1;
            } else {
                pad(indent, text);
                text.push_str("# ");
                (width, begun) = (0, true);
            }
            text.push_str(word);
            width += word.len();
        }
        text.push('\n');
    }
}

fn pad(indent: usize, text: &mut String) {
    text.extend(std::iter::repeat_n(' ', indent));
}

/// Longest line of a comment.
const WIDTH: usize = 100;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;

    fn parsed(text: &str) -> Value {
        serde_saphyr::from_str(text).unwrap_or_else(|error| panic!("{error}\n{text}"))
    }

    fn read_back(text: &str) -> Value {
        let map = Map::new()
            .with("value", text.to_owned())
            .with("list", vec![Node::Text(text.to_owned())])
            .with("short", texts([text]))
            .with("map", Map::new().with(text, text.to_owned()).with("last", 1u32));
        parsed(&documents("A comment.", &[map]))
    }

    #[test]
    fn texts_that_look_like_other_things_stay_texts() {
        let odd = [
            "yes",
            "NO",
            "null",
            "~",
            "1e3",
            "0x10",
            "-",
            "- a",
            "--epochs",
            ":",
            "a: b",
            "#c",
            " a ",
            "",
            "'",
            "\"",
            "\\",
            "a\nb",
            "\t",
            "%a",
            "@a",
            "`a",
            "&a",
            "*a",
            "!a",
            "|",
            ">",
            "{a}",
            "[a]",
            "é",
            "日本",
            "🦀",
            "\u{85}",
            "\u{2028}",
            "\u{feff}",
            "\u{7f}",
            "12:30:45",
            "2026-01-01",
            ".5",
            "<<",
            "=",
            "on",
            "y",
        ];
        for text in odd {
            let value = read_back(text);
            assert_eq!(value["value"], json!(text), "{text:?}");
            assert_eq!((&value["list"][0], &value["short"][0]), (&json!(text), &json!(text)));
            assert_eq!(value["map"][text], json!(text), "{text:?}");
        }
    }

    #[test]
    fn the_form_is_that_of_hand_written_files() {
        let item = Map::new().noted("Why.", "name", "tensorflow").with("ports", vec![Node::from(1u32)]);
        let map = Map::new()
            .with("kind", "Job")
            .noted("First.\nSecond.", "spec", Map::new().with("containers", vec![item.into()]))
            .with("none", Vec::<Node>::new())
            .with("limits", Map::new());
        let expected = "# Head.\nkind: Job\n# First.\n# Second.\nspec:\n  containers:\n    # Why.\n    - name: \
                        tensorflow\n      ports:\n        - 1\nnone: []\nlimits: {}\n";
        assert_eq!(documents("Head.", &[map]), expected);
    }

    #[test]
    fn long_comments_are_wrapped() {
        let text = documents(&"word ".repeat(40), &[]);
        assert!(text.lines().count() > 1 && text.lines().all(|line| line.starts_with("# ") && line.len() <= WIDTH));
    }

    proptest! {
        #[test]
        fn every_text_is_read_back(text in any::<String>()) {
            let value = read_back(&text);
            prop_assert_eq!(&value["value"], &json!(&text));
            prop_assert_eq!(&value["list"][0], &json!(&text));
            prop_assert_eq!(&value["short"][0], &json!(&text));
            prop_assert_eq!(&value["map"][&text], &json!(&text));
        }
    }
}
