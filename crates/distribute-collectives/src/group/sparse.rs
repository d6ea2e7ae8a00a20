//! All-reduce of a few rows of a large matrix, such as the gradient of an embedding.

use distribute_arithmetic::reduce_to_one;
use distribute_device::Element;

use super::ProcessGroup;
use super::reductions::{check_at_most, check_len};
use crate::{Error, ReduceOp, Result};

/// Rows of a matrix, each with its index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SparseRows<T> {
    /// The indices of the rows.
    pub indices: Vec<i64>,
    /// The rows, one after another.
    pub values: Vec<T>,
}

impl<T: Element> SparseRows<T> {
    /// Returns the reduction of all ranks' rows, by index. Each rank contributes the rows that it has.
    ///
    /// An index may occur more than once, on one rank or on several: all its rows are combined, in the order of ranks
    /// and then of their positions, so every rank gets the same bits. `Mean` divides by the world size, not by the
    /// number of ranks that have the row: absent rows count as zeros.
    ///
    /// # Shapes
    /// `values` holds `indices.len()` rows of `row_len` elements; ranks may have different numbers of rows, or none.
    /// The result has each index once, in ascending order.
    ///
    /// # Cost
    /// Three operations; every rank receives all ranks' rows. It pays if there are fewer rows in total than in the
    /// dense matrix.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) on all ranks if `row_len` differs, and on a rank without memory for the
    /// rows of all ranks, which ends the group; [`Error::Mismatch`](crate::Error::Mismatch) if `op` differs,
    /// [`Error::UnfitType`](crate::Error::UnfitType) for bitwise operations on floats, and the errors of every
    /// operation: see [`ProcessGroup`].
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::{ProcessGroup, ReduceOp, SparseRows};
    ///
    /// let ranks = ProcessGroup::local(2)?;
    /// std::thread::scope(|scope| {
    ///     for group in &ranks {
    ///         scope.spawn(move || {
    ///             let me = i64::from(group.rank().0);
    ///             // Both have row 7; row `me` is on this rank only.
    ///             let rows = SparseRows { indices: vec![7, me], values: vec![1.0, 2.0, 3.0, 4.0] };
    ///             let sums = rows.all_reduce(group, 2, ReduceOp::Sum).expect("both ranks take part");
    ///             assert_eq!(sums.indices, [0, 1, 7]);
    ///             assert_eq!(sums.values, [3.0, 4.0, 3.0, 4.0, 2.0, 4.0]);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), distribute_collectives::Error>(())
    /// ```
    ///
    /// # Source
    /// tf.distribute's reduction of `IndexedSlices`, which also gathers.
    pub fn all_reduce(&self, group: &ProcessGroup, row_len: usize, op: ReduceOp) -> Result<SparseRows<T>> {
        Ok(self.all_reduce_few(group, row_len, op, usize::MAX)?.unwrap_or_default())
    }

    /// Returns the reduction like [`all_reduce`](SparseRows::all_reduce), or `None` on all ranks if they have more than
    /// `most` rows together, so that the dense matrix is reduced at less cost. All ranks pass the same `most`.
    ///
    /// # Errors
    /// The errors of [`all_reduce`](SparseRows::all_reduce) occur in the same cases.
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::{ProcessGroup, ReduceOp, SparseRows};
    ///
    /// let alone = ProcessGroup::local(1)?;
    /// let rows = SparseRows { indices: vec![7, 1], values: vec![1.0, 2.0, 3.0, 4.0] };
    /// assert!(rows.all_reduce_few(&alone[0], 2, ReduceOp::Sum, 1)?.is_none());
    /// # Ok::<(), distribute_collectives::Error>(())
    /// ```
    pub fn all_reduce_few(
        &self,
        group: &ProcessGroup,
        row_len: usize,
        op: ReduceOp,
        most: usize,
    ) -> Result<Option<SparseRows<T>>> {
        let SparseRows { indices, values } = self;
        op.check(T::DTYPE)?;
        self.check("values of a sparse all_reduce", row_len)?;
        let mut shapes = vec![0u64; 2 * group.world_size()];
        let counts = vec![2; group.world_size()];
        // Only gathers follow, which do not tell of the operator.
        group.parts(&counts).tag(op as u32).all_gather(&[indices.len() as u64, row_len as u64], &mut shapes)?;
        for shape in shapes.chunks_exact(2) {
            let remedy = "rows are equally long on all ranks";
            check_len("row of a sparse all_reduce", shape[1] as usize, shapes[1] as usize, remedy)?;
        }
        let rows: Vec<usize> = shapes.iter().step_by(2).map(|rows| *rows as usize).collect();
        let total = rows.iter().fold(0, |sum: usize, rows| sum.saturating_add(*rows));
        if total > most {
            return Ok(None);
        }
        // The numbers come from other processes.
        let longest = isize::MAX as usize / size_of::<T>().saturating_mul(row_len).max(size_of::<i64>());
        let remedy = "a rank reports more rows than memory can hold";
        check_at_most("rows of all ranks of a sparse all_reduce", total, longest, remedy)?;
        let lens: Vec<usize> = rows.iter().map(|rows| rows * row_len).collect();
        let mut all_indices = zeroed(group, total, most.min(longest))?;
        group.parts(&rows).all_gather(indices, &mut all_indices)?;
        let mut all_values = zeroed(group, total * row_len, most.min(longest).saturating_mul(row_len))?;
        group.parts(&lens).all_gather(values, &mut all_values)?;
        Ok(Some(combine(&all_indices, &all_values, row_len, op, group.world_size())))
    }

    /// Returns the sums of these rows by index, without any communication: each index once, in ascending order. Rows of
    /// one index are added in their order.
    ///
    /// # Shapes
    /// `values` holds `indices.len()` rows of `row_len` elements.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) if it does not.
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::SparseRows;
    ///
    /// let rows = SparseRows { indices: vec![7, 1, 7], values: vec![1.0, 2.0, 0.5] };
    /// let sums = rows.coalesced(1)?;
    /// assert_eq!((&sums.indices[..], &sums.values[..]), (&[1, 7][..], &[2.0, 1.5][..]));
    /// # Ok::<(), distribute_collectives::Error>(())
    /// ```
    ///
    /// # Source
    /// `Tensor.coalesce` of PyTorch's sparse tensors.
    pub fn coalesced(&self, row_len: usize) -> Result<SparseRows<T>> {
        self.check("values of sparse rows", row_len)?;
        Ok(combine(&self.indices, &self.values, row_len, ReduceOp::Sum, 1))
    }

    fn check(&self, what: &'static str, row_len: usize) -> Result<()> {
        check_len(what, self.values.len(), self.indices.len().saturating_mul(row_len), "one row per index")
    }
}

/// Returns memory for values of all ranks, whose number other ranks report. If there is not as much, ends the group,
/// since the other ranks may have it and would wait for this one.
fn zeroed<T: Element>(group: &ProcessGroup, len: usize, most: usize) -> Result<Vec<T>> {
    let mut memory = Vec::new();
    if memory.try_reserve_exact(len).is_err() {
        let what = "values of all ranks of a sparse all_reduce";
        let remedy = "there is no memory for as many; reduce the dense matrix, or call all_reduce_few with a limit";
        let error = Error::Length { what, got: len, expected: most, remedy };
        group.abort_by(&error);
        return Err(error);
    }
    memory.resize(len, T::default());
    Ok(memory)
}

/// Combines the rows of each index, in their order.
fn combine<T: Element>(indices: &[i64], values: &[T], row_len: usize, op: ReduceOp, ranks: usize) -> SparseRows<T> {
    let mut order: Vec<usize> = (0..indices.len()).collect();
    // The sort is stable: rows of one index stay in the order of ranks.
    order.sort_by_key(|row| indices[*row]);
    let divisor = (op == ReduceOp::Mean).then_some(u32::try_from(ranks).unwrap_or(u32::MAX));
    let of_one_index = || order.chunk_by(|a, b| indices[*a] == indices[*b]);
    let count = of_one_index().count();
    let mut result = SparseRows { indices: Vec::with_capacity(count), values: vec![T::default(); count * row_len] };
    for (place, rows) in of_one_index().enumerate() {
        result.indices.push(indices[rows[0]]);
        let row = |row: &usize| &values[row * row_len..][..row_len];
        let target = &mut result.values[place * row_len..][..row_len];
        if let ([one], None) = (rows, divisor) {
            target.copy_from_slice(row(one));
            continue;
        }
        let sources: Vec<&[u8]> = rows.iter().map(|one| bytemuck::cast_slice(row(one))).collect();
        reduce_to_one(T::DTYPE, op.reduce(divisor), &sources, bytemuck::cast_slice_mut(target));
    }
    result
}

#[cfg(test)]
mod tests {
    use distribute_device::bf16;

    use super::*;

    fn reduced<T: Element>(op: ReduceOp, [first, second]: [T; 2]) -> Result<Vec<T>> {
        let groups = ProcessGroup::local(2)?;
        let rows = [
            SparseRows { indices: vec![3, 3], values: vec![first; 2] },
            SparseRows { indices: vec![3, 5], values: vec![second; 2] },
        ];
        std::thread::scope(|scope| {
            let ranks: Vec<_> = groups
                .iter()
                .zip(&rows)
                .map(|(group, rows)| scope.spawn(move || rows.all_reduce(group, 1, op)))
                .collect();
            let mut all = ranks.into_iter().map(|rank| rank.join().expect("no panic"));
            let (one, other) = (all.next().expect("two")?, all.next().expect("two")?);
            assert_eq!(one, other);
            assert_eq!(one.indices, [3, 5]);
            Ok(one.values)
        })
    }

    #[test]
    fn ranks_with_other_operators_are_told() {
        let groups = ProcessGroup::local(2).unwrap();
        std::thread::scope(|scope| {
            for (group, op) in groups.iter().zip([ReduceOp::Sum, ReduceOp::Mean]) {
                scope.spawn(move || {
                    let rows = SparseRows { indices: vec![1], values: vec![1.0f32] };
                    assert!(matches!(rows.all_reduce(group, 1, op), Err(Error::Mismatch { .. })));
                });
            }
        });
    }

    #[test]
    fn an_impossible_number_of_rows_is_an_error() {
        let groups = ProcessGroup::local(2).unwrap();
        std::thread::scope(|scope| {
            let claims = scope.spawn(|| {
                // What a rank with 2^59 rows sends.
                let shape = [1u64 << 59, 1];
                groups[1].parts(&[2, 2]).tag(ReduceOp::Sum as u32).all_gather(&shape, &mut [0; 4])
            });
            let rows = SparseRows { indices: vec![1], values: vec![1u8] };
            let error = rows.all_reduce(&groups[0], 1, ReduceOp::Sum).unwrap_err();
            assert!(matches!(error, Error::Length { got, .. } if got == (1 << 59) + 1), "{error}");
            claims.join().expect("no panic").unwrap();
        });
        // The other rank does not wait for this one.
        assert!(matches!(groups[1].failure(), Some(Error::Aborted { .. })), "{:?}", groups[1].failure());
    }

    #[test]
    fn means_of_every_type_are_divided_and_do_not_overflow() {
        assert_eq!(reduced(ReduceOp::Mean, [1.0f32, 6.0]).unwrap(), [4.0, 3.0]);
        assert_eq!(reduced(ReduceOp::Mean, [1i32, 6]).unwrap(), [4, 3]);
        assert_eq!(reduced(ReduceOp::Mean, [100u8, 100]).unwrap(), [150, 50]);
        assert_eq!(reduced(ReduceOp::Mean, [-3i64, 0]).unwrap(), [-3, 0]);
        let short = |x: f32| bf16::from_f32(x);
        assert_eq!(reduced(ReduceOp::Mean, [1.0, 6.0].map(short)).unwrap(), [4.0, 3.0].map(short));
    }

    #[test]
    fn floats_have_no_bits_to_combine() {
        let refused = reduced(ReduceOp::BitOr, [1.0f32, 2.0]).unwrap_err();
        assert!(matches!(refused, Error::UnfitType { op: ReduceOp::BitOr, .. }), "{refused}");
        assert_eq!(reduced(ReduceOp::BitOr, [1u8, 6]).unwrap(), [7, 6]);
    }
}
