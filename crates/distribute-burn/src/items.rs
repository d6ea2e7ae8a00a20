//! burn's own datasets and batchers.

use std::sync::Arc;

use burn::data::dataloader::batcher::Batcher;
use distribute_input::{Array, BoxError, Dataset};
use distribute_strategy::{DistributedDataset, Strategy};
use distribute_types::Classified;

use crate::backend::device_of;
use crate::{Error, Result};

/// A dataset of burn whose items a batcher of burn makes batches of.
///
/// The indices of items are distributed as every dataset of this project: shuffled, cut into global batches, divided
/// between the replicas of all workers, and resumed from a position in the middle of a pass. Each replica then gets its
/// items, and its batch on its own device, on a thread that runs ahead of training.
///
/// # Examples
/// ```
/// use burn::data::dataloader::batcher::Batcher;
/// use burn::data::dataset::InMemDataset;
/// use burn::tensor::{Device, Tensor};
/// use distribute_burn::{Error, Items};
/// use distribute_strategy::MirroredStrategy;
///
/// struct Rows;
///
/// impl Batcher<[f32; 2], Tensor<2>> for Rows {
///     fn batch(&self, items: Vec<[f32; 2]>, device: &Device) -> Tensor<2> {
///         Tensor::cat(items.into_iter().map(|item| Tensor::from_floats([item], device)).collect(), 0)
///     }
/// }
///
/// let strategy = MirroredStrategy::builder().devices(["CPU:0", "CPU:1"]).build()?;
/// let numbers = InMemDataset::new((0..10).map(|at| [at as f32, 1.0]).collect());
/// let items = Items::new(numbers, Rows, |indices| indices.shuffle(10, 42).batch(5));
/// let mut rows = 0;
/// for batch in items.distribute(&strategy)? {
///     rows += strategy.run_with(batch?, |_, x| Ok::<_, Error>(x.dims()[0]))?.values().iter().sum::<usize>();
/// }
/// assert_eq!(rows, 10);
/// # Ok::<(), Error>(())
/// ```
pub struct Items<I, B> {
    dataset: Arc<dyn burn::data::dataset::Dataset<I>>,
    batcher: Arc<dyn Batcher<I, B>>,
    indices: Dataset<Array<i64>>,
}

impl<I: 'static, B: Clone + Send + 'static> Items<I, B> {
    /// Takes the items in the order of indices that `order` returns. It takes all indices in ascending order, and
    /// returns batches of them: `|indices| indices.shuffle(60_000, 42).batch(128)`.
    pub fn new(
        dataset: impl burn::data::dataset::Dataset<I> + 'static,
        batcher: impl Batcher<I, B> + 'static,
        order: impl FnOnce(Dataset<Array<i64>>) -> Dataset<Array<i64>>,
    ) -> Items<I, B> {
        let indices = order(Dataset::range(0..dataset.len() as i64));
        Items { dataset: Arc::new(dataset), batcher: Arc::new(batcher), indices }
    }

    /// Returns the batches of indices.
    pub fn indices(&self) -> &Dataset<Array<i64>> {
        &self.indices
    }

    /// Distributes the batches over the replicas of a strategy.
    ///
    /// # Errors
    /// [`Error::Strategy`] if the indices are not batched.
    pub fn distribute(&self, strategy: &Strategy) -> Result<DistributedDataset<B>> {
        Ok(self.fetched(strategy, strategy.distribute_dataset(&self.indices)?))
    }

    /// Returns the batches of the items with the given indices.
    pub(crate) fn fetched(
        &self,
        strategy: &Strategy,
        indices: DistributedDataset<Array<i64>>,
    ) -> DistributedDataset<B> {
        let (items, strategy) = (self.clone(), strategy.clone());
        indices.map_replicas(move |local, indices| {
            let device = device_of(&strategy, local).map_err(Classified::new)?;
            Ok(items.batcher.batch(items.get(&indices)?, &device))
        })
    }

    fn get(&self, indices: &Array<i64>) -> Result<Vec<I>, BoxError> {
        let len = self.dataset.len();
        let index = |index: &i64| match usize::try_from(*index) {
            Ok(index) if index < len => Ok(index),
            _ => Err(Classified::new(Error::Index { index: *index, len })),
        };
        let indices = indices.as_slice().iter().map(index).collect::<Result<Vec<usize>, _>>()?;
        Ok(self.dataset.get_many(indices)?)
    }
}

impl<I, B> Clone for Items<I, B> {
    fn clone(&self) -> Self {
        Items { dataset: self.dataset.clone(), batcher: self.batcher.clone(), indices: self.indices.clone() }
    }
}
