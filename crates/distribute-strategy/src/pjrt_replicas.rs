//! The PJRT devices of replicas.

use std::any::Any;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use distribute_device::pjrt::{Client, PjrtDevice};
use distribute_types::{FNV64, fnv1a_64};

use crate::{Error, Result};

/// The PJRT devices of the replicas of this process.
#[derive(Debug)]
pub struct PjrtReplicas {
    client: Client,
    devices: Vec<PjrtDevice>,
    timeout: Duration,
    dump: Option<PathBuf>,
    /// See [`PjrtReplicas::programs`].
    programs: OnceLock<Arc<dyn Any + Send + Sync>>,
}

impl PjrtReplicas {
    pub(crate) fn new(
        client: Client,
        devices: Vec<PjrtDevice>,
        timeout: Duration,
        dump: Option<PathBuf>,
    ) -> PjrtReplicas {
        PjrtReplicas { client, devices, timeout, dump, programs: OnceLock::new() }
    }

    /// Returns the client of the devices.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Returns each replica's device.
    pub fn devices(&self) -> &[PjrtDevice] {
        &self.devices
    }

    /// Returns the programs that a tensor library's integration keeps with the devices; `None` if another one keeps
    /// its own.
    pub fn programs<T: Any + Default + Send + Sync>(&self) -> Option<Arc<T>> {
        self.programs.get_or_init(|| Arc::new(T::default())).clone().downcast().ok()
    }

    /// Writes the text of a program to the folder of [`TpuBuilder::dump_programs`], if there is one.
    ///
    /// # Errors
    /// [`Error::Dump`] if the file cannot be written.
    pub fn dump(&self, name: &str, text: &str) -> Result<()> {
        let Some(folder) = &self.dump else { return Ok(()) };
        let path = folder.join(format!("{name}-{:016x}.mlir", fnv1a_64(FNV64, text.bytes())));
        let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, text));
        written.map_err(|source| Error::Dump { path, source })
    }

    /// Returns the instant by which a step that begins now must have ended.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }
}
