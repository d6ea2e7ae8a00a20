//! Tables that turn words or numbers into ids.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use distribute_types::{FNV64, fnv1a_64};

use crate::read::{Lines, ReadOptions};
use crate::{Array, Dataset, Error, Ragged, Result};

/// A key of a [`LookupTable`]: a text or an integer.
pub trait LookupKey: sealed::Key {}

impl LookupKey for String {}
impl LookupKey for i64 {}

mod sealed {
    use std::fmt::Debug;
    use std::hash::Hash;

    pub trait Key: Clone + Debug + Eq + Hash + std::borrow::Borrow<Self::Borrowed> + Send + Sync + 'static {
        /// The type of a key that is looked up.
        type Borrowed: ?Sized + Debug + Eq + Hash + ToString;
    }

    impl Key for String {
        type Borrowed = str;
    }

    impl Key for i64 {
        type Borrowed = i64;
    }
}

/// The ids of keys that a [`LookupTable`] does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnknownKeys {
    /// They are errors. The default.
    Refuse,
    /// They have this id.
    Id(i64),
    /// They are hashed to this many ids that follow those of the vocabulary, at least one.
    ///
    /// The hash is 64-bit FNV-1a of the text, or of the number's digits, the same in every run and on every machine.
    Buckets(u32),
}

/// An immutable table from keys to ids, for the `map` of a dataset. Clones share its memory.
///
/// A table is built once in each process that looks up: before the dataset that uses it, or, in functions of workers
/// of parameter servers, by `WorkerContext::keep`. Tasks agree on the ids if they build it from the same list or file.
///
/// # Examples
/// ```
/// use distribute_input::{Array, Dataset, LookupTable, UnknownKeys};
/// let colours = LookupTable::vocabulary(["red", "green", "blue"])?.unknown(UnknownKeys::Buckets(2))?;
/// assert_eq!((colours.id("blue")?, colours.rows()), (2, 5));
/// let words = Array::new([2, 2], ["red", "blue", "green", "red"].map(str::to_owned).to_vec())?;
/// let ids = Dataset::from_tensor_slices(words).map(move |row| Ok(colours.lookup(&row)?)).batch(2);
/// assert_eq!(ids.iter().next().expect("there is a batch")?.as_slice(), [0, 2, 1, 0]);
///
/// // The ids of Keras' StringLookup: the first one is that of all unknown words.
/// let words = ["a", "b"].map(str::to_owned);
/// let keras = LookupTable::new(words.into_iter().zip(1..))?.unknown(UnknownKeys::Id(0))?;
/// assert_eq!((keras.id("b")?, keras.id("c")?), (2, 0));
/// # Ok::<(), distribute_input::Error>(())
/// ```
///
/// # Source
/// `tf.lookup.StaticHashTable` and `StaticVocabularyTable`, which hashes unknown keys otherwise;
/// `tf.keras.layers.StringLookup`.
#[derive(Clone, PartialEq)]
pub struct LookupTable<K: LookupKey> {
    ids: Arc<HashMap<K, i64>>,
    unknown: UnknownKeys,
}

impl<K: LookupKey> LookupTable<K> {
    /// Creates a table from keys with their ids. Keys may share an id.
    ///
    /// # Errors
    /// [`Error::Lookup`] if a key is given twice, or there are no keys.
    pub fn new(ids: impl IntoIterator<Item = (K, i64)>) -> Result<LookupTable<K>> {
        LookupTable::of(ids.into_iter().map(Ok), "entry")
    }

    /// Creates a table that numbers the keys from 0 in the given order.
    ///
    /// # Errors
    /// The errors of [`new`](LookupTable::new) occur in the same cases.
    pub fn vocabulary<I: Into<K>>(keys: impl IntoIterator<Item = I>) -> Result<LookupTable<K>> {
        LookupTable::new(keys.into_iter().map(Into::into).zip(0..))
    }

    /// Sets the ids of keys that the table does not have; by default they are errors.
    ///
    /// # Errors
    /// [`Error::Lookup`] for 0 buckets, and for buckets of a table whose ids are not 0 to n - 1, each once, since the
    /// buckets follow them.
    pub fn unknown(self, unknown: UnknownKeys) -> Result<LookupTable<K>> {
        if let UnknownKeys::Buckets(buckets) = unknown {
            let ids: BTreeSet<i64> = self.ids.values().copied().collect();
            if !ids.into_iter().eq(0..self.ids.len() as i64) {
                let len = self.ids.len();
                return Err(wrong(format!(
                    "buckets of unknown keys follow the ids of {len} keys, which are not 0 to {}, each once; give ids \
                     so, or give unknown keys an id",
                    len - 1
                )));
            }
            if buckets == 0 {
                return Err(wrong("unknown keys were given 0 buckets; give at least 1, or refuse them".to_owned()));
            }
        }
        Ok(LookupTable { unknown, ..self })
    }

    /// Returns the id of a key.
    ///
    /// # Errors
    /// [`Error::Lookup`] for an unknown key, unless [`unknown`](LookupTable::unknown) keys have ids.
    pub fn id(&self, key: &K::Borrowed) -> Result<i64> {
        if let Some(id) = self.ids.get(key) {
            return Ok(*id);
        }
        match self.unknown {
            UnknownKeys::Id(id) => Ok(id),
            UnknownKeys::Buckets(buckets) => {
                let bucket = fnv1a_64(FNV64, key.to_string().bytes()) % u64::from(buckets);
                Ok(self.ids.len() as i64 + bucket as i64)
            }
            UnknownKeys::Refuse => Err(wrong(format!(
                "{key:?} is not one of its {} keys; add it, or give unknown keys an id or buckets",
                self.ids.len()
            ))),
        }
    }

    /// Returns the ids of an array's keys.
    ///
    /// # Shapes
    /// That of `keys`.
    ///
    /// # Errors
    /// The errors of [`id`](LookupTable::id) occur in the same cases.
    pub fn lookup(&self, keys: &Array<K>) -> Result<Array<i64>> {
        let ids = keys.as_slice().iter().map(|key| self.id(key.borrow()));
        Array::new(keys.shape(), ids.collect::<Result<_>>()?)
    }

    /// Returns the ids of the keys of rows that differ in length, such as the words of sentences.
    ///
    /// # Errors
    /// The errors of [`id`](LookupTable::id) occur in the same cases.
    pub fn lookup_ragged(&self, keys: &Ragged<K>) -> Result<Ragged<i64>> {
        Ragged::new(self.lookup(keys.values())?, keys.row_splits())
    }

    /// Returns whether the table has a key.
    pub fn contains(&self, key: &K::Borrowed) -> bool {
        self.ids.contains_key(key)
    }

    /// Returns the number of keys, at least one.
    #[expect(clippy::len_without_is_empty, reason = "no table is empty")]
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Returns the number of rows that an embedding of the ids needs: one more than the largest id, also of unknown
    /// keys. Negative ids have no row.
    pub fn rows(&self) -> usize {
        let last = match self.unknown {
            UnknownKeys::Refuse => -1,
            UnknownKeys::Id(id) => id,
            UnknownKeys::Buckets(buckets) => self.ids.len() as i64 + i64::from(buckets) - 1,
        };
        let last = self.ids.values().copied().fold(last, i64::max);
        usize::try_from(last).map_or(0, |last| last.saturating_add(1))
    }

    /// Creates a table from entries, whose positions, from 1, are called `unit`.
    fn of(entries: impl Iterator<Item = Result<(K, i64)>>, unit: &str) -> Result<LookupTable<K>> {
        let (mut ids, mut places) = (HashMap::new(), HashMap::new());
        for (place, entry) in (1usize..).zip(entries) {
            let (key, id) = entry?;
            if let Some(first) = places.insert(key.clone(), place) {
                return Err(wrong(format!(
                    "{key:?} of {unit} {first} is given again as {unit} {place}; give each key once"
                )));
            }
            ids.insert(key, id);
        }
        if ids.is_empty() {
            return Err(wrong("it has no keys; give at least one".to_owned()));
        }
        Ok(LookupTable { ids: Arc::new(ids), unknown: UnknownKeys::Refuse })
    }
}

impl LookupTable<String> {
    /// Creates a table of the lines of a file, numbered from 0. The file may be compressed or in a store, as those of
    /// [`Lines`].
    ///
    /// # Errors
    /// [`Error::Lookup`] if a line occurs twice or there are none; [`Error::File`] if the file cannot be read;
    /// [`Error::Record`] for a line that is not UTF-8.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::LookupTable;
    /// # let folder = tempfile::tempdir()?;
    /// # let path = folder.path().join("words.txt");
    /// std::fs::write(&path, "the\nof\nand\n")?;
    /// assert_eq!(LookupTable::vocabulary_file(&path)?.id("and")?, 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Source
    /// `tf.lookup.TextFileInitializer`.
    pub fn vocabulary_file(path: impl AsRef<Path>) -> Result<LookupTable<String>> {
        let lines = Dataset::from_files([path.as_ref()]).read(Lines, ReadOptions::default());
        let table = LookupTable::of(lines.iter().zip(0..).map(|(line, id)| Ok((line?, id))), "line");
        table.map_err(|error| match error {
            Error::Lookup { problem } => wrong(format!("{}: {problem}", path.as_ref().display())),
            other => other,
        })
    }
}

impl<K: LookupKey> fmt::Debug for LookupTable<K> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "LookupTable({} keys, unknown: {:?})", self.ids.len(), self.unknown)
    }
}

fn wrong(problem: String) -> Error {
    Error::Lookup { problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said<T: fmt::Debug>(outcome: Result<T>) -> String {
        match outcome {
            Err(Error::Lookup { problem }) => problem,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn known_keys_have_their_ids_and_unknown_ones_what_was_set() {
        let table = LookupTable::<String>::vocabulary(["a", "b", "c"]).unwrap();
        let words =
            |words: &[&str]| Array::new([words.len(), 1], words.iter().map(|w| (*w).to_owned()).collect()).unwrap();
        assert_eq!(table.lookup(&words(&["c", "a"])).unwrap(), Array::new([2, 1], vec![2, 0]).unwrap());
        assert_eq!((table.len(), table.rows(), table.contains("d")), (3, 3, false));
        assert!(said(table.lookup(&words(&["a", "dé"]))).contains("\"dé\" is not one of its 3 keys"));
        let default = table.clone().unknown(UnknownKeys::Id(-1)).unwrap();
        assert_eq!((default.id("d").unwrap(), default.rows()), (-1, 3));
        // FNV-1a of "a" is 0xaf63dc4c8601ec8c, and of "7" the same as of 7.
        let buckets = |buckets| LookupTable::<String>::vocabulary(["b", "c"])?.unknown(UnknownKeys::Buckets(buckets));
        let ten = buckets(10).unwrap();
        assert_eq!((ten.id("a").unwrap(), ten.rows()), (2 + (0xaf63_dc4c_8601_ec8c_u64 % 10) as i64, 12));
        let numbers = LookupTable::<i64>::vocabulary([10, -20]).unwrap().unknown(UnknownKeys::Buckets(10)).unwrap();
        assert_eq!(numbers.lookup(&Array::from(vec![-20, 10])).unwrap().as_slice(), [1, 0]);
        assert_eq!(numbers.id(&7).unwrap(), ten.id("7").unwrap());
        assert!(said(buckets(0)).contains("0 buckets"));
    }

    #[test]
    fn ids_of_a_programs_own_may_repeat_and_keys_may_not() {
        let table = LookupTable::new([(5, 1), (6, 1), (7, 40)]).unwrap();
        assert_eq!((table.id(&6).unwrap(), table.rows()), (1, 41));
        for ids in [vec![(5, 1), (6, 2)], vec![(5, 0), (6, 0)], vec![(5, 0), (6, 2)]] {
            let table = LookupTable::new(ids).unwrap();
            assert!(said(table.unknown(UnknownKeys::Buckets(1))).contains("are not 0 to 1, each once"));
        }
        assert!(said(LookupTable::new([(5, 0), (6, 1), (5, 0)])).contains("5 of entry 1 is given again as entry 3"));
        assert!(said(LookupTable::<String>::vocabulary(Vec::<String>::new())).contains("no keys"));
    }

    #[test]
    fn the_lines_of_a_file_are_a_vocabulary() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("words.txt");
        let of = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            LookupTable::vocabulary_file(&path)
        };
        let table = of(b"the\r\nof\nand").unwrap();
        let rows = Ragged::new(Array::from(["of", "and", "the"].map(str::to_owned).to_vec()), [0, 1, 3]).unwrap();
        let ids = table.lookup_ragged(&rows).unwrap();
        assert_eq!((ids.values().as_slice(), ids.row_splits()), (&[1, 2, 0][..], &[0, 1, 3][..]));
        let twice = said(of(b"a\nb\na\n"));
        assert!(twice.contains("words.txt: \"a\" of line 1 is given again as line 3"), "{twice}");
        assert!(said(of(b"")).contains("words.txt: it has no keys"));
        assert!(matches!(of(b"a\n\xff\n"), Err(Error::Record { record: 1, .. })));
        let missing = LookupTable::vocabulary_file(folder.path().join("none"));
        assert!(matches!(missing, Err(Error::File { .. })), "{missing:?}");
    }
}
