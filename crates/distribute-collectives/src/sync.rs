//! The atomics that the engine and the shared-memory ring are built from: std's, or loom's under `--cfg distribute_loom`, which runs
//! the models in [`crate::phases`] and `transport::shm::ring` through the interleavings that the memory model allows
//! (`cargo xtask loom`).

#[cfg(distribute_loom)]
pub(crate) use loom::sync::atomic;
#[cfg(not(distribute_loom))]
pub(crate) use std::sync::atomic;
