//! Categorical columns.

use std::collections::HashMap;
use std::sync::Arc;

use distribute_input::{Column, Features};
use distribute_types::{FNV64, fnv1a_64};

use super::{Combiner, Embedding, FeatureColumn, Numeric, of};
use crate::{Error, Result};

/// A column of categories, numbered from 0.
///
/// An example may have several categories, if its feature has another dimension. An empty text and -1 stand for no
/// category.
#[derive(Clone, Debug)]
pub struct Categorical {
    kind: Kind,
    /// A setting that this kind of column does not have.
    misused: Option<&'static str>,
}

#[derive(Clone, Debug)]
enum Kind {
    Bucketized { of: Numeric, boundaries: Vec<f32> },
    Vocabulary { name: String, words: Arc<Vocabulary>, oov_buckets: usize, default: Option<usize> },
    Identity { name: String, buckets: usize, default: Option<usize> },
    Hashed { name: String, buckets: usize },
    Crossed { of: Vec<Crossing>, buckets: usize },
}

#[derive(Debug)]
struct Vocabulary {
    numbers: HashMap<String, usize>,
    /// The number of words given, greater than the number of indices if a word occurs twice.
    given: usize,
}

/// One side of crossed categories: a column's categories, or a feature's values.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Crossing {
    /// The values of a feature.
    Feature(String),
    /// The categories of a column.
    Column(Categorical),
}

/// The categories of a batch, with the same number of places per example; places may be empty.
pub(super) struct Ids {
    pub(super) examples: usize,
    /// The number of places per example.
    pub(super) width: usize,
    pub(super) ids: Vec<Option<u32>>,
}

impl Categorical {
    /// Maps each value to its index in a list.
    ///
    /// # Source
    /// `tf.feature_column.categorical_column_with_vocabulary_list`.
    pub fn vocabulary<W: ToString>(name: impl Into<String>, words: impl IntoIterator<Item = W>) -> Categorical {
        let words: Vec<String> = words.into_iter().map(|word| word.to_string()).collect();
        let given = words.len();
        let words = Arc::new(Vocabulary { numbers: words.into_iter().zip(0..).collect(), given });
        Categorical::of(Kind::Vocabulary { name: name.into(), words, oov_buckets: 0, default: None })
    }

    /// Uses integers below `buckets` as categories.
    ///
    /// # Source
    /// `tf.feature_column.categorical_column_with_identity`.
    pub fn identity(name: impl Into<String>, buckets: usize) -> Categorical {
        Categorical::of(Kind::Identity { name: name.into(), buckets, default: None })
    }

    /// Hashes each value, for values that are not known in advance. Several values may share a category.
    ///
    /// The hash is 64-bit FNV-1a of the text, or of the number's digits, the same in every run and on every machine.
    ///
    /// # Source
    /// `tf.feature_column.categorical_column_with_hash_bucket`, which uses another hash.
    pub fn hash_bucket(name: impl Into<String>, buckets: usize) -> Categorical {
        Categorical::of(Kind::Hashed { name: name.into(), buckets })
    }

    /// Hashes each combination of values, one from each side.
    ///
    /// # Source
    /// `tf.feature_column.crossed_column`, which uses another hash.
    pub fn crossed(of: impl IntoIterator<Item = Crossing>, buckets: usize) -> Categorical {
        Categorical::of(Kind::Crossed { of: of.into_iter().collect(), buckets })
    }

    fn of(kind: Kind) -> Categorical {
        Categorical { kind, misused: None }
    }

    pub(super) fn bucketized(of: Numeric, boundaries: Vec<f32>) -> Categorical {
        Categorical::of(Kind::Bucketized { of, boundaries })
    }

    /// Hashes words outside the vocabulary to this many additional categories (out-of-vocabulary buckets).
    ///
    /// Without these and without a [`default`](Categorical::default_category), such words have no category.
    pub fn oov_buckets(mut self, buckets: usize) -> Categorical {
        match &mut self.kind {
            Kind::Vocabulary { oov_buckets, .. } => *oov_buckets = buckets,
            _ => self.misused = Some("oov_buckets is a setting of vocabularies; leave it out"),
        }
        self
    }

    /// Sets the category of words outside a vocabulary, and of numbers outside an identity's range. An empty text and
    /// -1 still have none.
    pub fn default_category(mut self, category: usize) -> Categorical {
        match &mut self.kind {
            Kind::Vocabulary { default, .. } | Kind::Identity { default, .. } => *default = Some(category),
            _ => self.misused = Some("default_category is a setting of vocabularies and identities; leave it out"),
        }
        self
    }

    /// Creates a dense column with the count of each category.
    ///
    /// # Source
    /// `tf.feature_column.indicator_column`.
    pub fn indicator(self) -> FeatureColumn {
        FeatureColumn::Indicator(self)
    }

    /// Creates a dense column with a learnt vector of `dimension` numbers per category.
    ///
    /// # Source
    /// `tf.feature_column.embedding_column`.
    pub fn embedding(self, dimension: usize) -> Embedding {
        Embedding { of: self, dimension, combiner: Combiner::default() }
    }

    /// Returns the number of categories.
    pub fn buckets(&self) -> usize {
        match &self.kind {
            Kind::Bucketized { of, boundaries } => of.width() * (boundaries.len() + 1),
            Kind::Vocabulary { words, oov_buckets, .. } => words.given + oov_buckets,
            Kind::Identity { buckets, .. } | Kind::Hashed { buckets, .. } | Kind::Crossed { buckets, .. } => *buckets,
        }
    }

    pub(super) fn is_bucketized(&self) -> bool {
        matches!(self.kind, Kind::Bucketized { .. })
    }

    pub(super) fn name(&self) -> String {
        match &self.kind {
            Kind::Bucketized { of, .. } => format!("{}_bucketized", of.name),
            Kind::Vocabulary { name, .. } | Kind::Identity { name, .. } | Kind::Hashed { name, .. } => name.clone(),
            Kind::Crossed { of, .. } => {
                let name = |side: &Crossing| match side {
                    Crossing::Feature(name) => name.clone(),
                    Crossing::Column(column) => column.name(),
                };
                of.iter().map(name).collect::<Vec<_>>().join("_X_")
            }
        }
    }

    /// Returns the error in the description, if any.
    pub(super) fn problem(&self) -> Option<String> {
        match &self.kind {
            _ if self.misused.is_some() => self.misused.map(str::to_owned),
            Kind::Bucketized { of, .. } if of.problem().is_some() => of.problem(),
            Kind::Bucketized { boundaries, .. } if boundaries.is_empty() => {
                Some("it has no boundaries; give at least one".to_owned())
            }
            Kind::Bucketized { boundaries, .. }
                if !boundaries.is_sorted_by(|one, two| one < two) || boundaries[0].is_nan() =>
            {
                Some(format!("its boundaries are {boundaries:?}; give them in ascending order, each once"))
            }
            Kind::Vocabulary { words, .. } if words.given == 0 => {
                Some("its vocabulary is empty; give at least one word".to_owned())
            }
            Kind::Vocabulary { words, .. } if words.numbers.len() < words.given => Some(format!(
                "its vocabulary has {} words, of which {} differ; give each once",
                words.given,
                words.numbers.len()
            )),
            Kind::Vocabulary { oov_buckets, default: Some(_), .. } if *oov_buckets > 0 => {
                Some("it has both a default and buckets for unknown words; give one of them".to_owned())
            }
            Kind::Crossed { of, .. } if of.len() < 2 => {
                Some(format!("it crosses {} features; give at least two", of.len()))
            }
            Kind::Crossed { of, .. } if of.iter().any(|side| side.problem().is_some()) => {
                of.iter().find_map(Crossing::problem)
            }
            Kind::Vocabulary { default: Some(category), .. } | Kind::Identity { default: Some(category), .. }
                if *category >= self.buckets() =>
            {
                Some(format!("its default is category {category}, but it has {}; give one below that", self.buckets()))
            }
            _ if self.buckets() == 0 => Some("it has 0 categories; give at least 1".to_owned()),
            _ if u32::try_from(self.buckets()).is_err() => {
                Some(format!("it has {} categories; give fewer than 2^32", self.buckets()))
            }
            _ => None,
        }
    }

    /// Returns the categories of each example.
    pub(super) fn ids(&self, features: &Features) -> Result<Ids> {
        match &self.kind {
            Kind::Bucketized { of, boundaries } => {
                let ((values, examples), width) = (of.values(features)?, of.width());
                let bucket = |(at, value): (usize, &f32)| {
                    if value.is_nan() {
                        let problem = "it holds NaN, or its normalizer makes it, and intervals want numbers; replace \
                                       it in the input function or in the normalizer";
                        return Err(Error::Feature { name: of.name.clone(), problem: problem.to_owned() });
                    }
                    let place = boundaries.partition_point(|boundary| boundary <= value);
                    Ok(Some((at % width * (boundaries.len() + 1) + place) as u32))
                };
                Ok(Ids { examples, width, ids: values.iter().enumerate().map(bucket).collect::<Result<_>>()? })
            }
            Kind::Vocabulary { name, words, oov_buckets, default } => {
                let number = |word: &str| {
                    let known = words.numbers.get(word).copied();
                    let oov = || (*oov_buckets > 0).then(|| words.given + bucket_of(hash(word), *oov_buckets));
                    Ok(known.or_else(oov).or(*default))
                };
                ids_of_words(name, features, number)
            }
            Kind::Hashed { name, buckets } => {
                ids_of_words(name, features, |word| Ok(Some(bucket_of(hash(word), *buckets))))
            }
            Kind::Identity { name, buckets, default } => {
                let Column::Integers(numbers) = of(features, name)? else {
                    let problem = format!(
                        "it holds {}, and an identity wants whole numbers; read it as i64",
                        of(features, name)?.kind()
                    );
                    return Err(Error::Feature { name: name.clone(), problem });
                };
                let id = |number: &i64| match usize::try_from(*number).ok().filter(|number| number < buckets) {
                    Some(number) => Ok(Some(number as u32)),
                    None if *number == -1 => Ok(None),
                    None if default.is_some() => Ok(default.map(|default| default as u32)),
                    None => {
                        let problem = format!(
                            "it holds {number}, and its column has categories from 0 to {}; give more buckets, or a \
                                 default",
                            buckets - 1
                        );
                        Err(Error::Feature { name: name.clone(), problem })
                    }
                };
                Ids::new(numbers.shape(), numbers.as_slice().iter().map(id).collect::<Result<_>>()?)
            }
            Kind::Crossed { of, buckets } => crossed(of, *buckets, features),
        }
    }
}

impl Crossing {
    fn problem(&self) -> Option<String> {
        match self {
            Crossing::Feature(_) => None,
            Crossing::Column(column) => column.problem(),
        }
    }

    /// Returns a number for each value, the number of examples, and the number of values per example.
    fn values(&self, features: &Features) -> Result<(Vec<Option<u64>>, usize, usize)> {
        let Ids { examples, width, ids } = match self {
            Crossing::Column(column) => column.ids(features)?,
            Crossing::Feature(name) => {
                let column = of(features, name)?;
                let values = match column {
                    Column::Texts(texts) => {
                        texts.as_slice().iter().map(|text| (!text.is_empty()).then(|| hash(text))).collect()
                    }
                    Column::Integers(numbers) => {
                        numbers.as_slice().iter().map(|number| (*number != -1).then_some(*number as u64)).collect()
                    }
                    Column::Numbers(_) => {
                        let problem = "it holds numbers, which are not crossed; cross numeric.bucketized(…)".to_owned();
                        return Err(Error::Feature { name: name.clone(), problem });
                    }
                };
                return Ok((values, column.len(), width_of(column.shape())));
            }
        };
        Ok((ids.into_iter().map(|id| id.map(u64::from)).collect(), examples, width))
    }
}

/// Combines each value of every side with each of the others.
fn crossed(of: &[Crossing], buckets: usize, features: &Features) -> Result<Ids> {
    // Starts with one empty combination per example.
    let (mut combined, mut width): (Vec<Option<u64>>, usize) = (vec![Some(hash("")); features.examples()], 1);
    for side in of {
        let (values, _, own) = side.values(features)?;
        let pairs = combined.chunks_exact(width.max(1)).zip(values.chunks_exact(own.max(1)));
        combined = pairs
            .flat_map(|(before, values)| {
                before.iter().flat_map(move |before| values.iter().map(move |value| mixed((*before)?, (*value)?)))
            })
            .collect();
        width *= own;
    }
    let ids = combined.into_iter().map(|value| Some(bucket_of(value?, buckets) as u32)).collect();
    Ok(Ids { examples: features.examples(), width, ids })
}

/// Continues FNV-1a over the bytes of another number.
fn mixed(before: u64, value: u64) -> Option<u64> {
    Some(fnv1a_64(before, value.to_le_bytes()))
}

/// Hashes a text. Weights in checkpoints belong to the buckets of hashes, so this never changes.
fn hash(text: &str) -> u64 {
    fnv1a_64(FNV64, text.bytes())
}

fn bucket_of(hash: u64, buckets: usize) -> usize {
    (hash % buckets.max(1) as u64) as usize
}

/// Returns the categories of texts, or of integers by their digits.
fn ids_of_words(name: &str, features: &Features, number: impl Fn(&str) -> Result<Option<usize>>) -> Result<Ids> {
    let id = |word: &str| Ok(if word.is_empty() { None } else { number(word)?.map(|number| number as u32) });
    match of(features, name)? {
        Column::Texts(words) => {
            Ids::new(words.shape(), words.as_slice().iter().map(|word| id(word)).collect::<Result<_>>()?)
        }
        Column::Integers(numbers) => {
            let id = |number: &i64| if *number == -1 { Ok(None) } else { id(&number.to_string()) };
            Ids::new(numbers.shape(), numbers.as_slice().iter().map(id).collect::<Result<_>>()?)
        }
        Column::Numbers(_) => {
            let problem = "it holds numbers, and categories are texts or whole numbers; read it as such, or give \
                           Numeric::new(…).bucketized(…)";
            Err(Error::Feature { name: name.to_owned(), problem: problem.to_owned() })
        }
    }
}

/// Returns the number of values per example for a shape.
fn width_of(shape: &[usize]) -> usize {
    shape.get(1..).unwrap_or_default().iter().product()
}

impl Ids {
    fn new(shape: &[usize], ids: Vec<Option<u32>>) -> Result<Ids> {
        Ok(Ids { examples: shape.first().copied().unwrap_or(1), width: width_of(shape), ids })
    }
}

impl From<&str> for Crossing {
    fn from(name: &str) -> Crossing {
        Crossing::Feature(name.to_owned())
    }
}

impl From<Categorical> for Crossing {
    fn from(column: Categorical) -> Crossing {
        Crossing::Column(column)
    }
}
