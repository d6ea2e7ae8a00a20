//! The authority of `distribute run --tls`, which ends with the job.

use std::path::{Path, PathBuf};

use super::authority::Authority;
use super::files::write;
use crate::error::Error;

/// An authority whose key is in the launcher's memory alone.
#[derive(Debug)]
pub(crate) struct Ephemeral {
    authority: Authority,
    folder: PathBuf,
}

impl Ephemeral {
    /// Makes an authority whose certificates are written to a private folder.
    ///
    /// # Errors
    /// [`Error::Certificates`] or [`Error::Write`].
    pub(crate) fn create(folder: &Path) -> Result<Ephemeral, Error> {
        let authority = Authority::new(DAYS)?;
        write(&folder.join("ca.pem"), authority.pem(), 0o644)?;
        Ok(Ephemeral { authority, folder: folder.to_owned() })
    }

    /// Issues the certificate of a task, a new one for each start; returns the variables that give it to the task.
    ///
    /// # Errors
    /// [`Error::Certificates`] or [`Error::Write`].
    pub(crate) fn issue(&self, task: &str) -> Result<[(&'static str, PathBuf); 3], Error> {
        let (certificate, key) = (self.folder.join(format!("{task}.pem")), self.folder.join(format!("{task}.key")));
        // Those of an earlier start of the task, which has ended.
        for path in [&certificate, &key] {
            let _ = std::fs::remove_file(path);
        }
        self.authority.issue(&self.folder, task, vec!["distribute".to_owned()], DAYS)?;
        Ok([
            ("DISTRIBUTE_TLS_CA", self.folder.join("ca.pem")),
            ("DISTRIBUTE_TLS_CERT", certificate),
            ("DISTRIBUTE_TLS_KEY", key),
        ])
    }
}

/// As long as a job may take: these certificates are not renewed, and their authority's key ends with the launcher.
const DAYS: u32 = 365;
