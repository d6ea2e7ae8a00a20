//! Errors of estimators.

use std::path::PathBuf;

use distribute_types::{Class, Classified, ErrorClass};

use crate::Mode;

/// The errors of this crate.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A candle model or its optimizer failed.
    #[error(transparent)]
    Model(#[from] distribute_candle::Error),
    /// An operation of candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// The strategy failed.
    #[error(transparent)]
    Strategy(#[from] distribute_strategy::Error),
    /// A distributed value was used incorrectly, or could not be reduced.
    #[error(transparent)]
    Values(#[from] distribute_values::Error),
    /// A checkpoint, an event file or a metric failed, or the training was preempted.
    #[error(transparent)]
    Train(#[from] distribute_train::Error),
    /// The data could not be read.
    #[error(transparent)]
    Input(#[from] distribute_input::Error),
    /// The description of the cluster is invalid.
    #[error(transparent)]
    Cluster(#[from] distribute_cluster::Error),
    /// An input function returned an error.
    #[error("the input function failed: {0}")]
    InputFunction(#[source] distribute_input::BoxError),
    /// There are no examples to train on, to evaluate or to predict.
    #[error("the dataset to {what} has no elements; give at least one")]
    NoExamples {
        /// The operation.
        what: &'static str,
    },
    /// A feature does not fit a column of the model.
    #[error("feature {name:?}: {problem}")]
    Feature {
        /// The feature's name.
        name: String,
        /// The reason and the remedy.
        problem: String,
    },
    /// The description of a column is invalid.
    #[error("feature column {name:?}: {problem}")]
    FeatureColumn {
        /// The column's name.
        name: String,
        /// The reason and the remedy.
        problem: String,
    },
    /// The labels do not fit the model.
    #[error("the labels do not fit the model: {problem}")]
    Labels {
        /// The reason and the remedy.
        problem: String,
    },
    /// The spec that a model returned is incomplete.
    #[error("the EstimatorSpec of mode {mode}: {problem}")]
    Spec {
        /// The mode in which the model was called.
        mode: Mode,
        /// The reason and the remedy.
        problem: String,
    },
    /// Settings contradict each other or the cluster.
    #[error("{what}: {problem}")]
    Configuration {
        /// The type that was configured, such as `RunConfig`.
        what: &'static str,
        /// The reason and the remedy.
        problem: String,
    },
    /// A folder has no checkpoint.
    #[error("there is no checkpoint in {}; call train first, or correct model_dir", folder.display())]
    NoCheckpoint {
        /// The folder's path.
        folder: PathBuf,
    },
    /// A checkpoint has no variable of this name.
    #[error("the checkpoint has no variable {name:?}; it has {known}")]
    NotInCheckpoint {
        /// The requested name.
        name: String,
        /// The names in the checkpoint.
        known: String,
    },
    /// The loss is not finite.
    #[error(
        "the loss is {loss} after step {step}; lower the learning rate, limit gradients with Optimizer::clip, or look \
         for such values in the features"
    )]
    LossNotFinite {
        /// The loss.
        loss: f64,
        /// The number of the step.
        step: u64,
    },
}

distribute_types::debug_is_display!(Error);

impl ErrorClass for Error {
    fn class(&self) -> Class {
        match self {
            Error::Model(error) => error.class(),
            Error::Strategy(error) => error.class(),
            Error::Values(error) => error.class(),
            Error::Train(error) => error.class(),
            Error::Input(error) => error.class(),
            Error::Cluster(error) => error.class(),
            Error::InputFunction(error) => Classified::class_of(&**error),
            Error::Configuration { .. } | Error::FeatureColumn { .. } => Class::CONFIGURATION,
            _ => Class::PERMANENT,
        }
    }
}

/// The result of operations that fail with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
