//! The transports' decoders.

pub(crate) use super::tcp::fuzz::{control_messages, reception};

#[cfg(target_os = "linux")]
pub(crate) use super::shm::fuzz::shared_memory;

#[cfg(test)]
pub(crate) mod samples {
    #[cfg(target_os = "linux")]
    pub(crate) use super::super::shm::fuzz::samples as shared_memory;
    pub(crate) use super::super::tcp::fuzz::samples as tcp;
}
