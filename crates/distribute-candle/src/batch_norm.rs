//! Batch normalisation over the batches of all replicas together.

use candle_core::{D, Result, Tensor, Var};
use candle_nn::{BatchNormConfig, Init, ModuleT, VarBuilder};
use distribute_strategy::get_replica_context;

use crate::all_reduce::{keeping, sum_over_replicas};
use crate::statistics::keeps_common;

/// Batch normalisation whose mean and variance are those of the global batch.
///
/// Inside a replica, training exchanges the sum, the sum of squares and the count of each channel in one all-reduce, forward
/// and backward; a replica without [examples](distribute_strategy::ReplicaContext::has_examples) weighs nothing. Outside of replicas it is plain batch normalisation. Not training,
/// it uses the running statistics, which are equal on all replicas.
///
/// Where a replica may get [a batch without rows](distribute_strategy::DistributedDataset::with_empty_batches), put the branch with the normalisation on the left of sums, `branch + x`: candle forgets
/// the right side of operations on tensors without elements, and that replica would leave the others alone in backward.
///
/// # Shapes
/// Inputs have the channels in axis 1: (examples, channels, …).
///
/// # Examples
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{BatchNormConfig, ModuleT};
/// use distribute_candle::{CandleStrategy, Error, sync_batch_norm};
/// use distribute_strategy::MirroredStrategy;
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let model = strategy.scope(|vb| sync_batch_norm(1, BatchNormConfig::default(), vb.pp("norm")))?;
/// let normed = strategy.run_with(&model, |context, norm| {
///     // The mean over both replicas is 1, whatever each has.
///     let x = Tensor::full(2.0 * context.replica_id() as f32, (3, 1), &Device::Cpu)?;
///     Ok::<_, Error>(norm.forward_t(&x, true)?.mean_all()?.to_scalar::<f32>()?)
/// })?;
/// assert!((normed.values()[0] + 1.0).abs() < 1e-4 && (normed.values()[1] - 1.0).abs() < 1e-4);
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// Ioffe and Szegedy, "Batch normalization", 2015; synchronised as `tf.keras.layers.BatchNormalization(synchronized=True)`.
/// Settings and running statistics follow [`candle_nn::BatchNorm`], so checkpoints fit both.
#[derive(Clone, Debug)]
pub struct SyncBatchNorm {
    affine: Option<(Tensor, Tensor)>,
    running_mean: Var,
    running_var: Var,
    config: BatchNormConfig,
}

/// A [`SyncBatchNorm`] for so many channels, under the names that [`candle_nn::batch_norm()`] gives its variables.
///
/// # Errors
/// candle's; a negative epsilon or a momentum outside 0..=1.
pub fn sync_batch_norm(
    num_features: usize,
    config: impl Into<BatchNormConfig>,
    vb: VarBuilder<'_>,
) -> Result<SyncBatchNorm> {
    let config = config.into();
    if config.eps < 0.0 || !(0.0..=1.0).contains(&config.momentum) {
        let (eps, momentum) = (config.eps, config.momentum);
        candle_core::bail!(
            "sync_batch_norm: eps is {eps}, momentum {momentum}; give eps ≥ 0 and a momentum from 0 to 1"
        );
    }
    let get = |name, value| vb.get_with_hints(num_features, name, Init::Const(value));
    let affine = if config.affine { Some((get("weight", 1.0)?, get("bias", 0.0)?)) } else { None };
    let running_mean = Var::from_tensor(&get("running_mean", 0.0)?)?;
    let running_var = Var::from_tensor(&get("running_var", 1.0)?)?;
    keeps_common([&running_mean, &running_var]);
    Ok(SyncBatchNorm { affine, running_mean, running_var, config })
}

impl SyncBatchNorm {
    /// The running mean of each channel.
    pub fn running_mean(&self) -> &Tensor {
        &self.running_mean
    }

    /// The running variance of each channel.
    pub fn running_var(&self) -> &Tensor {
        &self.running_var
    }

    /// Mean and variance of each channel over all replicas, and the count that they are of.
    fn statistics(&self, x: &Tensor) -> Result<(Tensor, Tensor, f64)> {
        let channels = x.dim(1)?;
        // (channels, elements)
        let flat = x.transpose(0, 1)?.flatten_from(1)?.contiguous()?;
        let count = flat.dim(1)?;
        let sums = flat.sum(D::Minus1)?;
        let squares = flat.sqr()?.sum(D::Minus1)?;
        let own = Tensor::full(count as f32, 1, x.device())?.to_dtype(x.dtype())?;
        let fused = Tensor::cat(&[&sums, &squares, &own], 0)?;
        let context = get_replica_context();
        // A row that stands in for examples is none of the batch's.
        let has_examples = context.as_ref().is_none_or(distribute_strategy::ReplicaContext::has_examples);
        let fused = if has_examples { fused } else { (&fused * fused.zeros_like()?)? };
        let fused = match context {
            Some(context) if context.num_replicas_in_sync() > 1 => sum_over_replicas(&context, &fused)?,
            _ => fused,
        };
        let total: f64 = fused.detach().get(2 * channels)?.to_dtype(candle_core::DType::F64)?.to_scalar()?;
        let n = total.max(1.0);
        let mean = (fused.narrow(0, 0, channels)? / n)?;
        let variance = ((fused.narrow(0, channels, channels)? / n)? - mean.sqr()?)?;
        // Rounding may leave a little less than nothing.
        Ok((mean, variance.relu()?, total))
    }

    fn remember(&self, mean: &Tensor, variance: &Tensor, count: f64) -> Result<()> {
        let momentum = self.config.momentum;
        let blend = |old: &Var, new: &Tensor, scale: f64| -> Result<()> {
            let blended = ((old.as_tensor() * (1.0 - momentum))? + (new.detach() * (momentum * scale))?)?;
            old.set(&blended)
        };
        blend(&self.running_mean, mean, 1.0)?;
        // The variance of the population that the batch is a sample of.
        blend(&self.running_var, variance, if count > 1.0 { count / (count - 1.0) } else { 1.0 })
    }
}

impl ModuleT for SyncBatchNorm {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let channels = self.running_mean.dim(0)?;
        if x.rank() < 2 || x.dim(1)? != channels {
            candle_core::bail!(
                "sync_batch_norm: the input has shape {:?}; give (examples, {channels}, …), with the channels in axis 1",
                x.dims()
            );
        }
        let (mean, variance) = match train {
            true => {
                let (mean, variance, count) = self.statistics(x)?;
                if count > 0.0 {
                    self.remember(&mean, &variance, count)?;
                }
                (mean, variance)
            }
            false => (self.running_mean.as_detached_tensor(), self.running_var.as_detached_tensor()),
        };
        let mut shape = vec![1; x.rank()];
        shape[1] = channels;
        let wide = |tensor: &Tensor| tensor.reshape(shape.as_slice());
        let centred = if self.config.remove_mean { x.broadcast_sub(&wide(&mean)?)? } else { x.clone() };
        let normed = centred.broadcast_div(&wide(&(&variance + self.config.eps)?.sqrt()?)?)?;
        let normed = if train && x.elem_count() == 0 { keeping(&normed, &variance)? } else { normed };
        match &self.affine {
            Some((weight, bias)) => normed.broadcast_mul(&wide(weight)?)?.broadcast_add(&wide(bias)?),
            None => Ok(normed),
        }
    }
}
