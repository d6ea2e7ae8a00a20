//! Errors of checks.

/// Why a check did not pass.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A result is not the expected one.
    #[error("{0}")]
    Wrong(String),
    /// A requirement is missing on this machine.
    #[error("{0}")]
    Missing(String),
    /// A device returned an error.
    #[error(transparent)]
    Device(#[from] distribute_device::Error),
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] distribute_collectives::Error),
    /// NCCL returned an error.
    #[error(transparent)]
    Nccl(#[from] nccl_sys::Error),
    /// A file could not be written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: String,
        /// The system's error.
        source: std::io::Error,
    },
}

/// The result of checks and measurements.
pub type Result<T, E = Error> = std::result::Result<T, E>;
