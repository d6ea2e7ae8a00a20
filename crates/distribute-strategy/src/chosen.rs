//! The strategies of programs that name none: the default, and the one that the environment describes.

use distribute_cluster::Membership;

use crate::one_device::default_strategy;
use crate::{MultiWorkerMirroredStrategy, Result, Strategy};

impl Strategy {
    /// Returns the strategy of programs that choose none: one replica, on the first GPU that this process
    /// sees if a library that computes on GPUs is part of the build (feature `cuda`), else on the CPU.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective) if a variable of the environment that sets communication options
    /// cannot be read; [`Error::Alone`](crate::Error::Alone) if this process is one of several, and has joined none of
    /// them.
    pub fn default_strategy() -> Result<Strategy> {
        default_strategy()
    }

    /// Returns the strategy that the environment describes: [`MultiWorkerMirroredStrategy`] if a launcher's variables
    /// make this process one of several (see [`Membership::from_env`]), else the default. Logs which, and why.
    ///
    /// # Errors
    /// [`Error::Cluster`](crate::Error::Cluster) if the variables are invalid or other tasks are missing.
    pub fn from_env() -> Result<Strategy> {
        let Some(membership) = Membership::from_env()? else {
            tracing::info!("no variable describes a job: one replica in one process");
            return Strategy::default_strategy();
        };
        let (task, processes) = (membership.task(), membership.world_size());
        tracing::info!("{task} of {processes} processes, by {}", membership.source);
        MultiWorkerMirroredStrategy::builder().membership(membership).build()
    }
}
