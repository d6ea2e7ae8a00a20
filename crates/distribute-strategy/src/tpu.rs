//! Replicas on TPUs, or on other devices of a PJRT plugin.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use distribute_cluster::tpu::{AssignmentOptions, DeviceAssignment, TpuResolver, local_chips};
use distribute_device::pjrt::{Client, ClientOptions, Plugin, ProgramCache, Search};
use distribute_device::{DeviceKind, DeviceSpec};

use crate::alone::refuse_lonely;
use crate::pjrt_replicas::PjrtSettings;
use crate::{CommunicationOptions, Error, PjrtReplicas, Replicas, Result, Strategy, StrategyExtended};

pub(crate) mod placement;
#[cfg(test)]
mod tests;

/// Synchronous training on the TPU of this machine, or on other devices that a PJRT plugin opens.
///
/// Each replica has a device, `TPU:0`, `TPU:1` and so on. Models run there in programs that are compiled for all
/// replicas: forward, backward, the reduction of gradients and the update are one program. Functions that
/// [`run`](Strategy::run_with) calls are on the host, as are reductions between them and reads of variables; models are
/// refused there.
///
/// libtpu opens TPUs. With a plugin for CPUs, whose devices are `TPU:0` to `TPU:n-1` too, programs can be tried without
/// a TPU.
///
/// # Examples
/// ```no_run
/// use distribute_strategy::TpuStrategy;
/// // Eight devices of XLA's plugin for CPUs, whose path is in DISTRIBUTE_PJRT_PLUGIN.
/// let strategy = TpuStrategy::builder().replicas(8).build()?;
/// assert_eq!(strategy.num_replicas_in_sync(), 8);
/// # Ok::<(), distribute_strategy::Error>(())
/// ```
///
/// # Source
/// `tf.distribute.TPUStrategy`, with `tpu = "local"`.
pub struct TpuStrategy {
    replicas: Replicas,
    pjrt: PjrtReplicas,
}

impl TpuStrategy {
    /// Returns a builder to choose the plugin and the devices.
    pub fn builder() -> TpuBuilder {
        TpuBuilder::default()
    }
}

/// How replicas get their cores.
#[derive(Clone, Debug)]
enum Assignment {
    Given(DeviceAssignment),
    Built(AssignmentOptions),
}

/// Builds a [`TpuStrategy`].
#[derive(Clone, Debug, Default)]
#[must_use]
pub struct TpuBuilder {
    plugin: Option<PathBuf>,
    replicas: Option<usize>,
    resolver: Option<Arc<TpuResolver>>,
    assignment: Option<Assignment>,
    timeout: Option<Duration>,
    dump: Option<PathBuf>,
    cache: Option<PathBuf>,
}

impl TpuBuilder {
    /// Sets the file of the plugin. Default: the one that DISTRIBUTE_PJRT_PLUGIN or TPU_LIBRARY_PATH names, or the
    /// libtpu that is installed.
    pub fn plugin(mut self, file: impl Into<PathBuf>) -> Self {
        self.plugin = Some(file.into());
        self
    }

    /// Sets the number of replicas, each of which gets the next device. Default: one for each device. A plugin for CPUs
    /// is asked for as many devices.
    pub fn replicas(mut self, replicas: usize) -> Self {
        self.replicas = Some(replicas);
        self
    }

    /// Sets the resolver of the TPU, which is to be of one host. Building waits until the TPU is healthy, and compares
    /// its number of cores with the plugin's. Default: the plugin's devices, whatever they are.
    ///
    /// # Source
    /// The argument `tpu_cluster_resolver` of `tf.distribute.TPUStrategy`.
    pub fn resolver(mut self, resolver: impl Into<Arc<TpuResolver>>) -> Self {
        self.resolver = Some(resolver.into());
        self
    }

    /// Sets the core of each replica. Default: cores in the order of the plugin.
    ///
    /// # Source
    /// The argument `experimental_device_assignment` of `tf.distribute.TPUStrategy`.
    pub fn device_assignment(mut self, assignment: DeviceAssignment) -> Self {
        self.assignment = Some(Assignment::Given(assignment));
        self
    }

    /// Assigns cores to replicas by the [topology](PjrtReplicas::topology) of the plugin's devices, in place of an
    /// assignment that is given.
    pub fn assign(mut self, options: AssignmentOptions) -> Self {
        self.assignment = Some(Assignment::Built(options));
        self
    }

    /// Sets how long opening the devices, compiling a program and running one may take, each. Default: 10 minutes.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Writes the text of each program that is compiled to a file of this folder, in StableHLO:
    /// `train-0123456789abcdef.mlir`. The folder is made if it is missing. Default: none is written.
    pub fn dump_programs(mut self, folder: impl Into<PathBuf>) -> Self {
        self.dump = Some(folder.into());
        self
    }

    /// Keeps compiled programs in a folder, from which later runs of the program load them, up to 4 GiB: those that
    /// were used least recently are removed. The folder is made if it is missing. It is to be one that others cannot
    /// write, as its programs run, and one for each kind of machine. Default: programs are compiled in each run.
    pub fn program_cache(mut self, folder: impl Into<PathBuf>) -> Self {
        self.cache = Some(folder.into());
        self
    }

    /// Opens the devices and builds the strategy.
    ///
    /// # Errors
    /// [`Error::Device`] if there is no plugin, or it has no devices, or does not answer in time, or if the folder of
    /// [`program_cache`](TpuBuilder::program_cache) cannot be made; [`Error::Devices`] for another number of replicas
    /// than of devices, for a resolver whose TPU has several hosts or another number of cores, or for an assignment
    /// that gives a replica several cores, since programs are not partitioned; [`Error::Cluster`] if the TPU is not
    /// healthy, or an assignment does not fit it; [`Error::Alone`] if this process is one of several: each process of
    /// a TPU of several hosts would need the devices of the others.
    pub fn build(self) -> Result<Strategy> {
        refuse_lonely("TpuStrategy")?;
        let timeout = self.timeout.unwrap_or(TIMEOUT);
        let wrong = |problem: String| Error::Devices { strategy: "TpuStrategy", problem };
        if self.replicas == Some(0) {
            return Err(wrong("0 replicas were asked for; ask for at least one".to_owned()));
        }
        if let Some(resolver) = &self.resolver {
            placement::check_hosts(resolver, timeout)?;
        }
        let search = self.plugin.map_or_else(Search::new, Search::file).with_tpu_chips(local_chips().is_some());
        let plugin = Plugin::open(&search, Instant::now() + timeout)?;
        let mut options = ClientOptions::new().with_close_timeout(timeout.min(CLOSE_TIMEOUT));
        let is_libtpu = plugin.path().file_name().is_some_and(|name| name.to_string_lossy().starts_with("libtpu"));
        if let (Some(replicas), false) = (self.replicas, is_libtpu) {
            // Other plugins ignore the option.
            options = options.with("cpu_device_count", i64::try_from(replicas).unwrap_or(i64::MAX));
        }
        let client = Client::create(&plugin, options, Instant::now() + timeout)?;
        let all = client.addressable_devices();
        if let Some(resolver) = &self.resolver {
            placement::check_cores(resolver, all.len())?;
        }
        let devices = match self.assignment {
            Some(Assignment::Given(assignment)) => placement::assigned(&assignment, &all).map_err(wrong)?,
            Some(Assignment::Built(options)) => {
                let assignment = DeviceAssignment::build(placement::topology(&client.devices())?, options)?;
                placement::assigned(&assignment, &all).map_err(wrong)?
            }
            None => all[..self.replicas.unwrap_or(all.len()).min(all.len())].to_vec(),
        };
        if devices.is_empty() || self.replicas.is_some_and(|replicas| replicas != devices.len()) {
            let (platform, asked) = (client.platform_name(), self.replicas.unwrap_or(1));
            let problem =
                format!("{asked} replicas were asked for, but {platform} has {} devices for them", devices.len());
            return Err(wrong(problem));
        }
        let spec = |index: usize| -> Result<DeviceSpec> {
            Ok(format!("{}:{index}", DeviceKind::Tpu).parse::<DeviceSpec>()?.canonicalize(&DeviceSpec::default()))
        };
        let names = (0..devices.len()).map(spec).collect::<Result<Vec<_>>>()?;
        let options = CommunicationOptions::default().options(&names)?;
        let replicas = Replicas::local(names, options)?;
        let cache = self.cache.map(|folder| ProgramCache::open(folder, CACHE_BYTES)).transpose()?;
        let settings = PjrtSettings { timeout, dump: self.dump, cache };
        Ok(Strategy::new(TpuStrategy { replicas, pjrt: PjrtReplicas::new(client, devices, settings) }))
    }
}

/// How long the end of the devices waits at most for programs that have not ended.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// The size of the folder of [`TpuBuilder::program_cache`].
const CACHE_BYTES: u64 = 4 << 30;

/// The default of [`TpuBuilder::timeout`]: compiling a large program takes minutes.
const TIMEOUT: Duration = Duration::from_secs(600);

impl StrategyExtended for TpuStrategy {
    fn name(&self) -> &'static str {
        "Tpu"
    }

    fn replicas(&self) -> &Replicas {
        &self.replicas
    }

    fn describe(&self) -> String {
        format!("Tpu {} replicas on {}", self.pjrt.devices().len(), self.pjrt.client().platform_name())
    }

    fn pjrt(&self) -> Option<&PjrtReplicas> {
        Some(&self.pjrt)
    }
}
