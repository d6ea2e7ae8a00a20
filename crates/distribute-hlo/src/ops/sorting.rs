//! Sorting.

use crate::shape::in_range;
use crate::{Builder, OpKind, Result, SortOrder, Value};

impl Builder {
    /// Sorts tensors of the same sizes together along a dimension, by the elements of the first. Elements that compare
    /// as equal keep their order. Floating-point numbers are compared by IEEE 754's total order.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if none is given, sizes differ, or the dimension does not exist.
    pub fn sort(&mut self, operands: &[Value], dimension: usize, order: SortOrder) -> Result<Vec<Value>> {
        self.sorted(operands, dimension, order, true)
    }

    /// Sorts as [`Builder::sort`], except that the order of elements that compare as equal is not defined.
    ///
    /// # Errors
    /// [`Error::Operation`](crate::Error::Operation) if none is given, sizes differ, or the dimension does not exist.
    pub fn sort_unstable(&mut self, operands: &[Value], dimension: usize, order: SortOrder) -> Result<Vec<Value>> {
        self.sorted(operands, dimension, order, false)
    }

    /// Adds a sort.
    fn sorted(&mut self, operands: &[Value], dimension: usize, order: SortOrder, stable: bool) -> Result<Vec<Value>> {
        self.check("sort", operands)?;
        let Some(&first) = operands.first() else {
            return Err(self.refuse("sort", &[], "give at least one tensor"));
        };
        let mut results = Vec::with_capacity(operands.len());
        for &operand in operands {
            let [ty, expected] = self.types("sort", [operand, first])?;
            if ty.dims != expected.dims {
                let problem = "tensors that are sorted together must have the same sizes";
                return Err(self.refuse("sort", &[("first", first), ("other", operand)], problem));
            }
            in_range("the dimension", dimension, ty.ndim())
                .map_err(|problem| self.refuse("sort", &[("operand", operand)], problem))?;
            results.push(ty);
        }
        self.push_all(OpKind::Sort { dimension, order, stable }, operands, results, Vec::new())
    }
}
