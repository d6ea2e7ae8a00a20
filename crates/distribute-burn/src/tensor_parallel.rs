//! Tensor parallelism: layers whose variables are split among the ranks of a tensor group.
//!
//! - [`ColumnParallelLinear`], [`RowParallelLinear`] and [`VocabParallelEmbedding`] are burn's layers in parts. Outside
//!   strategies with tensor groups they are those layers whole.
//! - [`vocab_parallel_cross_entropy_per_example`] computes losses from parts of logits.
//! - [`copy_to_tensor_group`], [`sum_over_tensor_group`], [`gather_from_tensor_group`] and
//!   [`scatter_to_tensor_group`] are the operations that they are made of.
//!
//! A layer is always built whole. `scope` cuts its parameters, which say how they are split when they are visited.
//!
//! # Source
//! Shoeybi and others, "Megatron-LM: training multi-billion parameter language models using model parallelism", 2019,
//! section 3; the layers and their options are those of Megatron-LM's `tensor_parallel`.

mod embedding;
mod linear;
mod loss;
mod operations;
mod split_param;

pub use embedding::{VocabParallelEmbedding, vocab_parallel_embedding, vocab_parallel_embedding_with};
pub use linear::{ColumnParallelLinear, RowParallelLinear, column_parallel_linear, row_parallel_linear};
pub use loss::vocab_parallel_cross_entropy_per_example;
pub use operations::{copy_to_tensor_group, gather_from_tensor_group, scatter_to_tensor_group, sum_over_tensor_group};
pub(crate) use split_param::{Request, announced};

use burn::tensor::{Bool, Int, Tensor};
use distribute_collectives::ProcessGroup;
use distribute_strategy::raise;

use crate::{Error, Result};

/// Returns a value, or ends the replica with the error of a collective or of the strategy. Other errors are the
/// program's, and panic, as those of burn's layers do.
fn or_end<T>(result: Result<T>) -> T {
    match result {
        Ok(value) => value,
        Err(Error::Collective(error)) => raise(error.into()),
        Err(Error::Strategy(error)) => raise(error),
        #[expect(clippy::panic, reason = "the interface of burn has no place for an error, and burn panics too")]
        Err(error) => panic!("{error}"),
    }
}

/// Returns indices as they are in one rank's part of a vocabulary, 0 for those outside, and for each whether it is
/// outside.
fn within_part<const D: usize>(
    indices: Tensor<D, Int>,
    part: usize,
    group: &ProcessGroup,
) -> (Tensor<D, Int>, Tensor<D, Bool>) {
    let first = (group.rank().index() * part) as i64;
    let local = indices.sub_scalar(first);
    let outside = local.clone().lower_scalar(0).bool_or(local.clone().greater_equal_scalar(part as i64));
    (local.mask_fill(outside.clone(), 0), outside)
}
