//! Batch normalisation over the batches of all replicas.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp2, D, DType, Device, Error, Layout, Result, Shape, Tensor, Var};
use candle_nn::{BatchNormConfig, Init, ModuleT, VarBuilder};
use distribute_strategy::{ReplicaContext, get_replica_context};

use crate::all_reduce::{gather_numbers, sum_over_replicas};
use crate::statistics::keeps_common;
use crate::tensor::is_short;

/// Batch normalisation whose mean and variance are those of the global batch.
///
/// Each replica computes the count, the mean and the sum of squared deviations of each channel. In training, forward
/// gathers these from all replicas in one collective and merges them in f64, in the order of replicas, so that a large
/// mean loses no precision and all replicas hold equal bits. Backward sums two numbers for each channel in one
/// collective. If all replicas are on GPUs, both are done in their memory, and the host exchanges the counts alone. A
/// replica without [examples](distribute_strategy::ReplicaContext::has_examples) has no weight. Inputs of 16 bits are
/// normalised in f32, and running statistics are kept in f32 or f64.
///
/// Outside replicas it is plain batch normalisation. In evaluation it uses the running statistics, which are equal on
/// all replicas.
///
/// If a replica may get [a batch without rows](distribute_strategy::DistributedDataset::with_empty_batches), put the
/// branch with the normalisation on the left of sums, `branch + x`. candle drops the right operand of operations on
/// tensors without elements, so that this replica would not take part in backward, and the others would wait for it.
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
///     // The mean over both replicas is 1, whatever the values of each.
///     let x = Tensor::full(2.0 * context.replica_id() as f32, (3, 1), &Device::Cpu)?;
///     Ok::<_, Error>(norm.forward_t(&x, true)?.mean_all()?.to_scalar::<f32>()?)
/// })?;
/// assert!((normed.values()[0] + 1.0).abs() < 1e-4 && (normed.values()[1] - 1.0).abs() < 1e-4);
/// # Ok::<(), Error>(())
/// ```
///
/// # Source
/// Ioffe and Szegedy, "Batch normalization", 2015; Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm
/// for computing sample variances", 1979; synchronised as `tf.keras.layers.BatchNormalization(synchronized=True)`.
/// Settings and running statistics follow [`candle_nn::BatchNorm`], so checkpoints fit both.
#[derive(Clone, Debug)]
pub struct SyncBatchNorm {
    affine: Option<(Tensor, Tensor)>,
    running_mean: Var,
    running_var: Var,
    config: BatchNormConfig,
}

/// Creates a [`SyncBatchNorm`] for `num_features` channels, whose variables have the names that
/// [`candle_nn::batch_norm()`] gives them.
///
/// # Errors
/// [`candle_core::Error`] for a negative epsilon, for a momentum outside 0..=1, or if a variable cannot be created.
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
    let get = |name, value, dtype| vb.get_with_hints_dtype(num_features, name, Init::Const(value), dtype);
    let dtype = vb.dtype();
    let affine = if config.affine { Some((get("weight", 1.0, dtype)?, get("bias", 0.0, dtype)?)) } else { None };
    // 16 bits represent neither large variances nor small changes.
    let running_mean = Var::from_tensor(&get("running_mean", 0.0, widened(dtype))?)?;
    let running_var = Var::from_tensor(&get("running_var", 1.0, widened(dtype))?)?;
    keeps_common([&running_mean, &running_var]);
    Ok(SyncBatchNorm { affine, running_mean, running_var, config })
}

impl SyncBatchNorm {
    /// Returns the running mean of each channel.
    pub fn running_mean(&self) -> &Tensor {
        &self.running_mean
    }

    /// Returns the running variance of each channel.
    pub fn running_var(&self) -> &Tensor {
        &self.running_var
    }

    /// Updates the running statistics with those of a global batch.
    fn remember(&self, batch: &Moments) -> Result<()> {
        let momentum = self.config.momentum;
        let blend = |old: &Var, new: &Tensor| -> Result<()> {
            let kept = (old.as_detached_tensor().to_dtype(DType::F64)? * (1.0 - momentum))?;
            let blended = (kept + (new.to_device(old.device())? * momentum)?)?;
            old.set(&blended.to_dtype(old.dtype())?)
        };
        blend(&self.running_mean, &batch.means()?)?;
        // The unbiased estimate of the population's variance.
        blend(&self.running_var, &(&batch.deviations / f64::max(batch.count - 1.0, 1.0))?)
    }
}

impl ModuleT for SyncBatchNorm {
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let channels = self.running_mean.dim(0)?;
        if x.rank() < 2 || x.dim(1)? != channels {
            candle_core::bail!(
                "sync_batch_norm: the input has shape {:?}; give (examples, {channels}, …), with the channels in axis \
                 1",
                x.dims()
            );
        }
        if !x.dtype().is_float() {
            candle_core::bail!("sync_batch_norm: the input is of {:?}; give f32, f64, f16 or bf16", x.dtype());
        }
        let (dtype, epsilon, remove_mean) = (widened(x.dtype()), self.config.eps, self.config.remove_mean);
        let normed = if train {
            let context = get_replica_context().filter(|context| context.num_replicas_in_sync() > 1);
            let batch = Batch::new(x, context, epsilon, remove_mean)?;
            if batch.moments.count > 0.0 {
                self.remember(&batch.moments)?;
            }
            batch.normalise(x)?
        } else {
            let statistic = |var: &Var| per_channel(&var.as_detached_tensor().to_dtype(dtype)?, x.rank());
            let (mean, variance) = (statistic(&self.running_mean)?, statistic(&self.running_var)?);
            let x = x.to_dtype(dtype)?;
            let centred = if remove_mean { x.broadcast_sub(&mean)? } else { x };
            centred.broadcast_div(&(variance + epsilon)?.sqrt()?)?
        };
        let normed = match &self.affine {
            Some((weight, bias)) => {
                let parameter = |tensor: &Tensor| per_channel(&tensor.to_dtype(dtype)?, x.rank());
                normed.broadcast_mul(&parameter(weight)?)?.broadcast_add(&parameter(bias)?)?
            }
            None => normed,
        };
        normed.to_dtype(x.dtype())
    }
}

/// The moments of each channel over a set of elements: tensors of f64, on the device of the elements.
#[derive(Clone, Debug)]
struct Moments {
    /// The number of elements of a channel.
    count: f64,
    /// One element of each channel. The mean is stored as its difference from this element, so that a large mean loses
    /// no precision.
    origins: Tensor,
    /// The means minus the origins.
    offsets: Tensor,
    /// Sums of squared deviations from the mean.
    deviations: Tensor,
}

impl Moments {
    /// Returns the moments of an empty batch.
    fn none(channels: usize, device: &Device) -> Result<Moments> {
        let zeros = Tensor::zeros(channels, DType::F64, device)?;
        Ok(Moments { count: 0.0, origins: zeros.clone(), offsets: zeros.clone(), deviations: zeros })
    }

    /// Returns the moments of a non-empty tensor of shape (channels, elements).
    fn of(flat: &Tensor) -> Result<Moments> {
        let (_, count) = flat.dims2()?;
        let origin = flat.narrow(1, 0, 1)?.squeeze(1)?;
        let near = flat.broadcast_sub(&origin.unsqueeze(1)?)?;
        let offset = (near.sum(D::Minus1)? / count as f64)?;
        let deviations = near.broadcast_sub(&offset.unsqueeze(1)?)?.sqr()?.sum(D::Minus1)?;
        let wide = |numbers: Tensor| numbers.to_dtype(DType::F64);
        let (origins, offsets, deviations) = (wide(origin)?, wide(offset)?, wide(deviations)?);
        Ok(Moments { count: count as f64, origins, offsets, deviations })
    }

    /// Merges the moments of two sets of elements.
    ///
    /// # Source
    /// Chan, Golub and LeVeque, 1979, equations 2.1.
    fn merge(self, other: Moments) -> Result<Moments> {
        if self.count == 0.0 {
            return Ok(other);
        }
        if other.count == 0.0 {
            return Ok(self);
        }
        let count = self.count + other.count;
        let apart = (((other.origins - &self.origins)? + other.offsets)? - &self.offsets)?;
        let offsets = (self.offsets + (&apart * (other.count / count))?)?;
        let between = (apart.sqr()? * (self.count * (other.count / count)))?;
        let deviations = (self.deviations + (other.deviations + between)?)?;
        Ok(Moments { count, origins: self.origins, offsets, deviations })
    }

    /// Merges the moments of all replicas. Every replica calls this, and each gets the same bits.
    fn over_replicas(self, context: &ReplicaContext) -> Result<Moments> {
        let (channels, device) = (self.origins.dim(0)?, self.origins.device().clone());
        let count = Tensor::new(&[self.count], &device)?;
        let own = Tensor::cat(&[&count, &self.origins, &self.offsets, &self.deviations], 0)?;
        let all = gather_numbers(context, &own)?;
        let counts: Vec<f64> = match context.graph_device_group().map_err(Error::wrap)? {
            // The host knows its count without waiting for the GPU.
            Some(_) => {
                let group = context.graph_group().map_err(Error::wrap)?;
                let mut counts = vec![0.0; group.world_size()];
                group.all_gather(&[self.count], &mut counts).map_err(Error::wrap)?;
                counts
            }
            None => all.narrow(1, 0, 1)?.flatten_all()?.to_vec1()?,
        };
        let mut merged = Moments::none(channels, &device)?;
        for (replica, count) in counts.into_iter().enumerate() {
            let row = all.get(replica)?;
            let numbers = |at: usize| row.narrow(0, 1 + at * channels, channels);
            let (origins, offsets, deviations) = (numbers(0)?, numbers(1)?, numbers(2)?);
            merged = merged.merge(Moments { count, origins, offsets, deviations })?;
        }
        Ok(merged)
    }

    fn means(&self) -> Result<Tensor> {
        &self.origins + &self.offsets
    }
}

/// A global batch in training: the results of forward that backward needs.
struct Batch {
    context: Option<ReplicaContext>,
    remove_mean: bool,
    /// Whether this replica's elements belong to the batch.
    counts: bool,
    /// The moments of all replicas' elements.
    moments: Moments,
    /// One element of each channel of this replica, which is subtracted from elements before the rest of the mean.
    near: Tensor,
    /// One divided by the standard deviation.
    scales: Tensor,
}

impl Batch {
    fn new(x: &Tensor, context: Option<ReplicaContext>, epsilon: f64, remove_mean: bool) -> Result<Batch> {
        let channels = x.dim(1)?;
        // A row that stands in for missing examples does not belong to the batch.
        let counts = x.elem_count() > 0 && context.as_ref().is_none_or(ReplicaContext::has_examples);
        let own = if counts { Moments::of(&channels_first(x)?)? } else { Moments::none(channels, x.device())? };
        let near = own.origins.clone();
        let moments = match &context {
            Some(context) => own.over_replicas(context)?,
            None => own,
        };
        let scales = ((&moments.deviations / moments.count.max(1.0))? + epsilon)?.sqrt()?.recip()?;
        Ok(Batch { context, remove_mean, counts, moments, near, scales })
    }

    /// Returns the normalised input, in f32 or f64, through which backward reaches `x`.
    fn normalise(self, x: &Tensor) -> Result<Tensor> {
        let wide = x.detach().to_dtype(widened(x.dtype()))?;
        let normed = if x.elem_count() == 0 {
            wide
        } else {
            let centred = if self.remove_mean { self.centred(&wide)? } else { wide };
            centred.broadcast_mul(&vector(&self.scales, x)?)?
        };
        normed.contiguous()?.apply_op2(x, self)
    }

    /// Returns the deviation of each element from its channel's mean.
    fn centred(&self, wide: &Tensor) -> Result<Tensor> {
        let rest = ((&self.moments.origins - &self.near)? + &self.moments.offsets)?;
        wide.broadcast_sub(&vector(&self.near, wide)?)?.broadcast_sub(&vector(&rest, wide)?)
    }

    /// Returns the gradient of the sum of all replicas' losses with respect to this replica's `x`.
    fn gradient(&self, x: &Tensor, gradient: &Tensor) -> Result<Tensor> {
        let channels = self.scales.dim(0)?;
        let gradient = &gradient.detach();
        let centred = match self.counts {
            true => Some(self.centred(&x.detach().to_dtype(widened(x.dtype()))?)?),
            false => None,
        };
        let mut sums = match &centred {
            Some(centred) => {
                let of_channels = |tensor: &Tensor| channels_first(tensor)?.sum(D::Minus1)?.to_dtype(DType::F64);
                Tensor::cat(&[of_channels(gradient)?, of_channels(&(gradient * centred)?)?], 0)?
            }
            None => Tensor::zeros(2 * channels, DType::F64, x.device())?,
        };
        if let Some(context) = &self.context {
            sums = sum_over_replicas(context, &sums)?;
        }
        let Some(centred) = centred else { return x.zeros_like() };
        let (of_gradient, of_product) = (sums.narrow(0, 0, channels)?, sums.narrow(0, channels, channels)?);
        let n = self.moments.count;
        // The gradient through the variance, and through the mean if it was removed.
        let product = match self.remove_mean {
            true => of_product,
            false => (of_product + (self.moments.means()? * &of_gradient)?)?,
        };
        let spread = ((self.scales.sqr()? * &self.scales)? * (product / n)?)?;
        let scaled = gradient.broadcast_mul(&vector(&self.scales, x)?)?;
        let changed = (scaled - centred.broadcast_mul(&vector(&spread, x)?)?)?;
        let changed = if self.remove_mean {
            let shift = ((&self.scales * &of_gradient)? / n)?;
            changed.broadcast_sub(&vector(&shift, x)?)?
        } else {
            changed
        };
        changed.to_dtype(x.dtype())
    }
}

/// Forward returns the normalised values, backward returns the input's gradient.
impl CustomOp2 for Batch {
    fn name(&self) -> &'static str {
        "sync-batch-norm"
    }

    fn cpu_fwd(&self, normed: &CpuStorage, layout: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((normed.clone(), layout.shape().clone()))
    }

    fn cuda_fwd(
        &self,
        normed: &CudaStorage,
        layout: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        Ok((normed.try_clone(layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, x: &Tensor, _: &Tensor, gradient: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((None, Some(self.gradient(x, gradient)?)))
    }
}

/// Returns the type in which normalisation computes.
fn widened(dtype: DType) -> DType {
    if is_short(dtype) { DType::F32 } else { dtype }
}

/// Returns the elements by channel, (channels, elements), detached and in the type in which normalisation computes.
fn channels_first(x: &Tensor) -> Result<Tensor> {
    x.detach().to_dtype(widened(x.dtype()))?.transpose(0, 1)?.flatten_from(1)?.contiguous()
}

/// Reshapes one number per channel for broadcasting over examples.
fn per_channel(numbers: &Tensor, rank: usize) -> Result<Tensor> {
    let mut shape = vec![1; rank];
    shape[1] = numbers.dim(0)?;
    numbers.reshape(shape)
}

/// Returns one number per channel in the shape and the type in which they combine with `x`.
fn vector(numbers: &Tensor, x: &Tensor) -> Result<Tensor> {
    per_channel(&numbers.to_dtype(widened(x.dtype()))?, x.rank())
}
