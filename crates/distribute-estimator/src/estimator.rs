//! Training, evaluation and prediction whose whole state is in a folder.

use std::collections::BTreeMap;
use std::path::PathBuf;

use candle_core::{Device, Tensor};
use candle_nn::VarBuilder;
use distribute_candle::{CandleStrategy, Model, Optimizer};
use distribute_device::BufferRef;
use distribute_input::{BoxError, Column, Dataset};
use distribute_strategy::Strategy;
use distribute_train::checkpoint::{CheckpointManager, MODEL, OPTIMIZER, Snapshot};
use distribute_values::TensorStorage;

use crate::{Error, Result};

mod canned;
mod config;
mod dnn;
mod evaluation;
mod evaluator;
mod head;
mod layers;
mod linear;
mod spec;
mod together;
mod training;

pub use canned::CannedModel;
pub use config::RunConfig;
pub use dnn::{DnnClassifier, DnnRegressor};
pub use evaluation::EvalSpec;
pub use layers::{LayersEstimator, LayersModel};
pub use linear::{LinearClassifier, LinearRegressor};
pub use spec::{EstimatorModel, EstimatorSpec, Mode};
pub use together::{train_and_evaluate, train_and_evaluate_as};
pub use training::{TrainSpec, Until};

/// The labels of a batch: a column with one row per example.
pub type Labels = Column;

/// Losses, metrics and `global_step`, by name.
pub type Scores = BTreeMap<String, f64>;

/// An input function, which is called once for each training, evaluation or prediction.
type InputFn<'a, T> = Box<dyn Fn() -> Result<Dataset<T>, BoxError> + 'a>;

type ModelFn<M> = dyn Fn(Mode, VarBuilder<'static>) -> candle_core::Result<M> + Send + Sync;
type OptimizerFn<M> = dyn Fn(&Model<M>) -> distribute_candle::Result<Optimizer> + Send + Sync;

/// A model of tabular data that can be trained, evaluated and used for prediction under any strategy.
///
/// It holds no variables: they are in the checkpoints of its `model_dir`, and every call reads the newest. So a
/// training run that was killed can be resumed, and another process can evaluate at the same time.
///
/// Input functions return datasets that are batched by the global batch. Every worker must make the same calls.
///
/// [`LinearClassifier`], [`LinearRegressor`], [`DnnClassifier`] and [`DnnRegressor`] build an estimator from
/// [`FeatureColumns`](crate::FeatureColumns), [`LayersEstimator`] one from a model of tensors; [`Estimator::new`] takes
/// any candle model.
///
/// # Examples
/// ```
/// use candle_nn::{Linear, Module, VarBuilder, linear};
/// use distribute_candle::{Loss, MeanSquaredError, Sgd};
/// use distribute_estimator::{
///     Error, Estimator, EstimatorModel, EstimatorSpec, EvalSpec, FeatureColumns, InputLayer, Labels, Mode, Numeric,
///     Result, RunConfig, Until,
/// };
/// use distribute_input::{Column, Dataset, Features};
/// use distribute_train::metrics::MeanAbsoluteError;
///
/// struct Line { input: InputLayer, line: Linear }
///
/// impl EstimatorModel for Line {
///     fn spec(&self, features: &Features, labels: Option<&Labels>, _: Mode) -> Result<EstimatorSpec> {
///         let y = self.line.forward(&self.input.forward(features)?)?;
///         let spec = EstimatorSpec::new().prediction("y", &y);
///         let Some(Column::Numbers(labels)) = labels else { return Ok(spec) };
///         let right = candle_core::Tensor::from_slice(labels.as_slice(), y.dims(), y.device())?;
///         Ok(spec.loss(&MeanSquaredError.per_example(&y, &right)?).metric("off_by", MeanAbsoluteError, &y, &right))
///     }
/// }
///
/// # let folder = tempfile::tempdir().expect("a folder can be made");
/// # let model_dir = folder.path().join("line");
/// let columns = FeatureColumns::new().with(Numeric::new("x"));
/// let model_fn = move |_mode, vb: VarBuilder<'static>| {
///     Ok(Line { input: InputLayer::new(&columns, vb.pp("input"))?, line: linear(1, 1, vb.pp("line"))? })
/// };
/// let estimator = Estimator::new(model_fn, |model| Sgd::new(0.1).build(model), RunConfig::new(model_dir))?;
/// let points = || {
///     let x: Vec<f32> = (0..16).map(|x| x as f32 / 8.0).collect();
///     let y: Vec<f32> = x.iter().map(|x| 2.0 * x + 1.0).collect();
///     let features = Features::new([("x", Column::from(x))])?;
///     Ok(Dataset::from_tensor_slices((features, Column::from(y))).batch(8).repeat_forever())
/// };
/// estimator.train(points, Until::MaxSteps(200))?;
/// let scores = estimator.evaluate(&EvalSpec::new(points).steps(2))?;
/// assert!(scores["off_by"] < 0.1 && scores["global_step"] == 200.0, "{scores:?}");
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `tf.estimator.Estimator`.
pub struct Estimator<M> {
    model_fn: Box<ModelFn<M>>,
    optimizer: Box<OptimizerFn<M>>,
    config: RunConfig,
}

impl<M: EstimatorModel + Sync> Estimator<M> {
    /// Creates an estimator from a function that builds the model, one that builds its optimizer, and a configuration.
    ///
    /// `model_fn` is called once for each replica of each training, evaluation and prediction. Variables must have the
    /// same names and shapes in all modes.
    ///
    /// # Errors
    /// [`Error::Configuration`] if settings contradict each other.
    pub fn new(
        model_fn: impl Fn(Mode, VarBuilder<'static>) -> candle_core::Result<M> + Send + Sync + 'static,
        optimizer: impl Fn(&Model<M>) -> distribute_candle::Result<Optimizer> + Send + Sync + 'static,
        config: RunConfig,
    ) -> Result<Estimator<M>> {
        config.check()?;
        Ok(Estimator { model_fn: Box::new(model_fn), optimizer: Box::new(optimizer), config })
    }

    /// Returns the configuration.
    pub fn config(&self) -> &RunConfig {
        &self.config
    }

    /// Returns the folder of the newest checkpoint in `model_dir`, if there is one.
    ///
    /// # Errors
    /// [`Error::Train`] if the folder cannot be read.
    ///
    /// # Source
    /// `Estimator.latest_checkpoint`.
    pub fn latest_checkpoint(&self) -> Result<Option<PathBuf>> {
        Ok(self.checkpoints().list()?.into_iter().next().map(|(_, path)| path))
    }

    /// Returns the names of the newest checkpoint's variables: the model's, then the optimizer's.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] if there is none, [`Error::Train`] if it cannot be read or is damaged.
    ///
    /// # Source
    /// `Estimator.get_variable_names`.
    pub fn variable_names(&self) -> Result<Vec<String>> {
        let snapshot = self.newest()?;
        Ok([MODEL, OPTIMIZER].iter().flat_map(|file| snapshot.names(file)).map(str::to_owned).collect())
    }

    /// Returns the value of a variable in the newest checkpoint.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] if there is none; [`Error::NotInCheckpoint`], with the names in it, if it has no such
    /// variable; [`Error::Train`] if it cannot be read or is damaged.
    ///
    /// # Source
    /// `Estimator.get_variable_value`.
    pub fn variable_value(&self, name: &str) -> Result<Tensor> {
        let snapshot = self.newest()?;
        let found = [MODEL, OPTIMIZER].iter().find_map(|file| snapshot.tensor(file, name));
        let Some((dtype, shape, bytes)) = found else {
            let known = [MODEL, OPTIMIZER].iter().flat_map(|file| snapshot.names(file)).collect::<Vec<_>>().join(", ");
            return Err(Error::NotInCheckpoint { name: name.to_owned(), known });
        };
        let elements = BufferRef::from_bytes(dtype, bytes).map_err(distribute_values::Error::from)?;
        Ok(Tensor::zeros((), candle_core::DType::F32, &Device::Cpu)?.beside(shape, elements)?)
    }

    /// Builds the model for a strategy's replicas, with initial values.
    fn model(&self, strategy: &Strategy, mode: Mode) -> Result<Model<M>> {
        Ok(strategy.scope_seeded(self.config.seed, |vb| (self.model_fn)(mode, vb))?)
    }

    fn checkpoints(&self) -> CheckpointManager {
        let keep = if self.config.keep_checkpoint_max == 0 { usize::MAX } else { self.config.keep_checkpoint_max };
        CheckpointManager::new(&self.config.model_dir).keep(keep)
    }

    /// Reads the newest checkpoint, in this process only.
    fn newest(&self) -> Result<Snapshot> {
        let newest = self.checkpoints().read_newest()?;
        newest.ok_or_else(|| Error::NoCheckpoint { folder: self.config.model_dir.clone() })
    }

    fn train_strategy(&self) -> Result<Strategy> {
        Ok(match &self.config.train_distribute {
            Some(strategy) => strategy.clone(),
            None => Strategy::default_strategy()?,
        })
    }

    /// Workers that train together also read checkpoints together, since only the chief needs to have them.
    fn eval_strategy(&self) -> Result<Strategy> {
        let of_training = self.config.train_distribute.as_ref().filter(|strategy| strategy.topology().workers() > 1);
        Ok(match self.config.eval_distribute.as_ref().or(of_training) {
            Some(strategy) => strategy.clone(),
            None => Strategy::default_strategy()?,
        })
    }
}
