//! Feature columns: how a model's inputs are made from named columns of numbers and categories.

use std::fmt;
use std::sync::Arc;

use distribute_input::{Column, Features};

use crate::{Error, Result};

mod categorical;
mod layers;

pub use categorical::{Categorical, Crossing};
pub use layers::{InputLayer, LinearModel};

/// The columns of a model, in order.
///
/// Mistakes in a description are reported when a model is built from it, so descriptions need no `?`.
///
/// # Examples
/// ```
/// use distribute_estimator::{Categorical, FeatureColumns, Numeric};
/// let age = Numeric::new("age").normalizer(|age| (age - 40.0) / 20.0);
/// let job = Categorical::vocabulary("job", ["clerk", "cook", "smith"]).oov_buckets(1);
/// let columns = FeatureColumns::new()
///     .with(age.clone())
///     .with(age.bucketized([-0.5, 0.5]))
///     .with(job.clone())
///     .with(Categorical::crossed([job.into(), "town".into()], 100).embedding(4));
/// assert_eq!(columns.names(), ["age", "age_bucketized", "job", "job_X_town_embedding"]);
/// columns.check()?;
/// # Ok::<(), distribute_estimator::Error>(())
/// ```
///
/// # Source
/// `tf.feature_column`.
#[derive(Clone, Debug, Default)]
pub struct FeatureColumns {
    columns: Vec<FeatureColumn>,
}

/// One column of a model.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum FeatureColumn {
    /// Numbers, unchanged.
    Numeric(Numeric),
    /// Categories: a linear model has a weight for each; other models take them as indicator or embedding.
    Categorical(Categorical),
    /// The count of each category.
    Indicator(Categorical),
    /// A learnt vector per category.
    Embedding(Embedding),
}

/// A column of numbers.
///
/// # Source
/// `tf.feature_column.numeric_column`.
#[derive(Clone)]
pub struct Numeric {
    name: String,
    shape: Vec<usize>,
    normalizer: Option<Arc<dyn Fn(f32) -> f32 + Send + Sync>>,
}

/// A learnt vector per category; the vectors of an example are combined into one.
///
/// # Source
/// `tf.feature_column.embedding_column`.
#[derive(Clone, Debug)]
pub struct Embedding {
    of: Categorical,
    dimension: usize,
    combiner: Combiner,
}

/// How the vectors of one example are combined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Combiner {
    /// Their sum.
    Sum,
    /// Their mean.
    #[default]
    Mean,
    /// Their sum divided by the square root of their number.
    SqrtN,
}

impl FeatureColumns {
    /// Creates an empty list.
    pub fn new() -> FeatureColumns {
        FeatureColumns::default()
    }

    /// Adds a column.
    pub fn with(mut self, column: impl Into<FeatureColumn>) -> FeatureColumns {
        self.columns.push(column.into());
        self
    }

    /// Returns the names under which the columns' variables are stored.
    pub fn names(&self) -> Vec<String> {
        self.columns.iter().map(FeatureColumn::name).collect()
    }

    /// Checks the descriptions of all columns.
    ///
    /// # Errors
    /// [`Error::FeatureColumn`], with the name of the first invalid column and the reason.
    pub fn check(&self) -> Result<()> {
        if self.columns.is_empty() {
            let problem = "there is no column at all; give the model at least one".to_owned();
            return Err(Error::FeatureColumn { name: String::new(), problem });
        }
        let names = self.names();
        for (index, column) in self.columns.iter().enumerate() {
            let name = &names[index];
            let problem = match column {
                _ if names[..index].contains(name) => Some("it is given twice; leave one out".to_owned()),
                FeatureColumn::Numeric(numeric) => numeric.problem(),
                FeatureColumn::Categorical(categorical) | FeatureColumn::Indicator(categorical) => {
                    categorical.problem()
                }
                FeatureColumn::Embedding(embedding) if embedding.dimension == 0 => {
                    Some("its vectors have 0 elements; give at least 1".to_owned())
                }
                FeatureColumn::Embedding(embedding) => embedding.of.problem(),
            };
            if let Some(problem) = problem {
                return Err(Error::FeatureColumn { name: name.clone(), problem });
            }
        }
        Ok(())
    }

    /// Checks that every column is dense.
    pub(crate) fn check_dense(&self) -> Result<()> {
        self.check()?;
        for column in &self.columns {
            if let FeatureColumn::Categorical(categorical) = column
                && !categorical.is_bucketized()
            {
                let problem = "it has categories, and this model takes numbers; call indicator() or embedding(…) on it";
                return Err(Error::FeatureColumn { name: categorical.name(), problem: problem.to_owned() });
            }
        }
        Ok(())
    }
}

impl FeatureColumn {
    /// Returns the name under which the column's variables are stored, such as `age_bucketized`.
    pub fn name(&self) -> String {
        match self {
            FeatureColumn::Numeric(numeric) => numeric.name.clone(),
            FeatureColumn::Categorical(categorical) => categorical.name(),
            FeatureColumn::Indicator(categorical) => format!("{}_indicator", categorical.name()),
            FeatureColumn::Embedding(embedding) => format!("{}_embedding", embedding.of.name()),
        }
    }
}

impl Numeric {
    /// Describes a feature with one number per example.
    pub fn new(name: impl Into<String>) -> Numeric {
        Numeric { name: name.into(), shape: Vec::new(), normalizer: None }
    }

    /// Sets the shape of each example.
    pub fn shape(self, shape: impl Into<Vec<usize>>) -> Numeric {
        Numeric { shape: shape.into(), ..self }
    }

    /// Applies a function to each number first.
    pub fn normalizer(self, normalizer: impl Fn(f32) -> f32 + Send + Sync + 'static) -> Numeric {
        Numeric { normalizer: Some(Arc::new(normalizer)), ..self }
    }

    /// Divides the numbers into intervals, which are categories: below the first boundary, from each boundary to below
    /// the next, and from the last on. NaN is refused.
    ///
    /// # Source
    /// `tf.feature_column.bucketized_column`.
    pub fn bucketized(self, boundaries: impl Into<Vec<f32>>) -> Categorical {
        Categorical::bucketized(self, boundaries.into())
    }

    /// Returns the count of numbers per example.
    fn width(&self) -> usize {
        self.shape.iter().product()
    }

    fn problem(&self) -> Option<String> {
        (self.width() == 0).then(|| format!("its shape is {:?}, which holds nothing; give extents from 1", self.shape))
    }

    /// Returns the numbers of all examples, and the number of examples.
    pub(crate) fn values(&self, features: &Features) -> Result<(Vec<f32>, usize)> {
        let column = of(features, &self.name)?;
        let mut values: Vec<f32> = match column {
            Column::Numbers(numbers) => numbers.as_slice().to_vec(),
            Column::Integers(integers) => integers.as_slice().iter().map(|integer| *integer as f32).collect(),
            Column::Texts(_) => {
                let problem =
                    "it holds texts, and a numeric column wants numbers; read it as f32, or give a Categorical";
                return Err(Error::Feature { name: self.name.clone(), problem: problem.to_owned() });
            }
        };
        let examples = column.len();
        let shape = column.shape().get(1..).unwrap_or_default();
        if shape.iter().product::<usize>() != self.width() {
            let problem = format!(
                "its examples have shape {shape:?}, but the column is of shape {:?}; make them equal",
                self.shape
            );
            return Err(Error::Feature { name: self.name.clone(), problem });
        }
        if let Some(normalizer) = &self.normalizer {
            values.iter_mut().for_each(|value| *value = normalizer(*value));
        }
        Ok((values, examples))
    }
}

impl Embedding {
    /// Sets how the vectors of one example are combined. Default: their mean.
    pub fn combiner(self, combiner: Combiner) -> Embedding {
        Embedding { combiner, ..self }
    }
}

/// Returns a feature by its name.
fn of<'a>(features: &'a Features, name: &str) -> Result<&'a Column> {
    features.column(name).map_err(|_| Error::Feature {
        name: name.to_owned(),
        problem: format!(
            "a column of the model wants it, but the data have {}; add it in the input function, or leave the column \
             out",
            features.names().join(", ")
        ),
    })
}

impl fmt::Debug for Numeric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Numeric").field("name", &self.name).field("shape", &self.shape).finish_non_exhaustive()
    }
}

impl From<&str> for Numeric {
    fn from(name: &str) -> Numeric {
        Numeric::new(name)
    }
}

macro_rules! into_column {
    ($($from:ident),*) => {$(
        impl From<$from> for FeatureColumn {
            fn from(column: $from) -> FeatureColumn {
                FeatureColumn::$from(column)
            }
        }
    )*};
}

into_column!(Numeric, Categorical, Embedding);

#[cfg(test)]
mod tests;
