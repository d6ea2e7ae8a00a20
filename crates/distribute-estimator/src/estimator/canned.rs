//! Canned estimators: ready-made models.

use candle_core::Tensor;
use candle_nn::VarBuilder;
use distribute_candle::{Model, Optimizer};
use distribute_input::Features;

use super::dnn::Dnn;
use super::head::Head;
use super::{Estimator, EstimatorModel, EstimatorSpec, Labels, Mode, RunConfig};
use crate::Result;
use crate::feature_columns::{LinearModel, Numeric};

/// The model of a canned estimator.
pub struct CannedModel {
    pub(super) body: Body,
    pub(super) head: Head,
    /// The feature with the weight of each example.
    pub(super) weights: Option<Numeric>,
}

/// The part of a model that computes logits from features.
pub(super) enum Body {
    Linear(LinearModel),
    Dnn(Dnn),
}

impl CannedModel {
    /// Computes the logits, the outputs before they are converted to probabilities.
    ///
    /// # Errors
    /// [`Error::Feature`](crate::Error::Feature) if the features do not fit the model,
    /// [`Error::Candle`](crate::Error::Candle) if candle fails.
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

/// Builds the body of a model from its columns.
pub(super) trait Description: Send + Sync + 'static {
    fn check(&self, what: &'static str) -> Result<()>;

    fn body(&self, outputs: usize, vb: VarBuilder<'_>) -> candle_core::Result<Body>;
}

/// Creates the estimator of a body and a head.
pub(super) fn estimator(
    what: &'static str,
    description: impl Description,
    head: Head,
    weights: Option<Numeric>,
    optimizer: impl Fn(&Model<CannedModel>) -> distribute_candle::Result<Optimizer> + Send + Sync + 'static,
    config: RunConfig,
) -> Result<Estimator<CannedModel>> {
    head.check(what)?;
    description.check(what)?;
    let model_fn = move |_, vb: VarBuilder<'static>| {
        let body = description.body(head.outputs(), vb)?;
        Ok(CannedModel { body, head: head.clone(), weights: weights.clone() })
    };
    Estimator::new(model_fn, optimizer, config)
}

/// Methods that classifiers and regressors share: settings of the head, and `build`.
macro_rules! heads {
    (classifier $classifier:ident, regressor $regressor:ident) => {
        heads!(both $classifier, $regressor);

        impl $classifier {
            /// Sets the number of classes. Default: 2, which have one logit.
            pub fn n_classes(mut self, count: usize) -> $classifier {
                self.classes = count;
                self
            }

            /// Sets the texts that name the classes in labels, in the order of the classes.
            pub fn label_vocabulary<W: Into<String>>(mut self, words: impl IntoIterator<Item = W>) -> $classifier {
                self.vocabulary = words.into_iter().map(Into::into).collect();
                self
            }

            fn head(&self) -> $crate::estimator::head::Head {
                $crate::estimator::head::Head::Classes { count: self.classes, vocabulary: self.vocabulary.clone() }
            }
        }

        impl $regressor {
            /// Sets the number of values per example. Default: 1.
            pub fn label_dimension(mut self, values: usize) -> $regressor {
                self.values = values;
                self
            }

            fn head(&self) -> $crate::estimator::head::Head {
                $crate::estimator::head::Head::Regression(self.values)
            }
        }
    };
    (both $($model:ident),+) => {$(
        impl $model {
            /// Sets a feature as the weight of each example: its loss is multiplied by it, and scores are means with
            /// these weights. Default: equal weights.
            pub fn weight_column(mut self, weights: impl Into<$crate::feature_columns::Numeric>) -> $model {
                self.weights = Some(weights.into());
                self
            }

            /// Builds the estimator, with an optimizer such as `|model| Adam::new(1e-3).build(model)`.
            ///
            /// # Errors
            /// [`Error::FeatureColumn`](crate::Error::FeatureColumn) or
            /// [`Error::Configuration`](crate::Error::Configuration) if a column or a setting is invalid.
            pub fn build(
                self,
                optimizer: impl Fn(
                    &distribute_candle::Model<$crate::CannedModel>,
                ) -> distribute_candle::Result<distribute_candle::Optimizer>
                + Send
                + Sync
                + 'static,
                config: $crate::RunConfig,
            ) -> $crate::Result<$crate::Estimator<$crate::CannedModel>> {
                let head = self.head();
                let what = stringify!($model);
                $crate::estimator::canned::estimator(what, self.body, head, self.weights, optimizer, config)
            }
        }
    )+};
}

pub(super) use heads;
