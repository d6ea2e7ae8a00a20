//! Types of elements.

use burn_backend::DType;
use distribute_hlo::ElementType;

/// Returns the type of a program's elements for one of burn's; `None` for quantized numbers. Booleans of every width
/// are of one bit in a program.
pub fn element_type(dtype: DType) -> Option<ElementType> {
    Some(match dtype {
        DType::F64 => ElementType::F64,
        DType::F32 | DType::Flex32 => ElementType::F32,
        DType::F16 => ElementType::F16,
        DType::BF16 => ElementType::BF16,
        DType::I64 => ElementType::I64,
        DType::I32 => ElementType::I32,
        DType::I16 => ElementType::I16,
        DType::I8 => ElementType::I8,
        DType::U64 => ElementType::U64,
        DType::U32 => ElementType::U32,
        DType::U16 => ElementType::U16,
        DType::U8 => ElementType::U8,
        DType::Bool(_) => ElementType::Bool,
        DType::QFloat(_) => return None,
    })
}
