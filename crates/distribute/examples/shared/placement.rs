//! Flags that choose a strategy, for the examples that run under every one.

use clap::{Args, ValueEnum};
use distribute::Error;
use distribute::prelude::*;

/// Where an example trains.
#[derive(Args, Clone)]
pub(crate) struct Placement {
    /// Strategy; `auto` uses the environment, then the number of devices.
    #[arg(long, value_enum, default_value = "auto")]
    strategy: Kind,
    /// Devices of this process, such as CPU:0,CPU:1.
    #[arg(long, value_delimiter = ',', default_value = "CPU:0")]
    pub(crate) devices: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    Auto,
    Default,
    OneDevice,
    Mirrored,
    CentralStorage,
    MultiWorkerMirrored,
}

impl Placement {
    /// Builds the strategy: the only code that differs between one device and many machines.
    pub(crate) fn strategy(&self) -> distribute::Result<Strategy> {
        let devices = self.devices.clone();
        let several_processes = distribute::cluster::Membership::from_env()?.is_some();
        let refused = |problem: &str| Err(Error::program(format!("{problem}, and --devices is {}", devices.join(","))));
        Ok(match (self.strategy, &devices[..]) {
            (Kind::Default, [device]) if device == "CPU:0" => Strategy::default_strategy()?,
            (Kind::Default, _) => return refused("--strategy default chooses its device itself"),
            (Kind::OneDevice, [device]) => OneDeviceStrategy::builder(device).build()?,
            (Kind::OneDevice, _) => return refused("--strategy one-device trains on one device"),
            (Kind::CentralStorage, _) => CentralStorageStrategy::builder().compute_devices(devices).build()?,
            (Kind::Auto, _) if several_processes => MultiWorkerMirroredStrategy::builder().devices(devices).build()?,
            (Kind::MultiWorkerMirrored, _) => MultiWorkerMirroredStrategy::builder().devices(devices).build()?,
            (Kind::Auto | Kind::Mirrored, _) => MirroredStrategy::builder().devices(devices).build()?,
        })
    }
}
