//! Constants: numbers, and tensors of known values.

use std::sync::Arc;

use distribute_types::{bf16, bf16_from_f64, f16, f16_from_f64};

use crate::{ElementType, Error, Result, Scalar, TensorType};

/// A number that becomes an element of any type that can hold it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// A truth value.
    Bool(bool),
    /// An integer.
    Integer(i128),
    /// A floating-point number; it is rounded to the element type.
    Float(f64),
}

impl From<bool> for Number {
    fn from(value: bool) -> Number {
        Number::Bool(value)
    }
}

macro_rules! numbers {
    ($($variant:ident: $($type:ty)*;)*) => {$($(
        impl From<$type> for Number {
            fn from(value: $type) -> Number {
                Number::$variant(value.into())
            }
        }
    )*)*};
}

numbers! {
    Integer: i8 i16 i32 i64 u8 u16 u32 u64;
    Float: f16 bf16 f32 f64;
}

/// A tensor of known values.
///
/// # Examples
/// ```
/// use distribute_hlo::{ElementType, Literal, TensorType};
/// let table = Literal::dense(&[1.0f32, f32::NAN, -0.0], [3])?;
/// assert_eq!(table.ty().short().to_string(), "f32[3]");
/// let zeros = Literal::splat(TensorType::new(ElementType::I64, [2, 2]), 0)?;
/// assert_eq!(zeros.element_bytes(3), [0; 8]);
/// # Ok::<(), distribute_hlo::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Literal {
    /// The type.
    ty: TensorType,
    /// The elements, least significant byte first: one if all are equal, else all of them in row-major order.
    bytes: Arc<[u8]>,
    /// Whether `bytes` is the one element that all are equal to.
    splat: bool,
}

impl Literal {
    /// Creates a tensor whose elements are all `value`, rounded to the element type.
    ///
    /// # Errors
    /// [`Error::Literal`] if the element type cannot hold it: a fraction or an integer out of range for integers,
    /// a number for truth values, a truth value for numbers.
    pub fn splat(ty: TensorType, value: impl Into<Number>) -> Result<Literal> {
        let bytes = number_bytes(ty.element, value.into())?;
        Ok(Literal { ty, bytes: bytes.into(), splat: true })
    }

    /// Creates a tensor from all its elements in row-major order, bit by bit.
    ///
    /// # Errors
    /// [`Error::Literal`] if the number of elements is not that of the sizes.
    pub fn dense<T: Scalar>(values: &[T], dims: impl Into<Vec<usize>>) -> Result<Literal> {
        let ty = TensorType::new(T::ELEMENT, dims);
        if ty.elements() != Some(values.len()) {
            return Err(Error::Literal {
                problem: format!(
                    "{} values were given for a tensor of type {}; give one for each element",
                    values.len(),
                    ty.short()
                ),
            });
        }
        let mut bytes = Vec::with_capacity(values.len() * T::ELEMENT.size_bytes());
        for &value in values {
            value.append_to(&mut bytes);
        }
        Ok(Literal { ty, bytes: bytes.into(), splat: false })
    }

    /// Creates a tensor from the bytes of all its elements in row-major order, least significant byte first. A truth
    /// value is one byte, 0 or 1.
    ///
    /// # Errors
    /// [`Error::Literal`] if the number of bytes is not that of the type, or a truth value is neither 0 nor 1.
    pub fn from_bytes(ty: TensorType, bytes: impl Into<Arc<[u8]>>) -> Result<Literal> {
        let bytes = bytes.into();
        if ty.size_bytes() != Some(bytes.len()) {
            return Err(Error::Literal {
                problem: format!(
                    "{} bytes were given for a tensor of type {}; give the bytes of each element",
                    bytes.len(),
                    ty.short()
                ),
            });
        }
        if let (ElementType::Bool, Some(byte)) = (ty.element, bytes.iter().find(|&&byte| byte > 1)) {
            return Err(Error::Literal { problem: format!("a truth value was given as byte {byte}; expected 0 or 1") });
        }
        Ok(Literal { ty, bytes, splat: false })
    }

    /// Creates a tensor from the bytes of the element that all are equal to.
    pub(crate) fn splat_of(ty: TensorType, bytes: Vec<u8>) -> Literal {
        Literal { ty, bytes: bytes.into(), splat: true }
    }

    /// Returns the type.
    pub fn ty(&self) -> &TensorType {
        &self.ty
    }

    /// Returns whether it was made of one element.
    pub fn is_splat(&self) -> bool {
        self.splat
    }

    /// Returns the bytes of the stored elements, least significant first: one element of a splat, else all.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the bytes of an element by its place in row-major order; none if the literal is shorter.
    pub fn element_bytes(&self, place: usize) -> &[u8] {
        let size = self.ty.element.size_bytes();
        let start = if self.splat { 0 } else { place.saturating_mul(size) };
        self.bytes.get(start..start.saturating_add(size)).unwrap_or(&[])
    }
}

/// Returns the bytes of a number as an element.
fn number_bytes(element: ElementType, value: Number) -> Result<Vec<u8>> {
    let refused = |expected: &str| Error::Literal {
        problem: format!("{value:?} cannot be an element of type {}; give {expected}", element.name()),
    };
    let mut bytes = Vec::with_capacity(element.size_bytes());
    match (element, value) {
        (ElementType::Bool, Number::Bool(value)) => value.append_to(&mut bytes),
        (ElementType::Bool, _) => return Err(refused("true or false")),
        (_, Number::Bool(_)) => return Err(refused("a number")),
        (ElementType::F64, _) => as_f64(value).append_to(&mut bytes),
        // Rounded once, not by way of f64.
        (ElementType::F32, Number::Integer(value)) => (value as f32).append_to(&mut bytes),
        (ElementType::F32, _) => (as_f64(value) as f32).append_to(&mut bytes),
        (ElementType::F16, _) => f16_from_f64(as_f64(value)).append_to(&mut bytes),
        (ElementType::BF16, Number::Integer(value)) => bf16_from_f64(rounded_to_odd(value)).append_to(&mut bytes),
        (ElementType::BF16, _) => bf16_from_f64(as_f64(value)).append_to(&mut bytes),
        (_, value) => {
            let integer = as_integer(value).ok_or_else(|| refused("a whole number"))?;
            let (low, high) = integer_range(element);
            if !(low..=high).contains(&integer) {
                return Err(refused(&format!("a whole number from {low} to {high}")));
            }
            bytes.extend(integer.to_le_bytes().into_iter().take(element.size_bytes()));
        }
    }
    Ok(bytes)
}

/// Returns the smallest and the largest integer of an element type; 0 and 1 for types other than integers.
pub(crate) fn integer_range(element: ElementType) -> (i128, i128) {
    let bits = element.bits();
    match element.is_signed_integer() {
        true => (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1),
        false if element.is_unsigned_integer() => (0, (1i128 << bits) - 1),
        false => (0, 1),
    }
}

/// Returns the number as a floating-point number.
fn as_f64(value: Number) -> f64 {
    match value {
        Number::Bool(value) => f64::from(u8::from(value)),
        Number::Integer(value) => value as f64,
        Number::Float(value) => value,
    }
}

/// Returns the integer if f64 has it, else a neighbour whose last bit stands for all that were dropped, so that a
/// second rounding gives the result of a single one.
fn rounded_to_odd(value: i128) -> f64 {
    let magnitude = value.unsigned_abs();
    let dropped = (u128::BITS - magnitude.leading_zeros()).saturating_sub(f64::MANTISSA_DIGITS);
    let kept = magnitude >> dropped;
    let is_inexact = kept << dropped != magnitude;
    let rounded = ((kept | u128::from(is_inexact)) << dropped) as f64;
    if value < 0 { -rounded } else { rounded }
}

/// Returns the number as an integer, if it is one.
fn as_integer(value: Number) -> Option<i128> {
    match value {
        Number::Bool(_) => None,
        Number::Integer(value) => Some(value),
        Number::Float(value) => {
            (value.is_finite() && value.trunc() == value && value.abs() < 1e30).then_some(value as i128)
        }
    }
}
