//! Functions of elements.

use distribute_hlo::{BinaryOp, CompareOp, ElementType, TensorType, UnaryOp};

use crate::Tensor;
use crate::number::{Num, unsigned};

/// Applies a function to each element.
pub(crate) fn unary(op: UnaryOp, x: &Tensor) -> Tensor {
    let element = x.ty().element;
    let result = if op == UnaryOp::IsFinite { ElementType::Bool } else { element };
    Tensor::generate(x.ty().with_element(result), |index| match x.at(index) {
        Num::Float(value) => float_unary(op, value),
        Num::Int(value) => Num::Int(match op {
            UnaryOp::Abs => value.abs(),
            UnaryOp::Sign => value.signum(),
            UnaryOp::Not => !value,
            _ => -value,
        }),
        Num::Bool(value) => Num::Bool(!value),
    })
}

/// Computes a function of a floating-point number.
fn float_unary(op: UnaryOp, x: f64) -> Num {
    Num::Float(match op {
        UnaryOp::Abs => x.abs(),
        UnaryOp::Negate | UnaryOp::Not => -x,
        UnaryOp::Exp => x.exp(),
        UnaryOp::ExpMinusOne => x.exp_m1(),
        UnaryOp::Log => x.ln(),
        UnaryOp::LogPlusOne => x.ln_1p(),
        UnaryOp::Sqrt => x.sqrt(),
        UnaryOp::Rsqrt => 1.0 / x.sqrt(),
        UnaryOp::Cbrt => x.cbrt(),
        UnaryOp::Sine => x.sin(),
        UnaryOp::Cosine => x.cos(),
        UnaryOp::Tan => x.tan(),
        UnaryOp::Tanh => x.tanh(),
        UnaryOp::Logistic => 1.0 / (1.0 + (-x).exp()),
        UnaryOp::Floor => x.floor(),
        UnaryOp::Ceil => x.ceil(),
        UnaryOp::RoundNearestEven => x.round_ties_even(),
        UnaryOp::RoundNearestAwayFromZero => x.round(),
        UnaryOp::Sign if x == 0.0 || x.is_nan() => x,
        UnaryOp::Sign => x.signum(),
        UnaryOp::IsFinite => return Num::Bool(x.is_finite()),
    })
}

/// Applies a function to each pair of elements.
pub(crate) fn binary(op: BinaryOp, x: &Tensor, y: &Tensor) -> Tensor {
    let element = x.ty().element;
    Tensor::generate(x.ty().clone(), |index| combine(op, element, x.at(index), y.at(index)))
}

/// Computes a function of two elements of one type. The result is not rounded yet.
pub(crate) fn combine(op: BinaryOp, element: ElementType, x: Num, y: Num) -> Num {
    match (x, y) {
        (Num::Float(x), Num::Float(y)) => Num::Float(float_binary(op, x, y)),
        (Num::Bool(x), Num::Bool(y)) => Num::Bool(match op {
            BinaryOp::And | BinaryOp::Minimum => x && y,
            BinaryOp::Xor => x != y,
            _ => x || y,
        }),
        (x, y) => Num::Int(int_binary(op, element, x.int(), y.int())),
    }
}

fn float_binary(op: BinaryOp, x: f64, y: f64) -> f64 {
    match op {
        BinaryOp::Add => x + y,
        BinaryOp::Subtract => x - y,
        BinaryOp::Multiply => x * y,
        BinaryOp::Divide => x / y,
        BinaryOp::Remainder => x % y,
        BinaryOp::Power => x.powf(y),
        BinaryOp::Atan2 => x.atan2(y),
        BinaryOp::Maximum | BinaryOp::Minimum if x.is_nan() || y.is_nan() => f64::NAN,
        BinaryOp::Maximum => x.max(y),
        BinaryOp::Minimum => x.min(y),
        // The builder lets no floating-point number reach functions of bits.
        _ => f64::NAN,
    }
}

fn int_binary(op: BinaryOp, element: ElementType, x: i128, y: i128) -> i128 {
    let bits = i128::from(element.bits());
    let (ux, uy) = (unsigned(x, element), unsigned(y, element));
    match op {
        BinaryOp::Add => x.wrapping_add(y),
        BinaryOp::Subtract => x.wrapping_sub(y),
        BinaryOp::Multiply => x.wrapping_mul(y),
        // XLA's choice where the specification leaves it open.
        BinaryOp::Divide => {
            if y == 0 {
                -1
            } else {
                x / y
            }
        }
        BinaryOp::Remainder => {
            if y == 0 {
                x
            } else {
                x % y
            }
        }
        BinaryOp::Power => power(x, y),
        BinaryOp::Maximum => x.max(y),
        BinaryOp::Minimum => x.min(y),
        BinaryOp::And => x & y,
        BinaryOp::Or => x | y,
        BinaryOp::Xor => x ^ y,
        BinaryOp::ShiftLeft => {
            if uy >= bits {
                0
            } else {
                ux << uy
            }
        }
        BinaryOp::ShiftRightLogical => {
            if uy >= bits {
                0
            } else {
                ux >> uy
            }
        }
        BinaryOp::ShiftRightArithmetic => {
            // The sign is the highest bit, also of types that call themselves unsigned.
            let signed = if ux >> (bits - 1) == 1 { ux - (1 << bits) } else { ux };
            signed >> uy.min(bits - 1)
        }
        // The builder lets no integer reach it.
        BinaryOp::Atan2 => 0,
    }
}

/// Returns a power whose lowest 64 bits are right.
fn power(x: i128, y: i128) -> i128 {
    if y < 0 {
        return match x {
            1 => 1,
            -1 => {
                if y % 2 == 0 {
                    1
                } else {
                    -1
                }
            }
            _ => 0,
        };
    }
    let (mut result, mut square, mut rest) = (1i128, x, y);
    while rest > 0 {
        if rest % 2 == 1 {
            result = result.wrapping_mul(square);
        }
        square = square.wrapping_mul(square);
        rest /= 2;
    }
    result
}

/// Compares two elements.
pub(crate) fn compared(relation: CompareOp, total_order: bool, x: Num, y: Num) -> bool {
    use std::cmp::Ordering::{Equal, Greater, Less};
    let order = match (x, y) {
        (Num::Float(x), Num::Float(y)) if total_order => Some(x.total_cmp(&y)),
        (Num::Float(x), Num::Float(y)) => x.partial_cmp(&y),
        (x, y) => Some(x.int().cmp(&y.int())),
    };
    match relation {
        CompareOp::Eq => order == Some(Equal),
        CompareOp::Ne => order != Some(Equal),
        CompareOp::Lt => order == Some(Less),
        CompareOp::Le => matches!(order, Some(Less | Equal)),
        CompareOp::Gt => order == Some(Greater),
        CompareOp::Ge => matches!(order, Some(Greater | Equal)),
    }
}

/// Compares each pair of elements.
pub(crate) fn compare(relation: CompareOp, total_order: bool, x: &Tensor, y: &Tensor) -> Tensor {
    Tensor::generate(x.ty().with_element(ElementType::Bool), |index| {
        Num::Bool(compared(relation, total_order, x.at(index), y.at(index)))
    })
}

/// Returns an element, or the only one of a scalar.
fn at_or_scalar(x: &Tensor, index: &[usize]) -> Num {
    if x.dims().is_empty() { x.number(0) } else { x.at(index) }
}

/// Selects elements.
pub(crate) fn select(pred: &Tensor, x: &Tensor, y: &Tensor) -> Tensor {
    Tensor::generate(x.ty().clone(), |index| if at_or_scalar(pred, index).truth() { x.at(index) } else { y.at(index) })
}

/// Limits elements.
pub(crate) fn clamp(low: &Tensor, x: &Tensor, high: &Tensor) -> Tensor {
    let element = x.ty().element;
    Tensor::generate(x.ty().clone(), |index| {
        let raised = combine(BinaryOp::Maximum, element, x.at(index), at_or_scalar(low, index));
        combine(BinaryOp::Minimum, element, raised, at_or_scalar(high, index))
    })
}

/// Converts elements.
pub(crate) fn convert(x: &Tensor, element: ElementType) -> Tensor {
    Tensor::generate(x.ty().with_element(element), |index| x.at(index).converted(element))
}

/// Reads the same bytes as another type.
pub(crate) fn bitcast(x: &Tensor, ty: &TensorType) -> Tensor {
    Tensor::from_bytes(ty.clone(), &x.to_bytes())
}
