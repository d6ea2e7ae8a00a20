//! Batches of rows that differ in length.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::sparse::room;
use crate::{Array, Dataset, Element, ElementSpec, Error, Result};

/// The library marker under which [`Ragged`] is an [`Element`].
#[derive(Clone, Copy, Debug)]
pub enum RaggedArrays {}

/// A batch of arrays that differ in their first extent, one after the other, without padding; or one such array, which
/// is what a row of a batch is and what becomes a batch.
///
/// A ragged value goes wherever other elements go, also as a component of a tuple: it is batched, shuffled, divided
/// between replicas and joined again by rows. Slices of rows share the memory of their batch.
///
/// # Shapes
/// The values of a batch of `n` rows have the shape `[total, …]`; row `i` is `row_splits[i]..row_splits[i + 1]` of
/// them, of `n + 1` splits.
///
/// # Examples
/// ```
/// use distribute_input::{Array, Dataset, Ragged};
/// let texts = [vec![3, 1, 4], vec![1], vec![5, 9]].map(|words| (Array::from(words.clone()), words.len() as i64));
/// let data: Dataset<(Array<i64>, i64)> = texts.into_iter().collect();
/// let batches = data.map(|(words, label)| Ok((Ragged::from(words), Array::scalar(label)))).batch(3);
/// let (words, labels) = batches.iter().next().expect("there are three texts")?;
/// assert_eq!(words.values().as_slice(), [3, 1, 4, 1, 5, 9]);
/// assert_eq!(words.row_splits(), [0, 3, 4, 6]);
/// assert_eq!(labels.as_slice(), [3, 1, 2]);
/// # Ok::<(), distribute_input::Error>(())
/// ```
///
/// # Source
/// `tf.RaggedTensor` of ragged rank 1.
#[derive(Clone, PartialEq)]
pub struct Ragged<T> {
    values: Array<T>,
    /// The ends of the rows after a leading 0; `None` for a single row.
    row_splits: Option<Arc<[usize]>>,
}

impl<T: Clone + Send + Sync + 'static> Ragged<T> {
    /// Creates a batch from the values of all rows and the positions that divide them.
    ///
    /// # Errors
    /// - [`Error::Scalar`] if the values have no dimension.
    /// - [`Error::Ragged`] if the splits do not begin with 0, do not end with the number of values, or fall.
    pub fn new(values: Array<T>, row_splits: impl Into<Vec<usize>>) -> Result<Ragged<T>> {
        let (row_splits, total) = (row_splits.into(), values.rows()?);
        let problem = if row_splits.first() != Some(&0) {
            format!("the row splits begin with {:?}; begin them with 0", row_splits.first())
        } else if row_splits.last() != Some(&total) {
            format!("the row splits end with {:?}, and there are {total} values; end them there", row_splits.last())
        } else if let Some(fall) = row_splits.windows(2).position(|pair| pair[0] > pair[1]) {
            format!("the row splits fall from {} to {}; sort them", row_splits[fall], row_splits[fall + 1])
        } else {
            return Ok(Ragged { values, row_splits: Some(row_splits.into()) });
        };
        Err(Error::Ragged { problem })
    }

    /// Returns the values of all rows, one row after the other.
    pub fn values(&self) -> &Array<T> {
        &self.values
    }

    /// Returns the positions that divide the values into rows, one more than there are rows; empty for a single row
    /// that belongs to no batch.
    pub fn row_splits(&self) -> &[usize] {
        self.row_splits.as_deref().unwrap_or_default()
    }

    /// Returns the length of each row of a batch.
    pub fn row_lengths(&self) -> Vec<usize> {
        self.row_splits().windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// Returns a copy of a batch with all rows padded to the longest; the array of a single row as it is.
    ///
    /// # Errors
    /// [`Error::Ragged`] if the padded array does not fit into memory.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::{Array, Ragged};
    /// let ragged = Ragged::new(Array::from(vec![1, 2, 3]), [0, 2, 2, 3])?;
    /// assert_eq!(ragged.to_array(0)?, Array::new([3, 2], vec![1, 2, 0, 0, 3, 0])?);
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.RaggedTensor.to_tensor`.
    pub fn to_array(&self, padding: T) -> Result<Array<T>> {
        let Some(splits) = &self.row_splits else { return Ok(self.values.clone()) };
        let longest = self.row_lengths().into_iter().max().unwrap_or(0);
        let inner = &self.values.shape()[1..];
        let shape = [&[splits.len() - 1, longest], inner].concat();
        let count = shape.iter().try_fold(1_usize, |product, extent| product.checked_mul(*extent));
        let width: usize = inner.iter().product();
        let (_, mut elements) = count.and_then(room).ok_or_else(|| Error::Ragged {
            problem: format!("a padded array of shape {shape:?} does not fit into memory; leave it ragged"),
        })?;
        for (row, pair) in splits.windows(2).enumerate() {
            elements.extend_from_slice(&self.values.as_slice()[pair[0] * width..pair[1] * width]);
            elements.resize((row + 1) * longest * width, padding.clone());
        }
        Array::new(shape, elements)
    }

    /// Returns the positions of a row among the values.
    fn row_range(splits: &[usize], action: &'static str, row: usize) -> Result<Range<usize>> {
        let (start, end) = (splits.get(row), splits.get(row.saturating_add(1)));
        let outside = Error::OutOfRange { action, start: row, end: row.saturating_add(1), rows: splits.len() - 1 };
        start.zip(end).map(|(start, end)| *start..*end).ok_or(outside)
    }

    /// Joins the values of rows, or of batches, and returns how many each has.
    fn joined(items: &[Ragged<T>]) -> Result<(Array<T>, Vec<usize>)> {
        let values: Vec<Array<T>> = items.iter().map(|item| item.values.clone()).collect();
        let lengths = values.iter().map(Element::rows).collect::<Result<_>>()?;
        Ok((Array::concat(&values)?, lengths))
    }
}

/// Creates a single row, an element to be batched.
impl<T> From<Array<T>> for Ragged<T> {
    fn from(row: Array<T>) -> Ragged<T> {
        Ragged { values: row, row_splits: None }
    }
}

impl<T: Clone + Send + Sync + 'static> Element<RaggedArrays> for Ragged<T> {
    fn stack(items: &[Self]) -> Result<Self> {
        if let Some(index) = items.iter().position(|item| item.row_splits.is_some()) {
            return Err(Error::Ragged {
                problem: format!(
                    "value {index} to stack is a batch already; batch single rows, of one ragged dimension"
                ),
            });
        }
        if items.is_empty() {
            return Err(Error::Nothing { action: "stack" });
        }
        let (values, lengths) = Ragged::joined(items)?;
        let mut end = 0;
        let ends = lengths.into_iter().map(|length| {
            end += length;
            end
        });
        let row_splits: Vec<usize> = std::iter::once(0).chain(ends).collect();
        Ok(Ragged { values, row_splits: Some(row_splits.into()) })
    }

    fn rows(&self) -> Result<usize> {
        self.row_splits.as_ref().map_or_else(|| self.values.rows(), |splits| Ok(splits.len() - 1))
    }

    fn row(&self, index: usize) -> Result<Self> {
        let Some(splits) = &self.row_splits else { return Ok(Ragged::from(self.values.row(index)?)) };
        Ok(Ragged::from(self.values.slice(Ragged::<T>::row_range(splits, "row", index)?)?))
    }

    fn slice(&self, rows: Range<usize>) -> Result<Self> {
        let Some(splits) = &self.row_splits else { return Ok(Ragged::from(self.values.slice(rows)?)) };
        if rows.start > rows.end || rows.end >= splits.len() {
            let Range { start, end } = rows;
            return Err(Error::OutOfRange { action: "slice", start, end, rows: splits.len() - 1 });
        }
        let splits = &splits[rows.start..=rows.end];
        let (start, end) = (splits[0], splits[splits.len() - 1]);
        let row_splits = splits.iter().map(|split| split - start).collect();
        Ok(Ragged { values: self.values.slice(start..end)?, row_splits: Some(row_splits) })
    }

    fn gather(&self, rows: &[usize]) -> Result<Self> {
        let Some(splits) = &self.row_splits else { return Ok(Ragged::from(self.values.gather(rows)?)) };
        let (mut positions, mut row_splits) = (Vec::new(), vec![0]);
        for row in rows {
            positions.extend(Ragged::<T>::row_range(splits, "gather", *row)?);
            row_splits.push(positions.len());
        }
        Ok(Ragged { values: self.values.gather(&positions)?, row_splits: Some(row_splits.into()) })
    }

    fn concat(items: &[Self]) -> Result<Self> {
        let first = items.first().ok_or(Error::Nothing { action: "concat" })?;
        if let Some(index) = items.iter().position(|item| item.row_splits.is_some() != first.row_splits.is_some()) {
            let problem = format!("values 0 and {index} to concatenate are a batch and a single row; stack the rows");
            return Err(Error::Ragged { problem });
        }
        let (values, lengths) = Ragged::joined(items)?;
        let mut row_splits = vec![0];
        let mut start = 0;
        for (item, length) in items.iter().zip(lengths) {
            row_splits.extend(item.row_splits().iter().skip(1).map(|split| start + split));
            start += length;
        }
        Ok(Ragged { values, row_splits: first.row_splits.as_ref().map(|_| row_splits.into()) })
    }

    fn spec(&self) -> Vec<ElementSpec> {
        let rows = self.row_splits.as_ref().map(|splits| Some(splits.len() - 1));
        let inner = self.values.shape().iter().skip(1).copied().map(Some);
        let shape = rows.into_iter().chain([None]).chain(inner).collect();
        vec![ElementSpec { shape, dtype: std::any::type_name::<T>().to_owned() }]
    }
}

impl<T: Clone + Send + Sync + 'static> Dataset<Array<T>> {
    /// Batches arrays that differ in their first extent, without padding; the last batch may be smaller.
    ///
    /// For tuples, map the components that differ to [`Ragged`] values and call [`batch`](Dataset::batch).
    ///
    /// # Errors
    /// The pass reports [`Error::Zero`] if `size` is zero, [`Error::Scalar`] if an element has no dimensions, and
    /// [`Error::UnequalShapes`] if elements differ in an extent other than the first.
    ///
    /// # Examples
    /// ```
    /// use distribute_input::{Array, Dataset};
    /// let texts: Dataset<Array<i64>> = [vec![1], vec![2, 3, 4]].map(Array::from).into_iter().collect();
    /// let batch = texts.dense_to_ragged_batch(2).iter().next().expect("there are two texts")?;
    /// assert_eq!((batch.values().as_slice(), batch.row_splits()), (&[1, 2, 3, 4][..], &[0, 1, 4][..]));
    /// # Ok::<(), distribute_input::Error>(())
    /// ```
    ///
    /// # Source
    /// `tf.data.experimental.dense_to_ragged_batch`; `tf.data.Dataset.ragged_batch`.
    #[doc(alias = "ragged_batch")]
    pub fn dense_to_ragged_batch(self, size: usize) -> Dataset<Ragged<T>> {
        self.map(|row| Ok(Ragged::from(row))).batch(size)
    }
}

impl<T: fmt::Debug> fmt::Debug for Ragged<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Ragged({:?}, {:?})", self.values, self.row_splits.as_deref().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{InputOptions, Topology, distribute_dataset};

    fn row(values: &[i64]) -> Ragged<i64> {
        Ragged::from(Array::from(values.to_vec()))
    }

    fn lists(batch: &Ragged<i64>) -> Vec<Vec<i64>> {
        (0..batch.rows().unwrap()).map(|at| batch.row(at).unwrap().values.as_slice().to_vec()).collect()
    }

    #[test]
    fn wrong_splits_and_mixtures_are_answered_by_a_sentence() {
        let values = || Array::from(vec![1, 2, 3]);
        let said = |result: Result<Ragged<i64>>| result.unwrap_err().to_string();
        for (splits, words) in [
            (vec![], "begin with None"),
            (vec![1, 3], "begin with Some(1); begin them with 0"),
            (vec![0, 2], "end with Some(2), and there are 3 values"),
            (vec![0, 3, 1, 3], "fall from 3 to 1"),
        ] {
            let text = said(Ragged::new(values(), splits));
            assert!(text.contains(words), "{text}");
        }
        let batch = Ragged::new(values(), [0, 1, 3]).unwrap();
        assert!(said(Ragged::stack(&[row(&[1]), batch.clone()])).contains("value 1 to stack is a batch already"));
        assert!(said(Ragged::concat(&[row(&[1]), batch.clone()])).contains("a batch and a single row"));
        assert!(said(Ragged::stack(&[Ragged::from(Array::scalar(1))])).contains("is a scalar"));
        assert!(said(Ragged::stack(&[])).contains("no values were given"));
        assert!(matches!(batch.row(2), Err(Error::OutOfRange { rows: 2, .. })));
        assert!(matches!(batch.row(usize::MAX), Err(Error::OutOfRange { .. })));
        assert!(matches!(batch.slice(1..3), Err(Error::OutOfRange { end: 3, .. })));
        assert!(matches!(batch.gather(&[0, 2]), Err(Error::OutOfRange { .. })));
        let wide = Ragged::from(Array::new([1, 2], vec![1, 2]).unwrap());
        assert!(matches!(Ragged::stack(&[row(&[1]), wide]), Err(Error::UnequalShapes { index: 1, .. })));
        assert_eq!(batch.spec()[0].to_string(), "[2, ?] i64");
        assert_eq!(batch.row(0).unwrap().spec()[0].to_string(), "[?] i64");
    }

    #[test]
    fn rows_of_several_dimensions_are_padded() {
        let item = |length: usize| Ragged::from(Array::new([length, 2], (0..2 * length as i64).collect()).unwrap());
        let batch = Ragged::stack(&[item(1), item(0), item(2)]).unwrap();
        assert_eq!(batch.row_lengths(), [1, 0, 2]);
        let padded = batch.to_array(-1).unwrap();
        assert_eq!(padded, Array::new([3, 2, 2], vec![0, 1, -1, -1, -1, -1, -1, -1, 0, 1, 2, 3]).unwrap());
        assert_eq!(batch.slice(1..2).unwrap().to_array(0).unwrap().shape(), [1, 0, 2]);
        assert_eq!(batch.slice(1..1).unwrap().to_array(0).unwrap().shape(), [0, 0, 2]);
    }

    proptest! {
        #[test]
        fn divided_and_joined_again_is_the_same(
            all in prop::collection::vec(prop::collection::vec(0_i64..9, 0..5), 1..9),
            cut in 0_usize..9,
            picked in prop::collection::vec(0_usize..9, 0..9),
        ) {
            let rows: Vec<Ragged<i64>> = all.iter().map(|values| row(values)).collect();
            let batch = Ragged::stack(&rows).unwrap();
            prop_assert_eq!(&lists(&batch), &all);
            prop_assert_eq!(Ragged::new(batch.values().clone(), batch.row_splits()).unwrap(), batch.clone());
            let cut = cut.min(all.len());
            let halves = [batch.slice(0..cut).unwrap(), batch.slice(cut..all.len()).unwrap()];
            prop_assert_eq!(lists(&halves[1]), &all[cut..]);
            prop_assert_eq!(&Ragged::concat(&halves).unwrap(), &batch);
            let picked: Vec<usize> = picked.into_iter().map(|row| row % all.len()).collect();
            let expected: Vec<Vec<i64>> = picked.iter().map(|row| all[*row].clone()).collect();
            prop_assert_eq!(lists(&batch.gather(&picked).unwrap()), expected);
        }

        #[test]
        fn replicas_get_every_row_once(
            all in prop::collection::vec(prop::collection::vec(0_i64..9, 0..5), 1..20),
            size in 1_usize..7,
            workers in 1_usize..4,
            replicas in 1_usize..4,
            in_memory: bool,
        ) {
            let rows: Vec<Ragged<i64>> = all.iter().map(|values| row(values)).collect();
            let numbers = Array::from((0..all.len() as i64).collect::<Vec<_>>());
            // Tensors in memory are gathered, elements of a list are stacked and sliced.
            let data = if in_memory {
                Dataset::from_tensor_slices((Ragged::stack(&rows).unwrap(), numbers)).shuffle(5, 1).batch(size)
            } else {
                let elements = rows.into_iter().zip(0..).map(|(row, number)| (row, Array::scalar(number)));
                elements.collect::<Dataset<_>>().batch(size)
            };
            let mut seen = Vec::new();
            for worker in 0..workers {
                let topology = Topology::new(workers, worker, replicas).unwrap();
                for step in &distribute_dataset(&data, topology, InputOptions::default()).unwrap() {
                    for (part, numbers) in step.unwrap() {
                        prop_assert_eq!(part.rows().unwrap(), numbers.rows().unwrap());
                        seen.extend(numbers.as_slice().iter().copied().zip(lists(&part)));
                    }
                }
            }
            seen.sort();
            prop_assert_eq!(seen, (0..).zip(all).collect::<Vec<_>>());
        }
    }
}
