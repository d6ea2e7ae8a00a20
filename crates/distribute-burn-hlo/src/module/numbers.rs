//! Numbers and types that lowerings of modules share.

use burn_ir::ScalarIr;
use distribute_hlo::{Builder, ElementType, Value};

/// Returns the type in which numbers are added: f32 for those of 16 bits.
pub(crate) fn sum_element(element: ElementType) -> ElementType {
    match element {
        ElementType::F16 | ElementType::BF16 => ElementType::F32,
        other => other,
    }
}

/// Converts numbers to the type in which they are added.
pub(super) fn widen(b: &mut Builder, value: Value) -> distribute_hlo::Result<Value> {
    let element = b.type_of(value)?.element;
    narrow(b, value, sum_element(element))
}

/// Converts numbers, if they are of another type.
pub(super) fn narrow(b: &mut Builder, value: Value, element: ElementType) -> distribute_hlo::Result<Value> {
    if b.type_of(value)?.element == element {
        return Ok(value);
    }
    b.convert(value, element)
}

/// Returns the dimensions below `ndim` that a list does not name.
pub(super) fn all_but(ndim: usize, kept: &[usize]) -> Vec<usize> {
    (0..ndim).filter(|dim| !kept.contains(dim)).collect()
}

/// Returns a size as a signed number. The builder refuses sizes that do not fit.
pub(super) fn signed(size: usize) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

/// Returns an option that is a number.
pub(super) fn number(scalar: ScalarIr) -> f64 {
    scalar.elem()
}
