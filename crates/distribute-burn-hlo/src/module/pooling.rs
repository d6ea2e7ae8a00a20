//! Pooling over windows, and the tensor of all windows.

use burn_ir::TensorIr;
use distribute_hlo::{Builder, CompareOp, ElementType, Literal, Number, Reducer, TensorType, Value, Window};

use super::numbers::{narrow, signed, sum_element, widen};
use super::ranges::{along, inverse, sum_ranges};
use crate::{Lowering, Result};

/// The windows of one spatial dimension.
#[derive(Clone, Copy)]
pub(super) struct Windows {
    pub(super) kernel: usize,
    pub(super) stride: usize,
    pub(super) padding: usize,
    pub(super) dilation: usize,
}

impl Windows {
    /// Returns the windows of dimensions whose options come in arrays.
    pub(super) fn of<const N: usize>(
        kernel: [usize; N],
        stride: [usize; N],
        padding: [usize; N],
        dilation: [usize; N],
    ) -> Vec<Windows> {
        (0..N)
            .map(|dim| Windows {
                kernel: kernel[dim],
                stride: stride[dim],
                padding: padding[dim],
                dilation: dilation[dim],
            })
            .collect()
    }

    /// Returns the padding after an input, so that `count` windows fit: more than before it in ceil mode.
    fn padding_after(self, size: usize, count: usize) -> usize {
        let reach = count.saturating_sub(1) * self.stride + self.dilation * self.kernel.saturating_sub(1) + 1;
        reach.saturating_sub(size + self.padding)
    }

    /// Returns whether an element of a window lies in the input, not in padding.
    fn inside(self, size: usize, window: usize, element: usize) -> bool {
        let place = window * self.stride + element * self.dilation;
        (self.padding..self.padding + size).contains(&place)
    }

    /// Returns the number of elements of each window that an average divides by, at least 1. With `padded`, padding on
    /// both sides counts, and what lies beyond it in ceil mode does not.
    fn divisors(self, size: usize, count: usize, padded: bool) -> Vec<f64> {
        let whole = Windows { padding: 0, ..self };
        let counted = |window: usize| {
            let inside = |element: &usize| match padded {
                true => whole.inside(size + 2 * self.padding, window, *element),
                false => self.inside(size, window, *element),
            };
            (0..self.kernel).filter(inside).count().max(1) as f64
        };
        (0..count).map(counted).collect()
    }
}

/// The largest element of each window.
pub(super) fn max(l: &mut Lowering<'_>, x: &TensorIr, windows: &[Windows], out: &TensorIr) -> Result<()> {
    let (value, input, ty) = (l.operand(x)?, l.type_of(x)?, l.type_of(out)?);
    let value = l.build(|b| b.reduce_window(value, Reducer::Max, &window_of(windows, &input, &ty)))?;
    l.set(out, value)
}

/// The largest element of each window and its place in the example's channel: the first of equal ones, and the last
/// NaN. It is −1 for a window in padding.
pub(super) fn max_with_indices(
    l: &mut Lowering<'_>,
    x: &TensorIr,
    windows: &[Windows],
    [out, out_indices]: [&TensorIr; 2],
) -> Result<()> {
    let (value, input, ty) = (l.operand(x)?, l.type_of(x)?, l.type_of(out)?);
    let element = l.element(out_indices)?;
    let empty = |(dim, windows): (usize, &Windows)| {
        let none = |window| !(0..windows.kernel).any(|place| windows.inside(input.dims[dim + 2], window, place));
        (0..ty.dims[dim + 2]).any(none)
    };
    if !element.is_signed_integer() && windows.iter().enumerate().any(empty) {
        return Err(l.unsupported(
            "a window lies in padding, where burn's index is -1, and indices are unsigned; pad by less than a window",
        ));
    }
    let (best, places) = l.build(|b| {
        let places = places(b, &input)?;
        let low = b.full(TensorType::scalar(input.element), f64::NEG_INFINITY)?;
        let none = b.full(b.type_of(places)?.with_dims([]), -1)?;
        let mut pair = [pad(b, value, low, windows, &input, &ty)?, pad(b, places, none, windows, &input, &ty)?];
        // Rows first: among equal elements the first in row-major order remains.
        for (dim, windows) in windows.iter().enumerate().rev() {
            pair = largest(b, pair, dim + 2, *windows, ty.dims[dim + 2])?;
        }
        Ok((pair[0], b.convert(pair[1], element)?))
    })?;
    l.set(out, best)?;
    l.set(out_indices, places)
}

/// Adds each gradient to the place that its index names. A negative index names none.
pub(super) fn max_backward(
    l: &mut Lowering<'_>,
    [grad, indices]: [&TensorIr; 2],
    windows: &[Windows],
    out: &TensorIr,
) -> Result<()> {
    match windows.iter().map(|windows| windows.kernel).product::<usize>() <= COMPARISONS {
        true => by_comparisons(l, [grad, indices], windows, out),
        false => by_scattering(l, [grad, indices], out),
    }
}

/// The largest number of a window's elements that are each compared with the indices. Scattering is slow on TPUs.
const COMPARISONS: usize = 64;

/// Adds gradients to those elements of their windows that have the indices, one element of all windows after another.
fn by_comparisons(
    l: &mut Lowering<'_>,
    [grad, indices]: [&TensorIr; 2],
    windows: &[Windows],
    out: &TensorIr,
) -> Result<()> {
    let (grad, indices, ty) = (l.operand(grad)?, l.operand(indices)?, l.type_of(out)?);
    let value = l.build(|b| {
        let grad = widen(b, grad)?;
        let given = b.type_of(grad)?.clone();
        let plane = plane(b, &ty)?;
        let places = b.type_of(plane)?.element;
        let indices = b.convert(indices, places)?;
        // No index names padding.
        let none = b.full(TensorType::scalar(places), -2)?;
        let window = window_of(windows, &ty, &given);
        let (low, high): (Vec<i64>, Vec<i64>) = window.padding[2..].iter().copied().unzip();
        let plane = b.pad(plane, none, &low, &high, &vec![0; windows.len()])?;
        let (zero, zeros) = (b.full(TensorType::scalar(given.element), 0)?, b.full(given.clone(), 0)?);
        let mut sums = None;
        for element in 0..windows.iter().map(|windows| windows.kernel).product() {
            let (mut low, mut high, mut gaps) = (vec![0; ty.ndim()], vec![0; ty.ndim()], vec![0; ty.ndim()]);
            let (mut place, mut rest) = (plane, element);
            for (dim, windows) in windows.iter().enumerate().rev() {
                let (at, count) = (rest % windows.kernel, given.dims[dim + 2]);
                place = elements(b, place, dim, at, *windows, count)?;
                low[dim + 2] = signed(at * windows.dilation) - signed(windows.padding);
                let extent = (signed(count) - 1) * signed(windows.stride) + 1;
                high[dim + 2] = signed(ty.dims[dim + 2]) - extent - low[dim + 2];
                gaps[dim + 2] = windows.stride - 1;
                rest /= windows.kernel;
            }
            let dims: Vec<usize> = (2..ty.ndim()).collect();
            let place = b.broadcast_in_dim(place, &given.dims, &dims)?;
            let is_named = b.compare(CompareOp::Eq, indices, place)?;
            let own = b.select(is_named, grad, zeros)?;
            let own = b.pad(own, zero, &low, &high, &gaps)?;
            sums = Some(match sums {
                Some(sums) => b.add(sums, own)?,
                None => own,
            });
        }
        match sums {
            Some(sums) => narrow(b, sums, ty.element),
            None => b.full(ty.clone(), 0),
        }
    })?;
    l.set(out, value)
}

fn by_scattering(l: &mut Lowering<'_>, [grad, indices]: [&TensorIr; 2], out: &TensorIr) -> Result<()> {
    let windows: usize = grad.shape[2..].iter().product();
    let (grad, indices, ty) = (l.operand(grad)?, l.operand(indices)?, l.type_of(out)?);
    let (planes, size) = (ty.dims[0] * ty.dims[1], ty.dims[2..].iter().product());
    let value = l.build(|b| {
        let grad = widen(b, grad)?;
        let grad = b.reshape(grad, &[planes, windows])?;
        let indices = b.reshape(indices, &[planes, windows])?;
        let zeros = b.full(TensorType::new(sum_element(ty.element), [planes, size]), 0)?;
        let dimensions = distribute_hlo::ScatterDimensions {
            inserted_window_dims: vec![1],
            input_batching_dims: vec![0],
            scatter_indices_batching_dims: vec![0],
            scatter_dims_to_operand_dims: vec![1],
            index_vector_dim: 2,
            ..Default::default()
        };
        let sums = b.scatter(zeros, indices, grad, &dimensions, Some(Reducer::Sum))?;
        let sums = narrow(b, sums, ty.element)?;
        b.reshape(sums, &ty.dims)
    })?;
    l.set(out, value)
}

/// The average of each window.
pub(super) fn average(
    l: &mut Lowering<'_>,
    x: &TensorIr,
    windows: &[Windows],
    count_include_pad: bool,
    out: &TensorIr,
) -> Result<()> {
    let (value, input, ty) = (l.operand(x)?, l.type_of(x)?, l.type_of(out)?);
    let value = l.build(|b| {
        let value = widen(b, value)?;
        let sums = b.reduce_window(value, Reducer::Sum, &window_of(windows, &input, &ty))?;
        let averages = divide(b, sums, windows, &input, count_include_pad)?;
        narrow(b, averages, ty.element)
    })?;
    l.set(out, value)
}

/// The gradient of averages: each is divided among the elements of its window.
pub(super) fn average_backward(
    l: &mut Lowering<'_>,
    grad: &TensorIr,
    windows: &[Windows],
    count_include_pad: bool,
    out: &TensorIr,
) -> Result<()> {
    let (grad, ty) = (l.operand(grad)?, l.type_of(out)?);
    let value = l.build(|b| {
        let grad = widen(b, grad)?;
        let shares = divide(b, grad, windows, &ty, count_include_pad)?;
        let given = b.type_of(shares)?.clone();
        let (mut low, mut high, mut gaps) = (vec![0; ty.ndim()], vec![0; ty.ndim()], vec![0; ty.ndim()]);
        let mut window = Window::new(vec![1; ty.ndim()]);
        for (dim, windows) in windows.iter().enumerate().map(|(dim, windows)| (dim + 2, windows)) {
            // An element at place p gets the shares of the windows that start in p − kernel + 1 ..= p.
            let extent = (signed(given.dims[dim]) - 1) * signed(windows.stride) + 1;
            let reach = signed(windows.kernel) - 1;
            low[dim] = reach - signed(windows.padding);
            high[dim] = signed(ty.dims[dim]) + reach - extent - low[dim];
            gaps[dim] = windows.stride - 1;
            window.dims[dim] = windows.kernel;
        }
        let zero = b.full(TensorType::scalar(given.element), 0)?;
        let spread = b.pad(shares, zero, &low, &high, &gaps)?;
        let sums = b.reduce_window(spread, Reducer::Sum, &window)?;
        narrow(b, sums, ty.element)
    })?;
    l.set(out, value)
}

/// The averages of windows that divide each dimension into as many parts as the result has.
pub(super) fn adaptive(l: &mut Lowering<'_>, x: &TensorIr, out: &TensorIr) -> Result<()> {
    let (value, input, ty) = (l.operand(x)?, l.type_of(x)?, l.type_of(out)?);
    let value = l.build(|b| {
        let mut value = widen(b, value)?;
        for dim in 2..ty.ndim() {
            value = sum_ranges(b, value, dim, &parts(input.dims[dim], ty.dims[dim]))?;
        }
        let averages = divide_parts(b, value, &input, &ty)?;
        narrow(b, averages, ty.element)
    })?;
    l.set(out, value)
}

/// The gradient of averages of parts.
pub(super) fn adaptive_backward(l: &mut Lowering<'_>, grad: &TensorIr, out: &TensorIr) -> Result<()> {
    let (value, pooled, ty) = (l.operand(grad)?, l.type_of(grad)?, l.type_of(out)?);
    let value = l.build(|b| {
        let value = widen(b, value)?;
        let mut value = divide_parts(b, value, &ty, &pooled)?;
        for dim in 2..ty.ndim() {
            let ranges = inverse(&parts(ty.dims[dim], pooled.dims[dim]), ty.dims[dim]);
            value = sum_ranges(b, value, dim, &ranges)?;
        }
        narrow(b, value, ty.element)
    })?;
    l.set(out, value)
}

/// All windows of images, as columns: `[examples, channels · elements of a window, windows]`.
pub(super) fn unfold(l: &mut Lowering<'_>, x: &TensorIr, windows: &[Windows], out: &TensorIr) -> Result<()> {
    let (value, input, ty) = (l.operand(x)?, l.type_of(x)?, l.type_of(out)?);
    let mut counts = input.clone();
    for (dim, windows) in windows.iter().enumerate() {
        let reach = windows.dilation * (windows.kernel - 1) + 1;
        let padded = input.dims[dim + 2] + 2 * windows.padding;
        counts.dims[dim + 2] = padded.checked_sub(reach).map_or(0, |rest| rest / windows.stride + 1);
    }
    let value = l.build(|b| {
        let zero = b.full(TensorType::scalar(ty.element), 0)?;
        let mut value = pad(b, value, zero, windows, &input, &counts)?;
        // [examples, channels, rows, columns] becomes […, rows of a window, columns of it, rows, columns].
        for (dim, windows) in windows.iter().enumerate() {
            let mut slices = Vec::with_capacity(windows.kernel);
            let at = 2 + 2 * dim;
            for element in 0..windows.kernel {
                let slice = elements(b, value, at, element, *windows, counts.dims[dim + 2])?;
                let mut dims = b.type_of(slice)?.dims.clone();
                dims.insert(at, 1);
                slices.push(b.reshape(slice, &dims)?);
            }
            value = b.concatenate(&slices, at)?;
        }
        let value = b.transpose(value, &[0, 1, 2, 4, 3, 5])?;
        b.reshape(value, &ty.dims)
    })?;
    l.set(out, value)
}

/// Returns windows over all dimensions, padded so that they fit as often as the result has elements.
fn window_of(windows: &[Windows], input: &TensorType, out: &TensorType) -> Window {
    let mut all = Window::new(vec![1; input.ndim()]);
    for (dim, windows) in windows.iter().enumerate().map(|(dim, windows)| (dim + 2, windows)) {
        all.dims[dim] = windows.kernel;
        all.strides[dim] = windows.stride;
        all.window_dilations[dim] = windows.dilation;
        let after = windows.padding_after(input.dims[dim], out.dims[dim]);
        all.padding[dim] = (signed(windows.padding), signed(after));
    }
    all
}

/// Pads as [`window_of`].
fn pad(
    b: &mut Builder,
    value: Value,
    padding: Value,
    windows: &[Windows],
    input: &TensorType,
    out: &TensorType,
) -> distribute_hlo::Result<Value> {
    let (low, high): (Vec<i64>, Vec<i64>) = window_of(windows, input, out).padding.into_iter().unzip();
    b.pad(value, padding, &low, &high, &vec![0; low.len()])
}

/// Returns one element of each window along a dimension.
fn elements(
    b: &mut Builder,
    value: Value,
    dim: usize,
    element: usize,
    windows: Windows,
    count: usize,
) -> distribute_hlo::Result<Value> {
    let ty = b.type_of(value)?.clone();
    let (mut start, mut limit, mut strides) = (vec![0; ty.ndim()], ty.dims.clone(), vec![1; ty.ndim()]);
    start[dim] = element * windows.dilation;
    limit[dim] = start[dim] + (count.saturating_sub(1)) * windows.stride + count.min(1);
    strides[dim] = windows.stride;
    b.slice(value, &start, &limit, &strides)
}

/// Reduces windows along a dimension to their largest elements and the places of these.
fn largest(
    b: &mut Builder,
    [values, places]: [Value; 2],
    dim: usize,
    windows: Windows,
    count: usize,
) -> distribute_hlo::Result<[Value; 2]> {
    let mut best = elements(b, values, dim, 0, windows, count)?;
    let mut place = elements(b, places, dim, 0, windows, count)?;
    let ty = b.type_of(place)?.clone();
    let zero = b.full(ty, 0)?;
    for element in 1..windows.kernel {
        let value = elements(b, values, dim, element, windows, count)?;
        let at = elements(b, places, dim, element, windows, count)?;
        let larger = b.compare(CompareOp::Gt, value, best)?;
        let nan = b.compare(CompareOp::Ne, value, value)?;
        let empty = b.compare(CompareOp::Lt, place, zero)?;
        let better = b.or(larger, nan)?;
        let better = b.or(better, empty)?;
        best = b.select(better, value, best)?;
        place = b.select(better, at, place)?;
    }
    Ok([best, place])
}

/// Returns the place of each element in its channel of its example.
fn places(b: &mut Builder, input: &TensorType) -> distribute_hlo::Result<Value> {
    let plane = plane(b, input)?;
    let dims: Vec<usize> = (2..input.ndim()).collect();
    b.broadcast_in_dim(plane, &input.dims, &dims)
}

/// Returns the place of each element in a channel.
fn plane(b: &mut Builder, input: &TensorType) -> distribute_hlo::Result<Value> {
    let size: usize = input.dims[2..].iter().product();
    let element = if i32::try_from(size).is_ok() { ElementType::I32 } else { ElementType::I64 };
    let count = b.iota(TensorType::new(element, [size]), 0)?;
    b.reshape(count, &input.dims[2..])
}

/// Divides by the number of elements of each window.
fn divide(
    b: &mut Builder,
    sums: Value,
    windows: &[Windows],
    input: &TensorType,
    padded: bool,
) -> distribute_hlo::Result<Value> {
    let dims = b.type_of(sums)?.dims.clone();
    let counts =
        windows.iter().enumerate().map(|(dim, windows)| windows.divisors(input.dims[dim + 2], dims[dim + 2], padded));
    divide_by(b, sums, &counts.collect::<Vec<_>>())
}

/// Divides by the number of elements of each part.
fn divide_parts(b: &mut Builder, sums: Value, input: &TensorType, out: &TensorType) -> distribute_hlo::Result<Value> {
    let counts = (2..out.ndim())
        .map(|dim| parts(input.dims[dim], out.dims[dim]).iter().map(|part| part.len().max(1) as f64).collect());
    divide_by(b, sums, &counts.collect::<Vec<Vec<f64>>>())
}

/// Divides by products of numbers, one for each place of each spatial dimension. Products of counts are exact.
fn divide_by(b: &mut Builder, sums: Value, counts: &[Vec<f64>]) -> distribute_hlo::Result<Value> {
    let ty = b.type_of(sums)?.clone();
    let mut divisors = None;
    let mut same = 1.0;
    for (dim, counts) in counts.iter().enumerate() {
        match counts.first() {
            Some(first) if counts.iter().all(|count| count == first) => same *= first,
            _ => {
                let factor = along(b, &ty, dim + 2, counts)?;
                divisors = Some(match divisors {
                    None => factor,
                    Some(others) => b.multiply(others, factor)?,
                });
            }
        }
    }
    let same = b.constant(Literal::splat(ty, Number::Float(same))?)?;
    let divisors = match divisors {
        None => same,
        Some(divisors) => b.multiply(divisors, same)?,
    };
    b.divide(sums, divisors)
}

/// Returns the parts of adaptive pooling: from ⌊i · size / count⌋ to ⌈(i + 1) · size / count⌉.
fn parts(size: usize, count: usize) -> Vec<std::ops::Range<usize>> {
    (0..count).map(|part| part * size / count..((part + 1) * size).div_ceil(count)).collect()
}
