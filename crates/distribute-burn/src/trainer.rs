//! Training without a custom loop: compile, fit, evaluate, predict.

use std::sync::atomic::AtomicU64;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use distribute_optim::MemoryReport;
use distribute_strategy::{ReplicaContext, Strategy};
use distribute_train::checkpoint::Checkpointed;
use distribute_train::history::History;
use distribute_train::metrics::{Metrics, Predictions};
use distribute_train::trainer::{self, BATCH_SIZE, LOSS_SUMS, Part, Trainee};
use distribute_types::ErrorClass;
use distribute_values::PerReplica;

use crate::data::numbers;
use crate::losses::Loss;
use crate::{BurnContext, BurnStrategy, Error, Model, Optimizer, Result};

#[cfg(feature = "pjrt")]
mod compiled;
mod examples;

pub use examples::{Examples, HostTargets, Inputs, PredictionData, Targets, TensorMap, TrainingData};

use examples::{WithoutAutodiff, shapes_of};

/// The settings of a training run: its length, validation data and callbacks.
pub type Fit<X, Y> = distribute_train::trainer::Fit<Examples<X, Y>, Error>;

/// A model's forward pass.
type Forward<M, X, const D: usize> = dyn Fn(&M, X) -> Tensor<D> + Send + Sync;

/// A model with its forward pass, an optimizer, a loss and metrics, under any strategy.
///
/// Losses and metrics are computed from sums over examples, so their values do not depend on the number of replicas,
/// and partial batches are included. Weights of examples multiply both: the loss is the weighted sum divided by the
/// number of examples, and metrics are divided by the sum of weights.
///
/// [`evaluate`](Trainer::evaluate), validation and [`predict`](Trainer::predict) run the model as
/// [`Module::valid`] returns it: without automatic differentiation, without dropout, and with running statistics.
///
/// # Examples
/// ```
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{Int, Tensor};
/// use distribute_burn::{Adam, Error, Fit, SparseCategoricalCrossentropy, Trainer};
/// use distribute_input::{Array, Dataset};
/// use distribute_strategy::MirroredStrategy;
/// use distribute_train::callbacks::EarlyStopping;
/// use distribute_train::metrics::{Accuracy, Metrics};
///
/// let x = Array::new([20, 2], (0..40).map(|at| at as f32).collect())?;
/// let y = Array::from(vec![0u32; 20]);
/// let data = Dataset::from_tensor_slices((x.clone(), y)).shuffle(20, 1).batch(6);
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let mut trainer = Trainer::new(
///     &strategy,
///     |device| LinearConfig::new(2, 3).init(device),
///     |model: &Linear, x: Tensor<2>| model.forward(x),
///     |model| Adam::new(0.1).build(model),
///     SparseCategoricalCrossentropy,
///     Metrics::new().with(Accuracy),
/// )?;
/// let history = trainer.fit(&data, Fit::epochs(3).callback(EarlyStopping::new("loss")))?;
/// assert_eq!(history.of("loss").len(), 3);
/// assert_eq!(trainer.evaluate(&data)?[1].0, "accuracy");
/// assert_eq!(trainer.predict(&Dataset::from_tensor_slices(x).batch(6))?.dims(), [20, 3]);
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `compile`, `fit`, `evaluate` and `predict` of `tf.keras.Model`.
pub struct Trainer<M, X, Y, const D: usize> {
    strategy: Strategy,
    model: Model<M>,
    forward: Box<Forward<M, X, D>>,
    optimizer: Optimizer,
    loss: Box<dyn Loss<D, Y>>,
    metrics: Metrics,
    passes: AtomicU64,
}

impl<M: Module + Sync + 'static, X: Inputs, Y: Targets, const D: usize> Trainer<M, X, Y, D> {
    /// Builds the model once per replica, and its optimizer. `forward` computes the outputs of a batch, one example per
    /// row.
    ///
    /// # Errors
    /// The errors of [`BurnStrategy::scope`] if the model cannot be built, and those that `optimizer` returns.
    pub fn new(
        strategy: &Strategy,
        build: impl FnMut(&Device) -> M,
        forward: impl Fn(&M, X) -> Tensor<D> + Send + Sync + 'static,
        optimizer: impl FnOnce(&Model<M>) -> Result<Optimizer>,
        loss: impl Loss<D, Y> + 'static,
        metrics: Metrics,
    ) -> Result<Self> {
        Trainer::of_model(strategy, strategy.scope(build)?, forward, optimizer, loss, metrics)
    }

    /// Creates a trainer for an existing model, for example one with frozen parameters.
    ///
    /// # Errors
    /// The errors that `optimizer` returns, unchanged.
    pub fn of_model(
        strategy: &Strategy,
        model: Model<M>,
        forward: impl Fn(&M, X) -> Tensor<D> + Send + Sync + 'static,
        optimizer: impl FnOnce(&Model<M>) -> Result<Optimizer>,
        loss: impl Loss<D, Y> + 'static,
        metrics: Metrics,
    ) -> Result<Self> {
        let optimizer = strategy.report_failure_as(optimizer(&model), ErrorClass::failure_kind)?;
        let (forward, loss) = (Box::new(forward), Box::new(loss));
        Ok(Trainer { strategy: strategy.clone(), model, forward, optimizer, loss, metrics, passes: AtomicU64::new(0) })
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
    /// [`Error::Train`] if there are no examples, or a callback or a checkpoint fails; the errors of the loss;
    /// [`Error::Optim`] for the errors of [`ReplicaOptimizer::minimize`](crate::ReplicaOptimizer::minimize);
    /// [`Error::Strategy`] or [`Error::Collective`] if the data cannot be read, or a replica is missing or fails.
    pub fn fit(&mut self, data: &impl TrainingData<X, Y>, fit: Fit<X, Y>) -> Result<History> {
        self.strategy.report_failure_as(trainer::fit(self, data, fit), ErrorClass::failure_kind)
    }

    /// Evaluates the model on batches of a dataset, or on tensors. Returns the loss and the metrics, in that order.
    ///
    /// # Errors
    /// The errors of the loss; [`Error::Strategy`] or [`Error::Collective`] if the data cannot be read, or a replica is
    /// missing or fails.
    pub fn evaluate(&self, data: &impl TrainingData<X, Y>) -> Result<Vec<(String, f64)>> {
        self.strategy.report_failure_as(trainer::evaluate(self, data), ErrorClass::failure_kind)
    }

    /// Returns the model's outputs for each element of a batched dataset, or each row of a tensor, in order.
    ///
    /// # Errors
    /// [`Error::NoExamples`] for a dataset without elements; [`Error::Strategy`] or [`Error::Collective`] if the data
    /// cannot be read, or a replica is missing or fails.
    pub fn predict(&self, data: &impl PredictionData<X>) -> Result<Tensor<D>> {
        let predict = || {
            self.optimizer.synchronize(&self.strategy)?;
            let mut outputs = Vec::new();
            for batch in &data.distribute(&self.strategy, BATCH_SIZE)? {
                #[cfg(feature = "pjrt")]
                if self.strategy.pjrt().is_some() {
                    outputs.push(self.strategy.gather(&self.predict_compiled(batch?)?, 0)?);
                    continue;
                }
                let parts = self.strategy.run_with((&self.model, batch?), |_, (model, x)| {
                    Ok::<_, Error>((self.forward)(&model.valid(), x.map_tensors(&mut WithoutAutodiff)))
                })?;
                outputs.push(self.strategy.gather(&parts, 0)?);
            }
            if outputs.is_empty() { Err(Error::NoExamples { what: "predict" }) } else { Ok(Tensor::cat(outputs, 0)) }
        };
        self.strategy.report_failure_as(predict(), ErrorClass::failure_kind)
    }

    /// Computes the loss of each example, times its weight.
    fn losses(&self, outputs: Tensor<D>, targets: Y, weights: Option<Tensor<1>>) -> Result<Tensor<1>> {
        let examples = targets.examples();
        let losses = self.loss.per_example(outputs, targets)?;
        if losses.dims() != [examples] {
            return Err(Error::Losses { given: losses.dims()[0], examples });
        }
        match weights {
            Some(weights) => weighted(losses, weights),
            None => Ok(losses),
        }
    }

    /// Makes a step on one batch, and adds its losses and metrics to the sums.
    fn step(
        &self,
        context: &ReplicaContext,
        (model, optimizer): (&M, &crate::ReplicaOptimizer<'_>),
        examples: Examples<X, Y>,
        settings: (usize, &[f32]),
        sums: Option<&mut [f64]>,
    ) -> Result<()> {
        let (batch_size, class_weights) = settings;
        let Examples { inputs, targets, weights } = examples;
        let outputs = (self.forward)(model, inputs);
        let mut losses = self.losses(outputs.clone(), targets.clone(), weights.clone())?;
        if let Some(sums) = sums {
            self.add(sums, outputs, &targets, weights, losses.clone())?;
        }
        if !class_weights.is_empty() {
            // Classes without a weight have weight 1.
            let weight = |class: usize| class_weights.get(class).copied().unwrap_or(1.0);
            let weights: Vec<f32> = targets.to_host()?.classes()?.into_iter().map(weight).collect();
            let weights = Tensor::from_floats(weights.as_slice(), &losses.device());
            losses = weighted(losses, weights)?;
        }
        optimizer.minimize(context, &context.average_loss(losses, batch_size))?;
        Ok(())
    }

    /// Adds the losses and metrics of a batch to the sums.
    fn add(
        &self,
        sums: &mut [f64],
        outputs: Tensor<D>,
        targets: &Y,
        weights: Option<Tensor<1>>,
        losses: Tensor<1>,
    ) -> Result<()> {
        let losses: Vec<f64> = numbers(losses.without_autodiff().into_data())?;
        let examples = losses.len();
        if examples == 0 {
            return Ok(());
        }
        sums[0] += losses.iter().sum::<f64>();
        sums[1] += examples as f64;
        if sums.len() == LOSS_SUMS {
            return Ok(());
        }
        let (shape, shapes) = (outputs.dims(), shapes_of(targets.clone()));
        let outputs: Vec<f32> = numbers(outputs.without_autodiff().into_data())?;
        let targets = targets.to_host()?;
        if let (HostTargets::Classes(_), [of_targets]) = (&targets, &shapes[..]) {
            check_classes_of_rows(&shape, of_targets)?;
        }
        // Several predictions per example if it is a sequence of classes.
        let count = match &targets {
            HostTargets::Classes(classes) => classes.len(),
            HostTargets::Values(_) => examples,
        };
        let mut predictions = Predictions::new(&outputs, outputs.len() / count.max(1), targets.borrowed())?;
        let repeated: Vec<f32>;
        if let Some(weights) = weights {
            let weights: Vec<f32> = numbers(weights.without_autodiff().into_data())?;
            repeated = weights.into_iter().flat_map(|weight| std::iter::repeat_n(weight, count / examples)).collect();
            predictions = predictions.weighted(&repeated)?;
        }
        Ok(self.metrics.update(&mut sums[LOSS_SUMS..], &predictions)?)
    }
}

impl<M: Module + Sync + 'static, X: Inputs, Y: Targets, const D: usize> Trainee for Trainer<M, X, Y, D> {
    type Examples = Examples<X, Y>;
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
        &self.metrics
    }

    fn train_on(
        &self,
        batches: PerReplica<Vec<Part<Examples<X, Y>>>>,
        batch_size: usize,
        class_weights: &[f32],
    ) -> Result<PerReplica<Vec<f64>>> {
        #[cfg(feature = "pjrt")]
        if self.strategy.pjrt().is_some() {
            return self.train_compiled(batches, batch_size, class_weights);
        }
        let arguments = (&self.model, &self.optimizer, batches);
        self.strategy.run_with(arguments, |context, (model, optimizer, batches)| {
            let mut sums = trainer::sums(&self.metrics);
            for Part { examples, has_examples } in batches {
                context.begin_batch(has_examples)?;
                let counted = has_examples.then_some(&mut sums[..]);
                self.step(context, (model, &optimizer), examples, (batch_size, class_weights), counted)?;
            }
            Ok(sums)
        })
    }

    fn evaluate_on(&self, batch: PerReplica<Examples<X, Y>>) -> Result<PerReplica<Vec<f64>>> {
        #[cfg(feature = "pjrt")]
        if self.strategy.pjrt().is_some() {
            return self.evaluate_compiled(batch);
        }
        self.strategy.run_with((&self.model, batch), |context, (model, examples)| {
            let mut sums = trainer::sums(&self.metrics);
            let outputs = (self.forward)(&model.valid(), examples.inputs.map_tensors(&mut WithoutAutodiff));
            if context.has_examples() {
                let targets = examples.targets.map_tensors(&mut WithoutAutodiff);
                let weights = examples.weights.map(Tensor::without_autodiff);
                let losses = self.losses(outputs.clone(), targets.clone(), weights.clone())?;
                self.add(&mut sums, outputs, &targets, weights, losses)?;
            }
            Ok(sums)
        })
    }
}

/// Refuses classes of which it is not clear to which outputs they belong. There is one class for each row of the last
/// axis, or one for each output; axes of length 1 do not matter, and outputs of two axes may have all positions in one.
fn check_classes_of_rows(outputs: &[usize], targets: &[usize]) -> Result<()> {
    let long = |shape: &[usize]| shape.iter().copied().filter(|len| *len != 1).collect::<Vec<_>>();
    let rows = outputs.split_last().map_or(outputs, |(_, rows)| rows);
    let is_flat = rows.len() == 1 && rows[0] == targets.iter().product::<usize>();
    if is_flat || [long(rows), long(outputs)].contains(&long(targets)) {
        return Ok(());
    }
    let (outputs, targets) = (outputs.to_vec(), targets.to_vec());
    Err(Error::Shapes { outputs, targets, expected: "the shape of the outputs but the last axis" })
}

/// Multiplies losses by the weights of their examples.
fn weighted(losses: Tensor<1>, weights: Tensor<1>) -> Result<Tensor<1>> {
    if weights.dims() != losses.dims() {
        return Err(Error::Weights { given: weights.dims()[0], examples: losses.dims()[0] });
    }
    let dtype = losses.dtype();
    let weights = if weights.dtype() == dtype { weights } else { weights.cast(dtype) };
    Ok(losses * weights)
}
