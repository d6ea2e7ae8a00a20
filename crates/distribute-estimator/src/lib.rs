//! Estimators and feature columns: training, evaluation and prediction of tables, with everything they know in a
//! folder.
//!
//! An estimator holds no variables: each call takes the newest checkpoint of its folder, so a training that was killed
//! resumes, and another process evaluates meanwhile. The crate knows no collective, no optimizer and no file format of
//! its own: models and optimizers are [`distribute_candle`]'s, checkpoints and event files [`distribute_train`]'s.
//!
//! - [`Estimator`]: train, evaluate and predict; of any candle model that implements [`EstimatorModel`].
//! - [`LinearClassifier`], [`LinearRegressor`], [`DnnClassifier`], [`DnnRegressor`]: estimators of [`FeatureColumns`].
//! - [`FeatureColumns`]: how a model sees named columns of numbers and texts; [`InputLayer`] and [`LinearModel`] are
//!   layers of them.
//! - [`RunConfig`]: folder, strategies, and how often is saved; [`train_and_evaluate`]: both, also as several tasks.
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
//! - Training resumes after the newest checkpoint's last step, at the same place in the data.
//! - Scores are means over examples, whatever the batches, the replicas and the workers.
//! - Evaluation and prediction change nothing in the folder but the event files of `eval`.

mod error;
mod estimator;
mod feature_columns;

pub use error::{Error, Result};
pub use estimator::{
    CannedModel, DnnClassifier, DnnRegressor, Estimator, EstimatorModel, EstimatorSpec, EvalSpec, Labels,
    LinearClassifier, LinearRegressor, Mode, RunConfig, Scores, TrainSpec, Until, train_and_evaluate,
    train_and_evaluate_as,
};
pub use feature_columns::{
    Categorical, Combiner, Crossing, Embedding, FeatureColumn, FeatureColumns, InputLayer, LinearModel, Numeric,
};
