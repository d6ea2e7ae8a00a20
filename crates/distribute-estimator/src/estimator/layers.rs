//! Estimators of candle models that take one tensor and know nothing of features.

use std::sync::Arc;

use candle_core::{ModuleT, Tensor};
use candle_nn::VarBuilder;
use distribute_candle::{Loss, Model, Optimizer};
use distribute_input::{Column, Features};
use distribute_train::metrics::Metric;

use super::head::wide_as;
use super::spec::check_names;
use super::{Estimator, EstimatorModel, EstimatorSpec, Labels, Mode, RunConfig};
use crate::feature_columns::{FeatureColumns, InputLayer, Numeric};
use crate::{Error, Result};

type BuildFn<M> = dyn Fn(VarBuilder<'static>) -> candle_core::Result<M> + Send + Sync;

/// Describes the estimator of a candle model as a [`Trainer`](distribute_candle::Trainer) takes it: layers from one
/// tensor to another, a loss, and metrics. The features of an example are joined to one row by an [`InputLayer`], in
/// the order of the columns.
///
/// Variables have the names that the layers give them, so a checkpoint can be loaded into the same model under a
/// `Trainer`, and the other way round; those of embeddings are `input_layer.COLUMN.embedding_weights`.
///
/// - Labels that are integers are classes, of type `u32`; those that are numbers have the shape of the outputs if they
///   are as many. They are `f32`, or `f64` for outputs of this type; outputs of 16 bits do not round them.
/// - Predictions are the outputs, as `predictions`.
///
/// # Examples
/// ```
/// use candle_nn::linear;
/// use distribute_candle::{MeanSquaredError, Sgd};
/// use distribute_estimator::{Error, EvalSpec, FeatureColumns, LayersEstimator, Numeric, RunConfig, Until};
/// use distribute_input::{Column, Dataset, Features};
/// use distribute_train::metrics::MeanAbsoluteError;
///
/// # let folder = tempfile::tempdir().expect("a folder can be made");
/// # let model_dir = folder.path().join("line");
/// let columns = FeatureColumns::new().with(Numeric::new("x"));
/// let estimator = LayersEstimator::new(&columns, |vb| linear(1, 1, vb.pp("line")), MeanSquaredError)
///     .metric(MeanAbsoluteError)
///     .build(|model| Sgd::new(0.1).build(model), RunConfig::new(model_dir))?;
/// let points = || {
///     let features = Features::new([("x", Column::from(vec![0., 1., 2.]))])?;
///     Ok(Dataset::from_tensor_slices((features, Column::from(vec![1., 3., 5.]))).batch(3))
/// };
/// estimator.train(|| Ok(points()?.repeat_forever()), Until::MaxSteps(300))?;
/// assert!(estimator.evaluate(&EvalSpec::new(points))?["mean_absolute_error"] < 0.1);
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `tf.keras.estimator.model_to_estimator`.
pub struct LayersEstimator<M> {
    columns: FeatureColumns,
    build: Box<BuildFn<M>>,
    loss: Arc<dyn Loss>,
    metrics: Vec<Arc<dyn Metric>>,
    weights: Option<Numeric>,
}

/// A candle model between an input layer and a loss.
pub struct LayersModel<M> {
    input: InputLayer,
    layers: M,
    loss: Arc<dyn Loss>,
    metrics: Arc<[Arc<dyn Metric>]>,
    weights: Option<Numeric>,
}

impl<M: ModuleT + Sync + 'static> LayersEstimator<M> {
    /// Describes the estimator of the layers that `build` makes, which take rows of the columns' width.
    pub fn new(
        columns: &FeatureColumns,
        build: impl Fn(VarBuilder<'static>) -> candle_core::Result<M> + Send + Sync + 'static,
        loss: impl Loss + 'static,
    ) -> LayersEstimator<M> {
        let (columns, build, loss) = (columns.clone(), Box::new(build), Arc::new(loss));
        LayersEstimator { columns, build, loss, metrics: Vec::new(), weights: None }
    }

    /// Adds a metric of the outputs, which evaluations compute. Its name must be its own;
    /// [`Named`](distribute_train::metrics::Named) gives it another one.
    pub fn metric(mut self, metric: impl Metric + 'static) -> LayersEstimator<M> {
        self.metrics.push(Arc::new(metric));
        self
    }

    /// Sets a feature as the weight of each example: its loss is multiplied by it, and scores are means with these
    /// weights. Default: equal weights.
    pub fn weight_column(mut self, weights: impl Into<Numeric>) -> LayersEstimator<M> {
        self.weights = Some(weights.into());
        self
    }

    /// Builds the estimator, with an optimizer such as `|model| Adam::new(1e-3).build(model)`.
    ///
    /// # Errors
    /// [`Error::FeatureColumn`] if a column is invalid or has categories that are not dense; [`Error::Configuration`]
    /// if settings contradict each other, or metrics have equal names.
    pub fn build(
        self,
        optimizer: impl Fn(&Model<LayersModel<M>>) -> distribute_candle::Result<Optimizer> + Send + Sync + 'static,
        config: RunConfig,
    ) -> Result<Estimator<LayersModel<M>>> {
        self.columns.check_dense()?;
        let names: Vec<String> = self.metrics.iter().map(|metric| metric.name()).collect();
        check_names(&names.iter().map(String::as_str).collect::<Vec<_>>()).map_err(|problem| {
            let problem = format!("{problem}, by distribute_train::metrics::Named");
            Error::Configuration { what: "LayersEstimator", problem }
        })?;
        let LayersEstimator { columns, build, loss, metrics, weights } = self;
        let metrics: Arc<[Arc<dyn Metric>]> = metrics.into();
        let model_fn = move |_, vb: VarBuilder<'static>| {
            let input = InputLayer::new(&columns, vb.pp("input_layer"))?;
            let (loss, metrics, weights) = (loss.clone(), metrics.clone(), weights.clone());
            Ok(LayersModel { input, layers: build(vb)?, loss, metrics, weights })
        };
        Estimator::new(model_fn, optimizer, config)
    }
}

impl<M> LayersModel<M> {
    /// Returns the candle model.
    pub fn layers(&self) -> &M {
        &self.layers
    }
}

impl<M: ModuleT> EstimatorModel for LayersModel<M> {
    fn spec(&self, features: &Features, labels: Option<&Labels>, mode: Mode) -> Result<EstimatorSpec> {
        let outputs = self.layers.forward_t(&self.input.forward(features)?, mode == Mode::Train)?;
        let Some(labels) = labels else { return Ok(EstimatorSpec::new().prediction("predictions", &outputs)) };
        let targets = targets(labels, &outputs)?;
        let mut spec = EstimatorSpec::new().loss(&self.loss.per_example(&outputs, &targets)?);
        if mode == Mode::Eval {
            for metric in &*self.metrics {
                spec = spec.measured(metric.name(), metric.clone(), &outputs, &targets);
            }
        }
        Ok(match &self.weights {
            Some(weights) => {
                let (weights, examples) = weights.values(features)?;
                spec.weights(&Tensor::from_vec(weights, examples, outputs.device())?)
            }
            None => spec,
        })
    }
}

/// Returns labels as the targets of outputs.
fn targets(labels: &Labels, outputs: &Tensor) -> Result<Tensor> {
    let flat = labels.shape().iter().product::<usize>() == labels.len();
    let shape = if flat { vec![labels.len()] } else { labels.shape().to_vec() };
    match labels {
        Column::Numbers(numbers) => {
            let values = numbers.as_slice();
            let shape = if values.len() == outputs.elem_count() { outputs.dims().to_vec() } else { shape };
            wide_as(&Tensor::from_slice(values, shape, outputs.device())?, outputs)
        }
        Column::Integers(classes) => {
            let class = |class: &i64| {
                u32::try_from(*class).map_err(|_| Error::Labels {
                    problem: format!("a label is {class}; expected a class from 0 on, or numbers of type f32"),
                })
            };
            let classes = classes.as_slice().iter().map(class).collect::<Result<Vec<u32>>>()?;
            Ok(Tensor::from_vec(classes, shape, outputs.device())?)
        }
        Column::Texts(_) => {
            Err(Error::Labels { problem: "they are texts; give numbers, or the number of each class".to_owned() })
        }
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};

    use super::*;

    #[test]
    fn labels_that_are_numbers_are_not_rounded_to_outputs_of_16_bits() {
        for (dtype, expected) in [(DType::BF16, DType::F32), (DType::F32, DType::F32), (DType::F64, DType::F64)] {
            let outputs = Tensor::zeros((1, 1), dtype, &Device::Cpu).unwrap();
            let targets = targets(&Column::from(vec![1001.0f32]), &outputs).unwrap();
            assert_eq!((targets.dtype(), targets.dims()), (expected, &[1, 1][..]));
            assert_eq!(targets.to_dtype(DType::F64).unwrap().to_vec2::<f64>().unwrap(), [[1001.0]]);
        }
    }
}
