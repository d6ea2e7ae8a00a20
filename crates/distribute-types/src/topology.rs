//! Which of all replicas a process has.

/// The number of workers, the index of this one, and the number of replicas of each.
///
/// Replicas are numbered over all workers, worker by worker: replica `l` of worker `w` is replica `w * R + l`.
///
/// # Examples
/// ```
/// use distribute_types::Topology;
/// let second = Topology::new(2, 1, 4)?;
/// assert_eq!((second.num_replicas(), second.first_replica()), (8, 4));
/// # Ok::<(), distribute_types::InvalidTopology>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    workers: usize,
    worker: usize,
    replicas_per_worker: usize,
}

impl Topology {
    /// Makes the topology of worker `worker` of `workers`, each with `replicas_per_worker` replicas.
    ///
    /// # Errors
    /// [`InvalidTopology`] if there are no workers or no replicas, if `worker` is not below `workers`, or if the number
    /// of replicas overflows.
    pub fn new(workers: usize, worker: usize, replicas_per_worker: usize) -> Result<Topology, InvalidTopology> {
        let sensible = worker < workers && replicas_per_worker > 0;
        if !sensible || workers.checked_mul(replicas_per_worker).is_none() {
            return Err(InvalidTopology { workers, worker, replicas_per_worker });
        }
        Ok(Topology { workers, worker, replicas_per_worker })
    }

    /// Makes the topology of a single worker with `replicas` replicas.
    ///
    /// # Errors
    /// [`InvalidTopology`] if `replicas` is zero.
    pub fn local(replicas: usize) -> Result<Topology, InvalidTopology> {
        Topology::new(1, 0, replicas)
    }

    /// Returns the number of workers: processes that hold replicas.
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

    /// Returns the number of replicas of all workers.
    pub fn num_replicas(&self) -> usize {
        self.workers * self.replicas_per_worker
    }

    /// Returns the id of this worker's first replica.
    pub fn first_replica(&self) -> usize {
        self.worker * self.replicas_per_worker
    }
}

/// The error of numbers that are not a topology.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "worker {worker} of {workers} with {replicas_per_worker} replicas does not exist; give at least one worker and one \
     replica, and a worker below their number"
)]
pub struct InvalidTopology {
    /// The number of workers.
    pub workers: usize,
    /// The index of the worker.
    pub worker: usize,
    /// The number of replicas of each worker.
    pub replicas_per_worker: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_topologies_are_refused() {
        for (workers, worker, replicas_per_worker) in [(0, 0, 1), (1, 1, 1), (2, 0, 0), (usize::MAX, 0, 2)] {
            let refused = InvalidTopology { workers, worker, replicas_per_worker };
            assert_eq!(Topology::new(workers, worker, replicas_per_worker), Err(refused));
        }
    }
}
