//! Replicas on GPUs: collectives of a model's graph, and the reduction and application of gradients, in their memory.

#[cfg_attr(feature = "candle-cuda", path = "gpu/cuda.rs")]
#[cfg_attr(not(feature = "candle-cuda"), path = "gpu/without_cuda.rs")]
mod backend;

pub(crate) use backend::{Gpus, gathered, reduced};
