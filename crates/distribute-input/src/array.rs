//! Small arrays in host memory, so that pipelines need no tensor library.

use std::{fmt, ops::Range, sync::Arc};

use crate::{Element, ElementSpec, Error, Pad, Result};

/// The library marker under which [`Array`] is an [`Element`].
#[derive(Clone, Copy, Debug)]
pub enum Arrays {}

/// A shaped array in host memory, in row-major order. Rows and slices share the memory of their array.
///
/// It is meant for scalars, indices, labels and texts; use a tensor library for arithmetic.
///
/// # Examples
/// ```
/// use distribute_input::{Array, Element};
/// let images = Array::new([3, 2], vec![0.0, 0.1, 1.0, 1.1, 2.0, 2.1])?;
/// assert_eq!(images.row(1)?.as_slice(), [1.0, 1.1]);
/// assert_eq!(images.slice(0..0)?.shape(), [0, 2]);
/// # Ok::<(), distribute_input::Error>(())
/// ```
#[derive(Clone)]
pub struct Array<T> {
    elements: Arc<Vec<T>>,
    start: usize,
    shape: Vec<usize>,
}

impl<T> Array<T> {
    /// Creates an array from its shape and its elements in row-major order.
    ///
    /// # Errors
    /// [`Error::ArrayShape`] if the number of elements does not match the shape.
    pub fn new(shape: impl Into<Vec<usize>>, elements: Vec<T>) -> Result<Array<T>> {
        let shape = shape.into();
        if shape.iter().try_fold(1_usize, |product, extent| product.checked_mul(*extent)) != Some(elements.len()) {
            return Err(Error::ArrayShape { shape, got: elements.len() });
        }
        Ok(Array { elements: Arc::new(elements), start: 0, shape })
    }

    /// Creates an array of one element and no dimensions.
    pub fn scalar(element: T) -> Array<T> {
        Array { elements: Arc::new(vec![element]), start: 0, shape: Vec::new() }
    }

    /// Returns the extents, outermost first; empty for a scalar.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns all elements in row-major order.
    pub fn as_slice(&self) -> &[T] {
        &self.elements[self.start..self.start + self.shape.iter().product::<usize>()]
    }

    /// Returns the only element, or `None` if there is not exactly one.
    pub fn item(&self) -> Option<&T> {
        match self.as_slice() {
            [element] => Some(element),
            _ => None,
        }
    }

    /// Returns the leading extent and the number of elements per row.
    fn leading(&self, action: &'static str) -> Result<(usize, usize)> {
        let (rows, rest) = self.shape.split_first().ok_or(Error::Scalar { action })?;
        Ok((*rows, rest.iter().product()))
    }

    fn within(action: &'static str, rows: &Range<usize>, length: usize) -> Result<()> {
        if rows.start > rows.end || rows.end > length {
            return Err(Error::OutOfRange { action, start: rows.start, end: rows.end, rows: length });
        }
        Ok(())
    }
}

impl<T: Clone + Send + Sync + 'static> Element<Arrays> for Array<T> {
    fn stack(items: &[Self]) -> Result<Self> {
        let first = items.first().ok_or(Error::Nothing { action: "stack" })?;
        let mut elements = Vec::with_capacity(items.len() * first.as_slice().len());
        for (index, item) in items.iter().enumerate() {
            if item.shape != first.shape {
                let (got, expected) = (item.shape.clone(), first.shape.clone());
                return Err(Error::UnequalShapes { action: "stack", index, got, expected });
            }
            elements.extend_from_slice(item.as_slice());
        }
        let shape = std::iter::once(items.len()).chain(first.shape.iter().copied()).collect();
        Ok(Array { elements: Arc::new(elements), start: 0, shape })
    }

    fn rows(&self) -> Result<usize> {
        Ok(self.leading("rows")?.0)
    }

    fn row(&self, index: usize) -> Result<Self> {
        let (rows, width) = self.leading("row")?;
        Array::<T>::within("row", &(index..index.saturating_add(1)), rows)?;
        let start = self.start + index * width;
        Ok(Array { elements: Arc::clone(&self.elements), start, shape: self.shape[1..].to_vec() })
    }

    fn slice(&self, range: Range<usize>) -> Result<Self> {
        let (rows, width) = self.leading("slice")?;
        Array::<T>::within("slice", &range, rows)?;
        let mut shape = self.shape.clone();
        shape[0] = range.len();
        Ok(Array { elements: Arc::clone(&self.elements), start: self.start + range.start * width, shape })
    }

    fn gather(&self, picked: &[usize]) -> Result<Self> {
        let (rows, width) = self.leading("gather")?;
        let (from, mut elements) = (self.as_slice(), Vec::with_capacity(picked.len() * width));
        for &index in picked {
            Array::<T>::within("gather", &(index..index.saturating_add(1)), rows)?;
            elements.extend_from_slice(&from[index * width..(index + 1) * width]);
        }
        let mut shape = self.shape.clone();
        shape[0] = picked.len();
        Ok(Array { elements: Arc::new(elements), start: 0, shape })
    }

    fn concat(items: &[Self]) -> Result<Self> {
        let first = items.first().ok_or(Error::Nothing { action: "concat" })?;
        first.leading("concat")?;
        let (mut elements, mut rows) = (Vec::new(), 0);
        for (index, item) in items.iter().enumerate() {
            rows += item.leading("concat")?.0;
            if item.shape[1..] != first.shape[1..] {
                let (got, expected) = (item.shape.clone(), first.shape.clone());
                return Err(Error::UnequalShapes { action: "concat", index, got, expected });
            }
            elements.extend_from_slice(item.as_slice());
        }
        let mut shape = first.shape.clone();
        shape[0] = rows;
        Ok(Array { elements: Arc::new(elements), start: 0, shape })
    }

    fn spec(&self) -> Vec<ElementSpec> {
        vec![ElementSpec::new(&self.shape, std::any::type_name::<T>())]
    }
}

impl<T: Clone + Default + Send + Sync + 'static> Pad<Arrays> for Array<T> {
    fn padded(items: &[Self]) -> Result<Vec<Self>> {
        let Some(first) = items.first() else { return Ok(Vec::new()) };
        let mut shape = first.shape.clone();
        for (index, item) in items.iter().enumerate() {
            if item.shape.len() != shape.len() {
                let (got, expected) = (item.shape.clone(), first.shape.clone());
                return Err(Error::UnequalShapes { action: "padded_batch", index, got, expected });
            }
            shape.iter_mut().zip(&item.shape).for_each(|(largest, extent)| *largest = (*largest).max(*extent));
        }
        Ok(items.iter().map(|item| item.filled(&shape)).collect())
    }
}

impl<T: Clone + Default> Array<T> {
    /// Returns a copy in the low corner of a larger array, padded with default values.
    pub(crate) fn filled(&self, shape: &[usize]) -> Array<T> {
        if self.shape == shape {
            return self.clone();
        }
        let mut elements = vec![T::default(); shape.iter().product()];
        let width = self.shape.last().copied().unwrap_or(1);
        // Rows along the last dimension stay contiguous.
        for (row, values) in self.as_slice().chunks_exact(width.max(1)).enumerate() {
            let (mut rest, mut at, mut stride) = (row, 0, shape.last().copied().unwrap_or(1));
            for axis in (0..shape.len().saturating_sub(1)).rev() {
                at += rest % self.shape[axis] * stride;
                rest /= self.shape[axis];
                stride *= shape[axis];
            }
            elements[at..at + width].clone_from_slice(values);
        }
        Array { elements: Arc::new(elements), start: 0, shape: shape.to_vec() }
    }
}

impl<T> From<Vec<T>> for Array<T> {
    fn from(elements: Vec<T>) -> Array<T> {
        Array { shape: vec![elements.len()], elements: Arc::new(elements), start: 0 }
    }
}

impl<T: PartialEq> PartialEq for Array<T> {
    fn eq(&self, other: &Array<T>) -> bool {
        self.shape == other.shape && self.as_slice() == other.as_slice()
    }
}

impl<T: fmt::Debug> fmt::Debug for Array<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Array{:?}{:?}", self.shape, self.as_slice())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rows_and_slices_share_memory() {
        let array = Array::new([3, 2], vec![0, 1, 2, 3, 4, 5]).unwrap();
        assert!(std::ptr::eq(&array.as_slice()[2], &array.row(1).unwrap().as_slice()[0]));
        assert!(std::ptr::eq(&array.as_slice()[4], &array.slice(2..3).unwrap().as_slice()[0]));
    }

    #[test]
    fn arrays_are_filled_up_to_the_largest() {
        let items = [Array::new([2, 1], vec![1, 2]).unwrap(), Array::new([1, 3], vec![3, 4, 5]).unwrap()];
        let padded = Array::padded(&items).unwrap();
        assert_eq!(padded[0], Array::new([2, 3], vec![1, 0, 0, 2, 0, 0]).unwrap());
        assert_eq!(padded[1], Array::new([2, 3], vec![3, 4, 5, 0, 0, 0]).unwrap());
        assert!(Array::padded(&[items[0].clone(), Array::scalar(1)]).is_err());
        let empty = Array::new([0, 2], Vec::<i32>::new()).unwrap();
        assert_eq!(Array::padded(&[empty, items[0].clone()]).unwrap()[0].as_slice(), [0; 4]);
    }

    #[test]
    fn strings_are_elements_too() {
        let texts = Array::stack(&[Array::scalar("a".to_owned()), Array::scalar("b".to_owned())]).unwrap();
        assert_eq!(texts.shape(), [2]);
        assert_eq!(texts.row(1).unwrap().item().unwrap(), "b");
    }

    #[test]
    fn bad_input_is_answered_by_a_sentence() {
        let array = Array::from(vec![1, 2]);
        assert!(Array::new([2, 2], vec![1]).unwrap_err().to_string().contains("needs 4 elements, 1 were given"));
        assert!(matches!(Array::new([usize::MAX, 2], vec![1]), Err(Error::ArrayShape { .. })));
        assert!(matches!(array.row(2), Err(Error::OutOfRange { rows: 2, .. })));
        assert!(matches!(array.slice(1..3), Err(Error::OutOfRange { end: 3, .. })));
        assert!(matches!(array.gather(&[0, usize::MAX]), Err(Error::OutOfRange { .. })));
        assert!(matches!(Array::scalar(1).rows(), Err(Error::Scalar { .. })));
        assert!(matches!(Array::<i64>::stack(&[]), Err(Error::Nothing { .. })));
        assert!(matches!(Array::stack(&[array.clone(), Array::scalar(1)]), Err(Error::UnequalShapes { .. })));
        let wide = Array::new([1, 2], vec![1, 2]).unwrap();
        assert!(matches!(
            Array::concat(&[wide, Array::new([1, 1], vec![1]).unwrap()]),
            Err(Error::UnequalShapes { .. })
        ));
    }

    proptest! {
        #[test]
        fn divided_and_joined_again_is_the_same(rows in 1_usize..9, width in 0_usize..4, cut in 0_usize..9) {
            let array = Array::new([rows, width], (0..rows * width).collect()).unwrap();
            let single: Vec<_> = (0..rows).map(|row| array.row(row).unwrap()).collect();
            prop_assert_eq!(&Array::stack(&single).unwrap(), &array);
            prop_assert_eq!(&array.gather(&(0..rows).collect::<Vec<_>>()).unwrap(), &array);
            let cut = cut.min(rows);
            let halves = [array.slice(0..cut).unwrap(), array.slice(cut..rows).unwrap()];
            prop_assert_eq!(&Array::concat(&halves).unwrap(), &array);
        }
    }
}
