//! Why a check did not pass.

/// Why a check did not pass.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A result is not what it should be.
    #[error("{0}")]
    Wrong(String),
    /// What is needed is not here.
    #[error("{0}")]
    Missing(String),
    /// A device refused.
    #[error(transparent)]
    Device(#[from] distribute_device::Error),
    /// A collective failed.
    #[error(transparent)]
    Collective(#[from] distribute_collectives::Error),
    /// NCCL refused.
    #[error(transparent)]
    Nccl(#[from] nccl_sys::Error),
    /// A file could not be written.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
}

/// The result of checks and measurements.
pub type Result<T, E = Error> = std::result::Result<T, E>;
