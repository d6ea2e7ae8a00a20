//! Models that are ready-made.

use candle_core::Tensor;
use distribute_input::Features;

use super::dnn::Dnn;
use super::head::Head;
use super::{EstimatorModel, EstimatorSpec, Labels, Mode};
use crate::Result;
use crate::feature_columns::{LinearModel, Numeric};

/// The model of a ready-made Estimator.
pub struct CannedModel {
    pub(super) body: Body,
    pub(super) head: Head,
    /// The feature that says how much each example counts.
    pub(super) weights: Option<Numeric>,
}

/// What makes logits of features.
pub(super) enum Body {
    Linear(LinearModel),
    Dnn(Dnn),
}

impl CannedModel {
    /// The outputs before they are turned into probabilities.
    ///
    /// # Errors
    /// As [`EstimatorModel::spec`].
    pub fn logits(&self, features: &Features) -> Result<Tensor> {
        match &self.body {
            Body::Linear(linear) => linear.forward(features),
            Body::Dnn(dnn) => dnn.forward(features),
        }
    }
}

impl EstimatorModel for CannedModel {
    fn spec(&self, features: &Features, labels: Option<&Labels>, mode: Mode) -> Result<EstimatorSpec> {
        let logits = self.logits(features)?;
        let spec = self.head.spec(&logits, labels, mode)?;
        Ok(match &self.weights {
            Some(weights) if labels.is_some() => {
                let (weights, examples) = weights.values(features)?;
                spec.weights(&Tensor::from_vec(weights, examples, logits.device())?)
            }
            _ => spec,
        })
    }
}

/// What classifiers and regressors have in common: the settings of their heads.
macro_rules! heads {
    (classifier $classifier:ident, regressor $regressor:ident) => {
        heads!(weights $classifier, $regressor);

        impl $classifier {
            /// How many classes there are. Default: 2, which are learnt with one logit.
            pub fn n_classes(mut self, count: usize) -> $classifier {
                self.classes = count;
                self
            }

            /// What labels call the classes, where they are texts.
            pub fn label_vocabulary<W: Into<String>>(mut self, words: impl IntoIterator<Item = W>) -> $classifier {
                self.vocabulary = words.into_iter().map(Into::into).collect();
                self
            }
        }

        impl $regressor {
            /// Values for each example. Default: 1.
            pub fn label_dimension(mut self, values: usize) -> $regressor {
                self.values = values;
                self
            }
        }
    };
    (weights $($model:ident),+) => {$(
        impl $model {
            /// A feature that says how much each example counts: its loss is multiplied by it, and scores are means with these
            /// weights. Default: all count alike.
            pub fn weight_column(mut self, weights: impl Into<$crate::feature_columns::Numeric>) -> $model {
                self.weights = Some(weights.into());
                self
            }
        }
    )+};
}

pub(super) use heads;
