//! Replacements in a build without candle's CUDA support.

/// The exchange of a library without GPUs.
pub(crate) use distribute_optim::backend::NoDevices as Gpus;
