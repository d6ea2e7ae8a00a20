//! Losses of a replica.

use burn::tensor::{DType, Device, FloatDType, Tensor};
use distribute_strategy::ReplicaContext;

use crate::Result;
use crate::backend::device_of;

/// Operations of a replica context on burn's tensors.
pub trait BurnContext {
    /// Returns this replica's share of the mean loss over a global batch: the sum of `per_example` divided by
    /// `global_batch`.
    ///
    /// Summed over replicas, the shares are the mean over the examples of the whole batch, even if replicas have
    /// different numbers of examples. The share and the gradients of a replica without
    /// [examples](ReplicaContext::has_examples) are 0.
    ///
    /// # Shapes
    /// `per_example`: one value per example of this replica, in any shape. The result has one element, as burn's own
    /// losses.
    ///
    /// # Source
    /// `tf.nn.compute_average_loss`.
    fn average_loss<const D: usize>(&self, per_example: Tensor<D>, global_batch: usize) -> Tensor<1>;

    /// Multiplies a loss that the program computed itself by this replica's [`weight`](ReplicaContext::weight), which
    /// is 1, or 0 on a replica without examples. Backward still runs through the model there, so that the replica takes
    /// part in the collectives of its layers.
    ///
    /// # Examples
    /// ```
    /// use burn::tensor::{Device, Tensor};
    /// use distribute_burn::{BurnContext, Error};
    /// use distribute_strategy::MirroredStrategy;
    /// use distribute_values::PerReplica;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// // The last step of a pass, in which a row of the first replica stands in on the second.
    /// let row = Tensor::<1>::from_floats([3.0], &Device::flex());
    /// let batch = PerReplica::new(vec![row; 2]).with_examples(&[true, false]);
    /// let losses = strategy.run_with(batch, |context, x| {
    ///     Ok::<_, Error>(context.weigh((x.clone() * x).sum()).into_scalar::<f32>())
    /// })?;
    /// assert_eq!(losses.values(), [9.0, 0.0]);
    /// # Ok::<(), Error>(())
    /// ```
    fn weigh(&self, loss: Tensor<1>) -> Tensor<1>;

    /// Returns this replica's share of a loss that does not depend on examples, such as a penalty on weights: the loss
    /// divided by the number of replicas, so that the sum over replicas counts it once.
    ///
    /// # Source
    /// `tf.nn.scale_regularization_loss`.
    fn scale_regularization_loss(&self, loss: Tensor<1>) -> Tensor<1>;

    /// Returns this replica's device, with automatic differentiation: a model's inputs must be on it.
    ///
    /// # Errors
    /// [`Error::Device`](crate::Error::Device) if the replica is not on a CPU.
    fn burn_device(&self) -> Result<Device>;
}

impl BurnContext for ReplicaContext {
    fn average_loss<const D: usize>(&self, per_example: Tensor<D>, global_batch: usize) -> Tensor<1> {
        // A sum in 16 bits would soon overflow.
        let is_short = matches!(per_example.dtype(), DType::F16 | DType::BF16);
        let wide = if is_short { per_example.cast(FloatDType::F32) } else { per_example };
        self.weigh(wide.sum().div_scalar(global_batch.max(1) as f64))
    }

    fn weigh(&self, loss: Tensor<1>) -> Tensor<1> {
        if self.weight() > 0.0 { loss } else { loss.mul_scalar(0.0) }
    }

    fn scale_regularization_loss(&self, loss: Tensor<1>) -> Tensor<1> {
        loss.div_scalar(self.num_replicas_in_sync() as f64)
    }

    fn burn_device(&self) -> Result<Device> {
        device_of(self.strategy(), self.local_replica_id())
    }
}
