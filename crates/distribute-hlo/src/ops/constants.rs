//! Constants and counters.

use crate::{Builder, ElementType, Error, Literal, Number, OpKind, Result, Scalar, TensorType, Value};

impl Builder {
    /// Adds a constant.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn constant(&mut self, literal: Literal) -> Result<Value> {
        let ty = literal.ty().clone();
        self.push(OpKind::Constant(literal), &[], ty)
    }

    /// Adds a tensor of these sizes whose elements are all `value`, of the value's own type.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub fn splat<T: Scalar>(&mut self, dims: &[usize], value: T) -> Result<Value> {
        let mut bytes = Vec::with_capacity(T::ELEMENT.size_bytes());
        value.append_to(&mut bytes);
        self.constant(Literal::splat_of(TensorType::new(T::ELEMENT, dims), bytes))
    }

    /// Adds a scalar of the value's own type.
    ///
    /// # Errors
    /// [`Error::TooLarge`], which a scalar never is.
    pub fn scalar<T: Scalar>(&mut self, value: T) -> Result<Value> {
        self.splat(&[], value)
    }

    /// Adds a tensor whose elements are all `value`, rounded to the element type.
    ///
    /// # Errors
    /// [`Error::Literal`] if the element type cannot hold the value, as in [`Literal::splat`]; [`Error::TooLarge`].
    pub fn full(&mut self, ty: TensorType, value: impl Into<Number>) -> Result<Value> {
        self.constant(Literal::splat(ty, value)?)
    }

    /// Adds a tensor of all its elements in row-major order, bit by bit.
    ///
    /// # Errors
    /// [`Error::Literal`] if the number of elements is not that of the sizes.
    pub fn dense<T: Scalar>(&mut self, values: &[T], dims: &[usize]) -> Result<Value> {
        self.constant(Literal::dense(values, dims)?)
    }

    /// Adds a tensor in which each element is its index along a dimension.
    ///
    /// # Errors
    /// [`Error::Operation`] if the dimension does not exist, or elements are truth values; [`Error::TooLarge`].
    pub fn iota(&mut self, ty: TensorType, dimension: usize) -> Result<Value> {
        let problem = match crate::shape::in_range("the counted dimension", dimension, ty.ndim()) {
            Err(problem) => Some(problem),
            Ok(()) if ty.element == ElementType::Bool => Some("truth values do not count; use an integer".to_owned()),
            Ok(()) => None,
        };
        if let Some(problem) = problem {
            return Err(Error::Operation {
                operation: "iota",
                given: format!("the result is {}", ty.short()),
                problem,
            });
        }
        self.push(OpKind::Iota { dimension }, &[], ty)
    }
}
