//! The PJRT devices of replicas.

use std::any::Any;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use distribute_cluster::tpu::Topology;
use distribute_device::pjrt::{CacheOutcome, Client, CompileOptions, Executable, PjrtDevice, ProgramCache};
use distribute_notice::warn;
use distribute_types::{FNV64, fnv1a_64};

use crate::tpu::placement::topology;
use crate::{Error, Result};

/// The PJRT devices of the replicas of this process.
#[derive(Debug)]
pub struct PjrtReplicas {
    client: Client,
    devices: Vec<PjrtDevice>,
    settings: PjrtSettings,
    /// See [`PjrtReplicas::programs`].
    programs: OnceLock<Arc<dyn Any + Send + Sync>>,
}

/// Settings of the programs of [`PjrtReplicas`].
#[derive(Clone, Debug)]
pub(crate) struct PjrtSettings {
    /// How long compiling a program and running one may take, each.
    pub(crate) timeout: Duration,
    /// The folder for the text of programs.
    pub(crate) dump: Option<PathBuf>,
    /// The folder for compiled programs.
    pub(crate) cache: Option<ProgramCache>,
}

impl PjrtReplicas {
    pub(crate) fn new(client: Client, devices: Vec<PjrtDevice>, settings: PjrtSettings) -> PjrtReplicas {
        PjrtReplicas { client, devices, settings, programs: OnceLock::new() }
    }

    /// Returns the client of the devices.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns each replica's device.
    pub fn devices(&self) -> &[PjrtDevice] {
        &self.devices
    }

    /// Returns the mesh of all devices of the plugin, by the coordinates that it tells. Devices without coordinates,
    /// such as those of XLA's plugin for CPUs, are a line.
    ///
    /// # Errors
    /// [`Error::Cluster`] if devices share a place, or there are too many places; [`Error::Devices`] if a coordinate is
    /// negative.
    ///
    /// # Source
    /// `tf.tpu.experimental.initialize_tpu_system`, which returns the topology.
    pub fn topology(&self) -> Result<Topology> {
        topology(&self.client.devices())
    }

    /// Returns the programs that a tensor library's integration keeps with the devices; `None` if another one keeps
    /// its own.
    pub fn programs<T: Any + Default + Send + Sync>(&self) -> Option<Arc<T>> {
        self.programs.get_or_init(|| Arc::new(T::default())).clone().downcast().ok()
    }

    /// Compiles a program for the devices, or loads it from the folder of
    /// [`TpuBuilder::program_cache`](crate::TpuBuilder::program_cache), and writes its text to that of
    /// [`TpuBuilder::dump_programs`](crate::TpuBuilder::dump_programs).
    ///
    /// # Errors
    /// [`Error::Dump`] if the file of the text cannot be written; [`Error::Device`] if the plugin refuses the program,
    /// or does not end in time.
    pub fn compile(&self, name: &str, text: &str) -> Result<Executable> {
        self.dump(name, text)?;
        let mut options = CompileOptions::for_devices(&self.devices);
        if self.client.platform_name() == "cpu" {
            // Else maxima lose NaN.
            options = options.with("xla_cpu_enable_fast_min_max", false);
        }
        let Some(cache) = &self.settings.cache else {
            return Ok(self.client.compile(text, &options, self.deadline())?);
        };
        let (executable, outcome) = cache.get_or_compile(&self.client, text, &options, self.deadline())?;
        match outcome {
            CacheOutcome::Replaced { problem } => warn!("the program {name:?} was compiled again: {problem}"),
            CacheOutcome::NotStored { problem } => warn!("the program {name:?} was not stored: {problem}"),
            _ => {}
        }
        Ok(executable)
    }

    fn dump(&self, name: &str, text: &str) -> Result<()> {
        let Some(folder) = &self.settings.dump else { return Ok(()) };
        let path = folder.join(format!("{name}-{:016x}.mlir", fnv1a_64(FNV64, text.bytes())));
        let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, text));
        written.map_err(|source| Error::Dump { path, source })
    }

    /// Returns the instant by which a step that begins now must have ended.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.settings.timeout
    }
}
