//! Flags of examples that also train on a TPU.

use std::path::PathBuf;

use clap::Args;
use distribute::prelude::Strategy;
use distribute::strategy::TpuStrategy;

/// The devices of a PJRT plugin.
#[derive(Args)]
pub(crate) struct OnTpu {
    /// Trains on a TPU, or on the devices of another PJRT plugin.
    #[arg(long, conflicts_with = "devices")]
    tpu: bool,
    /// Replicas of --tpu. Default: one for each device.
    #[arg(long, requires = "tpu")]
    replicas: Option<usize>,
    /// Writes the programs that --tpu compiles to this folder.
    #[arg(long, requires = "tpu")]
    dump_programs: Option<PathBuf>,
}

impl OnTpu {
    /// Returns the strategy; `None` without --tpu.
    pub(crate) fn strategy(&self) -> distribute::Result<Option<Strategy>> {
        if !self.tpu {
            return Ok(None);
        }
        let mut builder = TpuStrategy::builder();
        if let Some(replicas) = self.replicas {
            builder = builder.replicas(replicas);
        }
        if let Some(folder) = &self.dump_programs {
            builder = builder.dump_programs(folder);
        }
        Ok(Some(builder.build()?))
    }
}
