//! The atomics that the engine and the shared-memory ring are built from: std's, or loom's under `--cfg loom`, which runs
//! the models in [`crate::phases`] and `transport::shm::ring` through the interleavings that the memory model allows
//! (`cargo xtask loom`).

#[cfg(loom)]
pub(crate) use loom::sync::atomic;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic;
