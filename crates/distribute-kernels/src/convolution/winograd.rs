//! Convolution with kernels of 3 × 3 that multiplies less often.

use distribute_rows::Float;
use pulp::{Arch, NullaryFnOnce};

use super::filters::{Filters, WIDEST};
use super::padded::{Frame, Padded, lanes};
use crate::parallel::{each_chunk, share};

pub(crate) mod gradient;

/// A convolution with a kernel of 3 × 3 and a stride of 1 that makes tiles of 2 × 2 places of the result by 16
/// multiplications for each channel, where the definition has 36.
///
/// Images and kernels are transformed by sums, and then a product of matrices is made for each of the 16 elements of a
/// transformed tile. Where an element of the input is not finite, the places of all tiles that it takes part in are
/// NaN.
///
/// # Source
/// Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016: F(2 × 2, 3 × 3).
#[derive(Debug)]
pub(crate) struct Winograd<'a, T> {
    /// The frame of tiles.
    tiles: Frame,
    /// Height and width of the result.
    output: [usize; 2],
    filters: Filters<'a, T>,
    /// The transformed weight by part, block, element, channel and filter of the block.
    weight: Vec<T>,
}

impl<'a, T: Float> Winograd<'a, T> {
    /// Prepares the convolution in this frame.
    pub(crate) fn new(frame: Frame, filters: Filters<'a, T>) -> Winograd<'a, T> {
        let channels = filters.channels;
        let weight = filters.packed(ELEMENTS, transform_kernel, |channel, element| element * channels + channel);
        Winograd { tiles: tiles(frame), output: frame.output, filters, weight }
    }

    /// Computes the results of all images.
    pub(crate) fn run(&self, x: &[T], out: &mut [T]) {
        match lanes::<T>() {
            8 if self.tiles.output[1] > 4 => self.run_by::<8, 8>(x, out),
            8 => self.run_by::<8, 4>(x, out),
            _ => self.run_by::<4, 4>(x, out),
        }
    }

    /// Computes them with vectors of `LANES` elements in products, and of `TILES` tiles in transforms.
    fn run_by<const LANES: usize, const TILES: usize>(&self, x: &[T], out: &mut [T]) {
        let ([height, width], filters) = (self.output, &self.filters);
        let input = filters.channels * self.tiles.size[0] * self.tiles.size[1];
        let result = filters.part * height * width;
        let padded = Padded::new(self.tiles, filters.channels, TILES);
        let vectors = vectors(&padded, self.tiles.output[1], TILES);
        let share = share(out.len() / result);
        each_chunk(out, share * result, |at, out| {
            let mut copy = vec![T::default(); filters.channels * padded.plane];
            let mut transformed = vec![[[[T::default(); LANES]; 2]; ELEMENTS + 1]; filters.channels];
            let mut products = [[[[T::default(); LANES]; 2]; ELEMENTS]; WIDEST];
            for (part, out) in out.chunks_exact_mut(result).enumerate() {
                let first = (at * share + part) * filters.part;
                Arch::new().dispatch(Part::<T, LANES, TILES> {
                    of: self,
                    padded: &padded,
                    vectors: &vectors,
                    x: &x[first / filters.count * input..][..input],
                    first: first % filters.bias.len(),
                    copy: &mut copy,
                    transformed: &mut transformed,
                    products: &mut products,
                    out,
                });
            }
        });
    }
}

/// Some tiles of a row.
#[derive(Clone, Copy, Debug)]
struct Vector {
    /// Where the first tile is in a channel of the padded copy.
    from: usize,
    /// The row of tiles in the band.
    row: usize,
    /// The first tile's column.
    column: usize,
}

/// Returns the tiles of a band, `tiles` at once.
fn vectors(padded: &Padded, width: usize, tiles: usize) -> Vec<Vector> {
    let rows = padded.bands().next().unwrap_or_default();
    let in_row = |row: usize| {
        let start = padded.start(row);
        (0..width).step_by(tiles).map(move |column| Vector { from: start + column, row, column })
    };
    rows.flat_map(in_row).collect()
}

/// Some transformed tiles of a channel in registers. The last element is not used: it keeps channels from the same
/// places of a cache.
type Transformed<T, const LANES: usize, const REGISTERS: usize> = [[[T; LANES]; REGISTERS]; ELEMENTS + 1];

/// Products of transformed tiles and a filter.
type Products<T, const LANES: usize> = [[[T; LANES]; 2]; ELEMENTS];

/// Transforms some tiles of a channel, and writes them from the place `to`.
#[inline(always)]
fn transform<T: Float, const LANES: usize, const REGISTERS: usize, const TILES: usize>(
    taps: &[usize; ELEMENTS],
    x: &[T],
    to: usize,
    out: &mut Transformed<T, LANES, REGISTERS>,
) {
    let (a, b) = (line::<T, TILES>(x, taps, 0), line(x, taps, 4));
    let (c, d) = (line(x, taps, 8), line(x, taps, 12));
    transform_line(minus_line(a, c), 0, to, out);
    transform_line(plus_line(b, c), 4, to, out);
    transform_line(minus_line(c, b), 8, to, out);
    transform_line(minus_line(b, d), 12, to, out);
}

/// Numbers of a row of some tiles.
type Line<T, const TILES: usize> = [[T; TILES]; 4];

/// Returns a row of tiles.
#[inline(always)]
fn line<T: Float, const TILES: usize>(x: &[T], taps: &[usize; ELEMENTS], first: usize) -> Line<T, TILES> {
    let mut line = [[T::default(); TILES]; 4];
    for j in 0..4 {
        line[j].copy_from_slice(&x[taps[first + j]..][..TILES]);
    }
    line
}

/// Transforms a row of tiles.
#[inline(always)]
fn transform_line<T: Float, const LANES: usize, const REGISTERS: usize, const TILES: usize>(
    [a, b, c, d]: Line<T, TILES>,
    first: usize,
    to: usize,
    out: &mut Transformed<T, LANES, REGISTERS>,
) {
    let line = [minus(a, c), plus(b, c), minus(c, b), minus(b, d)];
    for j in 0..4 {
        out[first + j].as_flattened_mut()[to..][..TILES].copy_from_slice(&line[j]);
    }
}

#[inline(always)]
fn plus<T: Float, const N: usize>(mut a: [T; N], b: [T; N]) -> [T; N] {
    for lane in 0..N {
        a[lane] += b[lane];
    }
    a
}

#[inline(always)]
fn minus<T: Float, const N: usize>(mut a: [T; N], b: [T; N]) -> [T; N] {
    for lane in 0..N {
        a[lane] = a[lane] - b[lane];
    }
    a
}

#[inline(always)]
fn plus_line<T: Float, const N: usize>([a, b, c, d]: Line<T, N>, [e, f, g, h]: Line<T, N>) -> Line<T, N> {
    [plus(a, e), plus(b, f), plus(c, g), plus(d, h)]
}

#[inline(always)]
fn minus_line<T: Float, const N: usize>([a, b, c, d]: Line<T, N>, [e, f, g, h]: Line<T, N>) -> Line<T, N> {
    [minus(a, e), minus(b, f), minus(c, g), minus(d, h)]
}

/// Returns the frame of tiles: a convolution with a kernel of 4 × 4 and a stride of 2.
fn tiles(frame: Frame) -> Frame {
    Frame { kernel: [4, 4], stride: 2, output: frame.output.map(|size| size.div_ceil(2)), ..frame }
}

/// Transforms a kernel of 3 × 3.
fn transform_kernel<T: Float>(kernel: &[T], out: &mut [T]) {
    let half = T::from_f64(0.5);
    let line = |[a, b, c]: [T; 3]| [a, (a + c + b) * half, (a + c - b) * half, c];
    let rows: [[T; 4]; 3] = std::array::from_fn(|i| line(std::array::from_fn(|j| kernel[3 * i + j])));
    for j in 0..4 {
        let column = line(std::array::from_fn(|i| rows[i][j]));
        column.iter().enumerate().for_each(|(i, x)| out[4 * i + j] = *x);
    }
}

/// The planes of a part's filters.
struct Part<'a, T, const LANES: usize, const TILES: usize> {
    of: &'a Winograd<'a, T>,
    padded: &'a Padded,
    vectors: &'a [Vector],
    /// The channels of the group.
    x: &'a [T],
    /// The first filter.
    first: usize,
    copy: &'a mut [T],
    transformed: &'a mut [Transformed<T, LANES, 2>],
    /// The transformed result of a block.
    products: &'a mut [Products<T, LANES>; WIDEST],
    out: &'a mut [T],
}

impl<T: Float, const LANES: usize, const TILES: usize> NullaryFnOnce for Part<'_, T, LANES, TILES> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Part { of, padded, vectors, x, first, copy, transformed, products, out } = self;
        let ([height, width], filters) = (of.output, &of.filters);
        let (plane, depth) = (height * width, ELEMENTS * filters.channels);
        let packed = filters.blocks.iter().map(|block| block.width).sum::<usize>() * depth;
        let mut taps = [0; ELEMENTS];
        taps.copy_from_slice(&padded.taps);
        for rows in padded.bands() {
            padded.fill(x, &rows, copy);
            let count = rows.len() * of.tiles.output[1].div_ceil(TILES);
            for vectors in vectors[..count].chunks(2 * LANES / TILES) {
                for (copy, out) in copy.chunks_exact(padded.plane).zip(&mut *transformed) {
                    for (at, vector) in vectors.iter().enumerate() {
                        transform::<T, LANES, 2, TILES>(&taps, &copy[vector.from..], at * TILES, out);
                    }
                }
                let mut weight = &of.weight[first / filters.part * packed..];
                for block in &filters.blocks {
                    let of_block = &weight[..block.width * depth];
                    match block.width {
                        2 => multiply::<T, LANES, 2>(of_block, transformed, products),
                        4 => multiply::<T, LANES, 4>(of_block, transformed, products),
                        _ => multiply::<T, LANES, WIDEST>(of_block, transformed, products),
                    }
                    weight = &weight[block.width * depth..];
                    let bias = filters.bias[first..].iter().skip(block.first);
                    let planes = out.chunks_exact_mut(plane).skip(block.first);
                    for ((products, bias), out) in products.iter_mut().take(block.width).zip(bias).zip(planes) {
                        transform_back::<T, LANES, TILES>(products, *bias, vectors.len());
                        for (at, vector) in vectors.iter().enumerate() {
                            let from = 2 * (rows.start + vector.row) * width;
                            let out = &mut out[from..plane.min(from + 2 * width)];
                            let (above, below) = out.split_at_mut(width);
                            let pairs = |i: usize| &products[i].as_flattened()[at * TILES..][..TILES];
                            interleave(pairs(0), pairs(1), &mut above[2 * vector.column..]);
                            interleave(pairs(2), pairs(3), below.get_mut(2 * vector.column..).unwrap_or_default());
                        }
                    }
                }
            }
        }
    }
}

/// Multiplies transformed tiles by the transformed weight of a block, for each element.
#[inline(always)]
fn multiply<T: Float, const LANES: usize, const FILTERS: usize>(
    weight: &[T],
    tiles: &[Transformed<T, LANES, 2>],
    out: &mut [Products<T, LANES>; WIDEST],
) {
    let weights = weight.as_chunks::<FILTERS>().0.chunks_exact(tiles.len());
    for (element, weight) in weights.enumerate().take(ELEMENTS) {
        let mut sums = [[[T::default(); LANES]; 2]; FILTERS];
        for (weight, tiles) in weight.iter().zip(tiles) {
            let x = tiles[element];
            for filter in 0..FILTERS {
                for vector in 0..2 {
                    for lane in 0..LANES {
                        let sum = sums[filter][vector][lane];
                        sums[filter][vector][lane] = x[vector][lane].mul_add(weight[filter], sum);
                    }
                }
            }
        }
        for filter in 0..FILTERS {
            out[filter][element] = sums[filter];
        }
    }
}

/// Replaces the first elements by those of the result: the two rows of two columns.
#[inline(always)]
fn transform_back<T: Float, const LANES: usize, const TILES: usize>(
    products: &mut Products<T, LANES>,
    bias: T,
    vectors: usize,
) {
    for at in (0..vectors * TILES).step_by(TILES) {
        let (a, b) = (products_of::<T, LANES, TILES>(products, 0, at), products_of(products, 4, at));
        let (c, d) = (products_of(products, 8, at), products_of(products, 12, at));
        let [first, second] = transform_line_back(plus_line(plus_line(a, b), c), bias);
        let [third, fourth] = transform_line_back(minus_line(minus_line(b, c), d), bias);
        for (element, line) in [first, second, third, fourth].iter().enumerate() {
            products[element].as_flattened_mut()[at..][..TILES].copy_from_slice(line);
        }
    }
}

/// Returns a row of products.
#[inline(always)]
fn products_of<T: Float, const LANES: usize, const TILES: usize>(
    products: &Products<T, LANES>,
    first: usize,
    at: usize,
) -> Line<T, TILES> {
    let mut line = [[T::default(); TILES]; 4];
    for j in 0..4 {
        line[j].copy_from_slice(&products[first + j].as_flattened()[at..][..TILES]);
    }
    line
}

/// Returns the two columns of a row of the result.
#[inline(always)]
fn transform_line_back<T: Float, const TILES: usize>([a, b, c, d]: Line<T, TILES>, bias: T) -> [[T; TILES]; 2] {
    let bias = [bias; TILES];
    [plus(plus(plus(a, b), c), bias), plus(minus(minus(b, c), d), bias)]
}

/// Writes the elements of two columns by turns.
#[inline(always)]
fn interleave<T: Float>(even: &[T], odd: &[T], out: &mut [T]) {
    let (pairs, rest) = out.as_chunks_mut::<2>();
    let count = pairs.len();
    for ((pair, even), odd) in pairs.iter_mut().zip(even).zip(odd) {
        *pair = [*even, *odd];
    }
    rest.iter_mut().zip(even.get(count..).unwrap_or_default()).for_each(|(out, even)| *out = *even);
}

/// The number of elements of a transformed tile.
const ELEMENTS: usize = 16;
