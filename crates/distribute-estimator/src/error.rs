//! What can go wrong with estimators.

use std::path::PathBuf;

use distribute_types::{Class, Classified, ErrorClass};

use crate::Mode;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A candle model or its optimizer failed.
    #[error(transparent)]
    Model(#[from] distribute_candle::Error),
    /// candle refused an operation.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// The strategy failed.
    #[error(transparent)]
    Strategy(#[from] distribute_strategy::Error),
    /// A distributed value was used wrongly, or could not be reduced.
    #[error(transparent)]
    Values(#[from] distribute_values::Error),
    /// A checkpoint, an event file or a metric failed, or the training was preempted.
    #[error(transparent)]
    Train(#[from] distribute_train::Error),
    /// The data could not be read.
    #[error(transparent)]
    Input(#[from] distribute_input::Error),
    /// The cluster is described wrongly.
    #[error(transparent)]
    Cluster(#[from] distribute_cluster::Error),
    /// An input function returned an error.
    #[error("the input function failed: {0}")]
    InputFunction(#[source] distribute_input::BoxError),
    /// There is nothing to evaluate or to predict.
    #[error("the dataset to {what} has no elements; give at least one")]
    NoExamples {
        /// What was to be done.
        what: &'static str,
    },
    /// A feature is not what a column of the model wants.
    #[error("feature {name:?}: {problem}")]
    Feature {
        /// The feature.
        name: String,
        /// What is wrong with it, and what to do.
        problem: String,
    },
    /// The description of a column makes no sense.
    #[error("feature column {name:?}: {problem}")]
    FeatureColumn {
        /// The column.
        name: String,
        /// What is wrong with it, and what to do.
        problem: String,
    },
    /// Labels are not what a model wants.
    #[error("the labels do not fit the model: {problem}")]
    Labels {
        /// What does not fit, and what to do.
        problem: String,
    },
    /// What a model returned lacks something.
    #[error("the EstimatorSpec of mode {mode}: {problem}")]
    Spec {
        /// The mode.
        mode: Mode,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// Settings contradict each other or the cluster.
    #[error("{what}: {problem}")]
    Configuration {
        /// What was configured, such as `RunConfig`.
        what: &'static str,
        /// What is wrong, and what to do.
        problem: String,
    },
    /// A folder has no checkpoint.
    #[error("there is no checkpoint in {}; call train first, or correct model_dir", folder.display())]
    NoCheckpoint {
        /// The folder.
        folder: PathBuf,
    },
    /// A checkpoint has no variable of a name.
    #[error("the checkpoint has no variable {name:?}; it has {known}")]
    NotInCheckpoint {
        /// The name.
        name: String,
        /// The names there are.
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
        /// The step.
        step: u64,
    },
}

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

/// The result of this crate's operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;
