//! Losses of a replica.

use burn::tensor::{Device, Element, Int, Tensor};
use distribute_input::Array;
use distribute_strategy::ReplicaContext;

use crate::backend::device_of;
use crate::losses::at_least_32_bits;
use crate::{FromElement, Result};

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

    /// Returns an array as a tensor on this replica's device, in one copy. Elements of any type are converted to the
    /// device's type of floating-point numbers.
    ///
    /// # Errors
    /// [`Error::Rank`](crate::Error::Rank) if the array does not have `D` dimensions, and the error of
    /// [`burn_device`](BurnContext::burn_device).
    ///
    /// # Examples
    /// ```
    /// use distribute_burn::{BurnContext, Error};
    /// use distribute_input::{Array, Dataset};
    /// use distribute_strategy::MirroredStrategy;
    ///
    /// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
    /// let images = Array::new([8, 2], (0..16).map(|pixel| pixel as f32).collect())?;
    /// let labels = Array::from((0..8).collect::<Vec<u32>>());
    /// let data = Dataset::from_tensor_slices((images, labels)).batch(4);
    /// for batch in strategy.distribute_dataset(&data)? {
    ///     strategy.run_with(batch?, |context, (x, y)| {
    ///         let (x, y) = (context.tensor::<2>(&x)?, context.int_tensor::<1>(&y)?);
    ///         Ok::<_, Error>(assert_eq!((x.dims(), y.dims()), ([2, 2], [2])))
    ///     })?;
    /// }
    /// # Ok::<(), Error>(())
    /// ```
    fn tensor<const D: usize>(&self, array: &Array<impl Element>) -> Result<Tensor<D>>;

    /// Returns an array as a tensor of integers on this replica's device, in one copy. Elements of any type are
    /// converted to the device's type of integers.
    ///
    /// # Errors
    /// [`Error::Rank`](crate::Error::Rank) if the array does not have `D` dimensions,
    /// [`Error::NotWhole`](crate::Error::NotWhole) if it has numbers that are not whole or not in this type, and the
    /// error of [`burn_device`](BurnContext::burn_device).
    fn int_tensor<const D: usize>(&self, array: &Array<impl Element>) -> Result<Tensor<D, Int>>;
}

impl BurnContext for ReplicaContext {
    fn average_loss<const D: usize>(&self, per_example: Tensor<D>, global_batch: usize) -> Tensor<1> {
        // A sum in 16 bits would soon overflow.
        self.weigh(at_least_32_bits(per_example).sum().div_scalar(global_batch.max(1) as f64))
    }

    fn weigh(&self, loss: Tensor<1>) -> Tensor<1> {
        #[cfg(feature = "pjrt")]
        if crate::pjrt::is_tracing() {
            return crate::pjrt::weighed(loss, self.weight());
        }
        if self.weight() > 0.0 { loss } else { loss.mul_scalar(0.0) }
    }

    fn scale_regularization_loss(&self, loss: Tensor<1>) -> Tensor<1> {
        loss.div_scalar(self.num_replicas_in_sync() as f64)
    }

    fn burn_device(&self) -> Result<Device> {
        device_of(self.strategy(), self.local_replica_id())
    }

    fn tensor<const D: usize>(&self, array: &Array<impl Element>) -> Result<Tensor<D>> {
        let tensor = Tensor::from_element(array, &self.burn_device()?)?;
        #[cfg(feature = "pjrt")]
        if crate::pjrt::is_tracing() {
            let leaf = crate::pjrt::Leaf::of(&crate::tensor::flex_of(tensor.clone())?)?;
            return Ok(crate::pjrt::float_input(leaf, true).unwrap_or(tensor));
        }
        Ok(tensor)
    }

    fn int_tensor<const D: usize>(&self, array: &Array<impl Element>) -> Result<Tensor<D, Int>> {
        let tensor: Tensor<D, Int> = Tensor::from_element(array, &self.burn_device()?)?;
        #[cfg(feature = "pjrt")]
        if crate::pjrt::is_tracing() {
            let leaf = crate::pjrt::collect(tensor.clone())?.swap_remove(0);
            return Ok(crate::pjrt::int_input(leaf, true).unwrap_or(tensor));
        }
        Ok(tensor)
    }
}
