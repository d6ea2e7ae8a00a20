//! One element, whatever its type.

use distribute_hlo::ElementType;
use distribute_types::{bf16_from_f64, f16_from_f64};

/// An element, in a type that holds all values of all element types.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Num {
    Bool(bool),
    Int(i128),
    Float(f64),
}

impl Num {
    /// Returns the element as a floating-point number.
    pub(crate) fn float(self) -> f64 {
        match self {
            Num::Bool(value) => f64::from(u8::from(value)),
            Num::Int(value) => value as f64,
            Num::Float(value) => value,
        }
    }

    /// Returns the element as an integer.
    pub(crate) fn int(self) -> i128 {
        match self {
            Num::Bool(value) => i128::from(value),
            Num::Int(value) => value,
            Num::Float(value) => value as i128,
        }
    }

    /// Returns whether the element is not 0.
    pub(crate) fn truth(self) -> bool {
        match self {
            Num::Bool(value) => value,
            Num::Int(value) => value != 0,
            Num::Float(value) => value != 0.0,
        }
    }

    /// Rounds, or wraps around, to a value of the type.
    pub(crate) fn rounded(self, element: ElementType) -> Num {
        match self {
            Num::Bool(_) => self,
            Num::Float(value) => Num::Float(round(value, element)),
            Num::Int(value) => Num::Int(wrap(value, element)),
        }
    }

    /// Converts to another type.
    pub(crate) fn converted(self, element: ElementType) -> Num {
        if element == ElementType::Bool {
            return Num::Bool(self.truth());
        }
        match (self, element.is_float()) {
            // Rounded once, not by way of f64.
            (Num::Int(value), true) if element == ElementType::F32 => Num::Float(f64::from(value as f32)),
            (value, true) => Num::Float(round(value.float(), element)),
            (Num::Float(value), false) => {
                let (low, high) = limits(element);
                Num::Int((value as i128).clamp(low, high))
            }
            (value, false) => Num::Int(wrap(value.int(), element)),
        }
    }
}

/// Rounds to a floating-point type.
fn round(value: f64, element: ElementType) -> f64 {
    match element {
        ElementType::F32 => f64::from(value as f32),
        ElementType::F16 => f16_from_f64(value).to_f64(),
        ElementType::BF16 => bf16_from_f64(value).to_f64(),
        _ => value,
    }
}

/// Returns the smallest and the largest integer of a type.
fn limits(element: ElementType) -> (i128, i128) {
    let values = 1i128 << element.bits();
    if element.is_signed_integer() { (-values / 2, values / 2 - 1) } else { (0, values - 1) }
}

/// Keeps the lowest bits of an integer.
fn wrap(value: i128, element: ElementType) -> i128 {
    let (_, high) = limits(element);
    let values = 1i128 << element.bits();
    let low_bits = value.rem_euclid(values);
    if low_bits > high { low_bits - values } else { low_bits }
}

/// Returns the bits of an integer as an unsigned one.
pub(crate) fn unsigned(value: i128, element: ElementType) -> i128 {
    value.rem_euclid(1i128 << element.bits())
}
