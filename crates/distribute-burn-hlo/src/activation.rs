//! Lowering of `ActivationOperationIr`.

use burn_ir::{ActivationOperationIr, DimOpIr};
use distribute_hlo::{Builder, CompareOp, Reducer, Value};

use crate::{Lowering, Result, math};

pub(crate) fn lower(l: &mut Lowering<'_>, operation: &ActivationOperationIr) -> Result<()> {
    use ActivationOperationIr as Op;
    match operation {
        Op::Relu(op) => l.unary(&op.input, &op.out, |b, x| {
            let zero = math::like(b, x, 0)?;
            math::select_if(b, (x, CompareOp::Le, 0.0), zero, x)
        }),
        Op::ReluBackward(op) => l.binary((&op.lhs, &op.rhs), &op.out, |b, [output, grad]| {
            let zero = math::like(b, grad, 0)?;
            math::select_if(b, (output, CompareOp::Le, 0.0), zero, grad)
        }),
        Op::LeakyRelu(op) => {
            let slope: f64 = op.rhs.elem();
            l.unary(&op.lhs, &op.out, |b, x| {
                math::in_f32(b, [x], |b, [x]| {
                    let scaled = math::times(b, x, slope)?;
                    math::select_if(b, (x, CompareOp::Ge, 0.0), x, scaled)
                })
            })
        }
        Op::PRelu(op) => l.binary((&op.lhs, &op.rhs), &op.out, |b, [x, alpha]| {
            let scaled = b.multiply(alpha, x)?;
            math::select_if(b, (x, CompareOp::Ge, 0.0), x, scaled)
        }),
        Op::Gelu(op) => l.unary(&op.input, &op.out, |b, x| {
            math::in_f32(b, [x], |b, [x]| {
                let share = normal_share(b, x)?;
                b.multiply(x, share)
            })
        }),
        Op::GeluBackward(op) => backward(l, (&op.lhs, &op.rhs), &op.out, |b, x| {
            let share = normal_share(b, x)?;
            let square = b.multiply(x, x)?;
            let exponent = math::times(b, square, -0.5)?;
            let power = b.exp(exponent)?;
            let density = math::times(b, power, 1.0 / std::f64::consts::TAU.sqrt())?;
            let slope = b.multiply(x, density)?;
            b.add(share, slope)
        }),
        Op::Sigmoid(op) => l.unary(&op.input, &op.out, |b, x| b.logistic(x)),
        Op::SigmoidBackward(op) => backward(l, (&op.lhs, &op.rhs), &op.out, |b, output| {
            let minus = b.negate(output)?;
            let rest = math::plus(b, minus, 1.0)?;
            b.multiply(output, rest)
        }),
        Op::HardSigmoid(op) => {
            let (alpha, beta): (f64, f64) = (op.alpha.elem(), op.beta.elem());
            l.unary(&op.tensor, &op.out, |b, x| {
                math::in_f32(b, [x], |b, [x]| {
                    let scaled = math::times(b, x, alpha)?;
                    let moved = math::plus(b, scaled, beta)?;
                    let (zero, one) = (math::like(b, x, 0)?, math::like(b, x, 1)?);
                    let raised = math::select_if(b, (moved, CompareOp::Lt, 0.0), zero, moved)?;
                    math::select_if(b, (raised, CompareOp::Gt, 1.0), one, raised)
                })
            })
        }
        Op::LogSigmoid(op) => l.unary(&op.input, &op.out, |b, x| {
            math::in_f32(b, [x], |b, [x]| {
                // min(x, 0) − log(1 + e^−|x|) does not overflow.
                let (size, zero) = (b.abs(x)?, math::like(b, x, 0)?);
                let low = math::select_if(b, (x, CompareOp::Ge, 0.0), zero, x)?;
                let minus = b.negate(size)?;
                let power = b.exp(minus)?;
                let log = b.log1p(power)?;
                b.subtract(low, log)
            })
        }),
        Op::LogSigmoidBackward(op) => backward(l, (&op.lhs, &op.rhs), &op.out, |b, x| {
            let minus = b.negate(x)?;
            b.logistic(minus)
        }),
        Op::Softmax(op) => along(l, op, |b, x| softmax(b, x, op.axis)),
        Op::Softmin(op) => along(l, op, |b, x| {
            let minus = b.negate(x)?;
            softmax(b, minus, op.axis)
        }),
        Op::LogSoftmax(op) => along(l, op, |b, x| {
            let moved = below_largest(b, x, op.axis)?;
            let powers = b.exp(moved)?;
            let sum = b.reduce(powers, Reducer::Sum, &[op.axis])?;
            let log = b.log(sum)?;
            let log = across(b, log, moved, op.axis)?;
            b.subtract(moved, log)
        }),
    }
}

/// Lowers the gradient of an activation: the slope at the first operand times the second.
fn backward(
    l: &mut Lowering<'_>,
    operands: (&burn_ir::TensorIr, &burn_ir::TensorIr),
    out: &burn_ir::TensorIr,
    slope: impl FnOnce(&mut Builder, Value) -> distribute_hlo::Result<Value>,
) -> Result<()> {
    l.binary(operands, out, |b, operands| {
        math::in_f32(b, operands, |b, [x, grad]| {
            let slope = slope(b, x)?;
            b.multiply(grad, slope)
        })
    })
}

/// Lowers a function along a dimension.
fn along(
    l: &mut Lowering<'_>,
    op: &DimOpIr,
    function: impl FnOnce(&mut Builder, Value) -> distribute_hlo::Result<Value>,
) -> Result<()> {
    l.unary(&op.input, &op.out, |b, x| math::in_f32(b, [x], |b, [x]| function(b, x)))
}

/// Returns the part of the standard normal distribution below each element.
fn normal_share(b: &mut Builder, x: Value) -> distribute_hlo::Result<Value> {
    let root = math::like(b, x, std::f64::consts::SQRT_2)?;
    let scaled = b.divide(x, root)?;
    let erf = math::erf(b, scaled)?;
    let above = math::plus(b, erf, 1.0)?;
    math::times(b, above, 0.5)
}

fn softmax(b: &mut Builder, x: Value, axis: usize) -> distribute_hlo::Result<Value> {
    let moved = below_largest(b, x, axis)?;
    let powers = b.exp(moved)?;
    let sum = b.reduce(powers, Reducer::Sum, &[axis])?;
    let sum = across(b, sum, powers, axis)?;
    b.divide(powers, sum)
}

/// Subtracts the largest element along a dimension, so that no power overflows.
fn below_largest(b: &mut Builder, x: Value, axis: usize) -> distribute_hlo::Result<Value> {
    let largest = b.reduce(x, Reducer::Max, &[axis])?;
    let largest = across(b, largest, x, axis)?;
    b.subtract(x, largest)
}

/// Repeats the result of a reduction along its dimension, to the sizes of `like`.
fn across(b: &mut Builder, x: Value, like: Value, axis: usize) -> distribute_hlo::Result<Value> {
    let dims = b.type_of(like)?.dims.clone();
    let places: Vec<usize> = (0..dims.len()).filter(|&dim| dim != axis).collect();
    b.broadcast_in_dim(x, &dims, &places)
}
