//! Lowering of `IntOperationIr`.

use burn_ir::IntOperationIr;
use distribute_hlo::{BinaryOp, Builder, Value};

use crate::{Lowering, Result, contraction, math};

pub(crate) fn lower(l: &mut Lowering<'_>, operation: &IntOperationIr) -> Result<()> {
    use IntOperationIr as Op;
    let binary = match operation {
        Op::BitwiseAnd(_) | Op::BitwiseAndScalar(_) => BinaryOp::And,
        Op::BitwiseOr(_) | Op::BitwiseOrScalar(_) => BinaryOp::Or,
        Op::BitwiseXor(_) | Op::BitwiseXorScalar(_) => BinaryOp::Xor,
        Op::BitwiseLeftShift(_) | Op::BitwiseLeftShiftScalar(_) => BinaryOp::ShiftLeft,
        _ => BinaryOp::ShiftRightArithmetic,
    };
    match operation {
        Op::IntoFloat(op) => {
            let element = l.element(&op.out)?;
            l.unary(&op.input, &op.out, |b, x| math::convert(b, x, element))
        }
        Op::BitwiseNot(op) => l.unary(&op.input, &op.out, |b, x| b.not(x)),
        Op::BitwiseAnd(op) | Op::BitwiseOr(op) | Op::BitwiseXor(op) => {
            l.binary((&op.lhs, &op.rhs), &op.out, |b, [x, y]| b.binary(binary, x, y))
        }
        Op::BitwiseAndScalar(op) | Op::BitwiseOrScalar(op) | Op::BitwiseXorScalar(op) => {
            l.with_scalar(op, |b, [x, y]| b.binary(binary, x, y))
        }
        Op::BitwiseLeftShift(op) | Op::BitwiseRightShift(op) => {
            l.binary((&op.lhs, &op.rhs), &op.out, |b, operands| shift(b, binary, operands))
        }
        Op::BitwiseLeftShiftScalar(op) | Op::BitwiseRightShiftScalar(op) => {
            l.with_scalar(op, |b, operands| shift(b, binary, operands))
        }
        Op::Matmul(op) => contraction::matmul(l, op),
    }
}

/// Moves bits by as many places as the lowest bits of `y` say, as burn does on CPUs: 33 of i32 are 1.
fn shift(b: &mut Builder, op: BinaryOp, [x, y]: [Value; 2]) -> distribute_hlo::Result<Value> {
    let element = math::element_of(b, x)?;
    let last = math::like(b, y, i64::from(element.bits()) - 1)?;
    let places = b.and(y, last)?;
    match op {
        BinaryOp::ShiftRightArithmetic if element.is_unsigned_integer() => b.shift_right_logical(x, places),
        op => b.binary(op, x, places),
    }
}
