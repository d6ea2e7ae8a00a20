//! Rust types of elements.

use distribute_types::{ElementType, bf16, f16};

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
