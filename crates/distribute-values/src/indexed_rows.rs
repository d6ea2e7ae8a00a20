//! Some rows of a tensor, and their reduction.

use distribute_collectives::{ProcessGroup, ReduceOp};
use distribute_device::BufferRef;
use distribute_types::with_dtype;

use crate::combine::{Form, Pending, begin_gather};
use crate::elements::{Arithmetic, Wide};
use crate::structure::{Leaves, Structure};
use crate::{Axis, Error, HostTensor, Result, TensorStorage};

/// Some rows of a large tensor, each with its index, such as the gradient of an embedding: a leaf of a [`Structure`].
///
/// A reduction over replicas combines the rows of each index; rows that a replica does not have count as zeros. Each
/// replica may have another number of rows, and an index may occur more than once. The result has each index once, in
/// ascending order. Sums are computed in f64 for floating-point types, in the order of replicas, and rounded once, so
/// all replicas get the same bits.
///
/// # Shapes
/// The first dimension of `rows` is the number of indices; the others are equal on all replicas.
///
/// # Errors
/// [`Error::Rows`] for a reduction by another operation than `Sum` and `Mean`, or over an axis; for a concatenation;
/// and if there is not one index per row.
///
/// # Examples
/// ```
/// use distribute_collectives::{ProcessGroup, ReduceOp};
/// use distribute_values::{Axis, HostTensor, IndexedRows, reduce_structure};
///
/// let row = |index, value| {
///     let rows = HostTensor::new(&[2, 1], vec![1.0, value])?;
///     Ok::<_, distribute_values::Error>(IndexedRows { indices: vec![7, index], rows })
/// };
/// let of_replicas = [row(2, 0.5)?, row(7, 3.0)?];
/// let groups = ProcessGroup::local(2)?;
/// let nests = of_replicas.each_ref().map(|rows| (10.0, rows.clone()));     // with a dense value
/// let (dense, sum) = reduce_structure(&groups, ReduceOp::Sum, &nests.each_ref(), &Axis::None)?;
/// assert_eq!((dense, &sum.indices[..]), (20.0, &[2, 7][..]));
/// # use distribute_values::TensorStorage;
/// assert_eq!(sum.rows.to_elements::<f64>()?, [0.5, 5.0]);
/// # Ok::<(), distribute_values::Error>(())
/// ```
///
/// # Source
/// `tf.IndexedSlices`, whose repeated indices TensorFlow leaves as they are.
#[derive(Clone, Debug)]
pub struct IndexedRows<T> {
    /// The index of each row.
    pub indices: Vec<i64>,
    /// The rows, one after another.
    pub rows: T,
}

/// Marks the implementation of [`Structure`] for [`IndexedRows`].
pub struct Indexed<L>(std::marker::PhantomData<L>);

impl<L, T: TensorStorage<L>> Structure<Indexed<L>> for IndexedRows<T> {
    fn combine(parts: &[&IndexedRows<T>], leaves: &mut impl Leaves) -> Result<IndexedRows<T>> {
        leaves.combine_rows(parts)
    }
}

impl<T> IndexedRows<T> {
    /// Returns no rows, of the same shape and type.
    pub(crate) fn without_rows<L>(&self) -> Result<IndexedRows<T>>
    where
        T: TensorStorage<L>,
    {
        let mut shape = self.rows.shape();
        if let Some(rows) = shape.first_mut() {
            *rows = 0;
        }
        let rows = with_dtype!(self.rows.dtype()?, E => self.rows.beside(&shape, BufferRef::from(&[] as &[E])))?;
        Ok(IndexedRows { indices: Vec::new(), rows })
    }
}

/// Starts the reduction of the rows of all replicas; shapes are exchanged at once. A mean divides by `with_examples` if
/// given, and by the number of replicas otherwise.
pub(crate) fn begin_reduce_rows<L, T: TensorStorage<L>>(
    groups: &[ProcessGroup],
    op: ReduceOp,
    values: &[&IndexedRows<T>],
    axis: &Axis,
    (with_examples, form): (Option<f64>, Form),
) -> Result<Pending<IndexedRows<T>>> {
    if !matches!(op, ReduceOp::Sum | ReduceOp::Mean) {
        let problem = format!("{op} has no meaning for rows that some replicas do not have; use Sum or Mean");
        return Err(Error::Rows { problem });
    }
    if !axis.axes().is_empty() {
        return Err(Error::Rows { problem: "they are reduced over replicas alone; give no axis".to_owned() });
    }
    for value in values {
        let (indices, shape) = (value.indices.len(), value.rows.shape());
        if shape.first() != Some(&indices) {
            let problem = format!("{indices} indices were given for rows of shape {shape:?}; give one for each row");
            return Err(Error::Rows { problem });
        }
        if op == ReduceOp::Mean && !value.rows.dtype()?.is_float() {
            let remedy = "a mean of integers is not an integer; reduce with Sum and divide";
            return Err(Error::Reduction { op, dtype: value.rows.dtype()?, remedy });
        }
    }
    let replicas = with_examples.unwrap_or(groups.first().map_or(1, ProcessGroup::world_size) as f64);
    let indices: Vec<HostTensor<i64>> = values
        .iter()
        .map(|value| HostTensor::new(&[value.indices.len()], value.indices.clone()))
        .collect::<Result<_>>()?;
    let indices: Pending<HostTensor<i64>> = begin_gather(groups, &indices.iter().collect::<Vec<_>>(), 0, form)?;
    let rows: Pending<T> = begin_gather(groups, &values.iter().map(|value| &value.rows).collect::<Vec<_>>(), 0, form)?;
    Ok(Box::new(move || {
        let (indices, rows) = (indices()?.to_elements::<i64>()?, rows()?);
        let divisor = if op == ReduceOp::Mean { Some(replicas) } else { None };
        with_dtype!(rows.dtype()?, E => combined::<E, L, T>(&indices, &rows, divisor))
    }))
}

/// Adds up the rows of each index, in their order.
fn combined<E: Arithmetic, L, T: TensorStorage<L>>(
    indices: &[i64],
    rows: &T,
    divisor: Option<f64>,
) -> Result<IndexedRows<T>> {
    let (mut shape, elements) = (rows.shape(), rows.to_elements::<E>()?);
    let len: usize = shape.iter().skip(1).product();
    let mut order: Vec<usize> = (0..indices.len()).collect();
    // The sort is stable: rows of one index stay in the order of replicas.
    order.sort_by_key(|row| indices[*row]);
    let (mut unique, mut sums): (Vec<i64>, Vec<E::Wide>) = (Vec::new(), Vec::new());
    for row in order {
        let source = elements[row * len..(row + 1) * len].iter().map(|element| element.widen());
        if unique.last() == Some(&indices[row]) {
            let start = sums.len() - len;
            sums[start..].iter_mut().zip(source).for_each(|(sum, more)| *sum = sum.combine(ReduceOp::Sum, more));
        } else {
            unique.push(indices[row]);
            sums.extend(source);
        }
    }
    let mean = |sum: E::Wide| divisor.map_or(sum, |divisor| sum.mean(divisor));
    let rounded: Vec<E> = sums.into_iter().map(|sum| E::narrow(mean(sum))).collect();
    shape[0] = unique.len();
    Ok(IndexedRows { indices: unique, rows: rows.beside(&shape, BufferRef::from(&rounded[..]))? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{PerReplica, gather_structure, reduce_examples, reduce_structure};

    fn rows(indices: &[i64], elements: &[f32]) -> IndexedRows<HostTensor<f32>> {
        let rows = HostTensor::new(&[indices.len(), 2], elements.to_vec()).unwrap();
        IndexedRows { indices: indices.to_vec(), rows }
    }

    fn of_three() -> [IndexedRows<HostTensor<f32>>; 3] {
        // Row 5 occurs twice on the first replica, and also on the third; the second has none.
        let first = rows(&[5, 1, 5], &[1.0, 2.0, 3.0, 4.0, 1e8, 6.0]);
        [first, rows(&[], &[]), rows(&[0, 5], &[7.0, 8.0, -1e8, 9.0])]
    }

    fn reduced(op: ReduceOp, axis: Axis) -> Result<(Vec<i64>, Vec<f32>)> {
        let groups = ProcessGroup::local(3)?;
        let sum = reduce_structure(&groups, op, &of_three().each_ref(), &axis)?;
        Ok((sum.indices, sum.rows.to_elements()?))
    }

    #[test]
    fn the_rows_of_each_index_are_added_in_f64() {
        let (indices, sums) = reduced(ReduceOp::Sum, Axis::None).unwrap();
        assert_eq!((&indices[..], &sums[..]), (&[0, 1, 5][..], &[7.0, 8.0, 3.0, 4.0, 1.0, 17.0][..]));
        for axis in [Axis::None, Axis::Over(Vec::new())] {
            let (_, means) = reduced(ReduceOp::Mean, axis).unwrap();
            assert_eq!(means[..2], [7.0 / 3.0, 8.0 / 3.0]);
        }
    }

    #[test]
    fn what_rows_cannot_do_is_a_sentence() {
        let told = |outcome: Result<(Vec<i64>, Vec<f32>)>| outcome.unwrap_err().to_string();
        assert!(told(reduced(ReduceOp::Max, Axis::None)).contains("use Sum or Mean"));
        assert!(told(reduced(ReduceOp::Sum, Axis::At(0))).contains("give no axis"));
        let groups = ProcessGroup::local(3).unwrap();
        let gathered = gather_structure(&groups, &of_three().each_ref(), 0).map(drop);
        assert!(gathered.unwrap_err().to_string().contains("as two tensors"));
        let alone = ProcessGroup::local(1).unwrap();
        let short = IndexedRows { indices: vec![1], ..rows(&[1, 2], &[0.0; 4]) };
        let error = reduce_structure(&alone, ReduceOp::Sum, &[&short], &Axis::None).map(drop).unwrap_err();
        assert!(error.to_string().contains("1 indices were given for rows of shape [2, 2]"), "{error}");
    }

    #[test]
    fn replicas_without_examples_add_no_rows() {
        let values = PerReplica::new(of_three().to_vec()).with_examples(&[true, true, false]);
        let groups = ProcessGroup::local(3).unwrap();
        for (op, of_row_1) in [(ReduceOp::Sum, 3.0), (ReduceOp::Mean, 1.5)] {
            let sum = reduce_examples(&groups, op, &values, &Axis::None).unwrap();
            assert_eq!(sum.indices, [1, 5], "{op}");
            assert_eq!(sum.rows.to_elements::<f32>().unwrap()[0], of_row_1, "{op}");
        }
    }
}
