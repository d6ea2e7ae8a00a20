//! Arrays of which most elements are zero.

use std::fmt;
use std::ops::Range;

use crate::{Array, Element, ElementSpec, Error, Result};

/// The library marker under which [`Sparse`] is an [`Element`].
#[derive(Clone, Copy, Debug)]
pub enum SparseArrays {}

/// An array of which only some elements are stored, each with its position. It is batched, shuffled, divided between
/// replicas and joined again by rows, as other elements are.
///
/// # Shapes
/// `indices` is `[stored, dimensions]` and in row-major order; `values` is `[stored]`.
///
/// # Examples
/// ```
/// use distribute_input::{Array, Dataset, Sparse};
/// let words = [vec![(2, 1.0)], vec![], vec![(0, 2.0), (3, 1.0)]];       // the words of three texts and their counts
/// let rows = words.map(|row| {
///     let (words, counts): (Vec<i64>, Vec<f32>) = row.into_iter().unzip();
///     Sparse::new(Array::new([words.len(), 1], words)?, Array::from(counts), [4])
/// });
/// let rows: Result<Dataset<Sparse<f32>>, distribute_input::Error> = rows.into_iter().collect();
/// let batch = rows?.batch(3).iter().next().expect("there are three texts")?;
/// assert_eq!(batch.dense_shape(), [3, 4]);
/// assert_eq!(batch.indices().as_slice(), [0, 2, 2, 0, 2, 3]);
/// assert_eq!(batch.values().as_slice(), [1.0, 2.0, 1.0]);
/// # Ok::<(), distribute_input::Error>(())
/// ```
///
/// # Source
/// `tf.SparseTensor`.
#[derive(Clone, PartialEq)]
pub struct Sparse<T> {
    indices: Array<i64>,
    values: Array<T>,
    dense_shape: Vec<usize>,
}

impl<T: Clone + Send + Sync + 'static> Sparse<T> {
    /// Creates a sparse array of the given shape from positions and the values there.
    ///
    /// # Errors
    /// [`Error::Sparse`] if there is not one position for each value, if a position lies outside of the shape, if the
    /// positions are not in row-major order or one of them is repeated, or if an extent exceeds `i64::MAX`.
    pub fn new(indices: Array<i64>, values: Array<T>, dense_shape: impl Into<Vec<usize>>) -> Result<Sparse<T>> {
        let dense_shape = dense_shape.into();
        let (stored, dims) = (values.as_slice().len(), dense_shape.len());
        if values.shape() != [stored] || indices.shape() != [stored, dims] {
            return Err(Error::Sparse {
                problem: format!(
                    "indices {:?} and values {:?} were given for the shape {dense_shape:?}; give [stored, {dims}] and \
                     [stored]",
                    indices.shape(),
                    values.shape()
                ),
            });
        }
        if let Some(extent) = dense_shape.iter().find(|extent| i64::try_from(**extent).is_err()) {
            let problem = format!("the shape has an extent of {extent}; positions are of the type i64, give less");
            return Err(Error::Sparse { problem });
        }
        let sparse = Sparse { indices, values, dense_shape };
        for at in 0..stored {
            let position = sparse.position(at);
            let is_inside =
                |(index, extent): (&i64, &usize)| usize::try_from(*index).is_ok_and(|index| index < *extent);
            if !position.iter().zip(&sparse.dense_shape).all(is_inside) {
                let problem = format!("position {position:?} lies outside of the shape {:?}", sparse.dense_shape);
                return Err(Error::Sparse { problem });
            }
            if at > 0 && sparse.position(at - 1) >= position {
                let before = sparse.position(at - 1);
                let problem = format!("position {position:?} follows {before:?}; sort them and give each once");
                return Err(Error::Sparse { problem });
            }
        }
        Ok(sparse)
    }

    /// Returns the positions of the stored values.
    pub fn indices(&self) -> &Array<i64> {
        &self.indices
    }

    /// Returns the stored values.
    pub fn values(&self) -> &Array<T> {
        &self.values
    }

    /// Returns the extents of the whole array.
    pub fn dense_shape(&self) -> &[usize] {
        &self.dense_shape
    }

    /// Returns a copy with all elements; those that are not stored are `zero`.
    ///
    /// # Errors
    /// [`Error::Sparse`] if the whole array does not fit into memory.
    ///
    /// # Source
    /// `tf.sparse.to_dense`.
    pub fn to_array(&self, zero: T) -> Result<Array<T>> {
        let shape = &self.dense_shape;
        let count = shape.iter().try_fold(1_usize, |product, extent| product.checked_mul(*extent));
        let reserved = count.and_then(room);
        let (count, mut elements) = reserved.ok_or_else(|| Error::Sparse {
            problem: format!("a dense array of shape {shape:?} does not fit into memory; leave it sparse"),
        })?;
        elements.resize(count, zero);
        for (at, value) in self.values.as_slice().iter().enumerate() {
            let place = self.position(at).iter().zip(shape).fold(0, |place, (index, extent)| {
                // Positions lie within the shape.
                place * extent + *index as usize
            });
            elements[place] = value.clone();
        }
        Array::new(shape.clone(), elements)
    }

    fn position(&self, at: usize) -> &[i64] {
        let dims = self.dense_shape.len();
        &self.indices.as_slice()[at * dims..(at + 1) * dims]
    }

    /// Returns the extents, the first apart.
    fn leading(&self, action: &'static str) -> Result<(usize, &[usize])> {
        let (rows, inner) = self.dense_shape.split_first().ok_or(Error::Scalar { action })?;
        Ok((*rows, inner))
    }

    /// Returns which of the stored values lie in the given rows.
    fn stored(&self, action: &'static str, rows: Range<usize>) -> Result<Range<usize>> {
        let (count, _) = self.leading(action)?;
        let Range { start, end } = rows;
        if start > end || end > count {
            return Err(Error::OutOfRange { action, start, end, rows: count });
        }
        let before = |row: usize| {
            let (mut low, mut high) = (0, self.values.as_slice().len());
            while low < high {
                let middle = low + (high - low) / 2;
                if (self.position(middle)[0] as usize) < row { low = middle + 1 } else { high = middle }
            }
            low
        };
        Ok(before(start)..before(end))
    }

    /// Joins pieces: the positions of each after `prefix`, which is given the number of the piece and its first index.
    fn joined<'a>(
        pieces: impl Iterator<Item = (&'a Sparse<T>, Range<usize>)>,
        dense_shape: Vec<usize>,
        prefix: impl Fn(usize, &[i64], &mut Vec<i64>),
    ) -> Result<Sparse<T>> {
        let (mut indices, mut values) = (Vec::new(), Vec::new());
        for (piece, (sparse, stored)) in pieces.enumerate() {
            for at in stored.clone() {
                prefix(piece, sparse.position(at), &mut indices);
            }
            values.extend_from_slice(&sparse.values.as_slice()[stored]);
        }
        let indices = Array::new([values.len(), dense_shape.len()], indices)?;
        Ok(Sparse { indices, values: Array::from(values), dense_shape })
    }

    fn whole(&self) -> (&Sparse<T>, Range<usize>) {
        (self, 0..self.values.as_slice().len())
    }
}

/// Returns an empty vector with room for `count` elements; `None` if there is no such room.
pub(crate) fn room<T>(count: usize) -> Option<(usize, Vec<T>)> {
    let mut elements = Vec::new();
    elements.try_reserve_exact(count).ok()?;
    Some((count, elements))
}

impl<T: Clone + Send + Sync + 'static> Element<SparseArrays> for Sparse<T> {
    fn stack(items: &[Self]) -> Result<Self> {
        let first = items.first().ok_or(Error::Nothing { action: "stack" })?;
        if let Some(index) = items.iter().position(|item| item.dense_shape != first.dense_shape) {
            let (got, expected) = (items[index].dense_shape.clone(), first.dense_shape.clone());
            return Err(Error::UnequalShapes { action: "stack", index, got, expected });
        }
        let shape = [&[items.len()], &first.dense_shape[..]].concat();
        Sparse::joined(items.iter().map(Sparse::whole), shape, |item, position, indices| {
            indices.push(item as i64);
            indices.extend_from_slice(position);
        })
    }

    fn rows(&self) -> Result<usize> {
        Ok(self.leading("rows")?.0)
    }

    fn row(&self, index: usize) -> Result<Self> {
        let stored = self.stored("row", index..index.saturating_add(1))?;
        let inner = self.leading("row")?.1.to_vec();
        Sparse::joined(std::iter::once((self, stored)), inner, |_, position, indices| {
            indices.extend_from_slice(&position[1..]);
        })
    }

    fn slice(&self, rows: Range<usize>) -> Result<Self> {
        let stored = self.stored("slice", rows.clone())?;
        let shape = [&[rows.len()], self.leading("slice")?.1].concat();
        Sparse::joined(std::iter::once((self, stored)), shape, |_, position, indices| {
            indices.push(position[0] - rows.start as i64);
            indices.extend_from_slice(&position[1..]);
        })
    }

    fn gather(&self, rows: &[usize]) -> Result<Self> {
        let stored = |row: &usize| Ok((self, self.stored("gather", *row..row.saturating_add(1))?));
        let pieces = rows.iter().map(stored).collect::<Result<Vec<_>>>()?;
        let shape = [&[rows.len()], self.leading("gather")?.1].concat();
        Sparse::joined(pieces.into_iter(), shape, |piece, position, indices| {
            indices.push(piece as i64);
            indices.extend_from_slice(&position[1..]);
        })
    }

    fn concat(items: &[Self]) -> Result<Self> {
        let first = items.first().ok_or(Error::Nothing { action: "concat" })?;
        let (mut rows, mut starts) = (0, Vec::with_capacity(items.len()));
        for (index, item) in items.iter().enumerate() {
            starts.push(rows as i64);
            let (own, inner) = item.leading("concat")?;
            rows = own.checked_add(rows).filter(|rows| i64::try_from(*rows).is_ok()).ok_or_else(|| Error::Sparse {
                problem: format!("{rows} and {own} rows to concatenate are more than positions can count; give fewer"),
            })?;
            if inner != first.leading("concat")?.1 {
                let (got, expected) = (item.dense_shape.clone(), first.dense_shape.clone());
                return Err(Error::UnequalShapes { action: "concat", index, got, expected });
            }
        }
        let shape = [&[rows], first.leading("concat")?.1].concat();
        Sparse::joined(items.iter().map(Sparse::whole), shape, |item, position, indices| {
            indices.push(starts[item] + position[0]);
            indices.extend_from_slice(&position[1..]);
        })
    }

    fn spec(&self) -> Vec<ElementSpec> {
        vec![ElementSpec::new(&self.dense_shape, std::any::type_name::<T>())]
    }
}

impl<T: fmt::Debug> fmt::Debug for Sparse<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Sparse({:?}, {:?}, {:?})", self.indices, self.values, self.dense_shape)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Dataset, InputOptions, Topology, distribute_dataset};

    /// Keeps the elements of a dense array that are not zero.
    fn sparse(dense: &Array<i64>) -> Sparse<i64> {
        let (mut indices, mut values) = (Vec::new(), Vec::new());
        for (place, value) in dense.as_slice().iter().enumerate().filter(|(_, value)| **value != 0) {
            let (mut rest, start) = (place, indices.len());
            for extent in dense.shape().iter().rev() {
                indices.insert(start, (rest % extent) as i64);
                rest /= extent;
            }
            values.push(*value);
        }
        let indices = Array::new([values.len(), dense.shape().len()], indices).unwrap();
        Sparse::new(indices, Array::from(values), dense.shape()).unwrap()
    }

    #[test]
    fn wrong_positions_are_answered_by_a_sentence() {
        let said = |indices: Vec<i64>, shape: &[usize]| {
            let (count, dims) = (indices.len() / 2, 2);
            let indices = Array::new([count, dims], indices).unwrap();
            Sparse::new(indices, Array::from(vec![1; count]), shape).unwrap_err().to_string()
        };
        assert!(said(vec![0, 0], &[1]).contains("indices [1, 2] and values [1] were given for the shape [1]"));
        assert!(said(vec![0, 2], &[2, 2]).contains("position [0, 2] lies outside of the shape [2, 2]"));
        assert!(said(vec![-1, 0], &[2, 2]).contains("position [-1, 0] lies outside"));
        assert!(said(vec![1, 0, 0, 1], &[2, 2]).contains("position [0, 1] follows [1, 0]; sort them"));
        assert!(said(vec![1, 0, 1, 0], &[2, 2]).contains("position [1, 0] follows [1, 0]"));
        let scalar = Sparse::new(Array::new([1, 0], vec![]).unwrap(), Array::from(vec![7]), []).unwrap();
        assert_eq!(scalar.to_array(0).unwrap(), Array::scalar(7));
        assert!(matches!(scalar.rows(), Err(Error::Scalar { .. })));
        let huge =
            Sparse::new(Array::new([0, 2], vec![]).unwrap(), Array::from(vec![0; 0]), [i64::MAX as usize, 2]).unwrap();
        let text = huge.to_array(0).unwrap_err().to_string();
        assert!(text.contains("shape [9223372036854775807, 2] does not fit into memory"), "{text}");
        assert!(Sparse::concat(&[huge.clone(), huge.clone()]).unwrap_err().to_string().contains("more than positions"));
        assert!(Sparse::new(huge.indices.clone(), huge.values.clone(), [usize::MAX, 2]).is_err());
        assert!(matches!(huge.row(usize::MAX), Err(Error::OutOfRange { .. })));
        let (narrow, wide) = (sparse(&Array::from(vec![1])), sparse(&Array::from(vec![1, 2])));
        assert!(matches!(Sparse::stack(&[narrow, wide]), Err(Error::UnequalShapes { index: 1, .. })));
    }

    proptest! {
        #[test]
        fn a_sparse_array_does_what_the_dense_one_does(
            rows in 1_usize..7,
            width in 1_usize..4,
            depth in 1_usize..3,
            values in prop::collection::vec(prop_oneof![Just(0_i64), 1_i64..9], 42),
            cut in 0_usize..7,
            picked in prop::collection::vec(0_usize..7, 0..7),
        ) {
            let dense = Array::new([rows, width, depth], values[..rows * width * depth].to_vec()).unwrap();
            let whole = sparse(&dense);
            let same = |sparse: Sparse<i64>, dense: Array<i64>| {
                let again = Sparse::new(sparse.indices.clone(), sparse.values.clone(), sparse.dense_shape.clone());
                prop_assert_eq!(&again.unwrap(), &sparse);
                prop_assert_eq!(sparse.to_array(0).unwrap(), dense);
                Ok(())
            };
            same(whole.clone(), dense.clone())?;
            let cut = cut.min(rows);
            same(whole.slice(0..cut).unwrap(), dense.slice(0..cut).unwrap())?;
            same(whole.row(rows - 1).unwrap(), dense.row(rows - 1).unwrap())?;
            let picked: Vec<usize> = picked.into_iter().map(|row| row % rows).collect();
            same(whole.gather(&picked).unwrap(), dense.gather(&picked).unwrap())?;
            let halves = [whole.slice(0..cut).unwrap(), whole.slice(cut..rows).unwrap()];
            same(Sparse::concat(&halves).unwrap(), dense.clone())?;
            let single: Vec<_> = (0..rows).map(|row| whole.row(row).unwrap()).collect();
            same(Sparse::stack(&single).unwrap(), dense)?;
        }
    }

    #[test]
    fn replicas_get_rows_of_sparse_batches() {
        let dense = Array::new([5, 3], (0..15).map(|x| if x % 2 == 0 { 0 } else { x }).collect()).unwrap();
        let data = Dataset::from_tensor_slices((sparse(&dense), dense)).shuffle(5, 3).batch(3);
        let data = distribute_dataset(&data, Topology::local(2).unwrap(), InputOptions::default()).unwrap();
        let mut rows = 0;
        for (sparse, dense) in data.iter().flat_map(|step| step.unwrap()) {
            rows += dense.rows().unwrap();
            assert_eq!(sparse.to_array(0).unwrap(), dense);
        }
        assert_eq!(rows, 5);
    }
}
