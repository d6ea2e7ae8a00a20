//! Interpolation of images, one dimension after the other. A result is a sum of elements with weights that only depend
//! on its place.

use burn_ir::{InterpolateModeIr, InterpolateOptionsIr, TensorIr};

use super::numbers::{narrow, widen};
use super::ranges::{inverse, scale, single, sum_ranges};
use crate::{Lowering, Result};

/// One element of the input for each result, with its weight; none is a weight of 1. Places ascend.
struct Tap {
    places: Vec<usize>,
    weights: Option<Vec<f64>>,
}

/// Images of other sizes.
pub(super) fn interpolate(
    l: &mut Lowering<'_>,
    x: &TensorIr,
    options: &InterpolateOptionsIr,
    out: &TensorIr,
) -> Result<()> {
    let (input, ty) = (l.type_of(x)?, l.type_of(out)?);
    let taps = all_taps(l, options, &input.dims, &ty.dims)?;
    let x = l.operand(x)?;
    let value = l.build(|b| {
        let mut value = widen(b, x)?;
        for (dim, taps) in taps {
            let mut sum = None;
            for tap in taps {
                let mut term = sum_ranges(b, value, dim, &single(&tap.places))?;
                if let Some(weights) = &tap.weights {
                    term = scale(b, term, dim, weights)?;
                }
                sum = Some(sum.map_or(Ok(term), |sum| b.add(sum, term))?);
            }
            value = sum.unwrap_or(value);
        }
        narrow(b, value, ty.element)
    })?;
    l.set(out, value)
}

/// The gradient of the input.
pub(super) fn interpolate_backward(
    l: &mut Lowering<'_>,
    grad: &TensorIr,
    options: &InterpolateOptionsIr,
    out: &TensorIr,
) -> Result<()> {
    let (given, ty) = (l.type_of(grad)?, l.type_of(out)?);
    let taps = all_taps(l, options, &ty.dims, &given.dims)?;
    let grad = l.operand(grad)?;
    let value = l.build(|b| {
        let mut value = widen(b, grad)?;
        for (dim, taps) in taps {
            let mut sum = None;
            for tap in taps {
                let mut term = value;
                if let Some(weights) = &tap.weights {
                    term = scale(b, term, dim, weights)?;
                }
                let term = sum_ranges(b, term, dim, &inverse(&single(&tap.places), ty.dims[dim]))?;
                sum = Some(sum.map_or(Ok(term), |sum| b.add(sum, term))?);
            }
            value = sum.unwrap_or(value);
        }
        narrow(b, value, ty.element)
    })?;
    l.set(out, value)
}

/// Returns the taps of both dimensions of images.
fn all_taps(
    l: &Lowering<'_>,
    options: &InterpolateOptionsIr,
    input: &[usize],
    output: &[usize],
) -> Result<Vec<(usize, Vec<Tap>)>> {
    if input.len() != 4 || input[2..].contains(&0) {
        return Err(
            l.unsupported(&format!("the input has sizes {input:?}; pass images [examples, channels, rows, columns]"))
        );
    }
    let align = options.align_corners;
    let of = |dim: usize| match options.mode {
        InterpolateModeIr::Nearest => Ok((dim, vec![nearest(input[dim], output[dim])])),
        InterpolateModeIr::Bilinear => Ok((dim, linear(input[dim], output[dim], align))),
        InterpolateModeIr::Bicubic => Ok((dim, cubic(input[dim], output[dim], align))),
        InterpolateModeIr::NearestExact | InterpolateModeIr::Lanczos3 => {
            Err(l
                .unsupported(&format!("the mode {:?} has no lowering; use nearest, bilinear or bicubic", options.mode)))
        }
    };
    [2, 3].into_iter().map(of).collect()
}

/// The element at ⌊place · input / output⌋.
fn nearest(input: usize, output: usize) -> Tap {
    let ratio = input as f64 / output as f64;
    let place = |out: usize| ((out as f64 * ratio).floor() as usize).min(input - 1);
    Tap { places: (0..output).map(place).collect(), weights: None }
}

/// The two elements around a place.
fn linear(input: usize, output: usize, align_corners: bool) -> Vec<Tap> {
    let at = coordinates(input, output, align_corners);
    let low: Vec<usize> = at.iter().map(|at| at.floor().max(0.0) as usize).collect();
    let high = low.iter().map(|&low| (low + 1).min(input - 1)).collect();
    let weights: Vec<f64> = at.iter().zip(&low).map(|(at, &low)| (at - low as f64).max(0.0)).collect();
    let others = weights.iter().map(|weight| 1.0 - weight).collect();
    vec![Tap { places: low, weights: Some(others) }, Tap { places: high, weights: Some(weights) }]
}

/// The four elements around a place, with Keys' weights for a = −0.75. Places beyond an edge are those of the edge.
fn cubic(input: usize, output: usize, align_corners: bool) -> Vec<Tap> {
    const A: f64 = -0.75;
    let weight = |distance: f64| match distance.abs() {
        t if t < 1.0 => ((A + 2.0) * t - (A + 3.0)) * t * t + 1.0,
        t if t < 2.0 => ((A * t - 5.0 * A) * t + 8.0 * A) * t - 4.0 * A,
        _ => 0.0,
    };
    let at = coordinates(input, output, align_corners);
    let tap = |offset: f64| Tap {
        places: at.iter().map(|at| (at.floor() + offset).clamp(0.0, (input - 1) as f64) as usize).collect(),
        weights: Some(at.iter().map(|at| weight(at - at.floor() - offset)).collect()),
    };
    [-1.0, 0.0, 1.0, 2.0].map(tap).into()
}

/// Returns the places of results between elements of the input.
fn coordinates(input: usize, output: usize, align_corners: bool) -> Vec<f64> {
    let places = (0..output).map(|out| out as f64);
    if align_corners {
        let ratio = (input as f64 - 1.0) / output.saturating_sub(1).max(1) as f64;
        return places.map(|out| out * ratio).collect();
    }
    let ratio = input as f64 / output as f64;
    places.map(|out| (out + 0.5) * ratio - 0.5).collect()
}
