//! All-reduce of a few rows of a large matrix, such as the gradient of an embedding.

use distribute_device::Element;

use super::ProcessGroup;
use super::reductions::check_len;
use crate::{ReduceOp, Result, kernel};

/// Rows of a matrix, each with its index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SparseRows<T> {
    /// Which rows these are.
    pub indices: Vec<i64>,
    /// The rows, one after another.
    pub values: Vec<T>,
}

impl ProcessGroup {
    /// Reduces rows over ranks, index by index; a rank takes part in the rows that it has.
    ///
    /// An index may occur more than once, on one rank or on several: all its rows are combined, in the order of ranks
    /// and then of their places, so every rank gets the same bits. `Mean` divides by the world size, not by the number
    /// of ranks that have the row: absent rows count as zeros.
    ///
    /// # Shapes
    /// `values` holds `indices.len()` rows of `row_len` elements; ranks may have different numbers of rows, or none.
    /// The result has each index once, in ascending order.
    ///
    /// # Cost
    /// Three operations: every rank receives all ranks' rows. It pays while all rows together are fewer than those of
    /// the dense matrix.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length), on all ranks where `row_len` differs, and see [`ProcessGroup`].
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::{ProcessGroup, ReduceOp};
    ///
    /// let ranks = ProcessGroup::local(2)?;
    /// std::thread::scope(|scope| {
    ///     for group in &ranks {
    ///         scope.spawn(move || {
    ///             let me = i64::from(group.rank().0);
    ///             // Both have row 7; row `me` is each rank's own.
    ///             let rows = group.all_reduce_sparse(&[7, me], &[1.0, 2.0, 3.0, 4.0], 2, ReduceOp::Sum);
    ///             let rows = rows.expect("both ranks take part");
    ///             assert_eq!(rows.indices, [0, 1, 7]);
    ///             assert_eq!(rows.values, [3.0, 4.0, 3.0, 4.0, 2.0, 4.0]);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), distribute_collectives::Error>(())
    /// ```
    ///
    /// # Source
    /// tf.distribute's reduction of `IndexedSlices`, which gathers too.
    pub fn all_reduce_sparse<T: Element>(
        &self,
        indices: &[i64],
        values: &[T],
        row_len: usize,
        op: ReduceOp,
    ) -> Result<SparseRows<T>> {
        check_len("values of all_reduce_sparse", values.len(), indices.len() * row_len, "one row per index")?;
        let mut shapes = vec![0u64; 2 * self.world_size()];
        self.all_gather(&[indices.len() as u64, row_len as u64], &mut shapes)?;
        for shape in shapes.chunks_exact(2) {
            let remedy = "rows are equally long on all ranks";
            check_len("row of all_reduce_sparse", shape[1] as usize, shapes[1] as usize, remedy)?;
        }
        let rows: Vec<usize> = shapes.iter().step_by(2).map(|rows| *rows as usize).collect();
        let lens: Vec<usize> = rows.iter().map(|rows| rows * row_len).collect();
        let mut all_indices = vec![0i64; rows.iter().sum()];
        self.all_gather_v(indices, &mut all_indices, &rows)?;
        let mut all_values = vec![T::default(); lens.iter().sum()];
        self.all_gather_v(values, &mut all_values, &lens)?;
        Ok(self.combine_rows(&all_indices, &all_values, row_len, op))
    }

    fn combine_rows<T: Element>(&self, indices: &[i64], values: &[T], row_len: usize, op: ReduceOp) -> SparseRows<T> {
        let mut order: Vec<usize> = (0..indices.len()).collect();
        // Stable: rows of one index stay in the order of ranks.
        order.sort_by_key(|row| indices[*row]);
        let mut result = SparseRows { indices: Vec::new(), values: Vec::with_capacity(values.len()) };
        for row in order {
            let source = &values[row * row_len..(row + 1) * row_len];
            if result.indices.last() == Some(&indices[row]) {
                let start = result.values.len() - row_len;
                let target = bytemuck::cast_slice_mut(&mut result.values[start..]);
                kernel::combine(T::DTYPE, op, target, bytemuck::cast_slice(source));
            } else {
                result.indices.push(indices[row]);
                result.values.extend_from_slice(source);
            }
        }
        if op == ReduceOp::Mean {
            let divisor = u32::try_from(self.world_size()).unwrap_or(u32::MAX);
            kernel::divide(T::DTYPE, bytemuck::cast_slice_mut(&mut result.values), divisor);
        }
        result
    }
}
