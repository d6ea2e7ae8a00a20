//! Examples for training.

use candle_core::Tensor;
use distribute_input::{AUTOTUNE, Dataset, Element, InputOptions};
use distribute_strategy::{DistributedDataset, Strategy};
use distribute_train::trainer::{self, Batching};

use crate::{Error, Result};

/// Examples, one per row: inputs, targets, and optional weights.
#[derive(Clone, Debug)]
pub struct Examples {
    /// The inputs of the model.
    pub inputs: Tensor,
    /// The targets of the outputs.
    pub targets: Tensor,
    /// The weight of each example, as f32.
    pub weights: Option<Tensor>,
}

impl From<(Tensor, Tensor)> for Examples {
    fn from((inputs, targets): (Tensor, Tensor)) -> Examples {
        Examples { inputs, targets, weights: None }
    }
}

impl From<(Tensor, Tensor, Tensor)> for Examples {
    fn from((inputs, targets, weights): (Tensor, Tensor, Tensor)) -> Examples {
        Examples { inputs, targets, weights: Some(weights) }
    }
}

/// Training data: batched datasets of inputs and targets, or of inputs, targets and weights; and tensors in memory
/// whose rows are examples.
pub trait TrainingData: trainer::TrainingData<Examples, Error> {}

impl<T: trainer::TrainingData<Examples, Error>> TrainingData for T {}

macro_rules! training_data {
    ($($tuple:ty),*) => {$(
        impl trainer::TrainingData<Examples, Error> for Dataset<$tuple> {
            fn distribute(
                &self,
                strategy: &Strategy,
                batching: Batching,
            ) -> Result<(DistributedDataset<Examples>, usize)> {
                batching.of_batched()?;
                let batches = strategy.distribute_dataset(self)?.map_replicas(|_, examples| Ok(examples.into()));
                Ok((batches, self.batch_size().unwrap_or(1)))
            }
        }

        impl trainer::TrainingData<Examples, Error> for $tuple {
            fn distribute(
                &self,
                strategy: &Strategy,
                batching: Batching,
            ) -> Result<(DistributedDataset<Examples>, usize)> {
                let rows = self.rows()?;
                let data = Dataset::from_tensor_slices(self.clone());
                let data = if batching.shuffle { data.shuffle(rows, 0) } else { data };
                let batching = Batching { is_set: false, ..batching };
                data.batch(batching.batch_size).prefetch(AUTOTUNE).distribute(strategy, batching)
            }
        }
    )*};
}

training_data!((Tensor, Tensor), (Tensor, Tensor, Tensor));

/// Data for prediction: a batched dataset of inputs, or a tensor of them.
pub trait PredictionData {
    /// Distributes batches over all replicas, whose outputs are returned in the data's order.
    ///
    /// # Errors
    /// [`Error::Strategy`] if the data cannot be distributed.
    fn distribute(&self, strategy: &Strategy, batch_size: usize) -> Result<DistributedDataset<Tensor>>;
}

impl PredictionData for Dataset<Tensor> {
    fn distribute(&self, strategy: &Strategy, _: usize) -> Result<DistributedDataset<Tensor>> {
        // All workers read the data together, so that rows are given to replicas in order, and outputs are returned in
        // it.
        let options = InputOptions::default().deterministic(true);
        Ok(strategy.distribute_dataset_with(self, options)?)
    }
}

impl PredictionData for Tensor {
    fn distribute(&self, strategy: &Strategy, batch_size: usize) -> Result<DistributedDataset<Tensor>> {
        Dataset::from_tensor_slices(self.clone()).batch(batch_size).distribute(strategy, batch_size)
    }
}
