//! Tensor parallelism: layers whose variables are split among the ranks of a tensor group.
//!
//! - [`ColumnParallelLinear`], [`RowParallelLinear`] and [`VocabParallelEmbedding`] are candle's layers in parts.
//!   Outside strategies with tensor groups they are those layers whole.
//! - [`vocab_parallel_cross_entropy_per_example`] computes losses from parts of logits.
//! - [`copy_to_tensor_group`], [`sum_over_tensor_group`], [`gather_from_tensor_group`] and
//!   [`scatter_to_tensor_group`] are the operations that they are made of.
//!
//! # Source
//! Shoeybi and others, "Megatron-LM: training multi-billion parameter language models using model parallelism", 2019,
//! section 3; the layers and their options are those of Megatron-LM's `tensor_parallel`.

mod embedding;
mod linear;
mod loss;
mod operations;
mod request;

pub use embedding::{VocabParallelEmbedding, vocab_parallel_embedding, vocab_parallel_embedding_with};
pub use linear::{ColumnParallelLinear, RowParallelLinear, column_parallel_linear, row_parallel_linear};
pub use loss::vocab_parallel_cross_entropy_per_example;
pub use operations::{copy_to_tensor_group, gather_from_tensor_group, scatter_to_tensor_group, sum_over_tensor_group};
pub(crate) use request::{Request, take_request};

use std::sync::Arc;

use candle_core::{DType, Result, Tensor};
use distribute_collectives::ProcessGroup;
use distribute_optim::backend::tensor_group_of;

/// Returns the tensor group of the replica that runs a layer whose variables are in `parts` parts; `None` if they are
/// whole.
fn group_of(what: &'static str, parts: usize) -> Result<Option<Arc<ProcessGroup>>> {
    tensor_group_of(what, parts).map_err(candle_core::Error::wrap)
}

/// Returns indices as they are in one rank's part of a vocabulary, 0 for those outside, and for each, as u8, whether it
/// is in that part.
fn within_part(indices: &Tensor, part: usize, group: &ProcessGroup) -> Result<(Tensor, Tensor)> {
    let first = (group.rank().index() * part) as f64;
    let local = (indices.to_dtype(DType::I64)? - first)?;
    let inside = (local.ge(0i64)? * local.lt(part as i64)?)?;
    let local = (local * inside.to_dtype(DType::I64)?)?.to_dtype(DType::U32)?;
    Ok((local, inside))
}
