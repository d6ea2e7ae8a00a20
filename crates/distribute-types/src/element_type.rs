//! Element types of tensors in compiled programs.

use std::fmt;

use crate::DType;

/// The type of one element of a tensor in a compiled program. It has truth values and integers of 16 bits, which
/// [`DType`] has not.
///
/// # Examples
/// ```
/// use distribute_types::{DType, ElementType};
/// assert_eq!(ElementType::from(DType::BF16).size_bytes(), 2);
/// assert_eq!((ElementType::Bool.dtype(), ElementType::Bool.name()), (None, "bool"));
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

    /// Returns the type as a [`DType`]; `None` for truth values and integers of 16 bits.
    pub fn dtype(self) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| ElementType::from(*dtype) == self)
    }

    /// Returns the name in Rust: `bool`, `f32`, `u8`.
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

/// Formats the [name](ElementType::name).
impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_have_the_sizes_of_their_dtypes_and_three_have_none() {
        for known in ElementType::ALL {
            if let Some(dtype) = known.dtype() {
                assert_eq!((dtype.size_bytes(), ElementType::from(dtype)), (known.size_bytes(), known));
            }
        }
        let without: Vec<_> = ElementType::ALL.into_iter().filter(|known| known.dtype().is_none()).collect();
        assert_eq!(without, [ElementType::Bool, ElementType::I16, ElementType::U16]);
    }
}
