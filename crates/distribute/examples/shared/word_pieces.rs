//! Word pieces, for the examples that read words.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use distribute::Error;
use unicode_categories::UnicodeCategories;
use unicode_normalization_alignments::UnicodeNormalization;

/// A vocabulary of word pieces, as BERT's: pieces that continue a word begin with `##`.
pub(crate) struct WordPieces {
    pieces: Vec<String>,
    indices: HashMap<String, u32>,
    /// Whether it has upper case, so that texts keep theirs.
    is_cased: bool,
    pub(crate) padding: u32,
    pub(crate) unknown: u32,
    /// The token before a text, whose last layer represents the whole.
    pub(crate) class: u32,
    /// The token after a text.
    pub(crate) separator: u32,
    pub(crate) mask: u32,
}

/// The tokens that are not words, in the order of the fields.
const SPECIAL: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

impl WordPieces {
    /// Collects all characters, alone and as continuations, and the most frequent words.
    pub(crate) fn new(texts: &[String], limit: usize) -> distribute::Result<WordPieces> {
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for word in texts.iter().flat_map(|text| words(text, false)) {
            *counts.entry(word).or_default() += 1;
        }
        let mut pieces: Vec<String> = SPECIAL.map(str::to_owned).to_vec();
        let characters: BTreeSet<char> = counts.keys().flat_map(|word| word.chars()).collect();
        pieces.extend(characters.iter().map(char::to_string));
        pieces.extend(characters.iter().map(|character| format!("##{character}")));
        let mut counts: Vec<(String, usize)> =
            counts.into_iter().filter(|(word, _)| word.chars().count() > 1).collect();
        // A stable sort: equally frequent ones stay in alphabetical order.
        counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        let room = limit.saturating_sub(pieces.len());
        pieces.extend(counts.into_iter().take(room).map(|(word, _)| word));
        WordPieces::of(pieces).map_err(Error::program)
    }

    /// Reads a vocabulary with a piece on each line, such as the `vocab.txt` of a published model.
    pub(crate) fn read(path: &Path) -> distribute::Result<WordPieces> {
        let wrong = |problem: String| Error::program(format!("{}: {problem}", path.display()));
        let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
        WordPieces::of(text.lines().map(str::to_owned).collect()).map_err(wrong)
    }

    /// Writes the vocabulary like the files that [`read`](WordPieces::read) reads.
    pub(crate) fn write(&self, path: &Path) -> distribute::Result<()> {
        let lines: String = self.pieces.iter().flat_map(|piece| [piece, "\n"]).collect();
        std::fs::write(path, lines).map_err(|error| Error::program(format!("{}: {error}", path.display())))
    }

    fn of(pieces: Vec<String>) -> Result<WordPieces, String> {
        let indices: HashMap<String, u32> = pieces.iter().cloned().zip(0..).collect();
        let find = |special: &str| {
            let problem = || format!("{special} is missing; give a vocabulary with {}", SPECIAL.join(", "));
            indices.get(special).copied().ok_or_else(problem)
        };
        let [padding, unknown, class, separator, mask] = SPECIAL.map(find);
        let (padding, unknown, class, separator, mask) = (padding?, unknown?, class?, separator?, mask?);
        // Letters without lower case, such as ℝ, are in vocabularies without upper case too.
        let is_cased = |piece: &String| !piece.starts_with('[') && piece.to_lowercase() != *piece;
        let is_cased = pieces.iter().any(is_cased);
        Ok(WordPieces { pieces, indices, is_cased, padding, unknown, class, separator, mask })
    }

    pub(crate) fn len(&self) -> usize {
        self.pieces.len()
    }

    /// Divides a text into pieces, of each word always the longest that begins the rest.
    pub(crate) fn encode(&self, text: &str) -> Vec<u32> {
        let mut tokens = Vec::new();
        for word in words(text, self.is_cased) {
            let (mut rest, mut of_word) = (word.as_str(), Vec::new());
            while !rest.is_empty() {
                let prefix = if of_word.is_empty() { "" } else { "##" };
                let ends = rest.char_indices().map(|(at, character)| at + character.len_utf8()).rev();
                let known = |end: usize| Some((end, *self.indices.get(&format!("{prefix}{}", &rest[..end]))?));
                let Some((end, token)) = ends.into_iter().find_map(known) else { break };
                of_word.push(token);
                rest = &rest[end..];
            }
            if rest.is_empty() { tokens.extend(of_word) } else { tokens.push(self.unknown) }
        }
        tokens
    }
}

/// Divides a text into words and punctuation marks, without accents and in lower case unless it is cased.
///
/// # Source
/// `BasicTokenizer` of BERT.
fn words(text: &str, is_cased: bool) -> Vec<String> {
    let text: String = text.chars().filter(|character| !is_ignored(*character)).collect();
    let text = if is_cased { text } else { without_accents(&text).to_lowercase() };
    let (mut words, mut is_inside) = (Vec::<String>::new(), false);
    for character in text.chars() {
        let is_part = !character.is_whitespace() && !stands_alone(character);
        match words.last_mut() {
            Some(word) if is_part && is_inside => word.push(character),
            _ if character.is_whitespace() => {}
            _ => words.push(character.to_string()),
        }
        is_inside = is_part;
    }
    words
}

/// Returns whether a character is removed: a control or format character other than a space, or one that stands for
/// text that could not be read.
fn is_ignored(character: char) -> bool {
    let is_space = matches!(character, '\t' | '\n' | '\r');
    !is_space && (character.is_other_control() || character.is_other_format()) || character == '\u{fffd}'
}

/// Decomposes characters, and removes the marks above and below letters.
fn without_accents(text: &str) -> String {
    text.nfd().map(|(character, _)| character).filter(|character| !character.is_mark_nonspacing()).collect()
}

/// Returns whether a character is a word of its own: punctuation, with all symbols of ASCII, and Chinese characters.
fn stands_alone(character: char) -> bool {
    let is_chinese = matches!(character,
        '\u{3400}'..='\u{4dbf}'
        | '\u{4e00}'..='\u{9fff}'
        | '\u{f900}'..='\u{faff}'
        | '\u{20000}'..='\u{2a6df}'
        | '\u{2a700}'..='\u{2ceaf}'
        | '\u{2f800}'..='\u{2fa1f}');
    is_chinese || character.is_ascii_punctuation() || character.is_punctuation()
}
