//! Flattening: elements that become datasets, and batches that become elements.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Cardinality, Dataset, Facts, Items, Opener, Pass};
use crate::{BoxError, Element, Error, Result};

impl<T: Send + 'static> Dataset<T> {
    /// Maps each element to a dataset and concatenates the results.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::Dataset;
    /// let rows = Dataset::range(1..4).flat_map(|n| Ok(Dataset::range(0..*n.item().ok_or("no scalar")?)));
    /// assert_eq!(rows.iter().count(), 6);
    /// ```
    ///
    /// # Source
    /// `tf.data.Dataset.flat_map`.
    pub fn flat_map<U, F>(self, function: F) -> Dataset<U>
    where
        U: Send + 'static,
        F: Fn(T) -> Result<Dataset<U>, BoxError> + Send + Sync + 'static,
    {
        self.interleave(1, 1, function)
    }

    /// Maps each element to a dataset and interleaves the results: `cycle` datasets are open at a time, and `block`
    /// consecutive elements are taken from each in turn.
    ///
    /// # Errors
    /// Each pass reports [`Error::Zero`] if `cycle` or `block` is zero, and [`Error::User`] if the function fails.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::{Array, Dataset};
    /// let rows = Dataset::range(0..2).interleave(2, 1, |n| {
    ///     let start = 10 * *n.item().ok_or("no scalar")?;
    ///     Ok(Dataset::range(start..start + 2))
    /// });
    /// let values: distribute_input::Result<Vec<i64>> = rows.iter().map(|row| Ok(row?.as_slice()[0])).collect();
    /// assert_eq!(values?, [0, 10, 1, 11]);
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.data.Dataset.interleave`.
    pub fn interleave<U, F>(self, cycle: usize, block: usize, function: F) -> Dataset<U>
    where
        U: Send + 'static,
        F: Fn(T) -> Result<Dataset<U>, BoxError> + Send + Sync + 'static,
    {
        let mut dataset = self.interleaved(cycle, block, function);
        // The datasets of the function may have stages of their own, and orders that change with the pass.
        dataset.facts.buffers += 1;
        dataset.facts.varies = true;
        dataset
    }

    /// Interleaves datasets that hold no elements by themselves.
    pub(crate) fn interleaved<U, F>(self, cycle: usize, block: usize, function: F) -> Dataset<U>
    where
        U: Send + 'static,
        F: Fn(T) -> Result<Dataset<U>, BoxError> + Send + Sync + 'static,
    {
        let mut facts = Facts { cardinality: Cardinality::Unknown, prefetch: 0, ..self.facts };
        facts.positive("interleave", "cycle", cycle);
        facts.positive("interleave", "block", block);
        facts.stage(format_args!("interleave {cycle} {block}"));
        facts.single();
        let (open, function) = (self.open, Arc::new(function));
        let open: Opener<U> = Arc::new(move |pass| {
            let (function, outer) = (Arc::clone(&function), pass.clone());
            let inner = move |item: T| {
                let dataset = function(item).map_err(|error| Error::user("interleave", error))?;
                // The outer sequence has applied the share already; the pass is passed on so that inner shuffles change
                // with it.
                match dataset.facts.error {
                    Some(error) => Err(error),
                    None => {
                        let stages = cycle.saturating_mul(dataset.facts.buffers);
                        Ok((dataset.open)(outer.of_inner(stages)))
                    }
                }
            };
            Box::new(Interleaved { outer: Some(open(pass)), inner, open: VecDeque::new(), cycle, block, left: block })
                as Items<U>
        });
        Dataset::new(open, facts)
    }

    /// Splits each element into its rows.
    ///
    /// # Source
    /// `tf.data.Dataset.unbatch`.
    pub fn unbatch<L>(self) -> Dataset<T>
    where
        T: Element<L>,
    {
        let mut facts = Facts { cardinality: Cardinality::Unknown, prefetch: 0, ..self.facts };
        facts.follows_dropped("unbatch");
        facts.single();
        let open = self.open;
        let open: Opener<T> = Arc::new(move |pass: Pass| {
            let rows = |batch: Result<T>| -> Items<T> {
                match batch.and_then(|batch| Ok((batch.rows()?, batch))) {
                    Ok((rows, batch)) => Box::new((0..rows).map(move |row| batch.row(row))),
                    Err(error) => Box::new(std::iter::once(Err(error))),
                }
            };
            Box::new(open(pass).flat_map(rows)) as Items<T>
        });
        Dataset::new(open, facts)
    }
}

struct Interleaved<T, U, F> {
    outer: Option<Items<T>>,
    inner: F,
    /// The open sequences; the first is being read.
    open: VecDeque<Items<U>>,
    cycle: usize,
    block: usize,
    /// The number of elements until the next sequence is read.
    left: usize,
}

impl<T, U, F: FnMut(T) -> Result<Items<U>>> Iterator for Interleaved<T, U, F> {
    type Item = Result<U>;

    fn next(&mut self) -> Option<Result<U>> {
        loop {
            while self.open.len() < self.cycle
                && let Some(outer) = &mut self.outer
            {
                match outer.next() {
                    Some(Ok(item)) => match (self.inner)(item) {
                        Ok(items) => self.open.push_back(items),
                        Err(error) => return Some(Err(error)),
                    },
                    Some(Err(error)) => return Some(Err(error)),
                    None => self.outer = None,
                }
            }
            match self.open.front_mut()?.next() {
                Some(item) => {
                    self.left -= 1;
                    if self.left == 0 {
                        self.open.rotate_left(1);
                        self.left = self.block;
                    }
                    return Some(item);
                }
                None => {
                    self.open.pop_front();
                    self.left = self.block;
                }
            }
        }
    }
}
