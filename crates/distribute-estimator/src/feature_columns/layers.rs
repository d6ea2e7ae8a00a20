//! Layers of models that take feature columns.

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Init, VarBuilder};
use distribute_candle::{Embedding, embedding_with};
use distribute_input::Features;

use super::categorical::Ids;
use super::{Categorical, Combiner, FeatureColumn, FeatureColumns, Numeric};
use crate::Result;

/// The first layer of deep models, which converts columns to one matrix with a row per example.
///
/// # Examples
/// ```
/// use candle_nn::linear;
/// use distribute_candle::CandleStrategy;
/// use distribute_estimator::{Categorical, Error, FeatureColumns, InputLayer, Numeric};
/// use distribute_input::{Column, Features};
/// use distribute_strategy::Strategy;
///
/// let columns = FeatureColumns::new().with(Numeric::new("age")).with(Categorical::identity("floor", 3).indicator());
/// let strategy = Strategy::default_strategy()?;
/// let model = strategy.scope(|vb| InputLayer::new(&columns, vb))?;
/// let homes = Features::new([("age", Column::from(vec![4., 7.])), ("floor", Column::from(vec![2, 0]))])?;
/// let rows = model.first().forward(&homes)?.to_vec2::<f32>()?;
/// assert_eq!(rows, [[4., 0., 0., 1.], [7., 1., 0., 0.]]);
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `tf.compat.v1.feature_column.input_layer`, `tf.keras.layers.DenseFeatures`.
#[derive(Debug)]
pub struct InputLayer {
    columns: Vec<Dense>,
    place: Placement,
}

/// A linear model: each output is the weighted sum of numbers and categories, plus a bias.
///
/// # Source
/// `tf.compat.v1.feature_column.linear_model`.
#[derive(Debug)]
pub struct LinearModel {
    columns: Vec<(Weighed, Embedding)>,
    bias: Tensor,
    place: Placement,
}

/// The device and the type in which a layer computes.
#[derive(Clone, Debug)]
struct Placement {
    device: Device,
    dtype: DType,
}

/// A column that is converted to numbers.
#[derive(Debug)]
enum Dense {
    Numbers(Numeric),
    Counts(Categorical),
    Vectors { of: Categorical, table: Embedding, combiner: Combiner },
}

/// A column with weights.
#[derive(Debug)]
enum Weighed {
    Dense(Dense),
    Categories(Categorical),
}

impl InputLayer {
    /// Builds a layer from columns. The vectors of embeddings are variables under the columns' names.
    ///
    /// # Errors
    /// [`Error::FeatureColumn`](crate::Error::FeatureColumn), wrapped in [`candle_core::Error`], if a description is
    /// invalid or has categories that are not dense; candle's own error if a variable cannot be created.
    pub fn new(columns: &FeatureColumns, vb: VarBuilder<'_>) -> candle_core::Result<InputLayer> {
        columns.check_dense().map_err(candle_core::Error::wrap)?;
        let place = Placement { device: vb.device().clone(), dtype: vb.dtype() };
        let columns: candle_core::Result<Vec<Dense>> =
            columns.columns.iter().map(|column| Dense::new(column, &vb)).collect();
        Ok(InputLayer { columns: columns?, place })
    }

    /// Returns the number of columns of the matrix.
    pub fn width(&self) -> usize {
        self.columns.iter().map(Dense::width).sum()
    }

    /// Computes the matrix.
    ///
    /// # Shapes
    /// (examples, [`width`](InputLayer::width)).
    ///
    /// # Errors
    /// [`Error::Feature`](crate::Error::Feature) if the data do not fit a column,
    /// [`Error::Candle`](crate::Error::Candle) if candle fails.
    pub fn forward(&self, features: &Features) -> Result<Tensor> {
        let parts: Result<Vec<Tensor>> =
            self.columns.iter().map(|column| column.forward(features, &self.place)).collect();
        Ok(Tensor::cat(&parts?, 1)?)
    }
}

impl LinearModel {
    /// Builds a linear model of columns with `outputs` outputs. Weights and bias start at 0.
    ///
    /// # Errors
    /// [`Error::FeatureColumn`](crate::Error::FeatureColumn), wrapped in [`candle_core::Error`], if a description is
    /// invalid; candle's own error if a variable cannot be created.
    pub fn new(columns: &FeatureColumns, outputs: usize, vb: VarBuilder<'_>) -> candle_core::Result<LinearModel> {
        columns.check().map_err(candle_core::Error::wrap)?;
        let place = Placement { device: vb.device().clone(), dtype: vb.dtype() };
        let weighed = |column: &FeatureColumn| {
            let weighed = match column {
                FeatureColumn::Categorical(categories) => Weighed::Categories(categories.clone()),
                dense => Weighed::Dense(Dense::new(dense, &vb)?),
            };
            let inputs = match &weighed {
                Weighed::Categories(categories) => categories.buckets(),
                Weighed::Dense(dense) => dense.width(),
            };
            let weights = embedding_with((inputs, outputs), "weights", Init::Const(0.0), vb.pp(column.name()))?;
            Ok((weighed, weights))
        };
        let columns: candle_core::Result<Vec<_>> = columns.columns.iter().map(weighed).collect();
        let bias = vb.get_with_hints(outputs, "bias_weights", Init::Const(0.0))?;
        Ok(LinearModel { columns: columns?, bias, place })
    }

    /// Computes the outputs.
    ///
    /// # Shapes
    /// (examples, outputs).
    ///
    /// # Errors
    /// [`Error::Feature`](crate::Error::Feature) if the data do not fit a column,
    /// [`Error::Candle`](crate::Error::Candle) if candle fails.
    pub fn forward(&self, features: &Features) -> Result<Tensor> {
        let mut sum = self.bias.unsqueeze(0)?.broadcast_as((features.examples(), self.bias.elem_count()))?;
        for (column, weights) in &self.columns {
            let part = match column {
                Weighed::Categories(categories) => {
                    looked_up(weights, &categories.ids(features)?, Combiner::Sum, &self.place)?
                }
                Weighed::Dense(dense) => dense.forward(features, &self.place)?.matmul(weights.embeddings())?,
            };
            sum = (sum + part)?;
        }
        Ok(sum)
    }
}

impl Dense {
    fn new(column: &FeatureColumn, vb: &VarBuilder<'_>) -> candle_core::Result<Dense> {
        Ok(match column {
            FeatureColumn::Numeric(numeric) => Dense::Numbers(numeric.clone()),
            FeatureColumn::Categorical(categories) | FeatureColumn::Indicator(categories) => {
                Dense::Counts(categories.clone())
            }
            FeatureColumn::Embedding(embedding) => {
                let (of, combiner) = (embedding.of.clone(), embedding.combiner);
                let stdev = 1.0 / (embedding.dimension as f64).sqrt();
                let shape = (of.buckets(), embedding.dimension);
                let vectors = vb.pp(column.name());
                let table = embedding_with(shape, "embedding_weights", Init::Randn { mean: 0.0, stdev }, vectors)?;
                Dense::Vectors { of, table, combiner }
            }
        })
    }

    fn width(&self) -> usize {
        match self {
            Dense::Numbers(numeric) => numeric.width(),
            Dense::Counts(categories) => categories.buckets(),
            Dense::Vectors { table, .. } => table.embeddings().dims().get(1).copied().unwrap_or(0),
        }
    }

    fn forward(&self, features: &Features, place: &Placement) -> Result<Tensor> {
        let (values, shape) = match self {
            Dense::Numbers(numeric) => {
                let (values, examples) = numeric.values(features)?;
                (values, (examples, numeric.width()))
            }
            Dense::Counts(categories) => {
                let (Ids { examples, width, ids }, buckets) = (categories.ids(features)?, categories.buckets());
                let mut counts = vec![0.0; examples * buckets];
                for (at, id) in ids.iter().enumerate() {
                    if let Some(id) = id {
                        counts[at / width * buckets + *id as usize] += 1.0;
                    }
                }
                (counts, (examples, buckets))
            }
            Dense::Vectors { of, table, combiner } => {
                return looked_up(table, &of.ids(features)?, *combiner, place);
            }
        };
        Ok(Tensor::from_vec(values, shape, &place.device)?.to_dtype(place.dtype)?)
    }
}

/// Looks up rows of a table and combines those of each example.
fn looked_up(table: &Embedding, ids: &Ids, combiner: Combiner, place: &Placement) -> Result<Tensor> {
    let Ids { examples, width, ids } = ids;
    let rows: Vec<u32> = ids.iter().map(|id| id.unwrap_or(0)).collect();
    let picked = table.forward(&Tensor::from_vec(rows, ids.len(), &place.device)?)?;
    if *width == 1 && ids.iter().all(Option::is_some) {
        return Ok(picked);
    }
    let weights: Vec<f32> = ids
        .chunks_exact((*width).max(1))
        .flat_map(|ids| {
            let count = ids.iter().flatten().count().max(1) as f32;
            let weight = match combiner {
                Combiner::Sum => 1.0,
                Combiner::Mean => 1.0 / count,
                Combiner::SqrtN => 1.0 / count.sqrt(),
            };
            ids.iter().map(move |id| if id.is_some() { weight } else { 0.0 })
        })
        .collect();
    let weights = Tensor::from_vec(weights, (*examples, *width, 1), &place.device)?.to_dtype(place.dtype)?;
    let dimension = picked.dim(1)?;
    Ok(picked.reshape((*examples, *width, dimension))?.broadcast_mul(&weights)?.sum(1)?)
}
