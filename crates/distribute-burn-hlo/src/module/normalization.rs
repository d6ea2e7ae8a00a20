//! Batch and layer normalization. Numbers of 16 bits are computed in f32 and rounded once.

use burn_ir::{BatchNormOpIr, LayerNormOpIr, ScalarIr};
use distribute_hlo::{Builder, Reducer, Value};

use super::numbers::{narrow, number, sum_element, widen};
use crate::{Lowering, Result};

/// (x − mean) / √(variance + ε) · gamma + beta, for statistics of each channel.
pub(super) fn batch_norm(l: &mut Lowering<'_>, op: &BatchNormOpIr) -> Result<()> {
    let ty = l.type_of(&op.out)?;
    let operands = [&op.x, &op.gamma, &op.beta, &op.mean, &op.variance];
    let mut values = Vec::with_capacity(operands.len());
    for operand in operands {
        values.push(l.operand(operand)?);
    }
    let value = l.build(|b| {
        let x = widen(b, values[0])?;
        let mut channels = Vec::with_capacity(4);
        for (place, &value) in values[1..].iter().enumerate() {
            let mut value = widen(b, value)?;
            if place == 3 {
                value = shifted_root(b, value, op.epsilon)?;
            }
            channels.push(b.broadcast_in_dim(value, &ty.dims, &[1])?);
        }
        let centered = b.subtract(x, channels[2])?;
        let normalized = b.divide(centered, channels[3])?;
        let scaled = b.multiply(normalized, channels[0])?;
        let shifted = b.add(scaled, channels[1])?;
        narrow(b, shifted, ty.element)
    })?;
    l.set(&op.out, value)
}

/// (x − mean) / √(variance + ε) · gamma + beta, for statistics over the last dimension.
pub(super) fn layer_norm(l: &mut Lowering<'_>, op: &LayerNormOpIr) -> Result<()> {
    let ty = l.type_of(&op.out)?;
    let Some(last) = ty.ndim().checked_sub(1) else {
        return Err(l.unsupported("the input is a scalar; pass one of at least one dimension"));
    };
    let (x, gamma) = (l.operand(&op.input)?, l.operand(&op.gamma)?);
    let beta = op.beta.as_ref().map(|beta| l.operand(beta)).transpose()?;
    let value = l.build(|b| {
        let x = widen(b, x)?;
        let leading: Vec<usize> = (0..last).collect();
        let rows = |b: &mut Builder, value| b.broadcast_in_dim(value, &ty.dims, &leading);
        let mean = mean_of_last(b, x)?;
        let mean = rows(b, mean)?;
        let centered = b.subtract(x, mean)?;
        let squares = b.multiply(centered, centered)?;
        let variance = mean_of_last(b, squares)?;
        let deviation = shifted_root(b, variance, op.epsilon)?;
        let deviation = rows(b, deviation)?;
        let mut result = b.divide(centered, deviation)?;
        let gamma = widen(b, gamma)?;
        let gamma = b.broadcast_in_dim(gamma, &ty.dims, &[last])?;
        result = b.multiply(result, gamma)?;
        if let Some(beta) = beta {
            let beta = widen(b, beta)?;
            let beta = b.broadcast_in_dim(beta, &ty.dims, &[last])?;
            result = b.add(result, beta)?;
        }
        narrow(b, result, ty.element)
    })?;
    l.set(&op.out, value)
}

/// √(variance + ε).
fn shifted_root(b: &mut Builder, variance: Value, epsilon: ScalarIr) -> distribute_hlo::Result<Value> {
    let ty = b.type_of(variance)?.clone();
    let epsilon = b.full(ty.with_element(sum_element(ty.element)), number(epsilon))?;
    let sum = b.add(variance, epsilon)?;
    b.sqrt(sum)
}

/// The means over the last dimension, without it.
fn mean_of_last(b: &mut Builder, x: Value) -> distribute_hlo::Result<Value> {
    let ty = b.type_of(x)?.clone();
    let last = ty.ndim() - 1;
    let sum = b.reduce(x, Reducer::Sum, &[last])?;
    let count = b.full(ty.with_dims(&ty.dims[..last]), ty.dims[last] as f64)?;
    b.divide(sum, count)
}
