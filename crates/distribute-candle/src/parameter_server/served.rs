//! Training without a custom loop on parameter servers, by a description that every task of the cluster makes.

use std::collections::BTreeMap;
use std::sync::Arc;

use candle_core::ModuleT;
use candle_nn::VarBuilder;
use distribute_input::{BoxError, Dataset, Element, InputContext};
use distribute_optim::{Optimizer, OptimizerDescription};
use distribute_parameter_server::{ParameterServerStrategy, Program};
use distribute_strategy::Strategy;
use distribute_train::metrics::Metrics;

use self::coordination::Coordination;
use self::data::NamedData;
use crate::losses::Loss;
use crate::trainer::Measures;
use crate::{CandleStrategy, Error, Examples, Result, Trainer};

mod coordination;
mod data;
mod functions;
mod trainer;

pub use self::data::{ServedBatch, ServedData};
pub use self::trainer::{ServedFit, ServedTrainer};

/// A description of a whole training: model, optimizer, loss, metrics and datasets.
///
/// Every task of a cluster makes the same description. Workers and servers serve its
/// [`program`](ServedTraining::program); the coordinator trains [`on_servers`](ServedTraining::on_servers). The same
/// description trains [`under`](ServedTraining::under) any other strategy.
///
/// The function of a dataset returns the part of one input pipeline, batched for one replica. On servers each worker is
/// a pipeline in training, and each part of an evaluation is one.
///
/// # Examples
/// ```no_run
/// use candle_core::{Device, Tensor};
/// use candle_nn::linear;
/// use distribute_candle::{Adam, Error, ServedFit, ServedTraining, SparseCategoricalCrossentropy};
/// use distribute_cluster::{ClusterResolver, TaskType, TfConfigResolver};
/// use distribute_input::{Dataset, InputContext};
/// use distribute_parameter_server::{ParameterServerStrategy, Server};
/// use distribute_train::metrics::{Accuracy, Metrics};
///
/// fn rows(context: &InputContext) -> Result<Dataset<(Tensor, Tensor)>, Error> {
///     let x = Tensor::arange(0f32, 80., &Device::Cpu)?.reshape((40, 2))?;
///     let y = Tensor::arange(0u32, 40, &Device::Cpu)?.ge(20u32)?;
///     let all = Dataset::from_tensor_slices((x, y));
///     Ok(all.shard(context.num_input_pipelines, context.input_pipeline_id).batch(4))
/// }
///
/// fn main() -> Result<(), Error> {
///     let metrics = Metrics::new().with(Accuracy);
///     let build = |vb| linear(2, 2, vb);
///     let training = ServedTraining::new(build, Adam::new(1e-3), SparseCategoricalCrossentropy, metrics)
///         .dataset("train", rows)
///         .dataset("test", rows);
///     let cluster = TfConfigResolver::from_env().map_err(distribute_parameter_server::Error::from)?;
///     if let Some(TaskType::Worker | TaskType::Ps) = cluster.task_type() {
///         return Ok(Server::start(&cluster, training.program())?.join()?);
///     }
///     let strategy = ParameterServerStrategy::builder(&cluster).build()?;
///     let mut trainer = training.on_servers(&strategy)?;       // or under(&mirrored)?
///     let fit = ServedFit::epochs(3).steps_per_epoch(100).validation(&trainer.data("test")?);
///     println!("{}", trainer.fit("train", fit)?);
///     println!("{:?}", trainer.evaluate("test")?);
///     Ok(())
/// }
/// ```
///
/// # Source
/// `tf.keras.Model.fit` under `ParameterServerStrategy`, with the datasets of
/// `tf.keras.utils.experimental.DatasetCreator`.
pub struct ServedTraining<M> {
    build: Arc<Build<M>>,
    optimizer: OptimizerDescription,
    measures: Arc<Measures>,
    datasets: Arc<BTreeMap<String, NamedData>>,
    replicas_per_worker: usize,
}

type Build<M> = dyn Fn(VarBuilder<'static>) -> candle_core::Result<M> + Send + Sync;

impl<M: ModuleT + Send + Sync + 'static> ServedTraining<M> {
    /// Describes a training without datasets.
    pub fn new(
        build: impl Fn(VarBuilder<'static>) -> candle_core::Result<M> + Send + Sync + 'static,
        optimizer: impl Into<OptimizerDescription>,
        loss: impl Loss + 'static,
        metrics: Metrics,
    ) -> ServedTraining<M> {
        ServedTraining {
            build: Arc::new(build),
            optimizer: optimizer.into(),
            measures: Arc::new(Measures::new(loss, metrics)),
            datasets: Arc::default(),
            replicas_per_worker: 1,
        }
    }

    /// Sets the number of replicas of each worker, which are threads of its process on logical CPUs. Default: 1.
    ///
    /// They divide each batch by rows, and their gradients are one push. The history is that of one replica, up to
    /// rounding; batch normalisation that is not `sync_batch_norm` normalises over each replica's rows. Other
    /// strategies than servers have replicas of their own and ignore this.
    ///
    /// # Errors
    /// [`Error::Served`] for 0.
    ///
    /// # Examples
    /// ```
    /// use candle_nn::linear;
    /// use distribute_candle::{Adam, Error, MeanSquaredError, ServedTraining};
    /// use distribute_train::metrics::Metrics;
    ///
    /// let build = |vb| linear(2, 2, vb);
    /// let training = ServedTraining::new(build, Adam::new(1e-3), MeanSquaredError, Metrics::new());
    /// let training = training.replicas_per_worker(2)?;
    /// # Ok::<(), Error>(())
    /// ```
    pub fn replicas_per_worker(self, replicas: usize) -> Result<ServedTraining<M>> {
        if replicas == 0 {
            let problem = "0 replicas per worker were given, and none would train; give at least 1";
            return Err(Error::Served { problem: problem.to_owned() });
        }
        Ok(ServedTraining { replicas_per_worker: replicas, ..self })
    }

    /// Adds a dataset of batches of inputs and targets, or of inputs, targets and weights, or replaces one. The
    /// function is called by the task that reads the data.
    pub fn dataset<T, L, E>(
        mut self,
        name: &str,
        make: impl Fn(&InputContext) -> Result<Dataset<T>, E> + Send + Sync + 'static,
    ) -> ServedTraining<M>
    where
        T: Element<L> + Into<Examples>,
        E: Into<BoxError>,
    {
        Arc::make_mut(&mut self.datasets).insert(name.to_owned(), NamedData::new(make));
        self
    }

    /// Returns the functions that workers run. More functions may be added to the program, for a loop of one's own.
    pub fn program(&self) -> Program {
        functions::add(Program::new(), self)
    }

    /// Creates the model and the optimizer on the servers, and the trainer that schedules the steps on workers.
    ///
    /// A coordinator that the strategy has already is used, with its options; its program must contain the functions of
    /// [`program`](ServedTraining::program).
    ///
    /// # Errors
    /// [`Error::ParameterServer`] if a server is lost or refuses a variable; [`Error::Candle`] if the model cannot be
    /// built; [`Error::Strategy`] if the environment cannot be read.
    pub fn on_servers(&self, strategy: &ParameterServerStrategy) -> Result<ServedTrainer<M>> {
        Ok(ServedTrainer::on_servers(Coordination::new(self.clone(), strategy)?))
    }

    /// Builds the model and the optimizer under a strategy without servers, and their trainer.
    ///
    /// # Errors
    /// [`Error::Candle`] if the model cannot be built, and [`Error::Optim`] if a setting of the optimizer is out of
    /// range.
    pub fn under(&self, strategy: &Strategy) -> Result<ServedTrainer<M>> {
        let model = strategy.scope(|vb| (self.build)(vb))?;
        let optimizer = |model: &_| Optimizer::from_description(model, self.optimizer);
        let trainer = Trainer::of_measures(strategy, model, optimizer, self.measures.clone())?;
        Ok(ServedTrainer::under(self.clone(), trainer))
    }
}

impl<M> ServedTraining<M> {
    fn find(&self, name: &str) -> Result<&NamedData> {
        self.datasets.get(name).ok_or_else(|| {
            let known: Vec<&str> = self.datasets.keys().map(String::as_str).collect();
            let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
            Error::Served { problem: format!("the training has no dataset {name:?}; it has {known}") }
        })
    }
}

impl<M> Clone for ServedTraining<M> {
    fn clone(&self) -> Self {
        let (build, optimizer) = (self.build.clone(), self.optimizer);
        let (measures, datasets) = (self.measures.clone(), self.datasets.clone());
        ServedTraining { build, optimizer, measures, datasets, replicas_per_worker: self.replicas_per_worker }
    }
}
