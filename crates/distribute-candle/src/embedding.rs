//! An embedding whose gradient has only the rows that were looked up.

use std::sync::Arc;

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};

use crate::context::{as_indices, check_rows};
use crate::short::rows_of;
use crate::table::{Gate, gated};

/// An embedding, like [`candle_nn::Embedding`], whose gradient in host memory has only the rows that a step looks up:
/// backward neither fills nor adds whole tables, and replicas exchange these rows alone (see
/// [`sparse_gradients`](crate::Optimizer::sparse_gradients)).
///
/// Names of variables and initial values are those of [`candle_nn::Embedding`], so checkpoints fit both. Elsewhere, for
/// 16-bit types, and where replicas share or shard the table, its operations are candle's, and a gradient of 16 bits is
/// added up in f32. The table can be used otherwise too, as that of a head that is tied to it; its gradient is then
/// whole.
///
/// # Shapes
/// Table: (`vocabulary`, `width`). Input: indices of any shape (…), u32, i64 or u8. Result: (…, `width`).
///
/// # Examples
/// ```
/// use candle_core::{Device, Module, Tensor};
/// use distribute_candle::{CandleContext, CandleStrategy, Error, Sgd, embedding};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let words = strategy.scope(|vb| embedding(10, 4, vb.pp("words")))?;
/// let optimizer = Sgd::new(0.1).build(&words)?;
/// strategy.run_with((&words, &optimizer), |context, (words, optimizer)| {
///     let rows = words.forward(&Tensor::new(&[7u32, 9, 7], &Device::Cpu)?)?;
///     optimizer.minimize(context, &context.average_loss(&rows.sqr()?.sum(1)?, 6)?)?;
///     Ok::<_, Error>(())
/// })?;
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// `torch.nn.Embedding` with `sparse=True`; `tf.IndexedSlices`. Unlike there, every optimizer takes such a gradient,
/// and its update is that by the whole gradient.
#[derive(Clone, Debug)]
pub struct Embedding {
    table: Tensor,
    gate: Option<Arc<Gate>>,
}

/// Creates an [`Embedding`].
///
/// # Errors
/// [`candle_core::Error`] if the variable exists with another shape.
pub fn embedding(vocabulary: usize, width: usize, vb: VarBuilder<'_>) -> Result<Embedding> {
    embedding_with((vocabulary, width), "weight", Init::Randn { mean: 0.0, stdev: 1.0 }, vb)
}

/// Creates an [`Embedding`] of (`vocabulary`, `width`) whose variable has this name and these initial values.
///
/// # Errors
/// [`candle_core::Error`] if the variable exists with another shape.
pub fn embedding_with(shape: (usize, usize), name: &str, init: Init, vb: VarBuilder<'_>) -> Result<Embedding> {
    let (table, gate) = gated(|| vb.get_with_hints(shape, name, init))?;
    Ok(Embedding { table, gate })
}

impl Embedding {
    /// Returns the table.
    pub fn embeddings(&self) -> &Tensor {
        &self.table
    }
}

impl Module for Embedding {
    /// # Errors
    /// [`candle_core::Error`] if an index is not that of a row; on a GPU candle's kernels handle these.
    fn forward(&self, indices: &Tensor) -> Result<Tensor> {
        let (vocabulary, width) = self.table.dims2()?;
        let shape = [indices.dims(), &[width]].concat();
        let rows = match &self.gate {
            Some(gate) => gate.select(&self.table, check_rows(indices, vocabulary)?)?,
            None => {
                if indices.device().is_cpu() {
                    check_rows(indices, vocabulary)?;
                }
                rows_of(&self.table, &as_indices(indices)?.flatten_all()?.contiguous()?)?
            }
        };
        rows.reshape(shape)
    }
}
