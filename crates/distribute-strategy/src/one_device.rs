//! One replica.

use distribute_cluster::Membership;
use distribute_collectives::Options;
use distribute_device::DeviceSpec;

use crate::alone::refuse_lonely;
use crate::devices::{DeviceChoice, OwnDevices, check_device};
use crate::{Error, Replicas, Result, Strategy, StrategyExtended};

/// Everything on one device, for testing distributed programs and for placing a program on a device.
///
/// # Source
/// `tf.distribute.OneDeviceStrategy`.
pub struct OneDeviceStrategy {
    replicas: Replicas,
    name: &'static str,
}

impl OneDeviceStrategy {
    /// Returns a builder for one device, such as `CPU:0`, or `/job:worker/task:1/device:CPU:0` in the process
    /// that TF_CONFIG, or another description of the job, makes that task.
    pub fn builder(device: impl Into<String>) -> OneDeviceBuilder {
        OneDeviceBuilder { device: device.into() }
    }

    /// Builds the strategy; `membership` tells which task this process is, and is called only if the device names one.
    fn of_task(given: DeviceSpec, membership: impl FnOnce() -> Result<Option<Membership>>) -> Result<Strategy> {
        let full = given.canonicalize(&DeviceSpec::default());
        if full.job.as_deref() == Some("localhost") {
            refuse_lonely("OneDeviceStrategy")?;
            return OneDeviceStrategy::build("OneDevice", check_device(given, None)?);
        }
        let own = membership()?.and_then(|membership| membership.tasks.get(membership.rank as usize).copied());
        let meant = own.is_some_and(|own| full.job.as_deref() == Some(own.kind.name()) && full.task == Some(own.index));
        if !meant {
            let here = own.map_or_else(|| "alone".to_owned(), |own| own.to_string());
            let problem =
                format!("{given} is a device of another task, and this process is {here}; run the program there");
            return Err(Error::Devices { strategy: "OneDeviceStrategy", problem });
        }
        let local = DeviceSpec { job: None, replica: None, task: None, ..full.clone() };
        check_device(local, None)?;
        OneDeviceStrategy::build("OneDevice", full)
    }

    fn build(name: &'static str, device: DeviceSpec) -> Result<Strategy> {
        let replicas = Replicas::local(vec![device], Options::from_env()?)?;
        Ok(Strategy::new(OneDeviceStrategy { replicas, name }))
    }
}

/// Builds a [`OneDeviceStrategy`].
#[derive(Clone, Debug)]
#[must_use]
pub struct OneDeviceBuilder {
    device: String,
}

impl OneDeviceBuilder {
    /// Builds the strategy.
    ///
    /// # Errors
    /// [`Error::Device`] if the device string cannot be parsed, [`Error::Cluster`] if the environment cannot, or
    /// [`Error::Devices`] if this build has no such device or it belongs to another task: closures run in the process
    /// that they are written in. [`Error::Alone`] if this process is one of several, and has joined none of them.
    pub fn build(self) -> Result<Strategy> {
        OneDeviceStrategy::of_task(self.device.parse()?, || Ok(Membership::from_env()?))
    }
}

pub(crate) fn default_strategy() -> Result<Strategy> {
    refuse_lonely("the default strategy")?;
    let found = DeviceChoice::Found.devices(&OwnDevices::of_one_process("the default strategy", None), 1)?;
    // It has one replica, on the first device.
    let device = found.into_iter().next().map_or_else(|| "CPU:0".parse(), Ok)?;
    OneDeviceStrategy::build("Default", device)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_of_this_process_may_be_named_by_its_task() {
        let second = || Ok(Some(Membership::new(1, 3, "10.0.0.1:2222")?));
        let device = |text: &str| text.parse().unwrap();
        let strategy = OneDeviceStrategy::of_task(device("/job:worker/task:1/cpu:0"), second).unwrap();
        assert_eq!(strategy.devices()[0].to_string(), "/job:worker/replica:0/task:1/device:CPU:0");
        let error = OneDeviceStrategy::of_task(device("/job:worker/task:2/cpu:0"), second).unwrap_err().to_string();
        assert!(error.contains("task:2") && error.contains("this process is worker:1"), "{error}");
        let error = OneDeviceStrategy::of_task(device("/job:worker/cpu:0"), || Ok(None)).unwrap_err().to_string();
        assert!(error.contains("alone"), "{error}");
        let error = OneDeviceStrategy::of_task(device("/job:worker/task:1/gpu:0"), second).unwrap_err().to_string();
        assert!(error.contains("GPU:0"), "{error}");
    }
}
