//! Estimators and feature columns: training, evaluation and prediction on tabular data, with the whole state in a
//! folder.
//!
//! An estimator holds no variables: each call reads the newest checkpoint of its folder, so a training run that was
//! killed can be resumed, and another process can evaluate at the same time. The crate has no collectives, optimizers
//! or file formats of its own: models and optimizers come from [`distribute_candle`], checkpoints and event files from
//! [`distribute_train`].
//!
//! - [`Estimator`] trains, evaluates and predicts with any candle model that implements [`EstimatorModel`].
//! - [`LinearClassifier`], [`LinearRegressor`], [`DnnClassifier`] and [`DnnRegressor`] are estimators of
//!   [`FeatureColumns`]; [`LayersEstimator`] makes one of a model that a `Trainer` could train.
//! - [`FeatureColumns`] describes the named columns of numbers and texts that a model takes; [`InputLayer`] and
//!   [`LinearModel`] are layers of them.
//! - [`RunConfig`] sets the folder, the strategies, and how often checkpoints are saved; [`train_and_evaluate`] trains
//!   and evaluates, also as several tasks.
//!
//! # Examples
//! ```
//! use distribute_candle::Sgd;
//! use distribute_estimator::{Error, EvalSpec, FeatureColumns, LinearRegressor, Numeric, RunConfig, Until};
//! use distribute_input::{Column, Dataset, Features};
//!
//! # let folder = tempfile::tempdir().expect("a folder can be made");
//! # let model_dir = folder.path().join("line");
//! let columns = FeatureColumns::new().with(Numeric::new("x"));
//! let line = LinearRegressor::new(&columns).build(|model| Sgd::new(0.1).build(model), RunConfig::new(model_dir))?;
//! let input = || {
//!     let features = Features::new([("x", Column::from(vec![0., 1., 2.]))])?;
//!     Ok(Dataset::from_tensor_slices((features, Column::from(vec![1., 3., 5.]))).batch(3))
//! };
//! line.train(|| Ok(input()?.repeat_forever()), Until::MaxSteps(200))?;
//! assert!(line.evaluate(&EvalSpec::new(input))?["loss"] < 0.01);
//! # Ok::<(), Error>(())
//! ```
//!
//! # Invariants
//! - Training resumes after the newest checkpoint's last step, at the same position in the data.
//! - Scores are means over examples, independent of batches, replicas and workers.
//! - Evaluation and prediction change nothing in the folder except the event files of `eval`.

mod error;
mod estimator;
mod feature_columns;

pub use error::{Error, Result};
pub use estimator::{
    CannedModel, DnnClassifier, DnnRegressor, Estimator, EstimatorModel, EstimatorSpec, EvalSpec, Labels,
    LayersEstimator, LayersModel, LinearClassifier, LinearRegressor, Mode, RunConfig, Scores, TrainSpec, Until,
    train_and_evaluate, train_and_evaluate_as,
};
pub use feature_columns::{
    Categorical, Combiner, Crossing, Embedding, FeatureColumn, FeatureColumns, InputLayer, LinearModel, Numeric,
};

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
