//! The reading process's position among the workers, and the context of an input function.

use crate::{Error, Result};

/// The description of the pipeline that an input function must create.
///
/// # Source
/// `tf.distribute.InputContext`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputContext {
    /// The number of input pipelines over all workers.
    pub num_input_pipelines: usize,
    /// The index of this pipeline, from 0.
    pub input_pipeline_id: usize,
    /// The number of replicas in sync over all workers.
    pub num_replicas_in_sync: usize,
}

impl InputContext {
    /// Returns the per-replica batch size for a global batch.
    ///
    /// # Errors
    /// [`Error::NotDivisible`] if the global batch is not a multiple of the number of replicas.
    pub fn per_replica_batch_size(&self, global_batch: usize) -> Result<usize> {
        let replicas = self.num_replicas_in_sync;
        match global_batch.checked_rem(replicas) {
            Some(0) => Ok(global_batch / replicas),
            _ => Err(Error::NotDivisible { global_batch, replicas }),
        }
    }
}

/// The number of workers that read, the index of this worker, and the number of replicas that each worker feeds.
///
/// Replicas are numbered over all workers, worker by worker: replica `l` of worker `w` is replica `w * R + l`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputTopology {
    workers: usize,
    worker: usize,
    replicas_per_worker: usize,
}

impl InputTopology {
    /// Creates the topology of worker `worker` of `workers`, each with `replicas_per_worker` replicas.
    ///
    /// # Errors
    /// [`Error::Topology`] if there are no workers or no replicas, if `worker` is not below `workers`, or if the number
    /// of replicas overflows.
    pub fn new(workers: usize, worker: usize, replicas_per_worker: usize) -> Result<InputTopology> {
        let sensible = worker < workers && replicas_per_worker > 0;
        if !sensible || workers.checked_mul(replicas_per_worker).is_none() {
            return Err(Error::Topology { workers, worker, replicas_per_worker });
        }
        Ok(InputTopology { workers, worker, replicas_per_worker })
    }

    /// Creates the topology of a single worker with `replicas` replicas.
    ///
    /// # Errors
    /// [`Error::Topology`] if `replicas` is zero.
    pub fn local(replicas: usize) -> Result<InputTopology> {
        InputTopology::new(1, 0, replicas)
    }

    /// Returns the number of workers.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Returns the index of this worker, from 0.
    pub fn worker(&self) -> usize {
        self.worker
    }

    /// Returns the number of replicas of each worker.
    pub fn replicas_per_worker(&self) -> usize {
        self.replicas_per_worker
    }

    /// Returns the number of replicas over all workers.
    pub fn num_replicas_in_sync(&self) -> usize {
        self.workers * self.replicas_per_worker
    }

    /// Returns the context that an input function of this worker receives.
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
