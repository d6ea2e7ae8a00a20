//! Linear classifiers and regressors.

use candle_nn::VarBuilder;

use super::canned::{Body, Description, heads};
use crate::Result;
use crate::feature_columns::{FeatureColumns, LinearModel, Numeric};

/// A linear classifier. Its variables are `linear.linear_model.COLUMN.weights` and `linear.linear_model.bias_weights`.
///
/// Its predictions are `logits`, `probabilities` and `class_ids`, and with two classes `logistic`. Its scores are
/// `accuracy`, `average_loss` and `loss`, and with two classes `auc`, `precision`, `recall`, `label/mean` and
/// `prediction/mean`.
///
/// # Examples
/// ```
/// use distribute_candle::Adam;
/// use distribute_estimator::{Categorical, Error, EvalSpec, FeatureColumns, LinearClassifier, RunConfig, Until};
/// use distribute_input::{Column, Dataset, Features};
///
/// # let folder = tempfile::tempdir().expect("a folder can be made");
/// # let model_dir = folder.path().join("fruit");
/// let fruit = || Features::new([("colour", Column::from(vec!["red", "green", "red", "yellow"]))]);
/// let columns = FeatureColumns::new().with(Categorical::vocabulary("colour", ["red", "green", "yellow"]));
/// let classifier = LinearClassifier::new(&columns)
///     .n_classes(3)
///     .label_vocabulary(["apple", "lime", "lemon"])
///     .build(|model| Adam::new(0.1).build(model), RunConfig::new(model_dir))?;
/// let input = || {
///     let kinds = Column::from(vec!["apple", "lime", "apple", "lemon"]);
///     Ok(Dataset::from_tensor_slices((fruit()?, kinds)).batch(2))
/// };
/// classifier.train(|| Ok(input()?.repeat_forever()), Until::Steps(100))?;
/// assert_eq!(classifier.evaluate(&EvalSpec::new(input))?["accuracy"], 1.0);
/// let predictions = classifier.predict(|| Ok(Dataset::from_tensor_slices(fruit()?).batch(3)))?;
/// assert_eq!(predictions["class_ids"].to_vec2::<i64>()?, [[0], [1], [0], [2]]);
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `tf.estimator.LinearClassifier`.
#[derive(Clone, Debug)]
pub struct LinearClassifier {
    body: FeatureColumns,
    classes: usize,
    vocabulary: Vec<String>,
    weights: Option<Numeric>,
}

/// A linear regressor, trained on the mean squared error. Its variables have the names of [`LinearClassifier`]'s.
///
/// Its prediction is `predictions`; its scores are `average_loss`, `loss`, `label/mean` and `prediction/mean`.
///
/// # Source
/// `tf.estimator.LinearRegressor`.
#[derive(Clone, Debug)]
pub struct LinearRegressor {
    body: FeatureColumns,
    values: usize,
    weights: Option<Numeric>,
}

impl LinearClassifier {
    /// Describes a model of columns, which may be sparse.
    pub fn new(columns: &FeatureColumns) -> LinearClassifier {
        LinearClassifier { body: columns.clone(), classes: 2, vocabulary: Vec::new(), weights: None }
    }
}

impl LinearRegressor {
    /// Describes a model of columns, which may be sparse.
    pub fn new(columns: &FeatureColumns) -> LinearRegressor {
        LinearRegressor { body: columns.clone(), values: 1, weights: None }
    }
}

heads!(classifier LinearClassifier, regressor LinearRegressor);

impl Description for FeatureColumns {
    fn check(&self, _: &'static str) -> Result<()> {
        FeatureColumns::check(self)
    }

    fn body(&self, outputs: usize, vb: VarBuilder<'_>) -> candle_core::Result<Body> {
        Ok(Body::Linear(LinearModel::new(self, outputs, vb.pp("linear.linear_model"))?))
    }
}
