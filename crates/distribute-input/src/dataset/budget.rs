//! A limit of the memory that the stages of a pipeline hold elements in.

use std::any::{Any, TypeId, type_name};
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use super::{Dataset, FileShard, Opener, Order, Pass, Picks};
use crate::{Array, Error, Result};

/// The sizes of elements in memory, by their type, for [`Dataset::memory_budget`].
///
/// Known from the beginning are `String`, `Vec<u8>`, and [`Array`] of numbers of 8 to 64 bits, `bool` and `String`.
///
/// # Examples
/// ```
/// use distribute_input::{Array, Sizes};
/// let sizes = Sizes::default()
///     .with(|(pixels, _): &(Array<u8>, Array<i64>)| pixels.as_slice().len() + 8);
/// ```
#[derive(Clone)]
pub struct Sizes {
    by_type: HashMap<TypeId, Measure>,
}

type Measure = Arc<dyn Fn(&dyn Any) -> usize + Send + Sync>;

impl Sizes {
    /// Adds or replaces the size in bytes of elements of type `T`.
    pub fn with<T: 'static>(mut self, size: impl Fn(&T) -> usize + Send + Sync + 'static) -> Sizes {
        let measure = move |element: &dyn Any| element.downcast_ref::<T>().map_or(0, &size);
        self.by_type.insert(TypeId::of::<T>(), Arc::new(measure));
        self
    }
}

impl Default for Sizes {
    fn default() -> Sizes {
        let sizes = Sizes { by_type: HashMap::new() };
        macro_rules! arrays {
            ($sizes:expr, $($number:ty)*) => {
                $sizes$(.with(|array: &Array<$number>| size_of_val(array.as_slice())))*
            };
        }
        arrays!(sizes, f32 f64 i8 i16 i32 i64 u8 u16 u32 u64 bool)
            .with(|text: &String| text.len())
            .with(|bytes: &Vec<u8>| bytes.len())
            .with(|texts: &Array<String>| texts.as_slice().iter().map(|text| size_of::<String>() + text.len()).sum())
    }
}

impl fmt::Debug for Sizes {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Sizes").field("types", &self.by_type.len()).finish_non_exhaustive()
    }
}

impl<T: Send + 'static> Dataset<T> {
    /// Limits the bytes of the elements that this pipeline holds in shuffle buffers, in parallel maps and read ahead.
    ///
    /// Each of these stages up to here gets an equal share of `bytes` and holds fewer elements than its own limit
    /// allows if they do not fit into it, but always one, so that a pass continues even if a single element is larger
    /// than the budget. Datasets that `interleave` or `flat_map` opens share one part. A shuffle with a smaller buffer
    /// still yields an order that depends on nothing but the elements, the seed and the number of the pass.
    ///
    /// The budget does not count an element that a thread is about to hand over, the batch that is being collected, the
    /// content of [`cache`](Dataset::cache), files and tensors in memory, and the buffers of readers of files. The size
    /// of the results of a parallel map is estimated as the largest so far; it begins with one element at a time.
    ///
    /// Stages after this one are not limited, and neither is the reading ahead of a distribution, which is set by
    /// [`per_replica_buffer_size`](crate::InputOptions::per_replica_buffer_size).
    ///
    /// # Errors
    /// Each pass reports [`Error::Zero`] if `bytes` is zero, and [`Error::UnknownSize`] if `sizes` lacks the type of
    /// elements that one of the stages holds.
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
        let stages = std::mem::take(&mut facts.buffers).max(1);
        let budget = Arc::new(Budget { stage_bytes: bytes / stages, sizes });
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

/// The share of each stage, and how elements are measured.
#[derive(Debug)]
pub(crate) struct Budget {
    stage_bytes: usize,
    sizes: Sizes,
}

impl Budget {
    /// Returns the budget of each of several pipelines that are one stage of this one.
    pub(crate) fn divided(&self, stages: usize) -> Budget {
        Budget { stage_bytes: self.stage_bytes / stages.max(1), sizes: self.sizes.clone() }
    }

    /// Returns how a stage measures elements of type `T`.
    pub(crate) fn limit<T: 'static>(&self, stage: &'static str) -> Result<Limit<T>> {
        if !is_counted::<T>() {
            return Ok(Limit::none());
        }
        let unknown = || Error::UnknownSize { stage, element: type_name::<T>() };
        let measure = Arc::clone(self.sizes.by_type.get(&TypeId::of::<T>()).ok_or_else(unknown)?);
        Ok(Limit { bytes: self.stage_bytes, size: Arc::new(move |element: &T| measure(element)) })
    }
}

/// Returns whether a stage with elements of type `T` takes part in a budget: the names of files and the numbers of rows
/// of tensors in memory do not.
pub(crate) fn is_counted<T: 'static>() -> bool {
    ![TypeId::of::<usize>(), TypeId::of::<Vec<usize>>(), TypeId::of::<FileShard>()].contains(&TypeId::of::<T>())
}

/// The bytes that one stage may hold in elements of type `T`.
pub(crate) struct Limit<T> {
    bytes: usize,
    size: Arc<dyn Fn(&T) -> usize + Send + Sync>,
}

impl<T> Limit<T> {
    pub(crate) fn none() -> Limit<T> {
        Limit { bytes: usize::MAX, size: Arc::new(|_| 0) }
    }

    pub(crate) fn size(&self, element: &T) -> usize {
        (self.size)(element)
    }

    pub(crate) fn is_none(&self) -> bool {
        self.bytes == usize::MAX
    }

    /// Returns whether there is room for more bytes than are held.
    pub(crate) fn has_room(&self, held: usize, more: usize) -> bool {
        held.saturating_add(more) <= self.bytes
    }
}

impl<T: 'static> Limit<T> {
    /// Returns the limit of lists of elements.
    pub(crate) fn of_lists(self) -> Limit<Vec<T>> {
        let size = self.size;
        Limit { bytes: self.bytes, size: Arc::new(move |list: &Vec<T>| list.iter().map(|one| size(one)).sum()) }
    }
}

#[cfg(test)]
mod tests;
