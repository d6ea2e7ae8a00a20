//! Convolution without a matrix of columns.

use distribute_rows::Float;
use pulp::NullaryFnOnce;

use super::filters::Filters;
use super::padded::{Frame, Padded};
use super::vectors::{MOST_SUMS, Tiles, dispatch, finished, lanes, write};

/// A convolution that sums up tiles of the result in registers, some vectors of a plane for some filters each, from a
/// padded copy of the image.
///
/// # Source
/// Georganas et al., "Anatomy of high-performance deep learning convolutions on SIMD architectures", 2018.
#[derive(Debug)]
pub(crate) struct Direct<'a, T> {
    frame: Frame,
    filters: Filters<'a, T>,
    /// The weight by part, block, channel, element of the kernel and filter of the block.
    weight: Vec<T>,
}

impl<'a, T: Float> Direct<'a, T> {
    /// Prepares the convolution in this frame.
    pub(crate) fn new(frame: Frame, filters: Filters<'a, T>) -> Direct<'a, T> {
        let taps = frame.kernel[0] * frame.kernel[1];
        let weight =
            filters.packed(taps, |kernel, out| out.copy_from_slice(kernel), |channel, tap| channel * taps + tap);
        Direct { frame, filters, weight }
    }

    /// Computes the results of all images, and the places of the largest elements if they are pooled.
    pub(crate) fn run(&self, x: &[T]) -> (Vec<T>, Vec<u8>) {
        match lanes::<T>(self.frame.output[1]) {
            _ if const { size_of::<T>() == 8 } => self.run_by::<4>(x),
            16 => self.run_by::<16>(x),
            _ => self.run_by::<8>(x),
        }
    }

    fn run_by<const LANES: usize>(&self, x: &[T]) -> (Vec<T>, Vec<u8>) {
        let padded = Padded::new(self.frame, self.filters.channels, LANES);
        let vectors = self.vectors::<LANES>(&padded);
        let state = || (vec![T::default(); self.filters.channels * padded.plane], [[T::default(); LANES]; MOST_SUMS]);
        self.filters.results(&self.frame, x, state, |(copy, sums), x, first, out| {
            let (padded, vectors) = (&padded, &vectors);
            dispatch::<T, LANES>(Part::<T, LANES> { of: self, padded, vectors, x, first, copy, sums, out });
        })
    }

    /// Returns the vectors of the rows of a band.
    fn vectors<const LANES: usize>(&self, padded: &Padded) -> Vec<Vector> {
        let (width, rows) = (self.frame.output[1], padded.bands().next().unwrap_or_default());
        let in_row = |row: usize| {
            let from = padded.start(row);
            (0..width).step_by(LANES).map(move |column| Vector { from: from + column, to: row * width + column })
        };
        rows.flat_map(in_row).collect()
    }
}

/// A vector of a plane of the result. The last one of a row may reach beyond its end.
#[derive(Clone, Copy, Debug)]
struct Vector {
    /// Where the first element under the kernel is in a channel of the padded copy.
    from: usize,
    /// Where the vector is in a band of the plane.
    to: usize,
}

/// The planes of a part's filters.
struct Part<'a, T, const LANES: usize> {
    of: &'a Direct<'a, T>,
    padded: &'a Padded,
    vectors: &'a [Vector],
    /// The channels of the group.
    x: &'a [T],
    /// The first filter.
    first: usize,
    copy: &'a mut [T],
    sums: &'a mut [[T; LANES]; MOST_SUMS],
    out: &'a mut [T],
}

impl<T: Float, const LANES: usize> NullaryFnOnce for Part<'_, T, LANES> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Part { of, padded, vectors, x, first, copy, sums, out } = self;
        let ([height, width], filters) = (of.frame.output, &of.filters);
        let (plane, depth) = (height * width, filters.channels * padded.taps.len());
        let packed = filters.blocks.iter().map(|block| block.width).sum::<usize>() * depth;
        for rows in padded.bands() {
            padded.fill(x, &rows, copy);
            let vectors = &vectors[..rows.len() * width.div_ceil(LANES)];
            let mut weight = &of.weight[first / filters.part * packed..];
            for block in &filters.blocks {
                let bias = &filters.bias[first + block.first..];
                let out = &mut out[block.first * plane..];
                let mut tiles = Band::<T, LANES> {
                    padded,
                    x: copy,
                    weight: &weight[..block.width * depth],
                    bias,
                    rectified: filters.rectified,
                    plane,
                    start: rows.start * width,
                    sums,
                };
                tiles.run(block.width, vectors, out);
                weight = &weight[block.width * depth..];
            }
        }
    }
}

/// A band of the result of a block of filters.
struct Band<'a, T, const LANES: usize> {
    padded: &'a Padded,
    /// A padded copy of the channels.
    x: &'a [T],
    weight: &'a [T],
    /// The bias from the first filter.
    bias: &'a [T],
    rectified: bool,
    /// The number of elements of a plane of the result.
    plane: usize,
    /// Where the band is in a plane.
    start: usize,
    /// Room for the sums of a tile.
    sums: &'a mut [[T; LANES]; MOST_SUMS],
}

impl<T: Float, const LANES: usize> Tiles<T, LANES> for Band<'_, T, LANES> {
    type Vector = Vector;

    /// Computes a tile. What vectors have beyond the ends of rows is overwritten by those of the next rows.
    #[inline(always)]
    fn tile<const FILTERS: usize, const VECTORS: usize>(&mut self, vectors: &[Vector; VECTORS], out: &mut [T]) {
        // Sums stay in registers until they are copied as a whole.
        let sums = self.sums::<FILTERS, VECTORS>(vectors);
        self.sums[..FILTERS * VECTORS].copy_from_slice(sums.as_flattened());
        let planes = out.chunks_exact_mut(self.plane).zip(self.bias);
        for ((out, bias), sums) in planes.zip(self.sums[..FILTERS * VECTORS].as_chunks::<VECTORS>().0) {
            for (vector, sums) in vectors.iter().zip(sums) {
                write(finished(*sums, *bias, self.rectified), &mut out[self.start + vector.to..]);
            }
        }
    }
}

impl<T: Float, const LANES: usize> Band<'_, T, LANES> {
    /// Returns vectors for each filter. Sums stay in registers because indices are constants and nothing refers to
    /// them.
    #[inline(always)]
    fn sums<const FILTERS: usize, const VECTORS: usize>(
        &self,
        vectors: &[Vector; VECTORS],
    ) -> [[[T; LANES]; VECTORS]; FILTERS] {
        let &Padded { plane, ref taps, reach, .. } = self.padded;
        let mut sums = [[[T::default(); LANES]; VECTORS]; FILTERS];
        let (mut x, mut weight) = (self.x, self.weight.as_chunks::<FILTERS>().0);
        while let Some((of_channel, rest)) = weight.split_at_checked(taps.len()) {
            let mut rows = [x; VECTORS];
            for (row, vector) in rows.iter_mut().zip(vectors) {
                *row = &x[vector.from..][..reach];
            }
            (x, weight) = (&x[plane..], rest);
            for (tap, weight) in taps.iter().zip(of_channel) {
                let mut x = [[T::default(); LANES]; VECTORS];
                for (x, row) in x.iter_mut().zip(rows) {
                    x.copy_from_slice(&row[*tap..][..LANES]);
                }
                for filter in 0..FILTERS {
                    for vector in 0..VECTORS {
                        for lane in 0..LANES {
                            let sum = sums[filter][vector][lane];
                            sums[filter][vector][lane] = x[vector][lane].mul_add(weight[filter], sum);
                        }
                    }
                }
            }
        }
        sums
    }
}
