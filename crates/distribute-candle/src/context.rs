//! Losses of a replica.

use candle_core::{D, DType, Tensor};
use distribute_strategy::ReplicaContext;

use crate::Result;
use crate::host::is_fused;
use crate::losses::at_least_32_bits;
use crate::rows::cross_entropy_of_classes;

/// Operations of a replica context on candle's tensors.
pub trait CandleContext {
    /// Returns this replica's share of the mean loss over a global batch: the sum of `per_example` divided by
    /// `global_batch`.
    ///
    /// Summed over replicas, the shares are the mean over the examples of the whole batch, even if replicas have
    /// different numbers of examples. The share and the gradients of a replica without
    /// [examples](ReplicaContext::has_examples) are 0.
    ///
    /// # Shapes
    /// `per_example`: one value per example of this replica. The result is a scalar.
    ///
    /// # Errors
    /// [`candle_core::Error`] if the values cannot be summed.
    ///
    /// # Source
    /// `tf.nn.compute_average_loss`.
    fn average_loss(&self, per_example: &Tensor, global_batch: usize) -> Result<Tensor>;

    /// Multiplies a loss that the program computed itself by this replica's [`weight`](ReplicaContext::weight), which
    /// is 1, or 0 on a replica without examples. Backward still runs through the model there, so that the replica takes
    /// part in the collectives of its layers.
    ///
    /// # Errors
    /// [`candle_core::Error`] if the product cannot be computed.
    ///
    /// # Examples
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use distribute_candle::{CandleContext, Error};
    /// use distribute_strategy::MirroredStrategy;
    /// use distribute_values::PerReplica;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// // The last step of a pass, in which a row of the first replica stands in on the second.
    /// let batch = PerReplica::new(vec![Tensor::new(&[3f32], &Device::Cpu)?; 2]).with_examples(&[true, false]);
    /// let losses = strategy.run_with(batch, |context, x| {
    ///     Ok::<_, Error>(context.weigh(&x.sqr()?.sum_all()?)?.to_scalar::<f32>()?)
    /// })?;
    /// assert_eq!(losses.values(), [9.0, 0.0]);
    /// # Ok::<(), Error>(())
    /// ```
    fn weigh(&self, loss: &Tensor) -> Result<Tensor>;

    /// Returns this replica's share of a loss that does not depend on examples, such as a penalty on weights: the loss
    /// divided by the number of replicas, so that the sum over replicas counts it once.
    ///
    /// # Errors
    /// [`candle_core::Error`] if the quotient cannot be computed.
    ///
    /// # Source
    /// `tf.nn.scale_regularization_loss`.
    fn scale_regularization_loss(&self, loss: &Tensor) -> Result<Tensor>;

    /// Returns a tensor on this replica's device: a copy, or the same tensor if it is on the device already. A model's
    /// inputs must be on the same device as its variables.
    ///
    /// # Errors
    /// [`Error::Candle`](crate::Error::Candle) if the copy fails, and [`Error::NoGpu`](crate::Error::NoGpu) if candle
    /// cannot use the replica's device.
    ///
    /// # Examples
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use distribute_candle::{CandleContext, Error};
    /// use distribute_strategy::MirroredStrategy;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
    /// strategy.run_with((), |context, ()| {
    ///     let x = context.to_device(&x)?;                       // on GPU:0 and GPU:1, a copy on each
    ///     Ok::<_, Error>(assert!(x.device().is_cpu()))
    /// })?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.distribute.Strategy.experimental_distribute_dataset`, which copies each replica's part to its device.
    fn to_device(&self, tensor: &Tensor) -> Result<Tensor>;
}

impl CandleContext for ReplicaContext {
    fn average_loss(&self, per_example: &Tensor, global_batch: usize) -> Result<Tensor> {
        // A sum in 16 bits would soon overflow.
        self.weigh(&(at_least_32_bits(per_example)?.sum_all()? / global_batch.max(1) as f64)?)
    }

    fn weigh(&self, loss: &Tensor) -> Result<Tensor> {
        if self.weight() > 0.0 {
            return Ok(loss.clone());
        }
        // Zero, also where the loss is not a number, and in the graph: candle cuts it at a multiplication by 0.
        let zeros = loss.detach().zeros_like()?;
        Ok(zeros.to_dtype(DType::U8)?.where_cond(loss, &zeros)?)
    }

    fn scale_regularization_loss(&self, loss: &Tensor) -> Result<Tensor> {
        Ok((loss / self.num_replicas_in_sync() as f64)?)
    }

    fn to_device(&self, tensor: &Tensor) -> Result<Tensor> {
        crate::device::moved(tensor, self.strategy(), self.local_replica_id())
    }
}

/// Computes the negative log-likelihood of each example's target, in f32 or f64.
///
/// # Shapes
/// `log_probabilities`: (examples, …, classes); `targets`: (examples, …), u32, i64 or u8. Result: (examples, …).
///
/// # Errors
/// [`candle_core::Error`] if shapes or types do not fit. On a CPU, also for the first target that is not a class; on a
/// GPU candle's kernels handle these.
pub fn nll_per_example(log_probabilities: &Tensor, targets: &Tensor) -> candle_core::Result<Tensor> {
    let log_probabilities = at_least_32_bits(log_probabilities)?;
    check_shapes(&log_probabilities, targets)?;
    if targets.device().is_cpu() {
        check_classes("the target of example", targets, log_probabilities.dim(D::Minus1)?)?;
    }
    log_probabilities.gather(&as_indices(targets)?.unsqueeze(D::Minus1)?, D::Minus1)?.squeeze(D::Minus1)?.neg()
}

/// Computes the cross-entropy of each example's logits and target, in f32 or f64.
///
/// # Shapes
/// Like [`nll_per_example`], with logits instead of log-probabilities.
///
/// # Errors
/// [`candle_core::Error`] if shapes or types do not fit or a target is not a class, like [`nll_per_example`].
pub fn cross_entropy_per_example(logits: &Tensor, targets: &Tensor) -> candle_core::Result<Tensor> {
    let logits = at_least_32_bits(logits)?;
    check_shapes(&logits, targets)?;
    if logits.elem_count() == 0 {
        // candle refuses the maximum of an empty tensor, but a replica without examples takes part in the step.
        return logits.narrow(D::Minus1, 0, 1)?.squeeze(D::Minus1);
    }
    if is_fused(&logits) && targets.device().is_cpu() && logits.rank() == 2 {
        let classes = check_classes("the target of example", targets, logits.dim(D::Minus1)?)?;
        return cross_entropy_of_classes(&logits, classes);
    }
    nll_per_example(&candle_nn::ops::log_softmax(&logits, D::Minus1)?, targets)
}

/// Refuses targets that are not one for each row of outputs; candle looks up as many as there are.
pub(crate) fn check_shapes(outputs: &Tensor, targets: &Tensor) -> candle_core::Result<()> {
    match outputs.dims().split_last() {
        Some((_, examples)) if targets.dims() == examples => Ok(()),
        _ => candle_core::bail!(
            "the outputs have shape {:?}, and the targets {:?}; give one target for each row of outputs, in all axes \
             but the last",
            outputs.dims(),
            targets.dims()
        ),
    }
}

/// Returns indices in a type of which the greatest number is not an index. To candle that is padding.
pub(crate) fn as_indices(indices: &Tensor) -> candle_core::Result<Tensor> {
    // candle refuses types that are not of indices.
    if indices.dtype() == DType::U8 { indices.to_dtype(DType::U32) } else { Ok(indices.clone()) }
}

/// Returns indices, such as targets, in host memory, and refuses one that is not a class. candle treats the greatest
/// number of a type as padding, with a loss of 0.
pub(crate) fn check_classes(what: &str, targets: &Tensor, classes: usize) -> candle_core::Result<Vec<usize>> {
    check_indices((what, "classes"), targets, classes)
}

/// Returns indices of a table's rows in host memory, and refuses one that is not that of a row.
pub(crate) fn check_rows(indices: &Tensor, rows: usize) -> candle_core::Result<Vec<usize>> {
    check_indices(("index", "rows"), indices, rows)
}

fn check_indices((what, of): (&str, &str), indices: &Tensor, count: usize) -> candle_core::Result<Vec<usize>> {
    if !indices.dtype().is_int() {
        candle_core::bail!("indices of {of} are of {:?}; give u32, i64 or u8", indices.dtype());
    }
    let all: Vec<i64> = indices.to_dtype(DType::I64)?.flatten_all()?.to_vec1()?;
    let checked = |(at, given): (usize, &i64)| match usize::try_from(*given) {
        Ok(index) if index < count => Ok(index),
        _ => candle_core::bail!(
            "{what} {at} is {given}, but there are {count} {of}; give indices from 0 to {}",
            count.saturating_sub(1)
        ),
    };
    all.iter().enumerate().map(checked).collect()
}
