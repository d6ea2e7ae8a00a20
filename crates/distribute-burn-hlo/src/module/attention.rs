//! Attention: softmax(query · keyᵀ · scale) · value. Numbers of 16 bits are computed in f32 and rounded once.

use burn_ir::AttentionOpIr;
use distribute_hlo::{Builder, CompareOp, DotDimensions, ElementType, Reducer, TensorType, Value};

use super::numbers::{narrow, number, sum_element, widen};
use crate::{Lowering, Result};

/// Scores are scaled, capped, masked, masked by causality, and get their bias, in this order. A query whose keys are
/// all masked has a result of 0.
pub(super) fn attention(l: &mut Lowering<'_>, op: &AttentionOpIr) -> Result<()> {
    let [query, key, value] = [&op.query, &op.key, &op.value];
    let ([q, k, v], ty) = ([l.type_of(query)?, l.type_of(key)?, l.type_of(value)?], l.type_of(&op.out)?);
    let fits = q.ndim() == 4 && k.ndim() == 4 && v.ndim() == 4 && k.dims[1] == v.dims[1] && k.dims[1] > 0;
    if !fits || !q.dims[1].is_multiple_of(k.dims[1]) || q.dims[3] == 0 {
        return Err(l.unsupported(&format!(
            "query, key and value are {}, {} and {}; pass [examples, heads, places, features] with features, and as \
             many heads of the query as of key and value, or a multiple of them",
            q.short(),
            k.short(),
            v.short()
        )));
    }
    let softcap = op.options.softcap.map(number);
    if let Some(cap) = softcap.filter(|cap| cap.is_nan() || *cap <= 0.0) {
        return Err(l.unsupported(&format!("softcap is {cap}; pass a number above 0")));
    }
    let scale = op.options.scale.map_or_else(|| 1.0 / (q.dims[3] as f64).sqrt(), number);
    let operands = [l.operand(query)?, l.operand(key)?, l.operand(value)?];
    let mask = op.mask.as_ref().map(|mask| l.operand(mask)).transpose()?;
    let bias = op.attn_bias.as_ref().map(|bias| l.operand(bias)).transpose()?;
    let result = l.build(|b| {
        let [query, key, value] = operands;
        let (query, key) = (widen(b, query)?, widen(b, key)?);
        let heads = q.dims[1];
        let key = repeat_heads(b, key, heads)?;
        let value = widen(b, value)?;
        let value = repeat_heads(b, value, heads)?;
        let mut scores = product(b, query, key, 3)?;
        scores = times(b, scores, scale)?;
        if let Some(cap) = softcap {
            let full = b.type_of(scores)?.clone();
            let limit = b.full(full, cap)?;
            let quotient = b.divide(scores, limit)?;
            let bounded = b.tanh(quotient)?;
            scores = b.multiply(bounded, limit)?;
        }
        if let Some(mask) = mask {
            scores = hide(b, scores, mask)?;
        }
        if op.options.is_causal {
            let later = later(b, q.dims[2], k.dims[2])?;
            scores = hide(b, scores, later)?;
        }
        if let Some(bias) = bias {
            let dims = b.type_of(scores)?.dims.clone();
            let bias = widen(b, bias)?;
            let bias = b.broadcast(bias, &dims)?;
            scores = b.add(scores, bias)?;
        }
        let weights = softmax(b, scores)?;
        let sums = product(b, weights, value, 2)?;
        narrow(b, sums, ty.element)
    })?;
    l.set(&op.out, result)
}

/// Multiplies matrices of heads: the last dimension of `lhs` by a dimension of `rhs`.
fn product(b: &mut Builder, lhs: Value, rhs: Value, contracting: usize) -> distribute_hlo::Result<Value> {
    let dimensions = DotDimensions {
        lhs_batching: vec![0, 1],
        rhs_batching: vec![0, 1],
        lhs_contracting: vec![3],
        rhs_contracting: vec![contracting],
        element: None,
    };
    b.dot_general(lhs, rhs, &dimensions)
}

/// Repeats each head of keys or values for the heads of the query that share it.
fn repeat_heads(b: &mut Builder, x: Value, heads: usize) -> distribute_hlo::Result<Value> {
    let ty = b.type_of(x)?.clone();
    if ty.dims[1] == heads {
        return Ok(x);
    }
    let full = [ty.dims[0], ty.dims[1], heads / ty.dims[1], ty.dims[2], ty.dims[3]];
    let repeated = b.broadcast_in_dim(x, &full, &[0, 1, 3, 4])?;
    b.reshape(repeated, &[ty.dims[0], heads, ty.dims[2], ty.dims[3]])
}

/// Multiplies by a number.
fn times(b: &mut Builder, x: Value, factor: f64) -> distribute_hlo::Result<Value> {
    let ty = b.type_of(x)?.clone();
    let factor = b.full(ty, factor)?;
    b.multiply(x, factor)
}

/// Replaces scores by −∞ where a mask, which is broadcast, is true.
fn hide(b: &mut Builder, scores: Value, mask: Value) -> distribute_hlo::Result<Value> {
    let ty = b.type_of(scores)?.clone();
    let mask = b.broadcast(mask, &ty.dims)?;
    let low = b.full(ty, f64::NEG_INFINITY)?;
    b.select(mask, low, scores)
}

/// Returns whether a key comes after a query, where the last of both belong together.
fn later(b: &mut Builder, queries: usize, keys: usize) -> distribute_hlo::Result<Value> {
    let ty = TensorType::new(ElementType::I64, [queries, keys]);
    let rows = b.iota(ty.clone(), 0)?;
    let columns = b.iota(ty.clone(), 1)?;
    let offset = b.full(ty, super::numbers::signed(keys) - super::numbers::signed(queries))?;
    let last = b.add(rows, offset)?;
    b.compare(CompareOp::Lt, last, columns)
}

/// The softmax over the last dimension; zeros for a row of −∞.
fn softmax(b: &mut Builder, scores: Value) -> distribute_hlo::Result<Value> {
    let ty = b.type_of(scores)?.clone();
    let element = sum_element(ty.element);
    let (lowest, smallest) = match element {
        ElementType::F64 => (f64::MIN, f64::MIN_POSITIVE),
        _ => (f64::from(f32::MIN), f64::from(f32::MIN_POSITIVE)),
    };
    let at_least = |b: &mut Builder, x: Value, least: f64| {
        let ty = b.type_of(x)?.clone();
        let least = b.full(ty, least)?;
        b.maximum(x, least)
    };
    let largest = b.reduce(scores, Reducer::Max, &[3])?;
    let largest = at_least(b, largest, lowest)?;
    let largest = b.broadcast_in_dim(largest, &ty.dims, &[0, 1, 2])?;
    let shifted = b.subtract(scores, largest)?;
    let powers = b.exp(shifted)?;
    let sum = b.reduce(powers, Reducer::Sum, &[3])?;
    let sum = at_least(b, sum, smallest)?;
    let sum = b.broadcast_in_dim(sum, &ty.dims, &[0, 1, 2])?;
    b.divide(powers, sum)
}
