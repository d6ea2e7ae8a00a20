//! The trainer of a described training, on parameter servers or under any other strategy.

use std::sync::atomic::AtomicU64;

use candle_core::{ModuleT, Tensor};
use distribute_optim::MemoryReport;
use distribute_strategy::Strategy;
use distribute_train::BoxError;
use distribute_train::checkpoint::Checkpointed;
use distribute_train::history::History;
use distribute_train::metrics::Metrics;
use distribute_train::trainer::{self, Part, Trainee};
use distribute_types::ErrorClass;
use distribute_values::PerReplica;

use super::coordination::{Coordination, WithModel};
use super::{ServedBatch, ServedData, ServedTraining};
use crate::{Error, PredictionData, Result, Trainer};

/// The settings of a training run of a [`ServedTrainer`].
pub type ServedFit = distribute_train::trainer::Fit<ServedBatch, Error>;

/// A model with an optimizer, a loss, metrics and datasets, on parameter servers or under any other strategy.
///
/// On servers a step is one batch of one worker, and several are under way at once: two for each worker. The loop waits
/// for all of them at the end of an epoch, before a checkpoint and before the learning rate changes. With a rate that
/// changes with each step, workers therefore wait for each other, unless
/// [`steps_per_execution`](ServedFit::steps_per_execution) is larger.
pub struct ServedTrainer<M>(Kind<M>);

enum Kind<M> {
    Servers(Box<Coordination<M>>),
    Replicas(Box<(ServedTraining<M>, Trainer<M>)>),
}

impl<M: ModuleT + Send + Sync + 'static> ServedTrainer<M> {
    pub(super) fn on_servers(coordination: Coordination<M>) -> ServedTrainer<M> {
        ServedTrainer(Kind::Servers(Box::new(coordination)))
    }

    pub(super) fn under(training: ServedTraining<M>, trainer: Trainer<M>) -> ServedTrainer<M> {
        ServedTrainer(Kind::Replicas(Box::new((training, trainer))))
    }

    /// Returns a dataset of the training, for [`validation`](ServedFit::validation).
    ///
    /// # Errors
    /// [`Error::Served`] if there is none of this name.
    pub fn data(&self, name: &str) -> Result<ServedData> {
        match &self.0 {
            Kind::Servers(servers) => servers.training.find(name).map(|_| ServedData::on_workers(name)),
            Kind::Replicas(replicas) => replicas.0.find(name).map(ServedData::here),
        }
    }

    /// Trains on a dataset, and returns the losses and metrics of each epoch, including those of an earlier run that
    /// this one resumes.
    ///
    /// On servers, `steps_per_epoch` must be set; workers read their data again from the beginning when a pass ends,
    /// and after a restart. The loss of a step is the mean over the examples of its batch.
    ///
    /// # Errors
    /// [`Error::Served`] for an unknown dataset, and for a setting that is missing or has no effect; [`Error::Train`]
    /// if there are no examples, or a callback or a checkpoint fails; [`Error::ParameterServer`] if a worker's function
    /// fails, a server is lost or no worker is left; under other strategies, the errors of [`Trainer::fit`].
    pub fn fit(&mut self, dataset: &str, fit: ServedFit) -> Result<History> {
        match &self.0 {
            Kind::Servers(servers) => {
                let fitted = servers.begin(dataset, fit.settings()).and_then(|steps| trainer::fit(self, &steps, fit));
                servers.end(fitted)
            }
            Kind::Replicas(replicas) => {
                let fitted = self.data(dataset).and_then(|data| trainer::fit(self, &data, fit));
                replicas.1.strategy().report_failure_as(fitted, ErrorClass::failure_kind)
            }
        }
    }

    /// Evaluates the model on a dataset. Returns the loss and the metrics, in that order.
    ///
    /// On servers, workers evaluate parts of the data, five for each worker, of which each counts once.
    ///
    /// # Errors
    /// [`Error::Served`] for an unknown dataset; [`Error::ParameterServer`] if a worker's function fails, a server is
    /// lost or no worker is left; under other strategies, the errors of [`Trainer::evaluate`].
    pub fn evaluate(&self, dataset: &str) -> Result<Vec<(String, f64)>> {
        let evaluated = self.data(dataset).and_then(|data| trainer::evaluate(self, &data));
        match &self.0 {
            Kind::Servers(servers) => servers.report(evaluated),
            Kind::Replicas(replicas) => replicas.1.strategy().report_failure_as(evaluated, ErrorClass::failure_kind),
        }
    }

    /// Returns the model's outputs for each element of a batched dataset, or each row of a tensor, in order. On
    /// servers, the coordinator computes them with the variables' current values.
    ///
    /// # Errors
    /// [`Error::NoExamples`] for a dataset without elements; [`Error::Candle`] if the model fails;
    /// [`Error::ParameterServer`] if a server is lost; under other strategies, the errors of [`Trainer::predict`].
    pub fn predict(&self, data: &impl PredictionData) -> Result<Tensor> {
        match &self.0 {
            Kind::Servers(servers) => servers.report(servers.predict(data)),
            Kind::Replicas(replicas) => replicas.1.predict(data),
        }
    }
}

impl<M: ModuleT + Send + Sync + 'static> Trainee for ServedTrainer<M> {
    type Examples = ServedBatch;
    type Error = Error;

    fn strategy(&self) -> &Strategy {
        match &self.0 {
            Kind::Servers(servers) => &servers.here,
            Kind::Replicas(replicas) => replicas.1.strategy(),
        }
    }

    fn describe(&self) -> String {
        match &self.0 {
            Kind::Servers(servers) => {
                let (workers, servers) = (servers.strategy.num_workers(), servers.strategy.num_servers());
                format!("ParameterServer {workers} workers, {servers} servers")
            }
            Kind::Replicas(replicas) => replicas.1.describe(),
        }
    }

    fn model(&self) -> &dyn Checkpointed {
        match &self.0 {
            Kind::Servers(servers) => &**servers,
            Kind::Replicas(replicas) => replicas.1.model(),
        }
    }

    fn optimizer(&self) -> &dyn Checkpointed {
        match &self.0 {
            Kind::Servers(_) => &WithModel,
            Kind::Replicas(replicas) => replicas.1.optimizer(),
        }
    }

    fn learning_rate(&self) -> f64 {
        match &self.0 {
            Kind::Servers(servers) => servers.learning_rate(),
            Kind::Replicas(replicas) => replicas.1.learning_rate(),
        }
    }

    fn set_learning_rate(&self, learning_rate: f64) {
        match &self.0 {
            Kind::Servers(servers) => servers.set_learning_rate(learning_rate),
            Kind::Replicas(replicas) => replicas.1.set_learning_rate(learning_rate),
        }
    }

    fn num_parameters(&self) -> usize {
        match &self.0 {
            Kind::Servers(servers) => servers.num_parameters(),
            Kind::Replicas(replicas) => replicas.1.num_parameters(),
        }
    }

    fn memory(&self) -> Option<MemoryReport> {
        match &self.0 {
            Kind::Servers(_) => None,
            Kind::Replicas(replicas) => replicas.1.memory(),
        }
    }

    fn passes(&self) -> &AtomicU64 {
        match &self.0 {
            Kind::Servers(servers) => &servers.passes,
            Kind::Replicas(replicas) => replicas.1.passes(),
        }
    }

    fn metrics(&self) -> &Metrics {
        match &self.0 {
            Kind::Servers(servers) => servers.training.measures.metrics(),
            Kind::Replicas(replicas) => replicas.1.metrics(),
        }
    }

    fn train_on(
        &self,
        batches: PerReplica<Vec<Part<ServedBatch>>>,
        batch_size: usize,
        class_weights: &[f32],
    ) -> Result<PerReplica<Vec<f64>>> {
        match &self.0 {
            Kind::Servers(servers) => {
                let steps = batches.values().iter().map(Vec::len).sum();
                Ok(PerReplica::new(vec![servers.train(steps, class_weights)?]))
            }
            Kind::Replicas(replicas) => {
                let of_part = |part: Part<ServedBatch>| {
                    let has_examples = part.has_examples;
                    Ok(Part { examples: part.examples.examples()?, has_examples })
                };
                let of_replica = |parts: Vec<Part<ServedBatch>>| parts.into_iter().map(of_part).collect();
                let batches: Result<Vec<_>> = batches.into_values().into_iter().map(of_replica).collect();
                replicas.1.train_on(PerReplica::new(batches?), batch_size, class_weights)
            }
        }
    }

    fn settle(&self) -> Result<PerReplica<Vec<f64>>, BoxError> {
        match &self.0 {
            Kind::Servers(servers) => Ok(PerReplica::new(vec![servers.settle()?])),
            Kind::Replicas(replicas) => replicas.1.settle(),
        }
    }

    fn steps_made(&self, known: u64) -> distribute_train::Result<u64> {
        match &self.0 {
            Kind::Servers(servers) => servers.steps_made(known),
            Kind::Replicas(replicas) => replicas.1.steps_made(known),
        }
    }

    fn prefer_checkpoint(&self) {
        match &self.0 {
            Kind::Servers(servers) => servers.strategy.prefer_checkpoint(),
            Kind::Replicas(replicas) => replicas.1.prefer_checkpoint(),
        }
    }

    fn synchronize(&self) -> Result<()> {
        match &self.0 {
            Kind::Servers(_) => Ok(()),
            Kind::Replicas(replicas) => replicas.1.synchronize(),
        }
    }

    fn evaluate_on(&self, batch: PerReplica<ServedBatch>) -> Result<PerReplica<Vec<f64>>> {
        match &self.0 {
            Kind::Servers(servers) => {
                let dataset = batch.values().first().map_or(Ok(""), ServedBatch::dataset)?;
                Ok(PerReplica::new(vec![servers.evaluate(dataset)?]))
            }
            Kind::Replicas(replicas) => {
                let has_examples: Vec<bool> = (0..batch.len()).map(|local| batch.has_examples(local)).collect();
                let examples: Result<Vec<_>> = batch.into_values().into_iter().map(ServedBatch::examples).collect();
                replicas.1.evaluate_on(PerReplica::new(examples?).with_examples(&has_examples))
            }
        }
    }
}
