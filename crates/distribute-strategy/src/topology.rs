//! Which of all replicas a process has.

/// The position of this process's replicas among all replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Topology {
    /// The number of processes that hold replicas.
    pub workers: usize,
    /// The index of this process among them.
    pub worker: usize,
    /// The number of replicas in each process.
    pub replicas_per_worker: usize,
}

impl Topology {
    /// Returns the number of replicas in all processes.
    pub fn num_replicas(&self) -> usize {
        self.workers * self.replicas_per_worker
    }

    /// Returns the id of this process's first replica.
    pub fn first_replica(&self) -> usize {
        self.worker * self.replicas_per_worker
    }
}
