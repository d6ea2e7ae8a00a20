//! Sums over ranges of one dimension, as in adaptive pooling and interpolation.

use std::ops::Range;

use distribute_hlo::{Builder, ElementType, Reducer, Result, TensorType, Value};

/// Returns for each of `size` elements the range of those results whose range contains it. Starts and ends of `ranges`
/// must ascend, so that these results follow each other.
pub(super) fn inverse(ranges: &[Range<usize>], size: usize) -> Vec<Range<usize>> {
    let results = |element: usize| {
        let start = ranges.iter().position(|range| range.end > element).unwrap_or(ranges.len());
        let end = ranges.iter().position(|range| range.start > element).unwrap_or(ranges.len());
        start..end.max(start)
    };
    (0..size).map(results).collect()
}

/// Returns the ranges of one element each.
pub(super) fn single(indices: &[usize]) -> Vec<Range<usize>> {
    indices.iter().map(|&index| index..index + 1).collect()
}

/// Adds the elements of each range of a dimension. A result has one element for each range.
pub(super) fn sum_ranges(b: &mut Builder, x: Value, dim: usize, ranges: &[Range<usize>]) -> Result<Value> {
    let ty = b.type_of(x)?.clone();
    let (size, count) = (ty.dims[dim], ranges.len());
    let width = ranges.iter().map(Range::len).max().unwrap_or(0);
    let mut dims = ty.dims.clone();
    dims[dim] = count;
    if width == 0 || size == 0 {
        return b.full(ty.with_dims(dims), 0);
    }
    if size == 1 && ranges.iter().all(|range| *range == (0..1)) {
        return b.broadcast(x, &dims);
    }
    if count * width == size && ranges.iter().enumerate().all(|(i, range)| *range == (i * width..(i + 1) * width)) {
        if width == 1 {
            return Ok(x);
        }
        let tiled = b.reshape(x, &split(&ty.dims, dim, [count, width]))?;
        return b.reduce(tiled, Reducer::Sum, &[dim + 1]);
    }
    // What a range lacks is read from a zero after the last element.
    let place = |range: &Range<usize>, at: usize| if at < range.len() { range.start + at } else { size };
    let places = ranges.iter().flat_map(|range| (0..width).map(move |at| super::numbers::signed(place(range, at))));
    let places: Vec<i64> = places.collect();
    let mut elements = x;
    if ranges.iter().any(|range| range.len() < width) {
        let zero = b.full(TensorType::scalar(ty.element), 0)?;
        let (low, mut high) = (vec![0; ty.ndim()], vec![0; ty.ndim()]);
        high[dim] = 1;
        elements = b.pad(x, zero, &low, &high, &vec![0; ty.ndim()])?;
    }
    let indices = indices(b, &places, &[count, width])?;
    let taken = b.take(elements, indices, dim)?;
    match width {
        1 => b.reshape(taken, &dims),
        _ => b.reduce(taken, Reducer::Sum, &[dim + 1]),
    }
}

/// Adds a table of floating-point numbers, rounded to the element type.
pub(super) fn table(b: &mut Builder, numbers: &[f64], element: ElementType) -> Result<Value> {
    if element == ElementType::F64 {
        return b.dense(numbers, &[numbers.len()]);
    }
    let rounded: Vec<f32> = numbers.iter().map(|&number| number as f32).collect();
    let dense = b.dense(&rounded, &[numbers.len()])?;
    b.convert(dense, element)
}

/// Multiplies by a number for each place of a dimension.
pub(super) fn scale(b: &mut Builder, x: Value, dim: usize, numbers: &[f64]) -> Result<Value> {
    let ty = b.type_of(x)?.clone();
    let factors = along(b, &ty, dim, numbers)?;
    b.multiply(x, factors)
}

/// Repeats a table along all dimensions but one.
pub(super) fn along(b: &mut Builder, ty: &TensorType, dim: usize, numbers: &[f64]) -> Result<Value> {
    let table = table(b, numbers, ty.element)?;
    b.broadcast_in_dim(table, &ty.dims, &[dim])
}

/// Adds a table of indices, of 32 bits if they suffice. The barrier keeps XLA on CPUs from gathering constants while it
/// compiles: what it computes from the result next is in a wrong order.
fn indices(b: &mut Builder, places: &[i64], dims: &[usize]) -> Result<Value> {
    let narrow: std::result::Result<Vec<i32>, _> = places.iter().map(|&place| i32::try_from(place)).collect();
    let table = match narrow {
        Ok(places) => b.dense(&places, dims)?,
        Err(_) => b.dense(places, dims)?,
    };
    Ok(b.optimization_barrier(&[table])?.pop().unwrap_or(table))
}

/// Replaces a dimension by two.
fn split(dims: &[usize], dim: usize, sizes: [usize; 2]) -> Vec<usize> {
    dims[..dim].iter().copied().chain(sizes).chain(dims[dim + 1..].iter().copied()).collect()
}
