//! Where a scenario runs: under a strategy, or on parameter servers.

use candle_nn::ModuleT;
use distribute::candle::{ServedTrainer, ServedTraining};
use distribute::cluster::{ClusterSpec, SimpleResolver, TaskType};
use distribute::parameter_server::{FixedShardsPartitioner, ParameterServerStrategy, Server};
use distribute::prelude::Strategy;
use distribute_testkit::Ports;

use crate::check::Stop;

pub(crate) enum Place {
    Strategy(Strategy),
    /// Two servers, and workers that train without waiting for each other.
    Servers {
        workers: usize,
        replicas: usize,
    },
}

/// The tasks of a cluster, which end when they are dropped.
pub(crate) struct Tasks(#[expect(dead_code, reason = "held until the scenario ends")] Vec<Server>);

impl Place {
    /// Returns the trainer of a training, with the tasks that it takes: on servers new ones.
    pub(crate) fn trainer<M: ModuleT + Send + Sync + 'static>(
        &self,
        training: ServedTraining<M>,
    ) -> Result<(ServedTrainer<M>, Tasks), Stop> {
        let (workers, replicas) = match self {
            Place::Strategy(strategy) => return Ok((training.under(strategy)?, Tasks(Vec::new()))),
            Place::Servers { workers, replicas } => (*workers, *replicas),
        };
        let training = training.replicas_per_worker(replicas)?;
        let addresses = Ports::reserve(2 + workers)?.addresses();
        let spec = ClusterSpec::new()
            .with_job(TaskType::Ps, addresses[..2].to_vec())?
            .with_job(TaskType::Worker, addresses[2..].to_vec())?;
        let task = |kind, index| SimpleResolver {
            spec: spec.clone(),
            task_type: Some(kind),
            task_id: Some(index),
            ..SimpleResolver::default()
        };
        let servers = (0..2).map(|index| (TaskType::Ps, index));
        let all = servers.chain((0..workers as u32).map(|index| (TaskType::Worker, index)));
        let started = all.map(|(kind, index)| Server::start(&task(kind, index), training.program()));
        let tasks = Tasks(started.collect::<Result<_, _>>()?);
        let builder = ParameterServerStrategy::builder(&task(TaskType::Chief, 0));
        let strategy = builder.partitioner(FixedShardsPartitioner::new(2)).build()?;
        Ok((training.on_servers(&strategy)?, tasks))
    }

    /// Returns the number of steps that read as many examples as one step of all replicas in step.
    pub(crate) fn steps(&self) -> u64 {
        match self {
            Place::Strategy(_) => 1,
            Place::Servers { workers, .. } => *workers as u64,
        }
    }

    /// Returns whether all steps are made one after the other, so that results are those of one replica.
    pub(crate) fn is_in_step(&self) -> bool {
        self.steps() == 1
    }

    /// Returns the number of parts of the data whose positions are saved. Those of servers' workers are not.
    pub(crate) fn pipelines(&self) -> usize {
        match self {
            Place::Strategy(strategy) => strategy.topology().workers(),
            Place::Servers { .. } => 1,
        }
    }

    /// Returns whether this process writes files.
    pub(crate) fn is_chief(&self) -> bool {
        match self {
            Place::Strategy(strategy) => strategy.is_chief(),
            Place::Servers { .. } => true,
        }
    }
}
