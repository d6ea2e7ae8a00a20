//! Slices at places that are known.

use burn_backend::Slice;
use burn_ir::{SliceAssignOpIr, SliceOpIr};
use distribute_hlo::{Builder, ElementType, TensorType, Value};

use crate::{Lowering, Result};

/// The places that a slice names along a dimension, in ascending order.
struct Places {
    start: usize,
    count: usize,
    step: usize,
    /// Whether burn reads them from the last to the first.
    reversed: bool,
}

impl Places {
    /// Returns the places of a slice. With a negative step burn begins at the last element of the range.
    fn of(slice: Option<&Slice>, size: usize) -> Places {
        let Some(slice) = slice else { return Places { start: 0, count: size, step: 1, reversed: false } };
        let (range, step) = (slice.to_range(size), slice.step.unsigned_abs().max(1));
        let count = range.end.saturating_sub(range.start).div_ceil(step);
        let reversed = slice.step < 0;
        let start = match reversed {
            true => range.end.saturating_sub(1 + count.saturating_sub(1) * step),
            false => range.start,
        };
        Places { start: start.min(size), count, step, reversed }
    }

    /// Returns the place after the last one.
    fn limit(&self) -> usize {
        if self.count == 0 { self.start } else { self.start + (self.count - 1) * self.step + 1 }
    }
}

/// Returns the places along each dimension. Dimensions without a range are whole.
fn places(ranges: &[Slice], dims: &[usize]) -> Vec<Places> {
    dims.iter().enumerate().map(|(dim, &size)| Places::of(ranges.get(dim), size)).collect()
}

/// Reverses the dimensions that burn reads backwards.
fn reverse(b: &mut Builder, x: Value, places: &[Places]) -> distribute_hlo::Result<Value> {
    let axes: Vec<usize> = (0..places.len()).filter(|&dim| places[dim].reversed).collect();
    if axes.is_empty() { Ok(x) } else { b.reverse(x, &axes) }
}

pub(super) fn slice(l: &mut Lowering<'_>, op: &SliceOpIr) -> Result<()> {
    let places = places(&op.ranges, op.tensor.shape.as_slice());
    let starts: Vec<usize> = places.iter().map(|place| place.start).collect();
    let limits: Vec<usize> = places.iter().map(Places::limit).collect();
    let steps: Vec<usize> = places.iter().map(|place| place.step).collect();
    l.unary(&op.tensor, &op.out, |b, x| {
        let taken = b.slice(x, &starts, &limits, &steps)?;
        reverse(b, taken, &places)
    })
}

pub(super) fn slice_assign(l: &mut Lowering<'_>, op: &SliceAssignOpIr) -> Result<()> {
    let dims = op.tensor.shape.as_slice();
    let places = places(&op.ranges, dims);
    let sizes: Vec<usize> = places.iter().map(|place| place.count).collect();
    let (tensor, value) = (l.operand(&op.tensor)?, l.operand(&op.value)?);
    if sizes.contains(&0) {
        return l.set(&op.out, tensor);
    }
    let result = l.build(|b| {
        let value = b.broadcast(value, &sizes)?;
        let value = reverse(b, value, &places)?;
        if places.iter().all(|place| place.step == 1) {
            let mut starts = Vec::with_capacity(places.len());
            for place in &places {
                starts.push(b.scalar(signed(place.start))?);
            }
            return b.dynamic_update_slice(tensor, value, &starts);
        }
        // The elements between the places are kept.
        let yes = b.full(TensorType::new(ElementType::Bool, sizes.clone()), true)?;
        let (spread, mask) = (spread(b, value, &places, dims)?, spread(b, yes, &places, dims)?);
        b.select(mask, spread, tensor)
    })?;
    l.set(&op.out, result)
}

/// Moves elements to their places in a tensor of these sizes, with 0 or false between them.
fn spread(b: &mut Builder, x: Value, places: &[Places], dims: &[usize]) -> distribute_hlo::Result<Value> {
    let ty = b.type_of(x)?.with_dims([]);
    let zero = if ty.element == ElementType::Bool { b.full(ty, false)? } else { b.full(ty, 0)? };
    let low: Vec<i64> = places.iter().map(|place| signed(place.start)).collect();
    let high: Vec<i64> = places.iter().zip(dims).map(|(place, &size)| signed(size) - signed(place.limit())).collect();
    let gaps: Vec<usize> = places.iter().map(|place| place.step - 1).collect();
    b.pad(x, zero, &low, &high, &gaps)
}

fn signed(size: usize) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}
