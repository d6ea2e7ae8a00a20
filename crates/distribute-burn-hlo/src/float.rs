//! Lowering of `FloatOperationIr`.

use burn_ir::{FloatOperationIr, UnaryOpIr};
use distribute_hlo::{Builder, CompareOp, Value};

use crate::{Lowering, Result, contraction, math, random};

pub(crate) fn lower(l: &mut Lowering<'_>, operation: &FloatOperationIr) -> Result<()> {
    use FloatOperationIr as Op;
    match operation {
        Op::Exp(op) => l.unary(&op.input, &op.out, |b, x| b.exp(x)),
        Op::Log(op) => l.unary(&op.input, &op.out, |b, x| b.log(x)),
        Op::Log1p(op) => l.unary(&op.input, &op.out, |b, x| b.log1p(x)),
        Op::Sqrt(op) => l.unary(&op.input, &op.out, |b, x| b.sqrt(x)),
        Op::Cos(op) => l.unary(&op.input, &op.out, |b, x| b.cosine(x)),
        Op::Sin(op) => l.unary(&op.input, &op.out, |b, x| b.sine(x)),
        Op::Tan(op) => l.unary(&op.input, &op.out, |b, x| b.tan(x)),
        Op::Tanh(op) => l.unary(&op.input, &op.out, |b, x| b.tanh(x)),
        Op::Round(op) => l.unary(&op.input, &op.out, |b, x| b.round_nearest_even(x)),
        Op::Floor(op) => l.unary(&op.input, &op.out, |b, x| b.floor(x)),
        Op::Ceil(op) => l.unary(&op.input, &op.out, |b, x| b.ceil(x)),
        Op::Trunc(op) => l.unary(&op.input, &op.out, math::trunc),
        Op::Recip(op) => l.unary(&op.input, &op.out, math::recip),
        Op::IsNan(op) => l.unary(&op.input, &op.out, math::is_nan),
        Op::IsInf(op) => l.unary(&op.input, &op.out, |b, x| {
            let size = b.abs(x)?;
            math::compare_with(b, CompareOp::Eq, size, f64::INFINITY)
        }),
        Op::Erf(op) => wide(l, op, math::erf),
        Op::Cosh(op) => wide(l, op, math::cosh),
        Op::Sinh(op) => wide(l, op, math::sinh),
        Op::ArcCos(op) => wide(l, op, math::acos),
        Op::ArcCosh(op) => wide(l, op, math::acosh),
        Op::ArcSin(op) => wide(l, op, math::asin),
        Op::ArcSinh(op) => wide(l, op, math::asinh),
        Op::ArcTanh(op) => wide(l, op, math::atanh),
        Op::ArcTan(op) => l.unary(&op.input, &op.out, |b, x| {
            let one = math::like(b, x, 1)?;
            b.atan2(x, one)
        }),
        Op::ArcTan2(op) => l.binary((&op.lhs, &op.rhs), &op.out, |b, [y, x]| b.atan2(y, x)),
        Op::Powf(op) => l.binary((&op.lhs, &op.rhs), &op.out, |b, [x, y]| b.power(x, y)),
        Op::Hypot(op) => l.binary((&op.lhs, &op.rhs), &op.out, |b, operands| {
            math::in_f32(b, operands, |b, [x, y]| math::hypot(b, x, y))
        }),
        Op::PowfScalar(op) => {
            let exponent: f64 = op.rhs.elem();
            l.unary(&op.lhs, &op.out, |b, x| math::in_f32(b, [x], |b, [x]| math::power_scalar(b, x, exponent)))
        }
        Op::IntoInt(op) => {
            let element = l.element(&op.out)?;
            l.unary(&op.input, &op.out, |b, x| math::convert(b, x, element))
        }
        Op::Matmul(op) => contraction::matmul(l, op),
        Op::Cross(op) => contraction::cross(l, op),
        Op::Random(op) => random::lower(l, op),
        Op::Quantize(_) | Op::Dequantize(_) => {
            Err(l.unsupported("programs have no quantized numbers; use f16 or bf16"))
        }
        Op::GridSample2d(_) => {
            Err(l.unsupported("elements between four pixels have no operation; use gather and a weighted sum"))
        }
    }
}

/// Lowers a function of several operations, of which only the result is rounded to 16 bits.
fn wide(
    l: &mut Lowering<'_>,
    op: &UnaryOpIr,
    function: impl FnOnce(&mut Builder, Value) -> distribute_hlo::Result<Value>,
) -> Result<()> {
    l.unary(&op.input, &op.out, |b, x| math::in_f32(b, [x], |b, [x]| function(b, x)))
}
