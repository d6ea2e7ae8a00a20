//! The gradient of a weight of 3 × 3 that multiplies less often.

use std::ops::Range;

use distribute_rows::Float;
use pulp::{Arch, NullaryFnOnce};

use super::{ELEMENTS, Transformed, Vector, minus, plus, tiles, transform, vectors};
use crate::convolution::Convolution;
use crate::convolution::filters::{Block, WIDEST, blocks};
use crate::convolution::padded::{Frame, Padded, lanes};
use crate::parallel::sum_of_parts;

/// The gradient of a weight of 3 × 3 for a stride of 1. Tiles of 2 × 2 places of the result take part in each element
/// by 16 multiplications for each channel, where the definition has 36.
///
/// # Source
/// Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016: F(3 × 3, 2 × 2).
#[derive(Debug)]
pub(crate) struct WinogradGradient<'a, T> {
    /// The frame of tiles.
    tiles: Frame,
    /// Height and width of the result.
    output: [usize; 2],
    groups: usize,
    /// Channels of a group.
    channels: usize,
    /// The blocks of channels.
    blocks: Vec<Block>,
    /// Filters of a group.
    filters: usize,
    x: &'a [T],
    gradient: &'a [T],
}

impl<'a, T: Float> WinogradGradient<'a, T> {
    /// Prepares the sum. `gradient` has the shape of the result.
    pub(crate) fn new(of: &Convolution, x: &'a [T], gradient: &'a [T]) -> WinogradGradient<'a, T> {
        let (frame, groups) = (of.geometry(), of.groups);
        let [channels, filters] = [of.channels, of.filters].map(|count| count / groups);
        let (tiles, output, blocks) = (tiles(frame), frame.output, blocks(channels));
        WinogradGradient { tiles, output, groups, channels, blocks, filters, x, gradient }
    }

    /// Computes the gradient, of the shape of the weight.
    pub(crate) fn run(&self, out: &mut [T]) {
        match lanes::<T>() {
            8 if self.tiles.output[1] > 4 => self.run_by::<8, 8>(out),
            8 => self.run_by::<8, 4>(out),
            _ => self.run_by::<4, 4>(out),
        }
    }

    fn run_by<const LANES: usize, const TILES: usize>(&self, out: &mut [T]) {
        let padded = Padded::new(self.tiles, self.channels, TILES);
        let vectors = vectors(&padded, self.tiles.output[1], TILES);
        let image = self.groups * self.channels * self.tiles.size[0] * self.tiles.size[1];
        let of_block = ELEMENTS * self.channels * 2 * LANES;
        let in_group = self.filters.div_ceil(2 * LANES) * of_block;
        let mut sums = vec![T::default(); self.groups * in_group];
        sum_of_parts(&mut sums, self.x.len() / image, |images, sums| {
            let (padded, vectors) = (&padded, &vectors);
            Arch::new().dispatch(Part::<T, LANES, TILES> { of: self, padded, vectors, images, sums });
        });
        let groups = out.chunks_exact_mut(self.filters * self.channels * 9).zip(sums.chunks_exact(in_group));
        for (out, sums) in groups {
            for (at, out) in out.as_chunks_mut::<9>().0.iter_mut().enumerate() {
                let (filter, channel) = (at / self.channels, at % self.channels);
                let sums = &sums[filter / (2 * LANES) * of_block + channel * 2 * LANES + filter % (2 * LANES)..];
                let mut elements = sums.iter().step_by(self.channels * 2 * LANES).copied();
                *out = transform_back(std::array::from_fn(|_| elements.next().unwrap_or_default()));
            }
        }
    }
}

/// Transforms a sum of products to a kernel.
fn transform_back<T: Float>(sums: [T; ELEMENTS]) -> [T; 9] {
    let half = T::from_f64(0.5);
    let line = |[a, b, c, d]: [T; 4]| [a + (b + c) * half, (b - c) * half, (b + c) * half - d];
    let rows: [[T; 3]; 4] = std::array::from_fn(|i| line(std::array::from_fn(|j| sums[4 * i + j])));
    let columns: [[T; 3]; 3] = std::array::from_fn(|j| line(std::array::from_fn(|i| rows[i][j])));
    std::array::from_fn(|at| columns[at % 3][at / 3])
}

/// Numbers of a block of filters: two registers.
type Numbers<T, const LANES: usize> = [[T; LANES]; 2];

/// A transformed gradient: for each element, the numbers of a block of filters for each tile of a run.
type OfBlock<T, const LANES: usize> = [[[Numbers<T, LANES>; LANES]; RUN]; ELEMENTS];

/// The sum over some images.
struct Part<'a, T, const LANES: usize, const TILES: usize> {
    of: &'a WinogradGradient<'a, T>,
    padded: &'a Padded,
    vectors: &'a [Vector],
    images: Range<usize>,
    /// Sums by group, block of filters, element, channel and filter of the block.
    sums: &'a mut [T],
}

impl<T: Float, const LANES: usize, const TILES: usize> NullaryFnOnce for Part<'_, T, LANES, TILES> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Part { of, padded, vectors, images, sums } = self;
        let WinogradGradient { tiles, output: [height, width], groups, channels, filters, .. } = *of;
        let (input, result) = (channels * tiles.size[0] * tiles.size[1], filters * height * width);
        let mut taps = [0; ELEMENTS];
        taps.copy_from_slice(&padded.taps);
        let mut copy = vec![T::default(); channels * padded.plane];
        let mut run = Run::<T, LANES> {
            channels: &of.blocks,
            tiles: vec![[[[T::default(); LANES]; RUN]; ELEMENTS + 1]; channels],
            gradients: vec![[[[[[T::default(); LANES]; 2]; LANES]; RUN]; ELEMENTS]; filters.div_ceil(2 * LANES)],
            turned: Box::new([[[[[T::default(); LANES]; 2]; LANES]; RUN]; 4]),
            products: [[[T::default(); LANES]; 2]; WIDEST],
            len: 0,
        };
        let sums_of_group = sums.len() / groups;
        for (group, sums) in sums.chunks_exact_mut(sums_of_group).enumerate() {
            for image in images.clone() {
                let at = image * groups + group;
                let (x, gradient) = (&of.x[at * input..][..input], &of.gradient[at * result..][..result]);
                for rows in padded.bands() {
                    padded.fill(x, &rows, &mut copy);
                    let count = rows.len() * tiles.output[1].div_ceil(TILES);
                    let mut vectors = &vectors[..count];
                    while !vectors.is_empty() {
                        let (now, rest) = vectors.split_at(vectors.len().min(run.room::<TILES>()));
                        for (copy, out) in copy.chunks_exact(padded.plane).zip(&mut run.tiles) {
                            for (at, vector) in now.iter().enumerate() {
                                let (x, to) = (&copy[vector.from..], run.len + at * TILES);
                                transform::<T, LANES, RUN, TILES>(&taps, x, to, out);
                            }
                        }
                        for (at, gradient) in gradient.chunks(2 * LANES * height * width).enumerate() {
                            run.turn::<TILES>(gradient, [height, width], rows.start, now);
                            run.transform_gradient(at, now.len() * TILES);
                        }
                        run.len += now.len() * TILES;
                        vectors = rest;
                        if run.room::<TILES>() == 0 {
                            run.add(sums);
                        }
                    }
                }
            }
            run.add(sums);
        }
    }
}

/// Transformed tiles whose products are added at once.
struct Run<'a, T, const LANES: usize> {
    /// The blocks of channels.
    channels: &'a [Block],
    /// Tiles by channel.
    tiles: Vec<Transformed<T, LANES, RUN>>,
    /// Gradients by block of filters.
    gradients: Vec<OfBlock<T, LANES>>,
    /// The gradient for a block of filters, before it is transformed: by place in a tile, and tile.
    turned: Box<[[[Numbers<T, LANES>; LANES]; RUN]; 4]>,
    /// Sums of products of a block of channels.
    products: [Numbers<T, LANES>; WIDEST],
    /// The number of tiles.
    len: usize,
}

impl<T: Float, const LANES: usize> Run<'_, T, LANES> {
    /// Returns how many vectors of tiles fit in.
    #[inline(always)]
    fn room<const TILES: usize>(&self) -> usize {
        (RUN * LANES - self.len) / TILES
    }

    /// Copies the gradient of some tiles for a block of filters, such that the numbers of all filters are next to each
    /// other. `first` is the first row of tiles of the band.
    #[inline(always)]
    fn turn<const TILES: usize>(
        &mut self,
        gradient: &[T],
        [height, width]: [usize; 2],
        first: usize,
        vectors: &[Vector],
    ) {
        for (filter, plane) in gradient.chunks_exact(height * width).enumerate() {
            for (at, vector) in vectors.iter().enumerate() {
                for i in 0..2 {
                    let from = (2 * (first + vector.row) + i) * width;
                    let row = plane.get(from + 2 * vector.column..from + width).unwrap_or_default();
                    let (pairs, rest) = row.as_chunks::<2>();
                    let [.., left, right] = &mut self.turned[..2 * i + 2] else { continue };
                    let left = &mut left.as_flattened_mut()[at * TILES..][..TILES];
                    let right = &mut right.as_flattened_mut()[at * TILES..][..TILES];
                    for (tile, (left, right)) in left.iter_mut().zip(right).enumerate() {
                        let [a, b] = match pairs.get(tile) {
                            Some(pair) => *pair,
                            None if tile == pairs.len() => [rest.first().copied().unwrap_or_default(), T::default()],
                            None => [T::default(); 2],
                        };
                        left.as_flattened_mut()[filter] = a;
                        right.as_flattened_mut()[filter] = b;
                    }
                }
            }
        }
    }

    /// Transforms the copied gradient of some tiles.
    #[inline(always)]
    fn transform_gradient(&mut self, block: usize, tiles: usize) {
        let out = &mut self.gradients[block];
        for tile in 0..tiles {
            for half in 0..2 {
                let of = |place: usize| self.turned[place].as_flattened()[tile][half];
                let (a, b, c, d) = (of(0), of(1), of(2), of(3));
                let rows = [[a, b], [plus(a, c), plus(b, d)], [minus(a, c), minus(b, d)], [c, d]];
                for i in 0..4 {
                    let [a, b] = rows[i];
                    let line = [a, plus(a, b), minus(a, b), b];
                    for j in 0..4 {
                        out[4 * i + j].as_flattened_mut()[self.len + tile][half] = line[j];
                    }
                }
            }
        }
    }

    /// Adds products to `sums`, and empties the run.
    #[inline(always)]
    fn add(&mut self, sums: &mut [T]) {
        let of_element = self.tiles.len() * 2 * LANES;
        for (gradient, sums) in self.gradients.iter().zip(sums.chunks_exact_mut(ELEMENTS * of_element)) {
            for (element, sums) in sums.chunks_exact_mut(of_element).enumerate() {
                let gradient = &gradient[element].as_flattened()[..self.len];
                for block in self.channels {
                    let sums = &mut sums.as_chunks_mut::<LANES>().0[2 * block.first..];
                    let tiles = &self.tiles[block.first..];
                    match block.width {
                        2 => products::<T, LANES, 2>(element, tiles, gradient, &mut self.products),
                        4 => products::<T, LANES, 4>(element, tiles, gradient, &mut self.products),
                        _ => products::<T, LANES, WIDEST>(element, tiles, gradient, &mut self.products),
                    }
                    let products = self.products.as_flattened().iter().take(2 * block.width);
                    sums.iter_mut().zip(products).for_each(|(sum, product)| *sum = plus(*sum, *product));
                }
            }
        }
        self.len = 0;
    }
}

/// Computes sums of products of an element for some channels and a block of filters.
#[inline(always)]
fn products<T: Float, const LANES: usize, const CHANNELS: usize>(
    element: usize,
    tiles: &[Transformed<T, LANES, RUN>],
    gradient: &[Numbers<T, LANES>],
    out: &mut [Numbers<T, LANES>; WIDEST],
) {
    let mut rows = [&[][..]; CHANNELS];
    for channel in 0..CHANNELS {
        rows[channel] = &tiles[channel.min(tiles.len() - 1)][element].as_flattened()[..gradient.len()];
    }
    let mut sums = [[[T::default(); LANES]; 2]; CHANNELS];
    for (tile, gradient) in gradient.iter().enumerate() {
        for channel in 0..CHANNELS {
            let x = rows[channel][tile];
            for vector in 0..2 {
                for lane in 0..LANES {
                    let sum = sums[channel][vector][lane];
                    sums[channel][vector][lane] = x.mul_add(gradient[vector][lane], sum);
                }
            }
        }
    }
    for (out, sums) in out.iter_mut().zip(sums) {
        *out = sums;
    }
}

/// The number of vectors of tiles in a run: 24 tiles of f32, which fit a second-level cache for 64 channels.
const RUN: usize = 3;
