//! Batching of elements.

use std::sync::Arc;

use super::{Batched, Dataset, Items, Opener, Order, Picks};
use crate::Element;

impl<T: Send + 'static> Dataset<T> {
    /// Stacks every `size` elements along a new leading dimension; the last batch may be smaller.
    ///
    /// If the dataset is distributed later, this is the *global* batch.
    ///
    /// # Errors
    /// The pass reports [`Error::Zero`](crate::Error::Zero) if `size` is zero, and the errors of [`Element::stack`] if
    /// shapes differ.
    ///
    /// # Source
    /// `tf.data.Dataset.batch`.
    pub fn batch<L>(self, size: usize) -> Dataset<T>
    where
        T: Element<L>,
    {
        self.batch_by("batch", size, false, T::stack)
    }

    /// Batches like [`batch`](Dataset::batch), and drops the last batch if it would be smaller. Where each worker reads
    /// files or splits of its own, it drops what does not fill its part of a step, or what does not fill a batch if its
    /// parts differ in size from step to step. Batches that are the elements of a later `batch` have `size` elements
    /// each in any case.
    ///
    /// # Errors
    /// The errors of [`batch`](Dataset::batch).
    ///
    /// # Source
    /// `tf.data.Dataset.batch` with `drop_remainder=True`.
    #[doc(alias = "drop_remainder")]
    pub fn batch_exact<L>(self, size: usize) -> Dataset<T>
    where
        T: Element<L>,
    {
        self.batch_by("batch_exact", size, true, T::stack)
    }

    fn batch_by(
        self,
        stage: &'static str,
        size: usize,
        exact: bool,
        stack: fn(&[T]) -> crate::Result<T>,
    ) -> Dataset<T> {
        let mut facts = self.facts;
        facts.positive(stage, "size", size);
        // A size of zero is an error and never read; 1 avoids a division by zero here.
        let divisor = size.max(1);
        facts.cardinality = facts.cardinality.map(|n| if exact { n / divisor } else { n.div_ceil(divisor) });
        facts.no_rows("batch");
        facts.batched = Some(Batched { exact, ..Batched::of(size) });
        let prefetched = std::mem::take(&mut facts.prefetch) > 0;
        match self.picks.filter(|_| !prefetched) {
            Some(Picks { source, order: Order::Rows(open) }) => {
                let order = Order::Batches(chunked(open, divisor, exact));
                Dataset::picked(Picks { source, order }, facts)
            }
            _ => {
                let open = chunked(self.open, divisor, exact);
                let stacked: Opener<T> =
                    Arc::new(move |pass| Box::new(open(pass).map(move |items| stack(&items?))) as Items<T>);
                Dataset::new(stacked, facts)
            }
        }
    }
}

/// Collects every `size` items. The last list may be shorter, unless `exact` is set, which drops what is left over: see
/// [`Pass::exact_rows`].
pub(crate) fn chunked<X: Send + 'static>(open: Opener<X>, size: usize, exact: bool) -> Opener<Vec<X>> {
    Arc::new(move |pass| {
        let multiple = if exact { pass.exact_rows(size).max(1) } else { 1 };
        let mut items = open(pass.within_batches());
        Box::new(std::iter::from_fn(move || {
            let mut chunk = Vec::with_capacity(size.min(MAX_RESERVED));
            while chunk.len() < size {
                match items.next() {
                    Some(Ok(item)) => chunk.push(item),
                    Some(Err(error)) => return Some(Err(error)),
                    None => break,
                }
            }
            chunk.truncate(chunk.len() / multiple * multiple);
            (!chunk.is_empty()).then_some(Ok(chunk))
        })) as Items<Vec<X>>
    })
}

/// Capacity limit of a new chunk: the requested batch may be far larger than the data.
const MAX_RESERVED: usize = 4096;
