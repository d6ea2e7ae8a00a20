//! ndarray's arrays as elements.

use std::ops::Range;

use ndarray::{ArcArray, Axis, IxDyn, Slice, concatenate, stack};

use crate::{Element, ElementSpec, Error, Result};

/// The library marker under which ndarray's shared arrays are elements.
///
/// # Examples
/// ```
/// use distribute_input::Dataset;
/// use ndarray::arr2;
/// let rows = arr2(&[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).into_dyn().into_shared();
/// let batch = Dataset::from_tensor_slices(rows).batch(2).iter().next().expect("there are three rows")?;
/// assert_eq!(batch, arr2(&[[1.0, 2.0], [3.0, 4.0]]).into_dyn());
/// # Ok::<(), distribute_input::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub enum NdArrays {}

impl<T: Clone + Send + Sync + 'static> Element<NdArrays> for ArcArray<T, IxDyn> {
    fn stack(items: &[Self]) -> Result<Self> {
        let views: Vec<_> = items.iter().map(|item| item.view()).collect();
        Ok(stack(Axis(0), &views).map_err(|error| Error::library("stack", error))?.into_shared())
    }

    fn rows(&self) -> Result<usize> {
        self.shape().first().copied().ok_or(Error::Scalar { action: "rows" })
    }

    fn row(&self, index: usize) -> Result<Self> {
        within(self, &(index..index.saturating_add(1)))?;
        Ok(self.clone().index_axis_move(Axis(0), index))
    }

    fn slice(&self, rows: Range<usize>) -> Result<Self> {
        within(self, &rows)?;
        let mut part = self.clone();
        part.slice_axis_inplace(Axis(0), Slice::from(rows));
        Ok(part)
    }

    fn gather(&self, rows: &[usize]) -> Result<Self> {
        rows.iter().try_for_each(|row| within(self, &(*row..row.saturating_add(1))))?;
        Ok(self.select(Axis(0), rows).into_shared())
    }

    fn concat(items: &[Self]) -> Result<Self> {
        let views: Vec<_> = items.iter().map(|item| item.view()).collect();
        Ok(concatenate(Axis(0), &views).map_err(|error| Error::library("concat", error))?.into_shared())
    }

    fn spec(&self) -> Vec<ElementSpec> {
        vec![ElementSpec::new(self.shape(), std::any::type_name::<T>())]
    }
}

fn within<T>(array: &ArcArray<T, IxDyn>, asked: &Range<usize>) -> Result<()> {
    let rows = array.shape().first().copied().ok_or(Error::Scalar { action: "slice" })?;
    if asked.start > asked.end || asked.end > rows {
        return Err(Error::OutOfRange { action: "slice", start: asked.start, end: asked.end, rows });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use ndarray::{arr1, arr2};

    use super::*;

    #[test]
    fn rows_are_joined_and_divided() {
        let array = arr2(&[[1, 2], [3, 4], [5, 6]]).into_dyn().into_shared();
        assert_eq!((array.rows().unwrap(), array.row(1).unwrap()), (3, arr1(&[3, 4]).into_dyn().into_shared()));
        let halves = [array.slice(0..1).unwrap(), array.slice(1..3).unwrap()];
        assert_eq!(Element::concat(&halves).unwrap(), array);
        let rows: Vec<_> = (0..3).map(|row| array.row(row).unwrap()).collect();
        assert_eq!(Element::stack(&rows).unwrap(), array);
        assert_eq!(array.gather(&[2, 0]).unwrap().shape(), [2, 2]);
        assert_eq!(array.slice(0..0).unwrap().shape(), [0, 2]);
        assert!(array.row(3).is_err() && array.gather(&[3]).is_err() && array.slice(2..4).is_err());
        assert_eq!(array.spec()[0].to_string(), "[3, 2] i32");
    }
}
