//! The elements of datasets.

use std::ops::Range;
use std::sync::Arc;

use distribute_device::Device;

use crate::{BoxError, Error, Result};

/// An element of a dataset: a tensor, or a tuple of tensors, that can be stacked into batches and divided again.
///
/// `L` is a marker type of the library that the value belongs to. It allows a crate to implement the trait for tensors
/// that it does not own (`impl Element<Candle> for Tensor`, where `Candle` is its own type), and is always inferred.
/// Inference requires that a type has exactly one implementation.
///
/// Tuples of up to six elements are elements; every operation applies to each component.
///
/// # Shapes
/// A *row* is what an index along the leading dimension selects.
pub trait Element<L>: Clone + Send + 'static {
    /// Stacks values of equal shape along a new leading dimension.
    ///
    /// # Errors
    /// If `items` is empty, or if shapes differ.
    fn stack(items: &[Self]) -> Result<Self>;

    /// Returns the length of the leading dimension.
    ///
    /// # Errors
    /// If the value has no dimensions.
    fn rows(&self) -> Result<usize>;

    /// Returns one row without the leading dimension; a view if the library has views.
    ///
    /// # Errors
    /// If the row is out of range.
    fn row(&self, index: usize) -> Result<Self>;

    /// Returns consecutive rows with the leading dimension; an empty range gives a value of zero rows.
    ///
    /// # Errors
    /// If the range is out of range.
    fn slice(&self, rows: Range<usize>) -> Result<Self>;

    /// Returns the rows at the given indices, in that order, in one copy.
    ///
    /// # Errors
    /// If a row is out of range.
    fn gather(&self, rows: &[usize]) -> Result<Self>;

    /// Concatenates values along their leading dimension.
    ///
    /// # Errors
    /// If `items` is empty, or if shapes differ in another dimension.
    fn concat(items: &[Self]) -> Result<Self>;

    /// Returns the shape and the type of each component.
    fn spec(&self) -> Vec<ElementSpec>;

    /// Returns the value in the memory of a replica's GPU. Default: the same value, for libraries that keep their
    /// values in host memory.
    ///
    /// # Errors
    /// If the library cannot use the device, or the copy fails.
    fn fetch_to_device(self, device: &Arc<dyn Device>) -> Result<Self, BoxError> {
        let _ = device;
        Ok(self)
    }
}

/// Elements that can be padded to a larger shape.
pub trait Pad<L>: Element<L> {
    /// Pads the items to equal shapes: each extent becomes the largest of all, and the padding is zero or the type's
    /// default.
    ///
    /// # Errors
    /// If the items differ in the number of dimensions.
    fn padded(items: &[Self]) -> Result<Vec<Self>>;
}

/// The shape and the type of one component of an element.
///
/// # Source
/// `tf.TensorSpec`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ElementSpec {
    /// The extents; `None` where elements differ.
    pub shape: Vec<Option<usize>>,
    /// The type's name in its library.
    pub dtype: String,
}

impl ElementSpec {
    /// Creates a specification with a fully known shape.
    pub fn new(shape: &[usize], dtype: impl Into<String>) -> ElementSpec {
        ElementSpec { shape: shape.iter().copied().map(Some).collect(), dtype: dtype.into() }
    }

    /// Leaves the leading extent open, as for batches.
    pub(crate) fn of_any_rows(mut self) -> ElementSpec {
        if let Some(rows) = self.shape.first_mut() {
            *rows = None;
        }
        self
    }
}

impl std::fmt::Display for ElementSpec {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let extent = |extent: &Option<usize>| extent.map_or_else(|| "?".to_owned(), |extent| extent.to_string());
        write!(formatter, "[{}] {}", self.shape.iter().map(extent).collect::<Vec<_>>().join(", "), self.dtype)
    }
}

/// The operations of one [`Element`] implementation, without its library marker.
pub(crate) struct Operations<T> {
    pub(crate) rows: fn(&T) -> Result<usize>,
    pub(crate) row: fn(&T, usize) -> Result<T>,
    pub(crate) slice: fn(&T, Range<usize>) -> Result<T>,
    pub(crate) gather: fn(&T, &[usize]) -> Result<T>,
    pub(crate) concat: fn(&[T]) -> Result<T>,
}

impl<T> Operations<T> {
    pub(crate) fn of<L>() -> Operations<T>
    where
        T: Element<L>,
    {
        Operations { rows: T::rows, row: T::row, slice: T::slice, gather: T::gather, concat: T::concat }
    }
}

impl<T> Clone for Operations<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Operations<T> {}

macro_rules! tuple_element {
    ($($tag:ident $component:ident $at:tt),+) => {
        impl<$($tag, $component: Element<$tag>),+> Element<($($tag,)+)> for ($($component,)+) {
            fn stack(items: &[Self]) -> Result<Self> {
                Ok(($(<$component as Element<$tag>>::stack(
                    &items.iter().map(|item| item.$at.clone()).collect::<Vec<_>>(),
                )?,)+))
            }

            fn rows(&self) -> Result<usize> {
                let rows = [$(self.$at.rows()?),+];
                if rows.iter().any(|component| *component != rows[0]) {
                    return Err(Error::UnequalRows { rows: rows.to_vec() });
                }
                Ok(rows[0])
            }

            fn row(&self, index: usize) -> Result<Self> {
                Ok(($(self.$at.row(index)?,)+))
            }

            fn slice(&self, rows: Range<usize>) -> Result<Self> {
                Ok(($(self.$at.slice(rows.clone())?,)+))
            }

            fn gather(&self, rows: &[usize]) -> Result<Self> {
                Ok(($(self.$at.gather(rows)?,)+))
            }

            fn concat(items: &[Self]) -> Result<Self> {
                Ok(($(<$component as Element<$tag>>::concat(
                    &items.iter().map(|item| item.$at.clone()).collect::<Vec<_>>(),
                )?,)+))
            }

            fn spec(&self) -> Vec<ElementSpec> {
                [$(self.$at.spec()),+].concat()
            }

            fn fetch_to_device(self, device: &Arc<dyn Device>) -> Result<Self, BoxError> {
                Ok(($(self.$at.fetch_to_device(device)?,)+))
            }
        }

        impl<$($tag, $component: Pad<$tag>),+> Pad<($($tag,)+)> for ($($component,)+) {
            #[expect(non_snake_case, reason = "one name for a type parameter and its values")]
            fn padded(items: &[Self]) -> Result<Vec<Self>> {
                $(let mut $component = <$component as Pad<$tag>>::padded(
                    &items.iter().map(|item| item.$at.clone()).collect::<Vec<_>>(),
                )?.into_iter();)+
                let mut all = Vec::with_capacity(items.len());
                while let ($(Some($component),)+) = ($($component.next(),)+) {
                    all.push(($($component,)+));
                }
                Ok(all)
            }
        }
    };
}

tuple_element!(LA A 0);
tuple_element!(LA A 0, LB B 1);
tuple_element!(LA A 0, LB B 1, LC C 2);
tuple_element!(LA A 0, LB B 1, LC C 2, LD D 3);
tuple_element!(LA A 0, LB B 1, LC C 2, LD D 3, LE E 4);
tuple_element!(LA A 0, LB B 1, LC C 2, LD D 3, LE E 4, LF F 5);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Array;

    #[test]
    fn tuples_treat_their_components_alike() {
        let pair = (Array::from(vec![1, 2, 3]), Array::new([3, 2], vec![1.0, 1.5, 2.0, 2.5, 3.0, 3.5]).unwrap());
        assert_eq!(pair.rows().unwrap(), 3);
        let row = pair.row(1).unwrap();
        assert_eq!(row, (Array::scalar(2), Array::from(vec![2.0, 2.5])));
        let stacked = Element::stack(&[row.clone(), row]).unwrap();
        assert_eq!(stacked.0.as_slice(), [2, 2]);
        assert_eq!(stacked.1.shape(), [2, 2]);
        assert_eq!(pair.gather(&[2, 0]).unwrap().0.as_slice(), [3, 1]);
        let joined = Element::concat(&[pair.slice(0..1).unwrap(), pair.slice(2..3).unwrap()]).unwrap();
        assert_eq!(joined.1.as_slice(), [1.0, 1.5, 3.0, 3.5]);
    }

    #[test]
    fn components_of_unequal_length_are_refused() {
        let pair = (Array::from(vec![1, 2, 3]), Array::from(vec![1, 2]));
        let text = pair.rows().unwrap_err().to_string();
        assert!(text.contains("[3, 2]"), "{text}");
    }
}
