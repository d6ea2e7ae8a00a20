//! Replacements in a build without candle's CUDA support.

use candle_core::{CudaStorage, Layout};
use distribute_collectives::ReduceOp;
/// The exchange of a library without GPUs.
pub(crate) use distribute_optim::backend::NoDevices as Gpus;
use distribute_strategy::ReplicaContext;

use crate::Result;
use crate::exchange::Exchange;

/// Returns `None`: there are no GPUs whose memory could be reduced.
pub(crate) fn reduced(
    _: &ReplicaContext,
    _: (ReduceOp, Exchange),
    _: &CudaStorage,
    _: &Layout,
) -> Result<Option<CudaStorage>> {
    Ok(None)
}

/// Returns `None`: there are no GPUs whose memory could be gathered.
pub(crate) fn gathered(_: &ReplicaContext, _: Exchange, _: &CudaStorage, _: &Layout) -> Result<Option<CudaStorage>> {
    Ok(None)
}
