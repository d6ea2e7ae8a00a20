//! An embedding whose rows are split among ranks.

use burn::module::Module;
use burn::nn::{EmbeddingConfig, Initializer};
use burn::tensor::module::{embedding, linear};
use burn::tensor::{Device, Int, Tensor};
use distribute_optim::backend::tensor_group_of;

use super::split_param::{Request, SplitParam};
use super::{copy_to_tensor_group, or_end, sum_over_tensor_group, within_part};
use crate::losses::first_outside;
use crate::{Error, Result};

/// The name of the layer in errors.
const LAYER: &str = "vocab_parallel_embedding";

/// An embedding of which each rank of a tensor group has a part of the vocabulary. Every rank looks up the indices of
/// its part, and the sum over ranks has the rows of all.
///
/// # Shapes
/// Input: indices (examples, positions), equal on all ranks. Output: (examples, positions, `width`), equal on all
/// ranks. On each rank the table is (`vocabulary` / ranks, `width`).
///
/// # Ordering
/// Every rank of the tensor group must call forward, in the same order with other layers.
///
/// # Examples
/// ```
/// use burn::tensor::{Device, Int, Tensor};
/// use distribute_burn::{BurnStrategy, Error, vocab_parallel_embedding};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).tensor_parallel(2).build()?;
/// let model = strategy.scope(|device| vocab_parallel_embedding(10, 4, device))?;
/// let rows = strategy.run_with(&model, |_, words| {
///     let rows = words.forward(Tensor::<2, Int>::from_ints([[0, 9]], &Device::flex()));
///     Ok::<_, Error>(rows.into_data())
/// })?;
/// assert_eq!(rows.values()[0], rows.values()[1]);
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// Shoeybi and others, "Megatron-LM", 2019, section 3; `VocabParallelEmbedding` of Megatron-LM.
#[derive(Module, Debug)]
pub struct VocabParallelEmbedding {
    weight: SplitParam<2>,
}

/// Creates a [`VocabParallelEmbedding`] whose parameter has the name and, as a whole, the initial values of burn's
/// [`Embedding`](burn::nn::Embedding). In a scope with tensor groups, `vocabulary` must be a multiple of the number of
/// ranks, or [`scope`](crate::BurnStrategy::scope) returns an error: add unused words.
pub fn vocab_parallel_embedding(vocabulary: usize, width: usize, device: &Device) -> VocabParallelEmbedding {
    of_config(&EmbeddingConfig::new(vocabulary, width), device)
}

/// Creates a [`VocabParallelEmbedding`] like [`vocab_parallel_embedding`], with other initial values.
pub fn vocab_parallel_embedding_with(
    vocabulary: usize,
    width: usize,
    init: Initializer,
    device: &Device,
) -> VocabParallelEmbedding {
    of_config(&EmbeddingConfig::new(vocabulary, width).with_initializer(init), device)
}

fn of_config(config: &EmbeddingConfig, device: &Device) -> VocabParallelEmbedding {
    VocabParallelEmbedding { weight: SplitParam::new(config.init(device).weight, Request { axis: 0, blocks: 1 }) }
}

impl VocabParallelEmbedding {
    /// Looks up indices. A failure of another rank ends the replica, as an error that its closure returns.
    ///
    /// # Panics
    /// Panics if an index is not below `vocabulary`, and as
    /// [`ColumnParallelLinear::forward`](crate::ColumnParallelLinear::forward) does.
    pub fn forward(&self, indices: Tensor<2, Int>) -> Tensor<3> {
        or_end(self.looked_up(indices))
    }

    fn looked_up(&self, indices: Tensor<2, Int>) -> Result<Tensor<3>> {
        let vocabulary = self.weight.len();
        if let Some((at, index)) = first_outside(&indices, vocabulary)? {
            return Err(Error::Word { at, index, vocabulary });
        }
        let Some(group) = tensor_group_of(LAYER, self.parts())? else {
            return Ok(embedding(self.weight.val(), indices));
        };
        let (local, outside) = within_part(indices, vocabulary / self.parts(), &group);
        let rows = embedding(self.weight.val(), local);
        let outside = outside.unsqueeze_dim::<3>(2).expand(rows.dims());
        sum_over_tensor_group(&group, rows.mask_fill(outside, 0.0))
    }

    /// Computes logits by the table itself, as models do whose embedding and head are tied: this rank's part of them,
    /// for [`vocab_parallel_cross_entropy_per_example`](crate::vocab_parallel_cross_entropy_per_example).
    ///
    /// # Shapes
    /// `x`: (…, `width`), equal on all ranks. Result: (…, `vocabulary` / ranks).
    ///
    /// # Panics
    /// See [`ColumnParallelLinear::forward`](crate::ColumnParallelLinear::forward).
    pub fn logits<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let x = match or_end(tensor_group_of(LAYER, self.parts()).map_err(Error::from)) {
            Some(group) => or_end(copy_to_tensor_group(&group, x)),
            None => x,
        };
        linear(x, self.weight.val().transpose(), None)
    }

    /// Returns this rank's rows of the table.
    pub fn embeddings(&self) -> Tensor<2> {
        self.weight.val()
    }

    /// Returns the number of parts of the table: of ranks in a tensor group, or 1.
    pub fn parts(&self) -> usize {
        self.weight.parts()
    }
}
