//! Batch normalisation over the batches of all replicas.

use candle_core::{D, DType, Result, Tensor, Var};
use candle_nn::{BatchNormConfig, Init, ModuleT, VarBuilder};
use distribute_strategy::{ReplicaContext, get_replica_context};

use self::fused::{Fused, has_planes};
use self::moments::Moments;
use self::normalised::Normalised;
use self::rectified::rectified;
use crate::all_reduce::sum_of_layer;
use crate::exchange::Exchange;
use crate::fused::weighted;
use crate::rows::{add, relu};
use crate::statistics::keeps_common;
use crate::tensor::is_short;

mod fused;
mod moments;
mod normalised;
mod rectified;

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
/// In host memory, f32 and f64 are normalised by fused operations, in one pass over memory for each of moments, result,
/// sums and gradient.
///
/// If a replica may get [a batch without rows](distribute_strategy::DistributedDataset::with_empty_batches), put the
/// branch with the normalisation on the left of candle's sums, `branch + x`, or use [`add`](crate::add) or
/// [`forward_relu`](SyncBatchNorm::forward_relu). candle drops the right operand of operations on tensors without
/// elements, so that this replica would not take part in backward, and the others would wait for it.
///
/// # Ordering
/// Every replica must call the same layers in the same order, and add their results in the same order, by which that of
/// backward is determined. Replicas compare the layers' paths: forward fails if they differ, and so does backward
/// unless all replicas are on GPUs.
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
/// Settings and running statistics follow [`candle_nn::BatchNorm`], so checkpoints fit both; but without `remove_mean`
/// elements are divided by the standard deviation here, also in evaluation, and there in training by the root of the
/// mean square.
#[derive(Clone, Debug)]
pub struct SyncBatchNorm {
    affine: Option<(Tensor, Tensor)>,
    running_mean: Var,
    running_var: Var,
    config: BatchNormConfig,
    /// The exchanges in forward and in backward.
    exchanges: [Exchange; 2],
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
    let exchanges = ["forward", "backward"].map(|direction| Exchange::new(direction, &vb.prefix()));
    Ok(SyncBatchNorm { affine, running_mean, running_var, config, exchanges })
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

    /// Normalises `x`, adds a shortcut if there is one, and applies the rectified linear unit: the same as
    /// [`relu`](crate::relu) of the sum of [`forward_t`](ModuleT::forward_t) and the shortcut.
    ///
    /// In training, for f32 and f64 in host memory, this is one pass over memory instead of three, and less is added
    /// up backward.
    ///
    /// # Shapes
    /// The shortcut has the shape of `x`.
    ///
    /// # Errors
    /// [`candle_core::Error`] if channels or the shortcut do not fit.
    ///
    /// # Examples
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_nn::{BatchNormConfig, VarBuilder, VarMap};
    /// use distribute_candle::sync_batch_norm;
    ///
    /// let variables = VarMap::new();
    /// let vb = VarBuilder::from_varmap(&variables, DType::F32, &Device::Cpu);
    /// let norm = sync_batch_norm(1, BatchNormConfig::default(), vb)?;
    /// let x = Tensor::new(&[[1f32], [3.0]], &Device::Cpu)?;
    /// let y = norm.forward_relu(&x, Some(&Tensor::new(&[[0.5f32], [0.5]], &Device::Cpu)?), true)?;
    /// assert_eq!(y.to_vec2::<f32>()?[0], [0.0]);
    /// assert!((y.to_vec2::<f32>()?[1][0] - 1.5).abs() < 1e-4);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    pub fn forward_relu(&self, x: &Tensor, shortcut: Option<&Tensor>, train: bool) -> Result<Tensor> {
        self.check(x)?;
        if let Some(shortcut) = shortcut
            && (shortcut.dims() != x.dims() || shortcut.dtype() != x.dtype())
        {
            candle_core::bail!(
                "sync_batch_norm: the shortcut is {:?} of {:?}; give {:?} of {:?}, as the input has",
                shortcut.dims(),
                shortcut.dtype(),
                x.dims(),
                x.dtype()
            );
        }
        let in_host = shortcut.is_none_or(|shortcut| shortcut.device().is_cpu());
        if train && in_host && self.is_fused(x) {
            let batch = self.batch(x)?;
            let [weight, bias] = self.parameters(x, &batch)?;
            return rectified(batch, x, [&weight, &bias], shortcut);
        }
        let normed = self.normalised(x, shortcut, train)?;
        relu(&match shortcut {
            // The shortcut of a batch without rows is in the graph, as that of its normalisation.
            Some(shortcut) if train => (normed + shortcut)?,
            Some(shortcut) => add(&normed, shortcut)?,
            None => normed,
        })
    }

    /// Normalises `x`. In training, backward reaches the shortcut after this layer and before what `x` is computed of,
    /// as if both were arguments of one operation, whatever operations this replica uses.
    fn normalised(&self, x: &Tensor, shortcut: Option<&Tensor>, train: bool) -> Result<Tensor> {
        let (dtype, epsilon, remove_mean) = (widened(x.dtype()), self.config.eps, self.config.remove_mean);
        let normed = if train {
            let batch = self.batch(x)?;
            if self.is_fused(x) {
                let [weight, bias] = self.parameters(x, &batch)?;
                return weighted(x, &weight, Some(&bias), Fused(batch));
            }
            batch.normalise(x, shortcut)?
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

    /// Returns whether a batch in training is normalised by fused operations.
    fn is_fused(&self, x: &Tensor) -> bool {
        self.config.remove_mean && has_planes(x)
    }

    /// Returns the global batch in training, whose statistics are remembered.
    fn batch(&self, x: &Tensor) -> Result<Batch> {
        let context = get_replica_context().filter(|context| context.num_replicas_in_sync() > 1);
        let batch = Batch::new(x, context, &self.config, self.exchanges)?;
        if batch.moments.count > 0.0 {
            self.remember(&batch.moments)?;
        }
        Ok(batch)
    }

    /// Returns the weight and the bias of each channel, in the type of `x`.
    fn parameters(&self, x: &Tensor, batch: &Batch) -> Result<[Tensor; 2]> {
        if let Some((weight, bias)) = &self.affine {
            return Ok([weight.to_dtype(x.dtype())?, bias.to_dtype(x.dtype())?]);
        }
        let of = |value: f64| Tensor::full(value, batch.scales.dims(), x.device())?.to_dtype(x.dtype());
        Ok([of(1.0)?, of(0.0)?])
    }

    /// Checks an input.
    fn check(&self, x: &Tensor) -> Result<()> {
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
        Ok(())
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
        self.check(x)?;
        self.normalised(x, None, train)
    }
}

/// A global batch in training: the results of forward that backward needs.
struct Batch {
    context: Option<ReplicaContext>,
    /// The exchange of backward.
    backward: Exchange,
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
    fn new(
        x: &Tensor,
        context: Option<ReplicaContext>,
        config: &BatchNormConfig,
        [forward, backward]: [Exchange; 2],
    ) -> Result<Batch> {
        let channels = x.dim(1)?;
        // A row that stands in for missing examples does not belong to the batch.
        let counts = x.elem_count() > 0 && context.as_ref().is_none_or(ReplicaContext::has_examples);
        let own = if counts { Moments::of(x)? } else { Moments::none(channels, x.device())? };
        let near = own.origins.clone();
        let moments = match &context {
            Some(context) => own.over_replicas(context, forward)?,
            None => own,
        };
        let scales = ((&moments.deviations / moments.count.max(1.0))? + config.eps)?.sqrt()?.recip()?;
        Ok(Batch { context, backward, remove_mean: config.remove_mean, counts, moments, near, scales })
    }

    /// Returns the normalised input, in f32 or f64, through which backward reaches `x` and the shortcut.
    fn normalise(self, x: &Tensor, shortcut: Option<&Tensor>) -> Result<Tensor> {
        let wide = x.detach().to_dtype(widened(x.dtype()))?;
        let normed = if x.elem_count() == 0 {
            wide
        } else {
            let centred = if self.remove_mean { self.centred(&wide)? } else { wide };
            centred.broadcast_mul(&vector(&self.scales, x)?)?
        };
        let operation = Normalised::new(self, normed.contiguous()?);
        match shortcut {
            Some(shortcut) => x.apply_op2(shortcut, operation),
            None => x.apply_op1(operation),
        }
    }

    /// Returns the deviation of each element from its channel's mean.
    fn centred(&self, wide: &Tensor) -> Result<Tensor> {
        let (near, rest) = self.centre()?;
        wide.broadcast_sub(&vector(near, wide)?)?.broadcast_sub(&vector(&rest, wide)?)
    }

    /// Returns what is subtracted from each channel's elements of this replica, in two parts.
    fn centre(&self) -> Result<(&Tensor, Tensor)> {
        Ok((&self.near, ((&self.moments.origins - &self.near)? + &self.moments.offsets)?))
    }

    /// Returns the gradient of the sum of all replicas' losses with respect to this replica's `x`.
    fn gradient(&self, x: &Tensor, gradient: &Tensor) -> Result<Tensor> {
        let channels = self.scales.dim(0)?;
        let gradient = &gradient.detach();
        let centred = match self.counts {
            true => Some(self.centred(&x.detach().to_dtype(widened(x.dtype()))?)?),
            false => None,
        };
        let sums = match &centred {
            Some(centred) => {
                let of_channels = |tensor: &Tensor| channels_first(tensor)?.sum(D::Minus1)?.to_dtype(DType::F64);
                Tensor::cat(&[of_channels(gradient)?, of_channels(&(gradient * centred)?)?], 0)?
            }
            None => Tensor::zeros(2 * channels, DType::F64, x.device())?,
        };
        let (spread, shift) = self.through_moments(sums)?;
        let Some(centred) = centred else { return x.zeros_like() };
        let scaled = gradient.broadcast_mul(&vector(&self.scales, x)?)?;
        let changed = (scaled - centred.broadcast_mul(&vector(&spread, x)?)?)?;
        changed.broadcast_sub(&vector(&shift, x)?)?.to_dtype(x.dtype())
    }

    /// Adds up, over replicas, the sums of gradients and those of their products with deviations, one after the other.
    /// Returns the gradients through the variance, a factor of deviations, and through the mean.
    fn through_moments(&self, sums: Tensor) -> Result<(Tensor, Tensor)> {
        let sums = match &self.context {
            Some(context) => sum_of_layer(context, &sums, self.backward)?,
            None => sums,
        };
        let (channels, n) = (self.scales.dim(0)?, self.moments.count.max(1.0));
        let (of_gradient, of_product) = (sums.narrow(0, 0, channels)?, sums.narrow(0, channels, channels)?);
        let product = match self.remove_mean {
            true => of_product,
            false => (of_product + (self.moments.means()? * &of_gradient)?)?,
        };
        let spread = ((self.scales.sqr()? * &self.scales)? * (product / n)?)?;
        let shift = match self.remove_mean {
            true => ((&self.scales * &of_gradient)? / n)?,
            false => of_gradient.zeros_like()?,
        };
        Ok((spread, shift))
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
