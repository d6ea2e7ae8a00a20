//! Sources of elements.

use std::{ops::Range, sync::Arc};

use super::{
    Cardinality, Dataset, Facts, Items, Opener, Order, Picks,
    picks::{Rows, consecutive},
};
use crate::{Array, BoxError, Element, Error, Result, element::Operations};

impl<T: Send + 'static> Dataset<T> {
    /// Creates a dataset of the rows of a value, or of a tuple of values of equal length.
    ///
    /// Such a dataset has random access at no cost: up to `batch`, the transformations `shuffle`, `take`, `skip`,
    /// `shard`, `repeat` and `cache` move row numbers only, and a batch is one slice or one gather.
    ///
    /// # Errors
    /// Each pass reports the error of [`Element::rows`] if the value has no rows or its components differ in length.
    ///
    /// # Source
    /// `tf.data.Dataset.from_tensor_slices`.
    pub fn from_tensor_slices<L>(data: T) -> Dataset<T>
    where
        T: Element<L> + Sync,
    {
        let (length, error) = match data.rows() {
            Ok(length) => (length, None),
            Err(error) => (0, Some(error)),
        };
        let mut facts = Facts::of(Cardinality::Known(length));
        facts.note(error);
        let source = Slices { data, operations: Operations::of::<L>() };
        Dataset::picked(Picks { source: Arc::new(source), order: in_order(length) }, facts)
    }

    /// Creates a dataset of one element, the value as a whole.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::{Array, Cardinality, Dataset};
    /// let whole = Dataset::from_tensors(Array::from(vec![1, 2, 3]));
    /// assert_eq!(whole.cardinality(), Cardinality::Known(1));
    /// let first = whole.repeat(2).batch(2).iter().next().expect("there is a batch")?;
    /// assert_eq!(first, Array::new([2, 3], vec![1, 2, 3, 1, 2, 3])?);
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.data.Dataset.from_tensors`.
    pub fn from_tensors(value: T) -> Dataset<T>
    where
        T: Clone + Sync,
    {
        std::iter::once(value).collect()
    }

    /// Creates a dataset of the items of an iterator; the function is called at the start of each pass.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::{Array, Dataset};
    /// let lines = Dataset::from_generator(|| "a b".split(' ').map(|word| Ok(Array::scalar(word.to_owned()))));
    /// assert_eq!(lines.iter().count(), 2);
    /// ```
    pub fn from_generator<F, I>(generator: F) -> Dataset<T>
    where
        F: Fn() -> I + Send + Sync + 'static,
        I: IntoIterator<Item = Result<T, BoxError>>,
        I::IntoIter: Send + 'static,
    {
        let open: Opener<T> = Arc::new(move |_| {
            // An iterator need not stay at its end, and stages ask again there.
            let items = generator().into_iter().fuse();
            Box::new(items.map(|item| item.map_err(|error| Error::user("generator", error)))) as Items<T>
        });
        Dataset::new(open, Facts::of(Cardinality::Unknown))
    }
}

impl Dataset<Array<i64>> {
    /// Creates a dataset of the integers of a range, as scalars.
    pub fn range(range: Range<i64>) -> Dataset<Array<i64>> {
        let length = (i128::from(range.end) - i128::from(range.start)).max(0);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        let source = Arc::new(Integers { start: range.start });
        Dataset::picked(Picks { source, order: in_order(length) }, Facts::of(Cardinality::Known(length)))
    }
}

/// Creates a dataset of the items of an iterator, held in memory.
impl<T: Clone + Send + Sync + 'static> FromIterator<T> for Dataset<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Dataset<T> {
        let items: Arc<[T]> = items.into_iter().collect();
        let facts = Facts::of(Cardinality::Known(items.len()));
        let open: Opener<T> = Arc::new(move |_| {
            let items = Arc::clone(&items);
            Box::new((0..items.len()).map(move |index| Ok(items[index].clone()))) as Items<T>
        });
        Dataset::new(open, facts)
    }
}

fn in_order(length: usize) -> Order {
    Order::Rows(Arc::new(move |_| Box::new((0..length).map(Ok)) as Items<usize>))
}

/// The rows of a value.
struct Slices<T> {
    data: T,
    operations: Operations<T>,
}

impl<T: Send + Sync> Rows<T> for Slices<T> {
    fn row(&self, index: usize) -> Result<T> {
        (self.operations.row)(&self.data, index)
    }

    fn pick(&self, rows: &[usize]) -> Result<T> {
        match rows {
            [] => (self.operations.slice)(&self.data, 0..0),
            [first, ..] if consecutive(rows) => (self.operations.slice)(&self.data, *first..first + rows.len()),
            _ => (self.operations.gather)(&self.data, rows),
        }
    }
}

/// The integers beginning at `start`.
struct Integers {
    start: i64,
}

impl Integers {
    fn value(&self, index: usize) -> i64 {
        // The cast is exact modulo 2^64, and the sum lies within the original range.
        self.start.wrapping_add(index as i64)
    }
}

impl Rows<Array<i64>> for Integers {
    fn row(&self, index: usize) -> Result<Array<i64>> {
        Ok(Array::scalar(self.value(index)))
    }

    fn pick(&self, rows: &[usize]) -> Result<Array<i64>> {
        Ok(Array::from(rows.iter().map(|row| self.value(*row)).collect::<Vec<_>>()))
    }
}
