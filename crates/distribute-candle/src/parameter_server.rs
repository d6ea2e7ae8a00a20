//! Candle models on parameter servers.
//!
//! The coordinator creates a model's variables on the servers. A worker builds the same model with copies of the
//! variables, pulls their values before each step, and pushes gradients.

use std::sync::Arc;

use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use distribute_device::DeviceSpec;
use distribute_optim::OptimizerDescription;
use distribute_parameter_server::{ParameterServerStrategy, WorkerContext};
use distribute_strategy::{MirroredStrategy, Strategy};

use self::backends::{Making, Reading};
use self::replicas::KeptReplicas;
use self::worker_model::Kept;
use crate::{Result, ScopeOptions};

mod backends;
mod embedding;
#[cfg(test)]
mod local_cluster;
mod replicas;
mod running_statistics;
mod served;
mod worker_model;

pub use self::embedding::{ShardedEmbedding, sharded_embedding, sharded_embedding_with};
pub use self::replicas::{ModelReplica, ReplicatedModel};
pub use self::served::{ServedBatch, ServedData, ServedFit, ServedTrainer, ServedTraining};
pub use self::worker_model::WorkerModel;

/// Construction of candle models on a [`ParameterServerStrategy`].
pub trait CandleParameterServer {
    /// Creates the variables of a model on the servers, with the optimizer that updates them there. Returns the
    /// optimizer's number. Initial values are those that [`CandleStrategy::scope`](crate::CandleStrategy::scope) draws.
    ///
    /// # Errors
    /// [`Error::ParameterServer`](crate::Error::ParameterServer) if a server is lost or refuses a variable, and
    /// [`Error::Candle`](crate::Error::Candle) if `build` fails.
    fn create_model<M>(
        &self,
        optimizer: impl Into<OptimizerDescription>,
        build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
    ) -> Result<u32> {
        self.create_model_with(ScopeOptions::default(), optimizer, build)
    }

    /// Creates a model like [`create_model`](CandleParameterServer::create_model), with options.
    ///
    /// # Errors
    /// The errors of [`create_model`](CandleParameterServer::create_model) occur in the same cases.
    fn create_model_with<M>(
        &self,
        options: ScopeOptions,
        optimizer: impl Into<OptimizerDescription>,
        build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
    ) -> Result<u32>;

    /// Builds a model with the values that its variables have on the servers now, to evaluate, predict or save.
    ///
    /// # Errors
    /// [`Error::ParameterServer`](crate::Error::ParameterServer) if a server is lost,
    /// [`Error::UnknownVariable`](crate::Error::UnknownVariable) for a variable that was not created, and
    /// [`Error::Candle`](crate::Error::Candle) if `build` fails.
    fn read_model<M>(&self, build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>) -> Result<M>;
}

impl CandleParameterServer for ParameterServerStrategy {
    fn create_model_with<M>(
        &self,
        options: ScopeOptions,
        optimizer: impl Into<OptimizerDescription>,
        build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
    ) -> Result<u32> {
        let made = Arc::default();
        let backend = Making { strategy: self.clone(), seed: options.seed, made: Arc::clone(&made) };
        build(VarBuilder::from_backend(Box::new(backend), options.dtype, Device::Cpu))?;
        let made = made.lock();
        let trained: Vec<_> = made.values().filter(|(_, trained)| *trained).map(|(variable, _)| variable).collect();
        Ok(self.optimizer(optimizer, &trained)?)
    }

    fn read_model<M>(&self, build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>) -> Result<M> {
        let backend = Reading { strategy: self.clone() };
        Ok(build(VarBuilder::from_backend(Box::new(backend), DType::F32, Device::Cpu))?)
    }
}

/// Construction of candle models on a worker of a parameter-server cluster.
pub trait CandleWorker {
    /// Returns the model, with the values that its variables have on the servers now. The first call builds the model
    /// and keeps it under its name; later calls pull what has changed.
    ///
    /// # Errors
    /// [`Error::ParameterServer`](crate::Error::ParameterServer) if a server is lost,
    /// [`Error::UnknownVariable`](crate::Error::UnknownVariable) for a variable that the coordinator has not created,
    /// and [`Error::Candle`](crate::Error::Candle) if `build` fails.
    ///
    /// # Examples
    /// ```
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use candle_nn::linear;
    /// use distribute_candle::{CandleWorker, Error};
    /// use distribute_parameter_server::{Program, WorkerContext};
    ///
    /// fn train_step(worker: &WorkerContext, (): ()) -> Result<f32, Error> {
    ///     let model = worker.model("linear", |vb| linear(3, 1, vb.pp("fc")))?;
    ///     let loss = model.forward(&Tensor::ones((2, 3), DType::F32, &Device::Cpu)?)?.sqr()?.mean_all()?;
    ///     model.minimize(&loss)?;                              // runs backward; the servers apply the gradients
    ///     Ok(loss.to_scalar()?)
    /// }
    ///
    /// let program = Program::new().function("train_step", train_step);
    /// ```
    fn model<M: Send + Sync + 'static>(
        &self,
        name: &str,
        build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
    ) -> Result<WorkerModel<'_, M>>;

    /// Returns a [`MirroredStrategy`] of this worker's own, with one replica on each of the named devices, such as
    /// `["CPU:0", "CPU:1"]`. The first call builds it and keeps it for later ones.
    ///
    /// # Errors
    /// [`Error::Strategy`](crate::Error::Strategy) if the list is empty or names a device twice or one that replicas
    /// cannot use.
    ///
    /// # Examples
    /// See [`replicated_model`](CandleWorker::replicated_model).
    fn mirrored<D: Into<String>>(&self, devices: impl IntoIterator<Item = D>) -> Result<Strategy>;

    /// Returns a model with one copy per replica of a strategy of this worker, all with the values that its variables
    /// have on the servers now. They are fetched once for all replicas. The first call builds the copies and keeps them
    /// under their name; pass the same strategy each time.
    ///
    /// Replicas compute gradients in [`run`](Strategy::run_with), with
    /// [`ModelReplica::backward`]; then [`ReplicatedModel::push_gradients`] sends their sum to the servers.
    ///
    /// # Errors
    /// [`Error::Served`](crate::Error::Served) for a strategy of several processes or with tensor groups;
    /// [`Error::ParameterServer`](crate::Error::ParameterServer) if a server is lost;
    /// [`Error::UnknownVariable`](crate::Error::UnknownVariable) for a variable that the coordinator has not created;
    /// [`Error::Candle`](crate::Error::Candle) if `build` fails.
    ///
    /// # Examples
    /// ```
    /// use candle_core::{DType, Device, Module, Tensor};
    /// use candle_nn::linear;
    /// use distribute_candle::{CandleContext, CandleWorker, Error};
    /// use distribute_collectives::ReduceOp;
    /// use distribute_parameter_server::{Program, WorkerContext};
    /// use distribute_values::Axis;
    ///
    /// fn train_step(worker: &WorkerContext, (): ()) -> Result<f32, Error> {
    ///     let strategy = worker.mirrored(["CPU:0", "CPU:1"])?;
    ///     let model = worker.replicated_model("linear", &strategy, |vb| linear(3, 1, vb.pp("fc")))?;
    ///     let batch = model.split(&Tensor::ones((5, 3), DType::F32, &Device::Cpu)?)?;
    ///     let losses = strategy.run_with((&model, batch), |context, (model, x)| {
    ///         let loss = context.average_loss(&model.forward(&x)?.sqr()?, 5)?;
    ///         model.backward(context, &loss)?;
    ///         Ok::<_, Error>(loss.detach())
    ///     })?;
    ///     model.push_gradients()?;                             // one gradient per variable; the servers apply it
    ///     Ok(strategy.reduce(ReduceOp::Sum, &losses, Axis::None)?.to_scalar()?)
    /// }
    ///
    /// let program = Program::new().function("train_step", train_step);
    /// ```
    ///
    /// # Source
    /// `strategy.run` in a function that a `ClusterCoordinator` schedules.
    fn replicated_model<M: Send + Sync + 'static>(
        &self,
        name: &str,
        strategy: &Strategy,
        build: impl FnMut(VarBuilder<'static>) -> candle_core::Result<M>,
    ) -> Result<ReplicatedModel<'_, M>>;
}

impl CandleWorker for WorkerContext {
    fn model<M: Send + Sync + 'static>(
        &self,
        name: &str,
        build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
    ) -> Result<WorkerModel<'_, M>> {
        let kept = self.keep(name, || {
            let (model, registry) = backends::build_on_worker(self, Device::Cpu, backends::seed(self), build)?;
            Kept::new(self, model, registry)
        })?;
        kept.refresh(self)?;
        Ok(WorkerModel::new(self, kept))
    }

    fn mirrored<D: Into<String>>(&self, devices: impl IntoIterator<Item = D>) -> Result<Strategy> {
        let devices: Vec<String> = devices.into_iter().map(Into::into).collect();
        let name = format!("strategy of {}", devices.join(", "));
        let kept = self.keep(&name, || MirroredStrategy::builder().devices(devices).build())?;
        Ok(Strategy::clone(&kept))
    }

    fn replicated_model<M: Send + Sync + 'static>(
        &self,
        name: &str,
        strategy: &Strategy,
        build: impl FnMut(VarBuilder<'static>) -> candle_core::Result<M>,
    ) -> Result<ReplicatedModel<'_, M>> {
        let devices: Vec<String> = strategy.devices().iter().map(DeviceSpec::short).collect();
        let kept =
            self.keep(&format!("{name} on {}", devices.join(", ")), || KeptReplicas::new(self, strategy, build))?;
        kept.refresh(self)?;
        Ok(ReplicatedModel::new(self, kept))
    }
}
