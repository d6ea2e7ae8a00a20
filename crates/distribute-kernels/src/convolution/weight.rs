//! The gradient of a convolution's weight without a matrix of columns.

use std::ops::Range;

use distribute_rows::Float;
use pulp::{Arch, NullaryFnOnce};

use super::Convolution;
use super::padded::{Frame, Padded, lanes};
use crate::parallel::sum_of_parts;

/// The gradient of a weight: sums over all places of the result, made in registers for several elements of the kernel
/// and, in vectors, for several filters.
#[derive(Debug)]
pub(crate) struct WeightGradient<'a, T> {
    frame: Frame,
    groups: usize,
    /// Channels of a group.
    channels: usize,
    /// Filters of a group.
    filters: usize,
    x: &'a [T],
    gradient: &'a [T],
    padded: Padded,
    /// Where the elements that make a filter are in a padded copy, relative to the first under the kernel.
    elements: Vec<[usize; ELEMENTS]>,
    /// Where the first element under the kernel is, for each place of a band.
    places: Vec<usize>,
}

/// Numbers of a block of filters: two registers.
type Block<T, const LANES: usize> = [[T; LANES]; 2];

impl<'a, T: Float> WeightGradient<'a, T> {
    /// Prepares the sum. `gradient` has the shape of the result.
    pub(crate) fn new(of: &Convolution, x: &'a [T], gradient: &'a [T]) -> WeightGradient<'a, T> {
        let (frame, channels) = (of.geometry(), of.channels / of.groups);
        let padded = Padded::new(frame, channels, 1);
        let taps = &padded.taps;
        let offsets: Vec<usize> =
            (0..channels * taps.len()).map(|at| at / taps.len() * padded.plane + taps[at % taps.len()]).collect();
        let element = |chunk: &[usize]| std::array::from_fn(|at| chunk.get(at).copied().unwrap_or_default());
        let elements = offsets.chunks(ELEMENTS).map(element).collect();
        let (rows, width) = (padded.bands().next().unwrap_or_default(), frame.output[1]);
        let places = (0..rows.len() * width).map(|at| padded.start(at / width) + at % width).collect();
        WeightGradient {
            frame,
            groups: of.groups,
            channels,
            filters: of.filters / of.groups,
            x,
            gradient,
            padded,
            elements,
            places,
        }
    }

    /// Computes the gradient, of the shape of the weight.
    pub(crate) fn run(&self, out: &mut [T]) {
        match lanes::<T>() {
            8 => self.run_by::<8>(out),
            _ => self.run_by::<4>(out),
        }
    }

    fn run_by<const LANES: usize>(&self, out: &mut [T]) {
        let image = self.groups * self.channels * self.frame.size[0] * self.frame.size[1];
        let (depth, block) = (self.channels * self.padded.taps.len(), self.block::<LANES>());
        let in_group = self.filters.div_ceil(2 * LANES) * block;
        let mut sums = vec![T::default(); self.groups * in_group];
        sum_of_parts(&mut sums, self.x.len() / image, |images, sums| {
            Arch::new().dispatch(Part::<T, LANES> { of: self, images, sums });
        });
        let groups = out.chunks_exact_mut(self.filters * depth).zip(sums.chunks_exact(in_group));
        for (out, sums) in groups {
            for (filter, out) in out.chunks_exact_mut(depth).enumerate() {
                let sums = &sums[filter / (2 * LANES) * block + filter % (2 * LANES)..];
                out.iter_mut().zip(sums.iter().step_by(2 * LANES)).for_each(|(out, sum)| *out = *sum);
            }
        }
    }

    /// Returns the number of sums of a block of filters.
    fn block<const LANES: usize>(&self) -> usize {
        self.elements.len() * ELEMENTS * 2 * LANES
    }
}

/// The sum over some images.
struct Part<'a, T, const LANES: usize> {
    of: &'a WeightGradient<'a, T>,
    images: Range<usize>,
    /// Sums by group, block of filters, element of the kernel and filter of the block.
    sums: &'a mut [T],
}

impl<T: Float, const LANES: usize> NullaryFnOnce for Part<'_, T, LANES> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Part { of, images, sums } = self;
        let Frame { size, output, .. } = of.frame;
        let (input, result) = (of.channels * size[0] * size[1], of.filters * output[0] * output[1]);
        let mut copy = vec![T::default(); of.channels * of.padded.plane];
        let mut turned = [[[T::default(); LANES]; 2]; RUN];
        for group in images.start * of.groups..images.end * of.groups {
            let (x, gradient) = (&of.x[group * input..][..input], &of.gradient[group * result..][..result]);
            let in_group = sums.len() / of.groups;
            let sums = &mut sums[group % of.groups * in_group..][..in_group];
            for rows in of.padded.bands() {
                of.padded.fill(x, &rows, &mut copy);
                of.add_band(&copy, gradient, &rows, &mut turned, sums);
            }
        }
    }
}

impl<T: Float> WeightGradient<'_, T> {
    /// Adds the products of a padded copy and the gradient of some rows of a group's result.
    #[inline(always)]
    fn add_band<const LANES: usize>(
        &self,
        copy: &[T],
        gradient: &[T],
        rows: &Range<usize>,
        turned: &mut [Block<T, LANES>; RUN],
        sums: &mut [T],
    ) {
        let [height, width] = self.frame.output;
        for (run, places) in self.places[..rows.len() * width].chunks(RUN).enumerate() {
            let start = rows.start * width + run * RUN;
            let blocks = gradient.chunks(2 * LANES * height * width);
            for (gradient, sums) in blocks.zip(sums.chunks_exact_mut(self.block::<LANES>())) {
                let turned = &mut turned[..places.len()];
                turn(&gradient[start..], height * width, turned);
                for (elements, sums) in self.elements.iter().zip(sums.chunks_exact_mut(ELEMENTS * 2 * LANES)) {
                    let products = products(copy, elements, places, turned);
                    let vectors = sums.chunks_exact_mut(LANES).zip(products.as_flattened());
                    vectors.for_each(|(sums, vector)| sums.iter_mut().zip(vector).for_each(|(sum, x)| *sum += *x));
                }
            }
        }
    }
}

/// Copies the beginning of a block's planes such that the numbers of a place are next to each other.
#[inline(always)]
fn turn<T: Float, const LANES: usize>(gradient: &[T], plane: usize, out: &mut [Block<T, LANES>]) {
    for (filter, gradient) in gradient.chunks(plane).enumerate().take(2 * LANES) {
        for (out, gradient) in out.iter_mut().zip(gradient) {
            out.as_flattened_mut()[filter] = *gradient;
        }
    }
}

/// Returns the sums, over some places, of products of elements under the kernel and the gradient.
#[inline(always)]
fn products<T: Float, const LANES: usize>(
    x: &[T],
    elements: &[usize; ELEMENTS],
    places: &[usize],
    gradient: &[Block<T, LANES>],
) -> [Block<T, LANES>; ELEMENTS] {
    let reach = places.last().map_or(0, |last| last + 1);
    let mut rows = [x; ELEMENTS];
    for (row, from) in rows.iter_mut().zip(elements) {
        *row = &x[*from..][..reach];
    }
    let mut sums = [[[T::default(); LANES]; 2]; ELEMENTS];
    for (place, gradient) in places.iter().zip(gradient) {
        for element in 0..ELEMENTS {
            let x = rows[element][*place];
            for vector in 0..2 {
                for lane in 0..LANES {
                    let sum = sums[element][vector][lane];
                    sums[element][vector][lane] = x.mul_add(gradient[vector][lane], sum);
                }
            }
        }
    }
    sums
}

/// The number of elements of the kernel whose sums are in registers.
const ELEMENTS: usize = 6;

/// The number of places whose numbers a first-level cache holds.
const RUN: usize = 128;
