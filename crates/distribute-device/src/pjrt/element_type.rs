//! Types of elements.

use std::fmt;

use pjrt_sys::BufferType;

use crate::DType;

/// The type of a buffer's elements. It has truth values, which [`DType`] has not.
///
/// # Examples
/// ```
/// use distribute_device::{DType, pjrt::ElementType};
/// assert_eq!(ElementType::from(DType::BF16).size_bytes(), 2);
/// assert_eq!(ElementType::Bool.dtype(), None);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ElementType {
    /// Truth values, one byte each, 0 or 1.
    Bool,
    /// Signed integers of 8 bits.
    I8,
    /// Signed integers of 16 bits.
    I16,
    /// Signed integers of 32 bits.
    I32,
    /// Signed integers of 64 bits.
    I64,
    /// Unsigned integers of 8 bits.
    U8,
    /// Unsigned integers of 16 bits.
    U16,
    /// Unsigned integers of 32 bits.
    U32,
    /// Unsigned integers of 64 bits.
    U64,
    /// IEEE numbers of 16 bits.
    F16,
    /// IEEE numbers of 32 bits.
    F32,
    /// IEEE numbers of 64 bits.
    F64,
    /// bfloat16.
    BF16,
}

impl ElementType {
    /// All types.
    pub const ALL: [ElementType; 13] = [
        ElementType::Bool,
        ElementType::I8,
        ElementType::I16,
        ElementType::I32,
        ElementType::I64,
        ElementType::U8,
        ElementType::U16,
        ElementType::U32,
        ElementType::U64,
        ElementType::F16,
        ElementType::F32,
        ElementType::F64,
        ElementType::BF16,
    ];

    /// Returns the size of an element in bytes.
    pub const fn size_bytes(self) -> usize {
        match self {
            ElementType::Bool | ElementType::I8 | ElementType::U8 => 1,
            ElementType::I16 | ElementType::U16 | ElementType::F16 | ElementType::BF16 => 2,
            ElementType::I32 | ElementType::U32 | ElementType::F32 => 4,
            ElementType::I64 | ElementType::U64 | ElementType::F64 => 8,
        }
    }

    /// Returns the type as a [`DType`]; `None` for truth values and types that it lacks.
    pub fn dtype(self) -> Option<DType> {
        DType::ALL.into_iter().find(|dtype| ElementType::from(*dtype) == self)
    }

    /// Returns PJRT's number of the type.
    pub(super) const fn buffer_type(self) -> BufferType {
        match self {
            ElementType::Bool => BufferType::PRED,
            ElementType::I8 => BufferType::S8,
            ElementType::I16 => BufferType::S16,
            ElementType::I32 => BufferType::S32,
            ElementType::I64 => BufferType::S64,
            ElementType::U8 => BufferType::U8,
            ElementType::U16 => BufferType::U16,
            ElementType::U32 => BufferType::U32,
            ElementType::U64 => BufferType::U64,
            ElementType::F16 => BufferType::F16,
            ElementType::F32 => BufferType::F32,
            ElementType::F64 => BufferType::F64,
            ElementType::BF16 => BufferType::BF16,
        }
    }

    /// Returns the type with PJRT's number; `None` for types that this crate does not know.
    pub(super) fn of(buffer_type: BufferType) -> Option<ElementType> {
        ElementType::ALL.into_iter().find(|known| known.buffer_type() == buffer_type)
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

/// Formats the type as programs in Rust write it: `f32`, `bool`.
impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ElementType::Bool => "bool",
            ElementType::I8 => "i8",
            ElementType::I16 => "i16",
            ElementType::I32 => "i32",
            ElementType::I64 => "i64",
            ElementType::U8 => "u8",
            ElementType::U16 => "u16",
            ElementType::U32 => "u32",
            ElementType::U64 => "u64",
            ElementType::F16 => "f16",
            ElementType::F32 => "f32",
            ElementType::F64 => "f64",
            ElementType::BF16 => "bf16",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_one_number_and_the_size_of_its_dtype() {
        for known in ElementType::ALL {
            assert_eq!(ElementType::of(known.buffer_type()), Some(known));
            if let Some(dtype) = known.dtype() {
                assert_eq!((dtype.size_bytes(), ElementType::from(dtype)), (known.size_bytes(), known));
            }
        }
        let without: Vec<_> = ElementType::ALL.into_iter().filter(|known| known.dtype().is_none()).collect();
        assert_eq!(without, [ElementType::Bool, ElementType::I16, ElementType::U16]);
        assert_eq!(ElementType::of(BufferType(29)), None);
    }
}
