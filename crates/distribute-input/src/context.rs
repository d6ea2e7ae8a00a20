//! Who reads: the place of this process among the workers, and what an input function is told of it.

use crate::{Error, Result};

/// What an input function is told of the pipeline it makes.
///
/// # Source
/// `tf.distribute.InputContext`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputContext {
    /// Input pipelines in all: one for each worker.
    pub num_input_pipelines: usize,
    /// Which of them this one is, from 0.
    pub input_pipeline_id: usize,
    /// Replicas in sync over all workers.
    pub num_replicas_in_sync: usize,
}

impl InputContext {
    /// The batch of one replica when the replicas together take `global_batch`.
    ///
    /// # Errors
    /// When the global batch cannot be divided evenly.
    pub fn per_replica_batch_size(&self, global_batch: usize) -> Result<usize> {
        let replicas = self.num_replicas_in_sync;
        match global_batch.checked_rem(replicas) {
            Some(0) => Ok(global_batch / replicas),
            _ => Err(Error::NotDivisible { global_batch, replicas }),
        }
    }
}

/// How many workers read, which of them this process is, and how many replicas each worker feeds.
///
/// Replicas are numbered over all workers, worker by worker: replica `l` of worker `w` is replica `w * R + l`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputTopology {
    workers: usize,
    worker: usize,
    replicas_per_worker: usize,
}

impl InputTopology {
    /// Worker `worker` of `workers`, each with `replicas_per_worker` replicas.
    ///
    /// # Errors
    /// When there is no worker or no replica, or `worker` is not below `workers`.
    pub fn new(workers: usize, worker: usize, replicas_per_worker: usize) -> Result<InputTopology> {
        let sensible = worker < workers && replicas_per_worker > 0;
        if !sensible || workers.checked_mul(replicas_per_worker).is_none() {
            return Err(Error::Topology { workers, worker, replicas_per_worker });
        }
        Ok(InputTopology { workers, worker, replicas_per_worker })
    }

    /// The only worker, with `replicas` replicas.
    ///
    /// # Errors
    /// When there is no replica.
    pub fn local(replicas: usize) -> Result<InputTopology> {
        InputTopology::new(1, 0, replicas)
    }

    /// Workers in all.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// This worker, from 0.
    pub fn worker(&self) -> usize {
        self.worker
    }

    /// Replicas of each worker.
    pub fn replicas_per_worker(&self) -> usize {
        self.replicas_per_worker
    }

    /// Replicas over all workers.
    pub fn num_replicas_in_sync(&self) -> usize {
        self.workers * self.replicas_per_worker
    }

    /// What an input function of this worker is told.
    pub fn context(&self) -> InputContext {
        InputContext {
            num_input_pipelines: self.workers,
            input_pipeline_id: self.worker,
            num_replicas_in_sync: self.num_replicas_in_sync(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_global_batch_is_divided_by_all_replicas() {
        let context = InputTopology::new(2, 1, 4).unwrap().context();
        assert_eq!(context, InputContext { num_input_pipelines: 2, input_pipeline_id: 1, num_replicas_in_sync: 8 });
        assert_eq!(context.per_replica_batch_size(64).unwrap(), 8);
        let text = context.per_replica_batch_size(12).unwrap_err().to_string();
        assert!(text.contains("12") && text.contains("multiple of 8"), "{text}");
        let none = InputContext { num_input_pipelines: 1, input_pipeline_id: 0, num_replicas_in_sync: 0 };
        assert!(none.per_replica_batch_size(4).is_err());
    }

    #[test]
    fn impossible_topologies_are_refused() {
        for (workers, worker, replicas) in [(0, 0, 1), (1, 1, 1), (2, 0, 0), (usize::MAX, 0, 2)] {
            assert!(matches!(InputTopology::new(workers, worker, replicas), Err(Error::Topology { .. })));
        }
    }
}
