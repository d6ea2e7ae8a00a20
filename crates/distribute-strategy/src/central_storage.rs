//! Several replicas that share one copy of every variable.

use distribute_device::{DeviceKind, DeviceSpec};

use crate::alone::refuse_lonely;
use crate::devices::{DeviceChoice, OwnDevices, check_device};
use crate::{CommunicationOptions, Error, Replicas, Result, Strategy, StrategyExtended, intra_op};

/// Synchronous training on several devices of one process, with one copy of every variable. Replicas read it; the
/// values they write are aggregated first and then written once.
///
/// Parameters and optimizer slots take the memory of one copy, however many replicas there are. Gradients are summed
/// after backward rather than during it.
///
/// # Examples
/// ```
/// use distribute_strategy::CentralStorageStrategy;
/// let strategy = CentralStorageStrategy::builder().compute_devices(["CPU:0", "CPU:1"]).build()?;
/// assert_eq!(strategy.describe(), "CentralStorage 2 replicas (CPU:0, CPU:1), variables on CPU:0");
/// # Ok::<(), distribute_strategy::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.experimental.CentralStorageStrategy`.
pub struct CentralStorageStrategy {
    replicas: Replicas,
    parameter_device: DeviceSpec,
}

impl CentralStorageStrategy {
    /// Returns a builder to choose devices and options.
    pub fn builder() -> CentralStorageBuilder {
        CentralStorageBuilder::default()
    }
}

/// Builds a [`CentralStorageStrategy`].
#[derive(Clone, Debug, Default)]
pub struct CentralStorageBuilder {
    compute_devices: DeviceChoice,
    parameter_device: Option<String>,
    communication: CommunicationOptions,
}

impl CentralStorageBuilder {
    /// Sets the devices of the replicas. Default: as
    /// [`MirroredBuilder::devices`](crate::MirroredBuilder::devices).
    pub fn compute_devices<D: Into<String>>(mut self, devices: impl IntoIterator<Item = D>) -> Self {
        self.compute_devices = DeviceChoice::named(devices);
        self
    }

    /// Runs this number of replicas, as [`MirroredBuilder::num_replicas`](crate::MirroredBuilder::num_replicas) does.
    pub fn num_replicas(mut self, count: usize) -> Self {
        self.compute_devices = DeviceChoice::Replicas(count);
        self
    }

    /// Sets the device of the variables. Default: the only compute device, or `CPU:0` if there are several. CPUs have
    /// one memory, so that any of them is that of all replicas on CPUs; a replica on a GPU must be the only one, and
    /// have the variables.
    pub fn parameter_device(mut self, device: impl Into<String>) -> Self {
        self.parameter_device = Some(device.into());
        self
    }

    /// Sets how replicas communicate. Default: the environment's settings.
    pub fn communication(mut self, options: CommunicationOptions) -> Self {
        self.communication = options;
        self
    }

    /// Builds the strategy.
    ///
    /// # Errors
    /// [`Error::Devices`](crate::Error::Devices) if the list is empty or names a device twice or one that replicas
    /// cannot use, or if replicas cannot read variables on the parameter device. [`Error::Alone`](crate::Error::Alone)
    /// if this process is one of several, and has joined none of them. The errors of device strings, of environment
    /// variables that cannot be read, and of starting the replicas' group and threads.
    pub fn build(self) -> Result<Strategy> {
        let own = OwnDevices::of_one_process("CentralStorageStrategy", None);
        let devices = self.compute_devices.devices(&own, 1)?;
        refuse_lonely("CentralStorageStrategy")?;
        let parameter_device = match (self.parameter_device, &devices[..]) {
            (Some(given), _) => check_device(given.parse()?, None)?,
            (None, [only]) => only.clone(),
            (None, _) => check_device("CPU:0".parse()?, None)?,
        };
        check_places(&devices, &parameter_device)?;
        intra_op::share_cores(devices.len());
        let options = self.communication.options(&devices)?;
        let replicas = Replicas::local(devices, options)?;
        Ok(Strategy::new(CentralStorageStrategy { replicas, parameter_device }))
    }
}

/// Returns an error unless all replicas can read the variables where they are: in host memory, or on the only device.
fn check_places(devices: &[DeviceSpec], parameter_device: &DeviceSpec) -> Result<()> {
    let is_cpu = |device: &DeviceSpec| device.kind() == Some(DeviceKind::Cpu);
    if matches!(devices, [only] if only == parameter_device) || devices.iter().chain([parameter_device]).all(is_cpu) {
        return Ok(());
    }
    let names: Vec<String> = devices.iter().map(DeviceSpec::short).collect();
    let problem = format!(
        "replicas on {} would read variables in the memory of {}, which is not supported; use MirroredStrategy, or one \
         compute device that has the variables too",
        names.join(", "),
        parameter_device.short()
    );
    Err(Error::Devices { strategy: "CentralStorageStrategy", problem })
}

impl StrategyExtended for CentralStorageStrategy {
    fn name(&self) -> &'static str {
        "CentralStorage"
    }

    fn replicas(&self) -> &Replicas {
        &self.replicas
    }

    fn describe(&self) -> String {
        let names: Vec<String> = self.replicas.devices.iter().map(DeviceSpec::short).collect();
        let parameters = self.parameter_device.short();
        format!("CentralStorage {} replicas ({}), variables on {parameters}", names.len(), names.join(", "))
    }

    fn shares_variables(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_must_be_where_all_replicas_read_them() {
        let check = |devices: &[&str], parameters: &str| {
            let devices: Vec<DeviceSpec> = devices.iter().map(|device| device.parse().unwrap()).collect();
            check_places(&devices, &parameters.parse().unwrap())
        };
        for (devices, parameters) in
            [(&["CPU:0", "CPU:1"][..], "CPU:0"), (&["CPU:0", "CPU:1"], "CPU:1"), (&["GPU:1"], "GPU:1")]
        {
            check(devices, parameters).unwrap();
        }
        for (devices, parameters) in [
            (&["GPU:0", "GPU:1"][..], "CPU:0"),
            (&["GPU:0", "GPU:1"], "GPU:0"),
            (&["GPU:0"], "CPU:0"),
            (&["GPU:0"], "GPU:1"),
            (&["CPU:0", "CPU:1"], "GPU:0"),
            (&["CPU:0", "GPU:0"], "CPU:0"),
        ] {
            let error = check(devices, parameters).unwrap_err().to_string();
            assert!(error.contains(parameters) && error.contains("MirroredStrategy"), "{error}");
        }
    }
}
