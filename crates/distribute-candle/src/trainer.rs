//! Training without a loop of one's own: compile, fit, evaluate, predict.

use candle_core::{DType, ModuleT, Tensor};
use candle_nn::VarBuilder;
use distribute_strategy::{DistributedDataset, Strategy};
use distribute_train::history::History;
use distribute_train::metrics::Metrics;
use distribute_values::PerReplica;

use crate::losses::Loss;
use crate::{CandleContext, CandleStrategy, Error, Model, Optimizer, Result, sums};

mod examples;
mod fit;
mod options;

pub use examples::{Batching, Examples, PredictionData, TrainingData};
pub use options::Fit;

use options::BATCH_SIZE;

/// A model with an optimizer, a loss and metrics, under any strategy.
///
/// Losses and metrics are sums over the examples that there are, so their values are the same under any number of replicas,
/// partial batches included. Weights of examples multiply both: the loss is divided by the number of examples, as what is
/// minimised is; metrics by the sum of weights.
///
/// Layers that behave differently in training, such as dropout, learn from [`ModuleT`] which it is.
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
/// #     Trainer::new(s, |vb| linear(2, 3, vb.pp("fc")), |model| Adam::new(0.1).build(model), SparseCategoricalCrossentropy, Metrics::new().with(Accuracy)) }
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
    loss: Box<dyn Loss>,
    metrics: Metrics,
}

impl<M: ModuleT + Sync> Trainer<M> {
    /// Builds the model once per replica, and an optimizer for it.
    ///
    /// # Errors
    /// Those of [`CandleStrategy::scope`], and of `optimizer`.
    pub fn new(
        strategy: &Strategy,
        build: impl FnMut(VarBuilder<'static>) -> candle_core::Result<M>,
        optimizer: impl FnOnce(&Model<M>) -> Result<Optimizer>,
        loss: impl Loss + 'static,
        metrics: Metrics,
    ) -> Result<Trainer<M>> {
        Trainer::of_model(strategy, strategy.scope(build)?, optimizer, loss, metrics)
    }

    /// Of a model that is there already, for example with frozen variables.
    ///
    /// # Errors
    /// Those of `optimizer`.
    pub fn of_model(
        strategy: &Strategy,
        model: Model<M>,
        optimizer: impl FnOnce(&Model<M>) -> Result<Optimizer>,
        loss: impl Loss + 'static,
        metrics: Metrics,
    ) -> Result<Trainer<M>> {
        let optimizer = optimizer(&model)?;
        Ok(Trainer { strategy: strategy.clone(), model, optimizer, loss: Box::new(loss), metrics })
    }

    /// The model.
    pub fn model(&self) -> &Model<M> {
        &self.model
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// The loss and the metrics on batches of a dataset, or on tensors, in that order.
    ///
    /// # Errors
    /// Those of the data, of candle, and of the collectives.
    pub fn evaluate(&self, data: &impl TrainingData) -> Result<Vec<(String, f64)>> {
        let batching = Batching { batch_size: BATCH_SIZE, shuffle: false };
        let evaluate = || self.evaluate_distributed(&data.distribute(&self.strategy, batching)?.0, None);
        self.strategy.tell_failure_as(evaluate(), Error::failure_kind)
    }

    fn evaluate_distributed(
        &self,
        data: &DistributedDataset<Examples>,
        steps: Option<usize>,
    ) -> Result<Vec<(String, f64)>> {
        let mut sums = self.zeros();
        for batch in data.iter().take(steps.unwrap_or(usize::MAX)) {
            let of_step = self.strategy.run_with((&self.model, batch?), |context, (model, examples)| {
                let outputs = model.forward_t(&examples.inputs, false)?;
                let mut sums = self.sums();
                if context.has_examples() {
                    self.add(&mut sums, &outputs, &examples, &self.losses(&outputs, &examples)?)?;
                }
                Ok::<_, Error>(sums)
            })?;
            add(&mut sums, of_step);
        }
        Ok(self.results(&self.whole(&sums)?))
    }

    /// The model's outputs for each element of a batched dataset, or each row of a tensor, in its order.
    ///
    /// # Errors
    /// Those of the data, of candle, and of the collectives; [`Error::NoExamples`] for a dataset without elements.
    pub fn predict(&self, data: &impl PredictionData) -> Result<Tensor> {
        let predict = || {
            let mut outputs = Vec::new();
            for batch in &data.distribute(&self.strategy, BATCH_SIZE)? {
                let parts = self.strategy.run_with((&self.model, batch?), |_, (model, x)| {
                    Ok::<_, Error>(model.forward_t(&x, false)?.detach())
                })?;
                outputs.push(self.strategy.gather(&parts, 0)?);
            }
            if outputs.is_empty() { Err(Error::NoExamples { what: "predict" }) } else { Ok(Tensor::cat(&outputs, 0)?) }
        };
        self.strategy.tell_failure_as(predict(), Error::failure_kind)
    }

    /// Of one replica: the sum of losses, the number of examples, and the metrics' sums.
    fn sums(&self) -> Vec<f64> {
        vec![0.0; METRICS + self.metrics.zeros().len()]
    }

    /// Of each local replica.
    fn zeros(&self) -> Vec<Vec<f64>> {
        vec![self.sums(); self.strategy.num_local_replicas()]
    }

    /// The loss of each example.
    fn losses(&self, outputs: &Tensor, examples: &Examples) -> Result<Tensor> {
        let losses = self.loss.per_example(outputs, &examples.targets)?;
        match &examples.weights {
            Some(weights) => weighted(&losses, weights),
            None => Ok(losses),
        }
    }

    fn add(&self, sums: &mut [f64], outputs: &Tensor, examples: &Examples, losses: &Tensor) -> Result<()> {
        let count = losses.elem_count();
        if count == 0 {
            return Ok(());
        }
        sums[0] += losses.to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>()?;
        sums[1] += count as f64;
        if sums.len() == METRICS {
            return Ok(());
        }
        let weights = match &examples.weights {
            Some(weights) => Some(sums::floats(&alike(weights, losses)?.broadcast_as(losses.shape())?)?),
            None => None,
        };
        sums::show(outputs, &examples.targets, weights.as_deref(), count, |predictions| {
            self.metrics.update(&mut sums[METRICS..], predictions);
        })
    }

    /// All replicas' sums, of all processes.
    fn whole(&self, sums: &[Vec<f64>]) -> distribute_train::Result<Vec<f64>> {
        sums::of_all(&self.strategy, sums)
    }

    fn results(&self, whole: &[f64]) -> Vec<(String, f64)> {
        let loss = if whole[1] == 0.0 { 0.0 } else { whole[0] / whole[1] };
        [("loss".to_owned(), loss)].into_iter().chain(self.metrics.results(&whole[METRICS..])).collect()
    }
}

/// Where in a replica's sums those of metrics begin.
const METRICS: usize = 2;

fn add(sums: &mut [Vec<f64>], of_step: PerReplica<Vec<f64>>) {
    for (sums, more) in sums.iter_mut().zip(of_step.into_values()) {
        sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
    }
}

/// Losses, each multiplied by its example's weight.
fn weighted(losses: &Tensor, weights: &Tensor) -> Result<Tensor> {
    Ok(losses.broadcast_mul(&alike(weights, losses)?.to_dtype(losses.dtype())?)?)
}

/// Weights of examples with as many dimensions as their losses have.
fn alike(weights: &Tensor, losses: &Tensor) -> Result<Tensor> {
    let rows = losses.dim(0)?;
    if weights.elem_count() != rows {
        let given = weights.dims().to_vec();
        return Err(Error::Weights { given, examples: rows });
    }
    let mut shape = vec![1; losses.dims().len()];
    shape[0] = rows;
    Ok(weights.reshape(shape)?)
}
