//! One replica.

use distribute_collectives::Options;
use distribute_device::DeviceSpec;

use crate::{Replicas, Result, Strategy, StrategyExtended};

/// Everything on one device: for tests of distributed programs, and for placing a program.
///
/// # Source
/// `tf.distribute.OneDeviceStrategy`.
pub struct OneDeviceStrategy {
    replicas: Replicas,
    name: &'static str,
}

impl OneDeviceStrategy {
    /// The strategy for one device, such as `CPU:0`.
    ///
    /// # Errors
    /// The device string cannot be read, or this build has no such device.
    #[expect(clippy::new_ret_no_self, reason = "every strategy is handled as a Strategy")]
    pub fn new(device: &str) -> Result<Strategy> {
        let device = crate::mirrored::check_device(device.parse()?)?;
        OneDeviceStrategy::build("OneDevice", device)
    }

    fn build(name: &'static str, device: DeviceSpec) -> Result<Strategy> {
        let replicas = Replicas::local(vec![device], Options::from_env()?)?;
        Ok(Strategy::new(OneDeviceStrategy { replicas, name }))
    }
}

pub(crate) fn default_strategy() -> Result<Strategy> {
    OneDeviceStrategy::build("Default", "CPU:0".parse()?)
}

impl StrategyExtended for OneDeviceStrategy {
    fn name(&self) -> &'static str {
        self.name
    }

    fn replicas(&self) -> &Replicas {
        &self.replicas
    }

    fn describe(&self) -> String {
        format!("{} {}", self.name, self.replicas.devices[0].short())
    }
}
