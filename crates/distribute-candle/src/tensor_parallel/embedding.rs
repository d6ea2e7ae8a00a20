//! An embedding whose rows are split among ranks.

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};

use super::request::{Request, part};
use super::{copy_to_tensor_group, group_of, sum_over_tensor_group, within_part};
use crate::context::check_rows;
use crate::short::rows_of;

/// An embedding of which each rank of a tensor group has a part of the vocabulary. Every rank looks up the indices of
/// its part, and the sum over ranks has the rows of all.
///
/// # Shapes
/// Input: indices of any shape (…), u32, i64 or u8, equal on all ranks. Output: (…, `width`), equal on all ranks. On
/// each rank the table is (`vocabulary` / ranks, `width`).
///
/// # Ordering
/// Every rank of the tensor group must call forward, in the same order with other layers.
///
/// # Examples
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use distribute_candle::{CandleStrategy, Error, vocab_parallel_embedding};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).tensor_parallel(2).build()?;
/// let model = strategy.scope(|vb| vocab_parallel_embedding(10, 4, vb.pp("words")))?;
/// let rows = strategy.run_with(&model, |_, words| {
///     Ok::<_, Error>(words.forward(&Tensor::new(&[0u32, 9], &Device::Cpu)?)?.to_vec2::<f32>()?)
/// })?;
/// assert_eq!(rows.values()[0], rows.values()[1]);
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// Shoeybi and others, "Megatron-LM", 2019, section 3; `VocabParallelEmbedding` of Megatron-LM.
#[derive(Clone, Debug)]
pub struct VocabParallelEmbedding {
    rows: Tensor,
    parts: usize,
}

/// Creates a [`VocabParallelEmbedding`] whose variable has the name and, as a whole, the initial values that
/// [`candle_nn::embedding()`] gives it.
///
/// # Errors
/// [`candle_core::Error`] if the variable cannot be created; it wraps
/// [`Indivisible`](distribute_optim::Error::Indivisible) if `vocabulary` is not a multiple of the number of ranks: add
/// unused words.
pub fn vocab_parallel_embedding(vocabulary: usize, width: usize, vb: VarBuilder<'_>) -> Result<VocabParallelEmbedding> {
    let init = Init::Randn { mean: 0.0, stdev: 1.0 };
    vocab_parallel_embedding_with(vocabulary, width, init, vb)
}

/// Creates a [`VocabParallelEmbedding`] like [`vocab_parallel_embedding`], with other initial values.
///
/// # Errors
/// The errors of [`vocab_parallel_embedding`] occur in the same cases.
pub fn vocab_parallel_embedding_with(
    vocabulary: usize,
    width: usize,
    init: Init,
    vb: VarBuilder<'_>,
) -> Result<VocabParallelEmbedding> {
    let (rows, parts) = part(&vb, (vocabulary, width), "weight", init, Request { axis: 0, blocks: 1 })?;
    Ok(VocabParallelEmbedding { rows, parts })
}

impl VocabParallelEmbedding {
    /// Returns this rank's rows of the table.
    pub fn embeddings(&self) -> &Tensor {
        &self.rows
    }

    /// Returns the number of parts of the table: of ranks in a tensor group, or 1.
    pub fn parts(&self) -> usize {
        self.parts
    }

    /// Computes logits by the table itself, as models do whose embedding and head are tied: this rank's part of them,
    /// for [`vocab_parallel_cross_entropy_per_example`](crate::vocab_parallel_cross_entropy_per_example).
    ///
    /// # Shapes
    /// `x`: (…, `width`), equal on all ranks. Result: (…, `vocabulary` / ranks).
    ///
    /// # Errors
    /// [`candle_core::Error`] if shapes do not fit, or if it is called outside a replica.
    pub fn logits(&self, x: &Tensor) -> Result<Tensor> {
        let x = match group_of("vocab_parallel_embedding", self.parts)? {
            Some(group) => copy_to_tensor_group(&group, x)?,
            None => x.clone(),
        };
        candle_nn::Linear::new(self.rows.clone(), None).forward(&x.contiguous()?)
    }
}

impl Module for VocabParallelEmbedding {
    fn forward(&self, indices: &Tensor) -> Result<Tensor> {
        let (part, width) = self.rows.dims2()?;
        if indices.device().is_cpu() {
            check_rows(indices, part * self.parts)?;
        }
        let shape = [indices.dims(), &[width]].concat();
        let flat = indices.flatten_all()?;
        let Some(group) = group_of("vocab_parallel_embedding", self.parts)? else {
            return rows_of(&self.rows, &flat.to_dtype(DType::U32)?)?.reshape(shape);
        };
        let (local, inside) = within_part(&flat, part, &group)?;
        let rows = rows_of(&self.rows, &local.contiguous()?)?;
        // Chosen and not multiplied: 0 times a row that holds NaN is NaN.
        let inside = inside.unsqueeze(1)?.broadcast_as(rows.shape())?.contiguous()?;
        let rows = inside.where_cond(&rows, &rows.zeros_like()?)?;
        sum_over_tensor_group(&group, &rows)?.reshape(shape)
    }
}
