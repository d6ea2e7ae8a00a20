//! Several replicas that share one copy of every variable.

use distribute_device::DeviceSpec;

use crate::alone::refuse_lonely;
use crate::devices::{check_device, check_devices};
use crate::{CommunicationOptions, Replicas, Result, Strategy, StrategyExtended, intra_op};

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
    compute_devices: Option<Vec<String>>,
    parameter_device: Option<String>,
    communication: CommunicationOptions,
}

impl CentralStorageBuilder {
    /// Sets the devices of the replicas. Default: `CPU:0`.
    pub fn compute_devices<D: Into<String>>(mut self, devices: impl IntoIterator<Item = D>) -> Self {
        self.compute_devices = Some(devices.into_iter().map(Into::into).collect());
        self
    }

    /// Sets the device of the variables. Default: the only compute device, or `CPU:0` if there are several.
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
    /// cannot use. [`Error::Alone`](crate::Error::Alone) if this process is one of several, and has joined none of
    /// them. The errors of device strings, of environment variables that cannot be read, and of starting the replicas'
    /// group and threads.
    pub fn build(self) -> Result<Strategy> {
        let devices = self.compute_devices.unwrap_or_else(|| vec!["CPU:0".to_owned()]);
        let devices = check_devices("CentralStorageStrategy", devices, None)?;
        refuse_lonely("CentralStorageStrategy")?;
        let parameter_device = match (self.parameter_device, &devices[..]) {
            (Some(given), _) => check_device(given.parse()?, None)?,
            (None, [only]) => only.clone(),
            (None, _) => check_device("CPU:0".parse()?, None)?,
        };
        intra_op::share_cores(devices.len());
        let options = self.communication.options(&devices)?;
        let replicas = Replicas::local(devices, options)?;
        Ok(Strategy::new(CentralStorageStrategy { replicas, parameter_device }))
    }
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
