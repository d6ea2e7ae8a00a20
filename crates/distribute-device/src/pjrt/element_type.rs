//! PJRT's numbers of element types.

use distribute_types::ElementType;
use pjrt_sys::BufferType;

/// Returns PJRT's number of a type.
pub(super) const fn buffer_type(element: ElementType) -> BufferType {
    match element {
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
pub(super) fn of_buffer(number: BufferType) -> Option<ElementType> {
    ElementType::ALL.into_iter().find(|known| buffer_type(*known) == number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_one_number() {
        for known in ElementType::ALL {
            assert_eq!(of_buffer(buffer_type(known)), Some(known));
        }
        assert_eq!(of_buffer(BufferType(29)), None);
    }
}
