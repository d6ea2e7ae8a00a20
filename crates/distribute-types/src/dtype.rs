//! Element types of buffers.

use std::fmt;
use std::str::FromStr;

use bytemuck::Pod;

/// The type of one element of a buffer.
///
/// # Examples
/// ```
/// use distribute_types::DType;
/// assert_eq!(DType::BF16.size_bytes(), 2);
/// assert_eq!("f32".parse::<DType>()?, DType::F32);
/// # Ok::<(), distribute_types::UnknownDType>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum DType {
    /// IEEE 754 binary32.
    F32 = 0,
    /// IEEE 754 binary64.
    F64 = 1,
    /// IEEE 754 binary16.
    F16 = 2,
    /// The upper half of a binary32.
    BF16 = 3,
    /// Signed 8-bit integer.
    I8 = 4,
    /// Unsigned 8-bit integer.
    U8 = 5,
    /// Signed 32-bit integer.
    I32 = 6,
    /// Unsigned 32-bit integer.
    U32 = 7,
    /// Signed 64-bit integer.
    I64 = 8,
    /// Unsigned 64-bit integer.
    U64 = 9,
}

impl DType {
    /// All data types, in the order of their codes.
    pub const ALL: [DType; 10] = [
        DType::F32,
        DType::F64,
        DType::F16,
        DType::BF16,
        DType::I8,
        DType::U8,
        DType::I32,
        DType::U32,
        DType::I64,
        DType::U64,
    ];

    /// Returns the size of one element in bytes.
    pub const fn size_bytes(self) -> usize {
        match self {
            DType::I8 | DType::U8 => 1,
            DType::F16 | DType::BF16 => 2,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F64 | DType::I64 | DType::U64 => 8,
        }
    }

    /// Returns whether elements are floating-point numbers.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F64 | DType::F16 | DType::BF16)
    }

    /// Returns the lower-case name: `f32`, `bf16`, `i64`.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "f32",
            DType::F64 => "f64",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::I8 => "i8",
            DType::U8 => "u8",
            DType::I32 => "i32",
            DType::U32 => "u32",
            DType::I64 => "i64",
            DType::U64 => "u64",
        }
    }

    /// Returns the code of this type on the wire.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Returns the type of a wire code, if there is one.
    pub fn from_code(code: u8) -> Option<DType> {
        DType::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for DType {
    type Err = UnknownDType;

    fn from_str(name: &str) -> Result<Self, UnknownDType> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| UnknownDType { given: name.to_owned() })
    }
}

/// The error of a name that is not a data type's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("data type {given:?} is not known; give one of f32, f64, f16, bf16, i8, u8, i32, u32, i64, u64")]
pub struct UnknownDType {
    /// The name.
    pub given: String,
}

/// A Rust type that can be an element of a buffer.
///
/// Sealed: the element types are those of [`DType`].
pub trait Element: Pod + Send + Sync + PartialOrd + fmt::Debug + Default + sealed::Sealed {
    /// The data type of `Self`.
    const DTYPE: DType;
}

mod sealed {
    /// Keeps [`super::Element`] sealed.
    pub trait Sealed {}
}

macro_rules! elements {
    ($($type:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $type {}
        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements! {
    f32 => F32,
    f64 => F64,
    half::f16 => F16,
    half::bf16 => BF16,
    i8 => I8,
    u8 => U8,
    i32 => I32,
    u32 => U32,
    i64 => I64,
    u64 => U64,
}

/// Evaluates an expression with a name bound to the Rust type of a [`DType`].
///
/// # Examples
/// ```
/// use distribute_types::{DType, with_dtype};
/// let size = with_dtype!(DType::BF16, T => size_of::<T>());
/// assert_eq!(size, 2);
/// ```
#[macro_export]
macro_rules! with_dtype {
    ($dtype:expr, $t:ident => $body:expr) => {
        $crate::with_dtype!(@arms $dtype, $t, $body,
            F32 f32, F64 f64, F16 $crate::f16, BF16 $crate::bf16, I8 i8, U8 u8, I32 i32, U32 u32, I64 i64, U64 u64)
    };
    (@arms $dtype:expr, $t:ident, $body:expr, $($variant:ident $type:ty),*) => {
        match $dtype {
            $($crate::DType::$variant => {
                type $t = $type;
                $body
            })*
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_round_trip() {
        for dtype in DType::ALL {
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
            assert_eq!(dtype.name().parse::<DType>().unwrap(), dtype);
        }
        assert_eq!(DType::from_code(10), None);
    }

    #[test]
    fn an_unknown_name_is_a_sentence() {
        let error = "float".parse::<DType>().unwrap_err().to_string();
        assert!(error.contains("\"float\"") && error.contains("f32"), "{error}");
    }
}
