//! Training without a custom loop: compile, fit, evaluate, predict.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use candle_core::{ModuleT, Tensor};
use candle_nn::VarBuilder;
use distribute_optim::MemoryReport;
use distribute_strategy::Strategy;
use distribute_train::checkpoint::Checkpointed;
use distribute_train::history::History;
use distribute_train::metrics::Metrics;
use distribute_train::trainer::{self, BATCH_SIZE, Part, Trainee};
use distribute_types::ErrorClass;
use distribute_values::PerReplica;

use crate::losses::Loss;
use crate::{CandleContext, CandleStrategy, Error, Model, Optimizer, Result};

mod examples;
mod measures;

pub(crate) use measures::{Measures, of_examples, weighted_by_class};

pub use examples::{Examples, PredictionData, TrainingData};

/// The settings of a training run: its length, validation data and callbacks.
pub type Fit = distribute_train::trainer::Fit<Examples, Error>;

/// A model with an optimizer, a loss and metrics, under any strategy.
///
/// Losses and metrics are computed from sums over examples, so their values do not depend on the number of replicas,
/// and partial batches are included. Weights of examples multiply both: the loss is the weighted sum divided by the
/// number of examples, and metrics are divided by the sum of weights.
///
/// Layers that behave differently in training, such as dropout, are told by [`ModuleT`].
///
/// # Examples
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::linear;
/// use distribute_candle::{Adam, Error, Fit, SparseCategoricalCrossentropy, Trainer};
/// use distribute_input::Dataset;
/// use distribute_strategy::MirroredStrategy;
/// use distribute_train::callbacks::EarlyStopping;
/// use distribute_train::metrics::{Accuracy, Metrics};
///
/// let x = Tensor::arange(0f32, 40., &Device::Cpu)?.reshape((20, 2))?;
/// let y = Tensor::zeros(20, DType::U32, &Device::Cpu)?;
/// let data = Dataset::from_tensor_slices((x.clone(), y)).shuffle(20, 1).batch(6);
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let model = strategy_model(&strategy)?;
/// # fn strategy_model(s: &distribute_strategy::Strategy) -> Result<Trainer<candle_nn::Linear>, Error> {
/// #     Trainer::new(s, |vb| linear(2, 3, vb.pp("fc")), |model| Adam::new(0.1).build(model),
/// #         SparseCategoricalCrossentropy, Metrics::new().with(Accuracy)) }
/// let mut trainer = model;
/// let history = trainer.fit(&data, Fit::epochs(3).callback(EarlyStopping::new("loss")))?;
/// assert_eq!(history.of("loss").len(), 3);
/// assert_eq!(trainer.evaluate(&data)?[1].0, "accuracy");
/// assert_eq!(trainer.predict(&Dataset::from_tensor_slices(x).batch(6))?.dims(), [20, 3]);
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `compile`, `fit`, `evaluate` and `predict` of `tf.keras.Model`.
pub struct Trainer<M> {
    strategy: Strategy,
    model: Model<M>,
    optimizer: Optimizer,
    measures: Arc<Measures>,
    regularization: Option<Box<Regularization<M>>>,
    passes: AtomicU64,
}

/// A term of the loss that depends on the model alone.
type Regularization<M> = dyn Fn(&M) -> candle_core::Result<Tensor> + Send + Sync;

impl<M: ModuleT + Sync> Trainer<M> {
    /// Builds the model once per replica, and its optimizer.
    ///
    /// # Errors
    /// The errors of [`CandleStrategy::scope`] if the model cannot be built, and those that `optimizer` returns.
    pub fn new(
        strategy: &Strategy,
        build: impl FnMut(VarBuilder<'static>) -> candle_core::Result<M>,
        optimizer: impl FnOnce(&Model<M>) -> Result<Optimizer>,
        loss: impl Loss + 'static,
        metrics: Metrics,
    ) -> Result<Trainer<M>> {
        Trainer::of_model(strategy, strategy.scope(build)?, optimizer, loss, metrics)
    }

    /// Creates a trainer for an existing model, for example one with frozen variables.
    ///
    /// # Errors
    /// The errors that `optimizer` returns, unchanged.
    pub fn of_model(
        strategy: &Strategy,
        model: Model<M>,
        optimizer: impl FnOnce(&Model<M>) -> Result<Optimizer>,
        loss: impl Loss + 'static,
        metrics: Metrics,
    ) -> Result<Trainer<M>> {
        Trainer::of_measures(strategy, model, optimizer, Arc::new(Measures::new(loss, metrics)))
    }

    pub(crate) fn of_measures(
        strategy: &Strategy,
        model: Model<M>,
        optimizer: impl FnOnce(&Model<M>) -> Result<Optimizer>,
        measures: Arc<Measures>,
    ) -> Result<Trainer<M>> {
        let optimizer = strategy.report_failure_as(optimizer(&model), ErrorClass::failure_kind)?;
        Ok(Trainer {
            strategy: strategy.clone(),
            model,
            optimizer,
            measures,
            regularization: None,
            passes: AtomicU64::new(0),
        })
    }

    /// Adds a term to the loss of every step that depends on the model's variables alone, such as a penalty on weights;
    /// it replaces an earlier one. All replicas together count it once. The losses that [`fit`](Trainer::fit) and
    /// [`evaluate`](Trainer::evaluate) report are without it.
    ///
    /// # Shapes
    /// The term is a scalar, in the type of the loss: f32, or f64 for models in f64. A step returns
    /// [`Error::Candle`] for one of another shape.
    ///
    /// # Examples
    /// Weight decay, whose gradient is 1e-4 times the weight:
    /// ```
    /// use candle_nn::linear;
    /// use distribute_candle::{Error, MeanSquaredError, Model, Sgd, Trainer};
    /// use distribute_strategy::MirroredStrategy;
    /// use distribute_train::metrics::Metrics;
    ///
    /// let strategy = MirroredStrategy::builder().build()?;
    /// let sgd = |model: &Model<_>| Sgd::new(0.1).momentum(0.9).build(model);
    /// let trainer = Trainer::new(&strategy, |vb| linear(2, 1, vb.pp("fc")), sgd, MeanSquaredError, Metrics::new())?
    ///     .regularize(|fc| fc.weight().sqr()?.sum_all()? * 0.5e-4);
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Source
    /// `kernel_regularizer` of tf.keras's layers.
    pub fn regularize(self, term: impl Fn(&M) -> candle_core::Result<Tensor> + Send + Sync + 'static) -> Trainer<M> {
        Trainer { regularization: Some(Box::new(term)), ..self }
    }

    /// Returns the model.
    pub fn model(&self) -> &Model<M> {
        &self.model
    }

    /// Returns the optimizer.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Trains, and returns the losses and metrics of each epoch, including those of an earlier run that this one
    /// resumes.
    ///
    /// Under several workers, all must call it. A failure on one of them reaches the others in their next step.
    ///
    /// # Errors
    /// [`Error::Train`] if there are no examples, or a callback or a checkpoint fails; [`Error::Candle`] if the model
    /// fails; [`Error::Optim`] for the errors of [`ReplicaOptimizer::minimize`](crate::ReplicaOptimizer::minimize);
    /// [`Error::Strategy`] or [`Error::Collective`] if the data cannot be read, or a replica is missing or fails.
    pub fn fit(&mut self, data: &impl TrainingData, fit: Fit) -> Result<History> {
        self.strategy.report_failure_as(trainer::fit(self, data, fit), ErrorClass::failure_kind)
    }

    /// Evaluates the model on batches of a dataset, or on tensors. Returns the loss and the metrics, in that order.
    ///
    /// # Errors
    /// [`Error::Candle`] if the model fails; [`Error::Strategy`] or [`Error::Collective`] if the data cannot be read,
    /// or a replica is missing or fails.
    pub fn evaluate(&self, data: &impl TrainingData) -> Result<Vec<(String, f64)>> {
        self.strategy.report_failure_as(trainer::evaluate(self, data), ErrorClass::failure_kind)
    }

    /// Returns the model's outputs for each element of a batched dataset, or each row of a tensor, in order.
    ///
    /// # Errors
    /// [`Error::NoExamples`] for a dataset without elements; [`Error::Candle`] if the model fails; [`Error::Strategy`]
    /// or [`Error::Collective`] if the data cannot be read, or a replica is missing or fails.
    pub fn predict(&self, data: &impl PredictionData) -> Result<Tensor> {
        let predict = || {
            self.optimizer.synchronize(&self.strategy)?;
            let mut outputs = Vec::new();
            for batch in &data.distribute(&self.strategy, BATCH_SIZE)? {
                let parts = self.strategy.run_with((&self.model, batch?), |_, (model, x)| {
                    Ok::<_, Error>(model.forward_t(&x, false)?.detach())
                })?;
                outputs.push(self.strategy.gather(&parts, 0)?);
            }
            if outputs.is_empty() { Err(Error::NoExamples { what: "predict" }) } else { Ok(Tensor::cat(&outputs, 0)?) }
        };
        self.strategy.report_failure_as(predict(), ErrorClass::failure_kind)
    }
}

impl<M: ModuleT + Sync> Trainee for Trainer<M> {
    type Examples = Examples;
    type Error = Error;

    fn strategy(&self) -> &Strategy {
        &self.strategy
    }

    fn model(&self) -> &dyn Checkpointed {
        &self.model
    }

    fn optimizer(&self) -> &dyn Checkpointed {
        &self.optimizer
    }

    fn learning_rate(&self) -> f64 {
        self.optimizer.learning_rate()
    }

    fn set_learning_rate(&self, learning_rate: f64) {
        self.optimizer.set_learning_rate(learning_rate);
    }

    fn num_parameters(&self) -> usize {
        self.model.num_parameters()
    }

    fn memory(&self) -> Option<MemoryReport> {
        Some(self.optimizer.memory())
    }

    fn synchronize(&self) -> Result<()> {
        self.optimizer.synchronize(&self.strategy)
    }

    fn passes(&self) -> &AtomicU64 {
        &self.passes
    }

    fn metrics(&self) -> &Metrics {
        self.measures.metrics()
    }

    fn train_on(
        &self,
        batches: PerReplica<Vec<Part<Examples>>>,
        batch_size: usize,
        class_weights: &[f32],
    ) -> Result<PerReplica<Vec<f64>>> {
        let arguments = (&self.model, &self.optimizer, batches);
        self.strategy.run_with(arguments, |context, (model, optimizer, batches)| {
            let mut sums = trainer::sums(self.measures.metrics());
            for Part { examples, has_examples } in batches {
                context.begin_batch(has_examples)?;
                let outputs = model.forward_t(&examples.inputs, true)?;
                let mut losses = self.measures.losses(&outputs, &examples)?;
                if has_examples {
                    self.measures.add(&mut sums, &outputs.detach(), &examples, &losses.detach())?;
                }
                if !class_weights.is_empty() {
                    losses = weighted_by_class(&losses, class_weights, &examples.targets)?;
                }
                let mut loss = context.average_loss(&of_examples(&losses)?, batch_size)?;
                if let Some(term) = &self.regularization {
                    loss = (loss + context.scale_regularization_loss(&term(model)?)?)?;
                }
                optimizer.minimize(context, &loss)?;
            }
            Ok(sums)
        })
    }

    fn evaluate_on(&self, batch: PerReplica<Examples>) -> Result<PerReplica<Vec<f64>>> {
        self.strategy.run_with((&self.model, batch), |context, (model, examples)| {
            let outputs = model.forward_t(&examples.inputs, false)?;
            let mut sums = trainer::sums(self.measures.metrics());
            if context.has_examples() {
                self.measures.add(&mut sums, &outputs, &examples, &self.measures.losses(&outputs, &examples)?)?;
            }
            Ok(sums)
        })
    }
}
