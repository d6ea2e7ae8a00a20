//! The strategies of programs that name none: the default, and the one that the environment describes.

use distribute_cluster::Membership;

use crate::one_device::default_strategy;
use crate::{MultiWorkerMirroredStrategy, Result, Strategy};

impl Strategy {
    /// Returns the strategy of programs that choose none: one replica, on the CPU.
    ///
    /// # Errors
    /// [`Error::Collective`](crate::Error::Collective) if a variable of the environment that sets communication options
    /// cannot be read; [`Error::Alone`](crate::Error::Alone) if this process is one of several, and has joined none of
    /// them.
    pub fn default_strategy() -> Result<Strategy> {
        default_strategy()
    }

    /// Returns the strategy that the environment describes: [`MultiWorkerMirroredStrategy`] if TF_CONFIG, RANK and
    /// WORLD_SIZE, Open MPI or Slurm make this process one of several, else the default.
    ///
    /// # Errors
    /// [`Error::Cluster`](crate::Error::Cluster) if the variables are invalid or other tasks are missing.
    pub fn from_env() -> Result<Strategy> {
        match Membership::from_env()? {
            Some(_) => MultiWorkerMirroredStrategy::builder().build(),
            None => Strategy::default_strategy(),
        }
    }
}
