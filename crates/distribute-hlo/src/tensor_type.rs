//! Types of tensors: an element type and sizes.

use std::fmt;

use crate::ElementType;

/// The type of a tensor: its element type and the sizes of its dimensions. A scalar has no dimensions.
///
/// # Examples
/// ```
/// use distribute_hlo::{ElementType, TensorType};
/// let ty = TensorType::new(ElementType::F32, [2, 3]);
/// assert_eq!(ty.to_string(), "tensor<2x3xf32>");
/// assert_eq!(ty.short().to_string(), "f32[2,3]");
/// assert_eq!((ty.elements(), ty.size_bytes()), (Some(6), Some(24)));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TensorType {
    /// The type of one element.
    pub element: ElementType,
    /// The size of each dimension; 0 is allowed.
    pub dims: Vec<usize>,
}

impl TensorType {
    /// Creates a type.
    pub fn new(element: ElementType, dims: impl Into<Vec<usize>>) -> TensorType {
        TensorType { element, dims: dims.into() }
    }

    /// Creates the type of a scalar.
    pub fn scalar(element: ElementType) -> TensorType {
        TensorType { element, dims: Vec::new() }
    }

    /// Returns the number of dimensions.
    pub fn ndim(&self) -> usize {
        self.dims.len()
    }

    /// Returns the number of elements, or `None` if it overflows.
    pub fn elements(&self) -> Option<usize> {
        // A zero makes the tensor empty, also where the other sizes alone overflow.
        if self.dims.contains(&0) {
            return Some(0);
        }
        self.dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim))
    }

    /// Returns the size of a dense buffer in bytes, or `None` if it overflows.
    pub fn size_bytes(&self) -> Option<usize> {
        self.elements()?.checked_mul(self.element.size_bytes())
    }

    /// Returns the same sizes with another element type.
    #[must_use]
    pub fn with_element(&self, element: ElementType) -> TensorType {
        TensorType { element, dims: self.dims.clone() }
    }

    /// Returns the same element type with other sizes.
    #[must_use]
    pub fn with_dims(&self, dims: impl Into<Vec<usize>>) -> TensorType {
        TensorType { element: self.element, dims: dims.into() }
    }

    /// Returns the form of error messages: `f32[2,3]`.
    pub fn short(&self) -> impl fmt::Display + '_ {
        Short(self)
    }
}

/// Prints the type in MLIR: `tensor<2x3xf32>`.
impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("tensor<")?;
        for dim in &self.dims {
            write!(f, "{dim}x")?;
        }
        match self.element {
            ElementType::Bool => f.write_str("i1>"),
            unsigned if unsigned.is_unsigned_integer() => write!(f, "ui{}>", unsigned.bits()),
            other => write!(f, "{}>", other.name()),
        }
    }
}

/// Prints `f32[2,3]`.
struct Short<'a>(&'a TensorType);

impl fmt::Display for Short<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[", self.0.element.name())?;
        for (place, dim) in self.0.dims.iter().enumerate() {
            let separator = if place == 0 { "" } else { "," };
            write!(f, "{separator}{dim}")?;
        }
        f.write_str("]")
    }
}
