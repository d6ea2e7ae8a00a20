//! Several replicas in one process.

use distribute_collectives::Options;
use distribute_device::{DeviceKind, DeviceSpec};

use crate::{Error, Replicas, Result, Strategy, StrategyExtended, intra_op};

/// Synchronous training on several devices of one process, each with its own copy of every variable.
///
/// # Examples
/// ```
/// use distribute_strategy::MirroredStrategy;
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// assert_eq!(strategy.num_replicas_in_sync(), 2);
/// # Ok::<(), distribute_strategy::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.MirroredStrategy`.
pub struct MirroredStrategy {
    replicas: Replicas,
}

impl MirroredStrategy {
    /// Chooses devices and options.
    pub fn builder() -> MirroredBuilder {
        MirroredBuilder { devices: None, options: None }
    }
}

/// Builds a [`MirroredStrategy`].
#[derive(Clone, Debug)]
pub struct MirroredBuilder {
    devices: Option<Vec<String>>,
    options: Option<Options>,
}

impl MirroredBuilder {
    /// The devices of the replicas, such as `["CPU:0", "CPU:1"]`. One CPU stands for as many logical ones as are named.
    /// Default: `CPU:0`.
    pub fn devices<D: Into<String>>(mut self, devices: impl IntoIterator<Item = D>) -> Self {
        self.devices = Some(devices.into_iter().map(Into::into).collect());
        self
    }

    /// Options of the group in which replicas reduce. Default: [`Options::from_env`].
    pub fn communication(mut self, options: Options) -> Self {
        self.options = Some(options);
        self
    }

    /// Makes the strategy.
    ///
    /// Where several replicas share the cores of this machine, it sets RAYON_NUM_THREADS so that each gets its share, or
    /// says how to do it.
    ///
    /// # Errors
    /// [`Error::Devices`] for an empty list or a device named twice.
    pub fn build(self) -> Result<Strategy> {
        let devices = check_devices("MirroredStrategy", self.devices.unwrap_or_else(|| vec!["CPU:0".to_owned()]))?;
        intra_op::share_cores(devices.len());
        let options = self.options.map_or_else(Options::from_env, Ok)?;
        Ok(Strategy::new(MirroredStrategy { replicas: Replicas::local(devices, options)? }))
    }
}

impl StrategyExtended for MirroredStrategy {
    fn name(&self) -> &'static str {
        "Mirrored"
    }

    fn replicas(&self) -> &Replicas {
        &self.replicas
    }

    fn describe(&self) -> String {
        let names: Vec<String> = self.replicas.devices.iter().map(DeviceSpec::short).collect();
        format!("Mirrored {} replicas ({})", names.len(), names.join(", "))
    }
}

/// Reads a list of devices: at least one, none twice, all of them there.
pub(crate) fn check_devices(strategy: &'static str, names: Vec<String>) -> Result<Vec<DeviceSpec>> {
    let mut devices: Vec<DeviceSpec> = Vec::with_capacity(names.len());
    for name in &names {
        let device = check_device(name.parse()?)?;
        if devices.contains(&device) {
            let problem = format!("device {} is named twice; name each device once", device.short());
            return Err(Error::Devices { strategy, problem });
        }
        devices.push(device);
    }
    if devices.is_empty() {
        let problem = "the list of devices is empty; name at least one, such as \"CPU:0\"".to_owned();
        return Err(Error::Devices { strategy, problem });
    }
    Ok(devices)
}

/// A device of this process, with its type and index filled in.
pub(crate) fn check_device(given: DeviceSpec) -> Result<DeviceSpec> {
    let device = given.canonicalize(&DeviceSpec::default());
    if device.job.as_deref() != Some("localhost") {
        let problem = format!("{given} is a device of another task; a replica of this process needs a local device");
        return Err(Error::Devices { strategy: "the strategy", problem });
    }
    if device.kind() != Some(DeviceKind::Cpu) {
        let problem =
            format!("{} was asked for, but this build has CPU devices only; name CPU:0, CPU:1, …", device.short());
        return Err(Error::Devices { strategy: "the strategy", problem });
    }
    Ok(device)
}
