//! Lowering of `BoolOperationIr`.

use burn_ir::BoolOperationIr;

use crate::{Lowering, Result, math};

pub(crate) fn lower(l: &mut Lowering<'_>, operation: &BoolOperationIr) -> Result<()> {
    match operation {
        BoolOperationIr::IntoFloat(op) | BoolOperationIr::IntoInt(op) => {
            let element = l.element(&op.out)?;
            l.unary(&op.input, &op.out, |b, x| math::convert(b, x, element))
        }
        BoolOperationIr::Not(op) => l.unary(&op.input, &op.out, |b, x| b.not(x)),
        BoolOperationIr::And(op) => l.binary((&op.lhs, &op.rhs), &op.out, |b, [x, y]| b.and(x, y)),
        BoolOperationIr::Or(op) => l.binary((&op.lhs, &op.rhs), &op.out, |b, [x, y]| b.or(x, y)),
        BoolOperationIr::Xor(op) => l.binary((&op.lhs, &op.rhs), &op.out, |b, [x, y]| b.xor(x, y)),
    }
}
