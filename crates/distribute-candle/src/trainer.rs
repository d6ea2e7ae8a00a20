//! Training without a loop of one's own: compile, fit, evaluate, predict.

use candle_core::{DType, Module, Tensor};
use candle_nn::VarBuilder;
use distribute_collectives::ReduceOp;
use distribute_input::{Dataset, InputOptions, InputPosition};
use distribute_strategy::{DistributedDataset, Strategy};
use distribute_train::callbacks::{Callback, EpochEnd};
use distribute_train::checkpoint::CheckpointManager;
use distribute_train::history::History;
use distribute_train::metrics::{Metrics, Predictions, Targets};
use distribute_train::progress::{self, Progress};
use distribute_values::{Axis, HostTensor, PerReplica, TensorStorage};
use serde::{Deserialize, Serialize};

use crate::losses::Loss;
use crate::{CandleContext, CandleStrategy, Error, Model, Optimizer, Result};

mod fit;

pub use fit::Fit;

/// A model with an optimizer, a loss and metrics, under any strategy.
///
/// Losses and metrics are weighted sums over the examples that there are, so their values are the same under any number of
/// replicas, partial batches included.
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

impl<M: Module + Sync> Trainer<M> {
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

    /// The loss and the metrics on a dataset, in that order.
    ///
    /// # Errors
    /// Those of the data, of candle, and of the collectives.
    pub fn evaluate(&self, data: &Dataset<(Tensor, Tensor)>) -> Result<Vec<(String, f64)>> {
        self.evaluate_distributed(&self.strategy.distribute_dataset(data)?)
    }

    fn evaluate_distributed(&self, data: &DistributedDataset<(Tensor, Tensor)>) -> Result<Vec<(String, f64)>> {
        let mut sums = self.zeros();
        for batch in data {
            let of_step = self.strategy.run_with((&self.model, batch?), |_, (model, (x, y))| {
                let outputs = model.forward(&x)?;
                self.sums_of(&outputs, &y, &self.loss.per_example(&outputs, &y)?)
            })?;
            add(&mut sums, of_step);
        }
        self.results(&sums)
    }

    /// The model's outputs for each element of a batched dataset, in its order.
    ///
    /// # Errors
    /// Those of the data, of candle, and of the collectives; [`Error::NoExamples`] for a dataset without elements.
    pub fn predict(&self, data: &Dataset<Tensor>) -> Result<Tensor> {
        // All workers walk the data together: rows then go to replicas in their order, and come back in it.
        let options = InputOptions { deterministic: true, ..InputOptions::default() };
        let mut outputs = Vec::new();
        for batch in &self.strategy.distribute_dataset_with(data, options)? {
            let parts = self
                .strategy
                .run_with((&self.model, batch?), |_, (model, x)| Ok::<_, Error>(model.forward(&x)?.detach()))?;
            outputs.push(self.strategy.gather(&parts, 0)?);
        }
        if outputs.is_empty() { Err(Error::NoExamples) } else { Ok(Tensor::cat(&outputs, 0)?) }
    }

    /// For each local replica: the sum of losses, the number of examples, and the metrics' sums.
    fn zeros(&self) -> Vec<Vec<f64>> {
        vec![vec![0.0; 2 + self.metrics.zeros().len()]; self.strategy.num_local_replicas()]
    }

    fn sums_of(&self, outputs: &Tensor, targets: &Tensor, losses: &Tensor) -> Result<Vec<f64>> {
        let examples = losses.elem_count();
        let mut sums = vec![0.0; 2 + self.metrics.zeros().len()];
        if examples == 0 {
            return Ok(sums);
        }
        sums[0] = losses.to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>()?;
        sums[1] = examples as f64;
        if sums.len() > 2 {
            let width = outputs.elem_count() / examples;
            let outputs = outputs.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
            if targets.dtype().is_float() {
                let values = targets.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
                self.metrics.update(&mut sums[2..], &Predictions::new(&outputs, width, Targets::Values(&values))?);
            } else {
                let classes = targets.to_dtype(DType::U32)?.flatten_all()?.to_vec1::<u32>()?;
                self.metrics.update(&mut sums[2..], &Predictions::new(&outputs, width, Targets::Classes(&classes))?);
            }
        }
        Ok(sums)
    }

    /// All replicas' sums, of all processes.
    fn whole(&self, sums: &[Vec<f64>]) -> Result<Vec<f64>> {
        let tensors: Result<Vec<HostTensor>, _> =
            sums.iter().map(|sums| HostTensor::new(&[sums.len()], sums.clone())).collect();
        let whole: HostTensor = self.strategy.reduce(ReduceOp::Sum, &PerReplica::new(tensors?), Axis::None)?;
        Ok(whole.to_elements::<f64>()?)
    }

    fn results(&self, sums: &[Vec<f64>]) -> Result<Vec<(String, f64)>> {
        let whole = self.whole(sums)?;
        let loss = if whole[1] == 0.0 { 0.0 } else { whole[0] / whole[1] };
        Ok([("loss".to_owned(), loss)].into_iter().chain(self.metrics.results(&whole[2..])).collect())
    }
}

fn add(sums: &mut [Vec<f64>], of_step: PerReplica<Vec<f64>>) {
    for (sums, more) in sums.iter_mut().zip(of_step.into_values()) {
        sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
    }
}
