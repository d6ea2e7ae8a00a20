//! The gradient of a weight of 3 × 3 that multiplies less often.

use std::ops::Range;

use distribute_rows::Float;
use pulp::NullaryFnOnce;

use super::{ELEMENTS, ROWS, TAPS, Tall};
use crate::convolution::Convolution;
use crate::convolution::padded::Frame;
use crate::convolution::vectors::dispatch;
use crate::convolution::weight::{Numbers, OfWeight, RUN, add, chunks, of_filter, places, sets, together, turn};
use crate::parallel::sum_of_parts;

/// The gradient of a weight of 3 × 3 for a stride of 1. Tiles of 4 rows and a column of the result take part in each
/// kernel by 18 multiplications for each channel, where the definition has 36.
///
/// # Source
/// Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016: F(3, 4), in one dimension.
#[derive(Debug)]
pub(crate) struct WinogradGradient<'a, T> {
    frame: Frame,
    groups: usize,
    /// Channels of a group.
    channels: usize,
    /// Filters of a group.
    filters: usize,
    x: &'a [T],
    gradient: &'a [T],
    tall: Tall,
    /// How many images are summed up at once.
    together: usize,
    /// Where a tile is in the transformed copies, for each tile of a band of these images.
    places: Vec<usize>,
}

impl<'a, T: Float> WinogradGradient<'a, T> {
    /// Prepares the sum. `gradient` has the shape of the result.
    pub(crate) fn new(of: &Convolution, x: &'a [T], gradient: &'a [T]) -> WinogradGradient<'a, T> {
        let (frame, groups) = (of.geometry(), of.groups);
        let [channels, filters] = [of.channels, of.filters].map(|count| count / groups);
        let (tall, width) = (Tall::new(frame, channels, 1), frame.output[1]);
        let (tiles, copy) = (tall.rows * width, channels * tall.plane);
        let together = if tall.bands().nth(1).is_none() { together(tiles, copy) } else { 1 };
        let places = places(together, copy, tiles, |at| at / width * tall.row + at % width);
        WinogradGradient { frame, groups, channels, filters, x, gradient, tall, together, places }
    }
}

impl<T: Float> OfWeight<T> for WinogradGradient<'_, T> {
    fn filters(&self) -> usize {
        self.filters
    }

    fn run_by<const LANES: usize, const VECTORS: usize, const SUMS: usize>(&self) -> Vec<T> {
        let image = self.groups * self.channels * self.frame.size[0] * self.frame.size[1];
        let depth = self.channels * TAPS;
        let elements = chunks::<SUMS>(depth, |at| at / TAPS * self.tall.plane + at % TAPS);
        let of_element = elements.len() * SUMS;
        let of_block = ELEMENTS * of_element;
        let in_group = self.filters.div_ceil(VECTORS * LANES) * of_block * VECTORS * LANES;
        let len = self.groups * in_group;
        let sums = sum_of_parts(len, self.x.len() / image, self.together, |images, sums| {
            let elements = &elements;
            dispatch::<T, LANES>(Part::<T, LANES, VECTORS, SUMS> { of: self, elements, images, sums });
        });
        let mut of_kernels = vec![T::default(); of_block];
        let mut out = vec![T::default(); self.groups * self.filters * self.channels * 9];
        let groups = out.chunks_exact_mut(self.filters * self.channels * 9).zip(sums.chunks_exact(in_group));
        for (out, sums) in groups {
            for (filter, out) in out.chunks_exact_mut(self.channels * 9).enumerate() {
                let sums = of_filter::<T, LANES, VECTORS>(sums, of_block, filter);
                of_kernels.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum);
                for (channel, out) in out.as_chunks_mut::<9>().0.iter_mut().enumerate() {
                    for tap in 0..TAPS {
                        let at = channel * TAPS + tap;
                        let column = transform_back(std::array::from_fn(|i| of_kernels[i * of_element + at]));
                        column.iter().enumerate().for_each(|(i, x)| out[TAPS * i + tap] = *x);
                    }
                }
            }
        }
        out
    }
}

/// Transforms a column of sums of products to one of a kernel.
fn transform_back<T: Float>([a, b, c, d, e, f]: [T; ELEMENTS]) -> [T; 3] {
    let [quarter, sixth, half] = [4.0, 6.0, 2.0].map(|n: f64| T::from_f64(n.recip()));
    let (sum, sum_of_2) = ((b + c) * sixth, (d + e) * sixth);
    [a * quarter - sum + sum_of_2 * quarter, (c - b) * sixth + (d - e) * sixth * half, sum_of_2 - sum + f]
}

/// Transforms columns of the gradient of the result.
#[inline(always)]
fn transform<T: Float, const LANES: usize>(gradient: [[T; LANES]; ROWS]) -> [[T; LANES]; ELEMENTS] {
    let (two, four) = (T::from_f64(2.0), T::from_f64(4.0));
    let mut out = [[T::default(); LANES]; ELEMENTS];
    for lane in 0..LANES {
        let (a, b, c, d) = (gradient[0][lane], gradient[1][lane], gradient[2][lane], gradient[3][lane]);
        let (even, odd) = (a + c, b + d);
        let (even_of_2, odd_of_2) = (a + four * c, two * (b + four * d));
        out[0][lane] = a;
        out[1][lane] = even + odd;
        out[2][lane] = even - odd;
        out[3][lane] = even_of_2 + odd_of_2;
        out[4][lane] = even_of_2 - odd_of_2;
        out[5][lane] = d;
    }
    out
}

/// The sum over some images.
struct Part<'a, T, const LANES: usize, const VECTORS: usize, const SUMS: usize> {
    of: &'a WinogradGradient<'a, T>,
    /// Where the channels and columns of the kernel are in a transformed copy, relative to a tile.
    elements: &'a [[usize; SUMS]],
    images: Range<usize>,
    /// Sums by group, block of filters, element, column of the kernel and filter of the block.
    sums: &'a mut [T],
}

impl<T: Float, const LANES: usize, const VECTORS: usize, const SUMS: usize> NullaryFnOnce
    for Part<'_, T, LANES, VECTORS, SUMS>
{
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Part { of, elements, images, sums } = self;
        let Frame { size, output: [height, width], .. } = of.frame;
        let (input, plane) = (of.channels * size[0] * size[1], height * width);
        let copy_len = of.channels * of.tall.plane;
        let mut copies = vec![T::default(); of.together * copy_len];
        let mut turned = vec![[[T::default(); LANES]; VECTORS]; ROWS * RUN];
        let mut transformed = vec![[[T::default(); LANES]; VECTORS]; ELEMENTS * RUN];
        let of_element = elements.len() * SUMS * VECTORS * LANES;
        for (group, sums) in sums.chunks_exact_mut(sums.len() / of.groups).enumerate() {
            for images in sets(&images, of.together) {
                for rows in of.tall.bands() {
                    for (image, copy) in images.clone().zip(copies.chunks_exact_mut(copy_len)) {
                        of.tall.fill(&of.x[(image * of.groups + group) * input..][..input], &rows, copy);
                    }
                    let places = &of.places[..images.len() * rows.len() * width];
                    for (run, places) in places.chunks(RUN).enumerate() {
                        // All tiles of each image, or some of one.
                        let (first, count) = (rows.start * width + run * RUN, places.len() / images.len());
                        for (block, sums) in sums.chunks_exact_mut(ELEMENTS * of_element).enumerate() {
                            for (at, image) in images.clone().enumerate() {
                                let filters = (image * of.groups + group) * of.filters;
                                let block = (filters + block * VECTORS * LANES) * plane;
                                let gradient = &of.gradient[block..(filters + of.filters) * plane];
                                turn_tiles(gradient, [height, width], first, &mut turned[at * count..], count);
                            }
                            transform_run(&turned, places.len(), &mut transformed);
                            for (element, sums) in sums.chunks_exact_mut(of_element).enumerate() {
                                let gradient = &transformed[element * RUN..][..places.len()];
                                add(&copies[element * of.tall.element..], elements, places, gradient, sums);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Copies the gradient of `count` tiles such that the numbers of all filters are next to each other: by row of the
/// tile, and tile.
#[inline(always)]
fn turn_tiles<T: Float, const LANES: usize, const VECTORS: usize>(
    gradient: &[T],
    [height, width]: [usize; 2],
    first: usize,
    out: &mut [Numbers<T, LANES, VECTORS>],
    count: usize,
) {
    let mut at = 0;
    while at < count {
        let (row, column) = ((first + at) / width, (first + at) % width);
        let len = (width - column).min(count - at);
        for i in 0..ROWS {
            let out = &mut out[i * RUN + at..][..len];
            if ROWS * row + i >= height {
                out.fill([[T::default(); LANES]; VECTORS]);
                continue;
            }
            let from = (ROWS * row + i) * width + column;
            turn(&gradient[from..], height * width, out);
        }
        at += len;
    }
}

/// Transforms the gradient of some tiles.
#[inline(always)]
fn transform_run<T: Float, const LANES: usize, const VECTORS: usize>(
    turned: &[Numbers<T, LANES, VECTORS>],
    count: usize,
    out: &mut [Numbers<T, LANES, VECTORS>],
) {
    for tile in 0..count {
        for vector in 0..VECTORS {
            let mut column = [[T::default(); LANES]; ROWS];
            for i in 0..ROWS {
                column[i] = turned[i * RUN + tile][vector];
            }
            let column = transform(column);
            for i in 0..ELEMENTS {
                out[i * RUN + tile][vector] = column[i];
            }
        }
    }
}
