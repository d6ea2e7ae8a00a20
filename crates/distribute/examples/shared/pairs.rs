//! Pairs of texts, for the examples that translate.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use candle_core::{Device, Tensor};
use distribute::Error;
use distribute::input::Dataset;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// The token that fills up rows.
pub(crate) const PADDING: u32 = 0;
/// The tokens before and after each target; sources have the second.
pub(crate) const BEGIN: u32 = 1;
pub(crate) const END: u32 = 2;
/// The token for those outside the vocabulary.
pub(crate) const UNKNOWN: u32 = 3;

/// The kind of a vocabulary's tokens.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    Character,
    /// A lower-case word, or a punctuation mark.
    Word,
}

impl Unit {
    fn split(self, text: &str) -> Vec<String> {
        match self {
            Unit::Character => text.chars().map(String::from).collect(),
            Unit::Word => {
                let mut apart = String::new();
                for character in text.to_lowercase().chars() {
                    match character {
                        '.' | ',' | ';' | ':' | '!' | '?' | '¡' | '¿' | '"' | '(' | ')' | '«' | '»' => {
                            apart.extend([' ', character, ' ']);
                        }
                        _ => apart.push(character),
                    }
                }
                apart.split_whitespace().map(str::to_owned).collect()
            }
        }
    }

    fn join(self, tokens: &[&str]) -> String {
        tokens.join(if self == Unit::Character { "" } else { " " })
    }
}

/// The tokens of one language.
pub(crate) struct Vocabulary {
    unit: Unit,
    tokens: Vec<String>,
    indices: HashMap<String, u32>,
}

impl Vocabulary {
    /// Collects the most frequent tokens.
    fn new<'a>(unit: Unit, texts: impl Iterator<Item = &'a str>, limit: usize) -> Vocabulary {
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        for token in texts.flat_map(|text| unit.split(text)) {
            *counts.entry(token).or_default() += 1;
        }
        let mut counts: Vec<(String, usize)> = counts.into_iter().collect();
        // A stable sort: equally frequent ones stay in alphabetical order.
        counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        let special = ["", "", "", "?"].map(str::to_owned);
        let tokens: Vec<String> = special.into_iter().chain(counts.into_iter().map(|(token, _)| token)).collect();
        let tokens = tokens[..tokens.len().min(limit)].to_vec();
        let indices = tokens.iter().cloned().zip(0..).skip(1 + UNKNOWN as usize).collect();
        Vocabulary { unit, tokens, indices }
    }

    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Writes tokens as text.
    pub(crate) fn text(&self, tokens: &[u32]) -> String {
        let tokens = tokens.iter().filter(|token| !(PADDING..=END).contains(*token));
        let tokens: Vec<&str> =
            tokens.filter_map(|token| self.tokens.get(*token as usize)).map(String::as_str).collect();
        self.unit.join(&tokens)
    }

    fn indices(&self, text: &str) -> impl Iterator<Item = u32> {
        self.unit.split(text).into_iter().map(|token| self.indices.get(&token).copied().unwrap_or(UNKNOWN))
    }
}

/// Rows of tokens: sources of shape (pairs, length), which end with [`END`], and targets of shape (pairs, length),
/// between [`BEGIN`] and [`END`].
pub(crate) struct Split {
    pub(crate) sources: Tensor,
    pub(crate) targets: Tensor,
}

impl Split {
    pub(crate) fn dataset(&self) -> Dataset<(Tensor, Tensor)> {
        Dataset::from_tensor_slices((self.sources.clone(), self.targets.clone()))
    }
}

/// The limits of pairs, and the kind of their tokens.
pub(crate) struct Limits {
    pub(crate) unit: Unit,
    /// The number of pairs that are not trained on.
    pub(crate) held_out: usize,
    /// The maximum number of tokens of a text; pairs with longer ones are left out.
    pub(crate) length: usize,
    /// The maximum number of tokens of a vocabulary.
    pub(crate) vocabulary: usize,
}

/// Pairs to train on, and others that have neither their sources nor their targets.
pub(crate) struct Pairs {
    pub(crate) source: Vocabulary,
    pub(crate) target: Vocabulary,
    pub(crate) train: Split,
    pub(crate) held_out: Split,
    /// The number of pairs that are left out because a text is empty or longer than the limit.
    pub(crate) beyond_limit: usize,
    /// The number of pairs that are left out because a held-out pair has one of their texts.
    pub(crate) known: usize,
}

impl Pairs {
    /// Holds out the first pairs.
    pub(crate) fn new(pairs: Vec<(String, String)>, limits: &Limits) -> distribute::Result<Pairs> {
        let (all, is_short) = (pairs.len(), |text: &str| (1..=limits.length).contains(&limits.unit.split(text).len()));
        let mut held_out: Vec<_> = pairs.into_iter().filter(|(from, to)| is_short(from) && is_short(to)).collect();
        let beyond_limit = all - held_out.len();
        let rest = held_out.split_off(held_out.len().min(limits.held_out));
        let of_rest = rest.len();
        let known: BTreeSet<&str> = held_out.iter().flat_map(|(from, to)| [from.as_str(), to.as_str()]).collect();
        let train: Vec<(String, String)> =
            rest.into_iter().filter(|(from, to)| !known.contains(&**from) && !known.contains(&**to)).collect();
        if train.is_empty() || held_out.is_empty() {
            return Err(Error::program(format!(
                "{} pairs of at most {} tokens are left to train on, and {} to test on; give more pairs, a smaller \
                 --held-out or a larger --length",
                train.len(),
                limits.length,
                held_out.len()
            )));
        }
        let known = of_rest - train.len();
        let texts = |side: fn(&(String, String)) -> &str| train.iter().map(side);
        let source = Vocabulary::new(limits.unit, texts(|pair| &pair.0), limits.vocabulary);
        let target = Vocabulary::new(limits.unit, texts(|pair| &pair.1), limits.vocabulary);
        let split = |pairs: &[(String, String)]| -> candle_core::Result<Split> {
            let sources = pairs.iter().map(|(from, _)| source.indices(from).chain([END]).collect()).collect();
            let targets = pairs.iter().map(|(_, to)| [BEGIN].into_iter().chain(target.indices(to)).chain([END]));
            Ok(Split { sources: padded(sources)?, targets: padded(targets.map(Iterator::collect).collect())? })
        };
        let (train, held_out) = (split(&train)?, split(&held_out)?);
        Ok(Pairs { source, target, train, held_out, beyond_limit, known })
    }
}

/// Removes columns that have nothing but padding.
pub(crate) fn trimmed(tokens: &Tensor) -> candle_core::Result<Tensor> {
    let rows = tokens.to_vec2::<u32>()?;
    let longest = rows.iter().filter_map(|row| row.iter().rposition(|token| *token != PADDING)).max();
    tokens.narrow(1, 0, longest.map_or(1, |last| last + 1))?.contiguous()
}

/// Makes rows equally long.
fn padded(rows: Vec<Vec<u32>>) -> candle_core::Result<Tensor> {
    let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
    let count = rows.len();
    let fill = |mut row: Vec<u32>| {
        row.resize(longest, PADDING);
        row
    };
    Tensor::from_vec(rows.into_iter().flat_map(fill).collect(), (count, longest), &Device::Cpu)
}

/// Reads pairs from a file with a source, a tab and a target on each line; further columns are ignored. They are
/// shuffled.
pub(crate) fn read(path: &Path, seed: u64) -> distribute::Result<Vec<(String, String)>> {
    let wrong = |problem: String| Error::program(format!("{}: {problem}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| wrong(error.to_string()))?;
    let mut pairs = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.trim().is_empty()) {
        let mut columns = line.split('\t');
        match (columns.next(), columns.next()) {
            (Some(source), Some(target)) => pairs.push((source.to_owned(), target.to_owned())),
            _ => {
                return Err(wrong(format!("line {number} has no tab; give a source, a tab and a target on each line")));
            }
        }
    }
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    for at in (1..pairs.len()).rev() {
        pairs.swap(at, below(&mut random, at as u32 + 1) as usize);
    }
    Ok(pairs)
}

/// Writes random days of the years 1950 to 2049 as people do, each with its ISO 8601 date.
pub(crate) fn dates(count: usize, seed: u64) -> Vec<(String, String)> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let mut date = || {
        let (year, month) = (1950 + below(&mut random, 100), below(&mut random, 12));
        let day = 1 + below(&mut random, days_of(year, month));
        let form = below(&mut random, 10);
        (written(year, month, day, form), format!("{year}-{:02}-{day:02}", month + 1))
    };
    (0..count).map(|_| date()).collect()
}

/// Writes a date in one of ten forms. Months count from 0. Numbers between slashes begin with the month, those between
/// dots with the day; two digits are a year from 1950 on.
fn written(year: u32, month: u32, day: u32, form: u32) -> String {
    let (name, number, short_year) = (MONTHS[month as usize], month + 1, year % 100);
    let short = &name[..3];
    match form {
        0 => format!("{day} {name} {year}"),
        1 => format!("{name} {day}, {year}"),
        2 => format!("{short} {day}, {year}"),
        3 => format!("{day}-{short}-{year}"),
        4 => format!("{}, {name} {day}, {year}", weekday(year, month, day)),
        5 => format!("{} {day} {name} {year}", &weekday(year, month, day)[..3]),
        6 => format!("{number}/{day}/{short_year:02}"),
        7 => format!("{day:02}.{number:02}.{year}"),
        8 => format!("{day}.{number}.{short_year:02}"),
        _ => format!("the {day}{} of {name} {year}", ordinal(day)),
    }
}

fn days_of(year: u32, month: u32) -> u32 {
    match month {
        // The years from 1950 to 2049.
        1 if year.is_multiple_of(4) => 29,
        1 => 28,
        3 | 5 | 8 | 10 => 30,
        _ => 31,
    }
}

/// Sakamoto's algorithm.
fn weekday(year: u32, month: u32, day: u32) -> &'static str {
    let year = year - u32::from(month < 2);
    let shift = [0, 3, 2, 5, 0, 3, 5, 1, 4, 6, 2, 4][month as usize];
    WEEKDAYS[((year + year / 4 - year / 100 + year / 400 + shift + day) % 7) as usize]
}

fn ordinal(day: u32) -> &'static str {
    match day {
        1 | 21 | 31 => "st",
        2 | 22 => "nd",
        3 | 23 => "rd",
        _ => "th",
    }
}

fn below(random: &mut ChaCha8Rng, bound: u32) -> u32 {
    ((u64::from(random.next_u32()) * u64::from(bound)) >> 32) as u32
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

const WEEKDAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
