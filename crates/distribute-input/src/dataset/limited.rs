//! Pipelines whose stages hold a limited number of bytes.

use std::any::TypeId;
use std::sync::Arc;

use super::budget::{Budget, Sizes};
use super::{Dataset, FileShard, Opener, Order, Pass, Picks};

impl<T: Send + 'static> Dataset<T> {
    /// Limits the bytes of the elements that this pipeline holds in shuffle buffers, in parallel maps and read ahead.
    ///
    /// Each of these stages up to here gets an equal share of `bytes` and holds fewer elements than its own limit
    /// allows if they do not fit into it, but always one, so that a pass continues even if a single element is larger
    /// than the budget. Datasets that `interleave` or `flat_map` opens share one part. A shuffle with a smaller buffer
    /// still yields an order that depends on nothing but the elements, the seed, the number of the pass and the budget:
    /// give all workers the same budget, and resume a pass with the one it began with.
    ///
    /// The budget does not count an element that a thread is about to hand over, the batch that is being collected, the
    /// content of [`cache`](Dataset::cache), files and tensors in memory, and the buffers of readers of files. The size
    /// of the results of a parallel map is estimated as the largest so far; it begins with one element at a time.
    ///
    /// Stages after this one are not limited, and neither is the reading ahead of a distribution, which is set by
    /// [`per_replica_buffer_size`](crate::InputOptions::per_replica_buffer_size).
    ///
    /// # Errors
    /// - [`Error::Zero`](crate::Error::Zero) in each pass if `bytes` is zero.
    /// - [`Error::UnknownSize`](crate::Error::UnknownSize) in each pass if `sizes` lacks the type of elements that one
    ///   of the stages holds.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::{Array, Dataset, Sizes};
    /// let images = Dataset::range(0..9).map(|_| Ok(Array::from(vec![0_u8; 1 << 20])));
    /// let data = images.shuffle(1000, 42).batch(2).prefetch(16).memory_budget(16 << 20, Sizes::default());
    /// assert_eq!(data.iter().count(), 5);
    /// ```
    ///
    /// # Source
    /// `tf.data.Options.autotune.ram_budget`, which has no effect on shuffles.
    pub fn memory_budget(self, bytes: usize, sizes: Sizes) -> Dataset<T> {
        let mut facts = self.facts;
        facts.positive("memory_budget", "number of bytes", bytes);
        // A distribution would otherwise read as far ahead again as a prefetch at the end of the pipeline.
        facts.prefetch = 0;
        // The order of a shuffle depends on its share.
        facts.stages.push(format!("memory_budget {bytes} of {} stages", facts.buffers));
        let stages = std::mem::take(&mut facts.buffers).max(1);
        let sizes = uncounted().into_iter().fold(sizes, Sizes::without);
        let budget = Arc::new(Budget::new(bytes / stages, sizes));
        let picks = self.picks.map(|Picks { source, order }| {
            let order = match order {
                Order::Rows(open) => Order::Rows(limited(open, &budget)),
                Order::Batches(open) => Order::Batches(limited(open, &budget)),
            };
            Picks { source, order }
        });
        let mut dataset = Dataset::new(limited(self.open, &budget), facts);
        dataset.picks = picks;
        dataset
    }
}

fn limited<X: 'static>(open: Opener<X>, budget: &Arc<Budget>) -> Opener<X> {
    let budget = Arc::clone(budget);
    Arc::new(move |pass: Pass| open(pass.with_budget(Some(Arc::clone(&budget)))))
}

/// Returns whether a stage with elements of type `T` takes part in a budget.
pub(super) fn is_counted<T: 'static>() -> bool {
    !uncounted().contains(&TypeId::of::<T>())
}

/// The types of the names of files and of the numbers of rows of tensors in memory.
fn uncounted() -> [TypeId; 3] {
    [TypeId::of::<usize>(), TypeId::of::<Vec<usize>>(), TypeId::of::<FileShard>()]
}

#[cfg(test)]
mod tests;
