//! Batches of elements that differ in shape.

use std::sync::Arc;

use super::{Batched, Dataset, Items, Opener, chunked};
use crate::{Pad, Result};

impl<T: Send + 'static> Dataset<T> {
    /// Batches like [`batch`](Dataset::batch), with elements padded to the largest extents of their batch.
    ///
    /// If the dataset is distributed, a step may have rows of several batches: after a resumption with another number
    /// of workers, and where workers read parts of their own that are not whole steps. Such rows are padded again. This
    /// is not possible after a `map`, `par_map` or `zip` of the batches, which may have changed the padding: a step
    /// whose rows differ in shape is then an error, [`Error::UnequalShapes`](crate::Error::UnequalShapes), perhaps late
    /// in the pass. Map the elements before they are batched.
    ///
    /// # Errors
    /// The pass reports [`Error::Zero`](crate::Error::Zero) if `size` is zero, and the errors of [`Pad::padded`] if
    /// elements differ in the number of dimensions.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::{Array, Dataset};
    /// let texts: Dataset<Array<i64>> = [vec![1], vec![2, 3, 4]].map(Array::from).into_iter().collect();
    /// let batch = texts.padded_batch(2).iter().next().expect("there are two texts")?;
    /// assert_eq!(batch, Array::new([2, 3], vec![1, 0, 0, 2, 3, 4])?);
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.data.Dataset.padded_batch`.
    pub fn padded_batch<L>(self, size: usize) -> Dataset<T>
    where
        T: Pad<L>,
    {
        let mut facts = self.facts;
        facts.positive("padded_batch", "size", size);
        let divisor = size.max(1);
        facts.cardinality = facts.cardinality.map(|n| n.div_ceil(divisor));
        facts.no_rows("batch");
        facts.batched = Some(Batched::joined_by(size, joined::<T, L>));
        facts.prefetch = 0;
        let chunks = chunked(self.open, divisor, false);
        let stack = |items: Result<Vec<T>>| T::stack(&T::padded(&items?)?);
        let open: Opener<T> = Arc::new(move |pass| Box::new(chunks(pass).map(stack)) as Items<T>);
        Dataset::new(open, facts)
    }
}

/// Joins rows of several batches, each of which is as wide as its own widest element.
fn joined<T: Pad<L>, L>(batches: &[T]) -> Result<T> {
    let mut rows = Vec::new();
    for batch in batches {
        for row in 0..batch.rows()? {
            rows.push(batch.row(row)?);
        }
    }
    T::stack(&T::padded(&rows)?)
}
