//! The gradient of a convolution's weight without a matrix of columns.

use std::ops::Range;

use distribute_rows::Float;
use pulp::NullaryFnOnce;

use super::Convolution;
use super::padded::{COPY, Frame, Padded};
use super::vectors::{dispatch, lanes};
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
    /// How many images are summed up at once.
    together: usize,
    /// Where the first element under the kernel is in the copies, for each place of a band of these images.
    places: Vec<usize>,
}

/// Numbers of a block of filters: one register or two.
pub(super) type Numbers<T, const LANES: usize, const VECTORS: usize> = [[T; LANES]; VECTORS];

impl<'a, T: Float> WeightGradient<'a, T> {
    /// Prepares the sum. `gradient` has the shape of the result.
    pub(crate) fn new(of: &Convolution, x: &'a [T], gradient: &'a [T]) -> WeightGradient<'a, T> {
        let (frame, channels) = (of.geometry(), of.channels / of.groups);
        let padded = Padded::new(frame, channels, 1);
        let [height, width] = frame.output;
        let (rows, copy) = (padded.bands().next().unwrap_or_default().len(), channels * padded.plane);
        let together = if rows == height { together(height * width, copy) } else { 1 };
        let places = places(together, copy, rows * width, |at| padded.start(at / width) + at % width);
        WeightGradient {
            frame,
            groups: of.groups,
            channels,
            filters: of.filters / of.groups,
            x,
            gradient,
            padded,
            together,
            places,
        }
    }
}

impl<T: Float> OfWeight<T> for WeightGradient<'_, T> {
    fn filters(&self) -> usize {
        self.filters
    }

    fn run_by<const LANES: usize, const VECTORS: usize, const ELEMENTS: usize>(&self) -> Vec<T> {
        let image = self.groups * self.channels * self.frame.size[0] * self.frame.size[1];
        let taps = &self.padded.taps;
        let depth = self.channels * taps.len();
        let offset = |at: usize| at / taps.len() * self.padded.plane + taps[at % taps.len()];
        let elements = chunks::<ELEMENTS>(depth, offset);
        let of_block = elements.len() * ELEMENTS;
        let in_group = self.filters.div_ceil(VECTORS * LANES) * of_block * VECTORS * LANES;
        let len = self.groups * in_group;
        let sums = sum_of_parts(len, self.x.len() / image, self.together, |images, sums| {
            let elements = &elements;
            dispatch::<T, LANES>(Part::<T, LANES, VECTORS, ELEMENTS> { of: self, elements, images, sums });
        });
        let mut out = vec![T::default(); self.groups * self.filters * depth];
        let groups = out.chunks_exact_mut(self.filters * depth).zip(sums.chunks_exact(in_group));
        for (out, sums) in groups {
            for (filter, out) in out.chunks_exact_mut(depth).enumerate() {
                let sums = of_filter::<T, LANES, VECTORS>(sums, of_block, filter);
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum);
            }
        }
        out
    }
}

/// A way of computing the gradient of a weight, with sums for several filters in registers.
pub(crate) trait OfWeight<T> {
    /// Returns the number of filters of a group.
    fn filters(&self) -> usize;

    /// Computes the gradient, of the shape of the weight.
    fn run(&self) -> Vec<T> {
        let lanes = lanes::<T>(self.filters());
        match (lanes, self.filters() > lanes) {
            (_, false) if const { size_of::<T>() == 8 } => self.run_by::<4, 1, 12>(),
            (_, true) if const { size_of::<T>() == 8 } => self.run_by::<4, 2, 6>(),
            (16, false) => self.run_by::<16, 1, 12>(),
            (16, true) => self.run_by::<16, 2, 6>(),
            (_, false) => self.run_by::<8, 1, 12>(),
            (_, true) => self.run_by::<8, 2, 6>(),
        }
    }

    /// Computes it with sums of `SUMS` elements of the kernel for `VECTORS` vectors of filters in registers.
    fn run_by<const LANES: usize, const VECTORS: usize, const SUMS: usize>(&self) -> Vec<T>;
}

/// Returns the sums of a filter, of which each block of filters has `of_block`.
pub(super) fn of_filter<T: Float, const LANES: usize, const VECTORS: usize>(
    sums: &[T],
    of_block: usize,
    filter: usize,
) -> impl Iterator<Item = T> {
    let width = VECTORS * LANES;
    sums[filter / width * of_block * width + filter % width..].iter().step_by(width).copied()
}

/// Returns the places of elements, those at once that registers have sums of. The last ones are filled up with the
/// first.
pub(super) fn chunks<const ELEMENTS: usize>(count: usize, place: impl Fn(usize) -> usize) -> Vec<[usize; ELEMENTS]> {
    let at = |at: usize| if at < count { place(at) } else { place(0) };
    (0..count).step_by(ELEMENTS).map(|first| std::array::from_fn(|element| at(first + element))).collect()
}

/// The sum over some images.
struct Part<'a, T, const LANES: usize, const VECTORS: usize, const ELEMENTS: usize> {
    of: &'a WeightGradient<'a, T>,
    /// Where the elements that make a filter are in a padded copy, relative to the first under the kernel.
    elements: &'a [[usize; ELEMENTS]],
    images: Range<usize>,
    /// Sums by group, block of filters, element of the kernel and filter of the block.
    sums: &'a mut [T],
}

impl<T: Float, const LANES: usize, const VECTORS: usize, const ELEMENTS: usize> NullaryFnOnce
    for Part<'_, T, LANES, VECTORS, ELEMENTS>
{
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Part { of, elements, images, sums } = self;
        let Frame { size, output: [height, width], .. } = of.frame;
        let (input, plane) = (of.channels * size[0] * size[1], height * width);
        let copy_len = of.channels * of.padded.plane;
        let mut copies = vec![T::default(); of.together * copy_len];
        let mut turned = [[[T::default(); LANES]; VECTORS]; RUN];
        let of_block = elements.len() * ELEMENTS * VECTORS * LANES;
        for (group, sums) in sums.chunks_exact_mut(sums.len() / of.groups).enumerate() {
            for images in sets(&images, of.together) {
                for rows in of.padded.bands() {
                    for (image, copy) in images.clone().zip(copies.chunks_exact_mut(copy_len)) {
                        of.padded.fill(&of.x[(image * of.groups + group) * input..][..input], &rows, copy);
                    }
                    let places = &of.places[..images.len() * rows.len() * width];
                    for (run, places) in places.chunks(RUN).enumerate() {
                        let (first, turned) = (rows.start * width + run * RUN, &mut turned[..places.len()]);
                        for (block, sums) in sums.chunks_exact_mut(of_block).enumerate() {
                            // All places of each image, or some of one.
                            let parts = turned.chunks_exact_mut(places.len() / images.len());
                            for (image, turned) in images.clone().zip(parts) {
                                let filters = (image * of.groups + group) * of.filters;
                                let block = (filters + block * VECTORS * LANES) * plane;
                                let gradient = &of.gradient[block..(filters + of.filters) * plane];
                                turn(&gradient[first..], plane, turned);
                            }
                            add(&copies, elements, places, turned, sums);
                        }
                    }
                }
            }
        }
    }
}

/// Returns how many images of `places` places are summed up at once. If it is more than one, a cache holds their copies
/// of `copy` elements, and the sums are read and written less often.
pub(super) fn together(places: usize, copy: usize) -> usize {
    (RUN / places).min(COPIES * COPY / copy).max(1)
}

/// The most elements of copies of several images, in multiples of those of one.
const COPIES: usize = 2;

/// Returns where the places of several images are in their copies.
pub(super) fn places(images: usize, copy: usize, count: usize, of_image: impl Fn(usize) -> usize) -> Vec<usize> {
    (0..images * count).map(|at| at / count * copy + of_image(at % count)).collect()
}

/// Divides images into sets.
#[inline(always)]
pub(super) fn sets(images: &Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let end = images.end;
    images.clone().step_by(size).map(move |first| first..end.min(first + size))
}

/// Copies the beginning of a block's planes such that the numbers of a place are next to each other.
#[inline(always)]
pub(super) fn turn<T: Float, const LANES: usize, const VECTORS: usize>(
    gradient: &[T],
    plane: usize,
    out: &mut [Numbers<T, LANES, VECTORS>],
) {
    for (filter, gradient) in gradient.chunks(plane).enumerate().take(VECTORS * LANES) {
        for (out, gradient) in out.iter_mut().zip(gradient) {
            out.as_flattened_mut()[filter] = *gradient;
        }
    }
}

/// Adds the products of elements under the kernel and the gradient at some places to the sums.
#[inline(always)]
pub(super) fn add<T: Float, const LANES: usize, const VECTORS: usize, const ELEMENTS: usize>(
    x: &[T],
    elements: &[[usize; ELEMENTS]],
    places: &[usize],
    gradient: &[Numbers<T, LANES, VECTORS>],
    sums: &mut [T],
) {
    let mut products = [[[T::default(); LANES]; VECTORS]; ELEMENTS];
    for (elements, sums) in elements.iter().zip(sums.chunks_exact_mut(ELEMENTS * VECTORS * LANES)) {
        multiply(x, elements, places, gradient, &mut products);
        let products = products.as_flattened().as_flattened();
        sums.iter_mut().zip(products).for_each(|(sum, product)| *sum += *product);
    }
}

/// Computes the sums, over some places, of products of elements under the kernel and the gradient. They stay in
/// registers until the end because indices are constants and nothing refers to them.
#[inline(always)]
fn multiply<T: Float, const LANES: usize, const VECTORS: usize, const ELEMENTS: usize>(
    x: &[T],
    elements: &[usize; ELEMENTS],
    places: &[usize],
    gradient: &[Numbers<T, LANES, VECTORS>],
    out: &mut [Numbers<T, LANES, VECTORS>; ELEMENTS],
) {
    let reach = places.last().map_or(0, |last| last + 1);
    let mut rows = [x; ELEMENTS];
    for element in 0..ELEMENTS {
        rows[element] = &x[elements[element]..][..reach];
    }
    let mut sums = [[[T::default(); LANES]; VECTORS]; ELEMENTS];
    for (place, gradient) in places.iter().zip(gradient) {
        for element in 0..ELEMENTS {
            let x = rows[element][*place];
            for vector in 0..VECTORS {
                for lane in 0..LANES {
                    let sum = sums[element][vector][lane];
                    sums[element][vector][lane] = x.mul_add(gradient[vector][lane], sum);
                }
            }
        }
    }
    *out = sums;
}

/// The number of places whose numbers a first-level cache holds.
pub(super) const RUN: usize = 128;
