//! Element types of tensors.

use std::fmt;

use distribute_types::{DType, bf16, f16};

/// The type of one element of a tensor.
///
/// # Examples
/// ```
/// use distribute_hlo::ElementType;
/// assert_eq!(ElementType::U8.to_string(), "ui8");
/// assert_eq!(ElementType::Bool.to_string(), "i1");
/// assert_eq!(ElementType::BF16.size_bytes(), 2);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ElementType {
    /// A truth value, one byte in buffers.
    Bool,
    /// IEEE 754 binary16.
    F16,
    /// The upper half of a binary32.
    BF16,
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary64.
    F64,
    /// Signed 8-bit integer.
    I8,
    /// Signed 16-bit integer.
    I16,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned 8-bit integer.
    U8,
    /// Unsigned 16-bit integer.
    U16,
    /// Unsigned 32-bit integer.
    U32,
    /// Unsigned 64-bit integer.
    U64,
}

impl ElementType {
    /// All element types.
    pub const ALL: [ElementType; 13] = [
        ElementType::Bool,
        ElementType::F16,
        ElementType::BF16,
        ElementType::F32,
        ElementType::F64,
        ElementType::I8,
        ElementType::I16,
        ElementType::I32,
        ElementType::I64,
        ElementType::U8,
        ElementType::U16,
        ElementType::U32,
        ElementType::U64,
    ];

    /// Returns the size of one element in a buffer, in bytes.
    pub const fn size_bytes(self) -> usize {
        match self {
            ElementType::Bool | ElementType::I8 | ElementType::U8 => 1,
            ElementType::F16 | ElementType::BF16 | ElementType::I16 | ElementType::U16 => 2,
            ElementType::F32 | ElementType::I32 | ElementType::U32 => 4,
            ElementType::F64 | ElementType::I64 | ElementType::U64 => 8,
        }
    }

    /// Returns the number of bits of one element: 1 for truth values.
    pub const fn bits(self) -> u32 {
        match self {
            ElementType::Bool => 1,
            _ => 8 * self.size_bytes() as u32,
        }
    }

    /// Returns whether elements are floating-point numbers.
    pub const fn is_float(self) -> bool {
        matches!(self, ElementType::F16 | ElementType::BF16 | ElementType::F32 | ElementType::F64)
    }

    /// Returns whether elements are signed integers.
    pub const fn is_signed_integer(self) -> bool {
        matches!(self, ElementType::I8 | ElementType::I16 | ElementType::I32 | ElementType::I64)
    }

    /// Returns whether elements are unsigned integers.
    pub const fn is_unsigned_integer(self) -> bool {
        matches!(self, ElementType::U8 | ElementType::U16 | ElementType::U32 | ElementType::U64)
    }

    /// Returns whether elements are integers. Truth values are not.
    pub const fn is_integer(self) -> bool {
        self.is_signed_integer() || self.is_unsigned_integer()
    }

    /// Returns the name in error messages: `bool`, `f32`, `u8`.
    pub const fn name(self) -> &'static str {
        match self {
            ElementType::Bool => "bool",
            ElementType::F16 => "f16",
            ElementType::BF16 => "bf16",
            ElementType::F32 => "f32",
            ElementType::F64 => "f64",
            ElementType::I8 => "i8",
            ElementType::I16 => "i16",
            ElementType::I32 => "i32",
            ElementType::I64 => "i64",
            ElementType::U8 => "u8",
            ElementType::U16 => "u16",
            ElementType::U32 => "u32",
            ElementType::U64 => "u64",
        }
    }
}

/// Prints the name in MLIR: `i1`, `f32`, `ui8`.
impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ElementType::Bool => f.write_str("i1"),
            other if other.is_unsigned_integer() => write!(f, "ui{}", other.bits()),
            other => f.write_str(other.name()),
        }
    }
}

impl From<DType> for ElementType {
    fn from(dtype: DType) -> ElementType {
        match dtype {
            DType::F32 => ElementType::F32,
            DType::F64 => ElementType::F64,
            DType::F16 => ElementType::F16,
            DType::BF16 => ElementType::BF16,
            DType::I8 => ElementType::I8,
            DType::U8 => ElementType::U8,
            DType::I32 => ElementType::I32,
            DType::U32 => ElementType::U32,
            DType::I64 => ElementType::I64,
            DType::U64 => ElementType::U64,
        }
    }
}

/// A Rust type that can be an element of a tensor.
///
/// Sealed: the element types are those of [`ElementType`].
pub trait Scalar: Copy + std::fmt::Debug + Into<crate::Number> + sealed::Sealed {
    /// The element type of `Self`.
    const ELEMENT: ElementType;

    /// Appends the element's bytes, least significant first.
    fn append_to(self, bytes: &mut Vec<u8>);
}

mod sealed {
    /// Keeps [`super::Scalar`] sealed.
    pub trait Sealed {}
}

impl sealed::Sealed for bool {}
impl Scalar for bool {
    const ELEMENT: ElementType = ElementType::Bool;

    fn append_to(self, bytes: &mut Vec<u8>) {
        bytes.push(u8::from(self));
    }
}

macro_rules! scalars {
    ($($type:ty => $element:ident),* $(,)?) => {$(
        impl sealed::Sealed for $type {}
        impl Scalar for $type {
            const ELEMENT: ElementType = ElementType::$element;

            fn append_to(self, bytes: &mut Vec<u8>) {
                bytes.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}

scalars! {
    f16 => F16, bf16 => BF16, f32 => F32, f64 => F64,
    i8 => I8, i16 => I16, i32 => I32, i64 => I64,
    u8 => U8, u16 => U16, u32 => U32, u64 => U64,
}
