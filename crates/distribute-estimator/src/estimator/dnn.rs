//! Classifiers and regressors with hidden layers.

use candle_core::Tensor;
use candle_nn::{Activation, Linear, Module, VarBuilder};
use distribute_input::Features;

use super::canned::{Body, Description, heads};
use crate::feature_columns::{FeatureColumns, InputLayer, Numeric};
use crate::{Error, Result};

/// A classifier with hidden layers. Its variables are `dnn.hiddenlayer_0.weight` and so on, `dnn.logits.weight`, and
/// `dnn.input_layer.COLUMN.embedding_weights`.
///
/// Predictions and scores are those of [`LinearClassifier`](crate::LinearClassifier).
///
/// # Source
/// `tf.estimator.DNNClassifier`.
#[derive(Clone, Debug)]
pub struct DnnClassifier {
    body: Layers,
    classes: usize,
    vocabulary: Vec<String>,
    weights: Option<Numeric>,
}

/// A regressor with hidden layers, trained on the mean squared error. Its variables have the names of
/// [`DnnClassifier`]'s.
///
/// Predictions and scores are those of [`LinearRegressor`](crate::LinearRegressor).
///
/// # Source
/// `tf.estimator.DNNRegressor`.
#[derive(Clone, Debug)]
pub struct DnnRegressor {
    body: Layers,
    values: usize,
    weights: Option<Numeric>,
}

/// The settings of the layers between features and logits.
#[derive(Clone, Debug)]
struct Layers {
    columns: FeatureColumns,
    hidden: Vec<usize>,
    activation: Activation,
}

/// The layers of a model.
pub(super) struct Dnn {
    input: InputLayer,
    hidden: Vec<Linear>,
    activation: Activation,
    logits: Linear,
}

impl DnnClassifier {
    /// Describes a model of dense columns with hidden layers of these sizes.
    pub fn new(columns: &FeatureColumns, hidden_units: impl Into<Vec<usize>>) -> DnnClassifier {
        DnnClassifier {
            body: Layers::new(columns, hidden_units.into()),
            classes: 2,
            vocabulary: Vec::new(),
            weights: None,
        }
    }
}

impl DnnRegressor {
    /// Describes a model of dense columns with hidden layers of these sizes.
    pub fn new(columns: &FeatureColumns, hidden_units: impl Into<Vec<usize>>) -> DnnRegressor {
        DnnRegressor { body: Layers::new(columns, hidden_units.into()), values: 1, weights: None }
    }
}

/// The method that both share.
macro_rules! activation {
    ($($model:ident),+) => {$(
        impl $model {
            /// Sets the activation after each hidden layer. Default: ReLU.
            pub fn activation(mut self, activation: Activation) -> $model {
                self.body.activation = activation;
                self
            }
        }
    )+};
}

activation!(DnnClassifier, DnnRegressor);
heads!(classifier DnnClassifier, regressor DnnRegressor);

impl Layers {
    fn new(columns: &FeatureColumns, hidden: Vec<usize>) -> Layers {
        Layers { columns: columns.clone(), hidden, activation: Activation::Relu }
    }
}

impl Description for Layers {
    fn check(&self, what: &'static str) -> Result<()> {
        self.columns.check_dense()?;
        if self.hidden.contains(&0) {
            let problem = format!("hidden_units are {:?}; give each layer at least 1", self.hidden);
            return Err(Error::Configuration { what, problem });
        }
        Ok(())
    }

    fn body(&self, outputs: usize, vb: VarBuilder<'_>) -> candle_core::Result<Body> {
        let vb = vb.pp("dnn");
        let input = InputLayer::new(&self.columns, vb.pp("input_layer"))?;
        let (mut width, mut hidden) = (input.width(), Vec::with_capacity(self.hidden.len()));
        for (index, units) in self.hidden.iter().enumerate() {
            hidden.push(candle_nn::linear(width, *units, vb.pp(format!("hiddenlayer_{index}")))?);
            width = *units;
        }
        let logits = candle_nn::linear(width, outputs, vb.pp("logits"))?;
        Ok(Body::Dnn(Dnn { input, hidden, activation: self.activation, logits }))
    }
}

impl Dnn {
    pub(super) fn forward(&self, features: &Features) -> Result<Tensor> {
        let mut x = self.input.forward(features)?;
        for layer in &self.hidden {
            x = self.activation.forward(&layer.forward(&x)?)?;
        }
        Ok(self.logits.forward(&x)?)
    }
}
