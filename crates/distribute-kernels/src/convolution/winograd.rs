//! Convolution with kernels of 3 × 3 that multiplies less often.

use std::ops::Range;

use distribute_rows::Float;
use pulp::NullaryFnOnce;

use super::filters::Filters;
use super::padded::{COPY, Frame};
use super::vectors::{MOST_SUMS, Tiles, dispatch, finished, is_wide, lanes, write};

pub(super) mod gradient;

/// A convolution with a kernel of 3 × 3 and a stride of 1 that makes tiles of 4 rows and a column of the result by 18
/// multiplications for each channel, where the definition has 36.
///
/// Tiles lie in columns because vectors, which lie in rows, then need no shuffling. Rows of the image and of the kernel
/// are transformed by sums, and each of the 6 elements of a transformed column is convolved with its row of 3. Where an
/// element of the input is not finite, the places of all tiles that it takes part in are NaN.
///
/// # Source
/// Lavin and Gray, "Fast algorithms for convolutional neural networks", 2016: F(4, 3), in one dimension.
#[derive(Debug)]
pub(crate) struct Winograd<'a, T> {
    frame: Frame,
    filters: Filters<'a, T>,
    /// The transformed weight by part, block, element, channel, column of the kernel and filter of the block.
    weight: Vec<T>,
}

impl<'a, T: Float> Winograd<'a, T> {
    /// Prepares the convolution in this frame.
    pub(crate) fn new(frame: Frame, filters: Filters<'a, T>) -> Winograd<'a, T> {
        let channels = filters.channels;
        let place = |channel: usize, at: usize| (at / TAPS * channels + channel) * TAPS + at % TAPS;
        let weight = filters.packed(ELEMENTS * TAPS, transform_kernel, place);
        Winograd { frame, filters, weight }
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
        let tall = Tall::new(self.frame, self.filters.channels, LANES);
        let vectors = self.vectors::<LANES>(&tall);
        let state = || {
            (vec![T::default(); self.filters.channels * tall.plane], vec![[T::default(); LANES]; ELEMENTS * MOST_SUMS])
        };
        self.filters.results(&self.frame, x, state, |(copy, products), x, first, out| {
            let (tall, vectors) = (&tall, &vectors);
            dispatch::<T, LANES>(Part::<T, LANES> { of: self, tall, vectors, x, first, copy, products, out });
        })
    }

    /// Returns the vectors of tiles of a band. The last one of a row ends where the row does, and computes some tiles
    /// again.
    fn vectors<const LANES: usize>(&self, tall: &Tall) -> Vec<Vector> {
        let width = self.frame.output[1];
        let in_row = |row: usize| {
            (0..width).step_by(LANES).map(move |column| Vector { row, column: column.min(width.saturating_sub(LANES)) })
        };
        (0..tall.rows).flat_map(in_row).collect()
    }
}

/// A vector of tiles. It may reach beyond the end of a row that is shorter.
#[derive(Clone, Copy, Debug)]
struct Vector {
    /// The row of tiles in the band.
    row: usize,
    /// The first tile's column.
    column: usize,
}

/// The layout of padded copies of some rows of images, transformed in columns.
#[derive(Clone, Copy, Debug)]
struct Tall {
    frame: Frame,
    /// The number of elements of a row.
    row: usize,
    /// Rows of tiles in a copy, as many as a cache holds.
    rows: usize,
    /// How far the elements of a transformed column are from each other.
    element: usize,
    /// The number of elements of a channel.
    plane: usize,
}

impl Tall {
    /// Lays out copies of `channels` channels for vectors of `lanes` elements.
    fn new(frame: Frame, channels: usize, lanes: usize) -> Tall {
        let row = frame.output[1].max(lanes) + TAPS - 1;
        let height = frame.output[0].div_ceil(ROWS);
        let fit = (COPY / (channels * ELEMENTS * row)).clamp(1, height);
        // All bands have about as many.
        let rows = height.div_ceil(height.div_ceil(fit));
        let element = rows * row;
        Tall { frame, row, rows, element, plane: ELEMENTS * element }
    }

    /// Divides the rows of tiles into those of one copy each.
    fn bands(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (height, rows) = (self.frame.output[0].div_ceil(ROWS), self.rows);
        (0..height).step_by(rows).map(move |from| from..height.min(from + rows))
    }

    /// Copies what some rows of tiles need from all channels of `x`, transformed. What `copy` holds is from former
    /// calls, or 0.
    #[inline(always)]
    fn fill<T: Float>(&self, x: &[T], rows: &Range<usize>, copy: &mut [T]) {
        match (self.frame.size[1], size_of::<T>()) {
            (16.., 4) if is_wide() => self.fill_by::<T, 16>(x, rows, copy),
            (8.., 4) => self.fill_by::<T, 8>(x, rows, copy),
            (4.., _) => self.fill_by::<T, 4>(x, rows, copy),
            _ => self.fill_by::<T, 1>(x, rows, copy),
        }
    }

    #[inline(always)]
    fn fill_by<T: Float, const LANES: usize>(&self, x: &[T], rows: &Range<usize>, copy: &mut [T]) {
        let Frame { size: [height, width], padding, .. } = self.frame;
        for (x, copy) in x.chunks_exact(height * width).zip(copy.chunks_exact_mut(self.plane)) {
            for (at, row) in rows.clone().enumerate() {
                let mut inputs = [None; ELEMENTS];
                for (i, input) in inputs.iter_mut().enumerate() {
                    let y = (ROWS * row + i).checked_sub(padding[0]).filter(|y| *y < height);
                    *input = y.map(|y| &x[y * width..][..width]);
                }
                let copy = &mut copy[at * self.row + padding[1]..];
                for column in (0..width).step_by(LANES) {
                    let column = column.min(width - LANES);
                    let mut numbers = [[T::default(); LANES]; ELEMENTS];
                    for i in 0..ELEMENTS {
                        if let Some(input) = inputs[i] {
                            numbers[i].copy_from_slice(&input[column..][..LANES]);
                        }
                    }
                    let numbers = transform(numbers);
                    for i in 0..ELEMENTS {
                        copy[i * self.element + column..][..LANES].copy_from_slice(&numbers[i]);
                    }
                }
            }
        }
    }
}

/// Transforms columns of an image.
#[inline(always)]
fn transform<T: Float, const LANES: usize>(x: [[T; LANES]; ELEMENTS]) -> [[T; LANES]; ELEMENTS] {
    let (two, four, five) = (T::from_f64(2.0), T::from_f64(4.0), T::from_f64(5.0));
    let mut out = [[T::default(); LANES]; ELEMENTS];
    for lane in 0..LANES {
        let (a, b, c, d, e, f) = (x[0][lane], x[1][lane], x[2][lane], x[3][lane], x[4][lane], x[5][lane]);
        let (even, odd) = (e - four * c, d - four * b);
        let (even_of_2, odd_of_2) = (e - c, two * (d - b));
        out[0][lane] = four * a - five * c + e;
        out[1][lane] = even + odd;
        out[2][lane] = even - odd;
        out[3][lane] = even_of_2 + odd_of_2;
        out[4][lane] = even_of_2 - odd_of_2;
        out[5][lane] = four * b - five * d + f;
    }
    out
}

/// Transforms the columns of a kernel.
fn transform_kernel<T: Float>(kernel: &[T], out: &mut [T]) {
    let [quarter, sixth, twelfth] = [4.0, 6.0, 12.0].map(|n: f64| T::from_f64(n.recip()));
    let half = T::from_f64(0.5);
    for tap in 0..TAPS {
        let [a, b, c] = [0, 1, 2].map(|i| kernel[TAPS * i + tap]);
        let (even, odd) = ((a + c) * sixth, b * sixth);
        let (even_of_2, odd_of_2) = ((a * half * half + c) * sixth, b * twelfth);
        let column = [a * quarter, -(even + odd), odd - even, even_of_2 + odd_of_2, even_of_2 - odd_of_2, c];
        column.iter().enumerate().for_each(|(i, x)| out[TAPS * i + tap] = *x);
    }
}

/// Returns the elements of the result in columns of products.
#[inline(always)]
fn transform_back<T: Float, const LANES: usize>(products: [[T; LANES]; ELEMENTS]) -> [[T; LANES]; ROWS] {
    let (two, four, eight) = (T::from_f64(2.0), T::from_f64(4.0), T::from_f64(8.0));
    let mut out = [[T::default(); LANES]; ROWS];
    for lane in 0..LANES {
        let (a, b, c) = (products[0][lane], products[1][lane], products[2][lane]);
        let (d, e, f) = (products[3][lane], products[4][lane], products[5][lane]);
        let (sum, difference, sum_of_2, difference_of_2) = (b + c, b - c, d + e, d - e);
        out[0][lane] = a + sum + sum_of_2;
        out[1][lane] = difference + two * difference_of_2;
        out[2][lane] = sum + four * sum_of_2;
        out[3][lane] = difference + eight * difference_of_2 + f;
    }
    out
}

/// The planes of a part's filters.
struct Part<'a, T, const LANES: usize> {
    of: &'a Winograd<'a, T>,
    tall: &'a Tall,
    vectors: &'a [Vector],
    /// The channels of the group.
    x: &'a [T],
    /// The first filter.
    first: usize,
    copy: &'a mut [T],
    products: &'a mut [[T; LANES]],
    out: &'a mut [T],
}

impl<T: Float, const LANES: usize> NullaryFnOnce for Part<'_, T, LANES> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        let Part { of, tall, vectors, x, first, copy, products, out } = self;
        let ([height, width], filters) = (of.frame.output, &of.filters);
        let (plane, depth) = (height * width, ELEMENTS * TAPS * filters.channels);
        let packed = filters.blocks.iter().map(|block| block.width).sum::<usize>() * depth;
        for rows in tall.bands() {
            tall.fill(x, &rows, copy);
            let vectors = &vectors[..rows.len() * width.div_ceil(LANES)];
            let mut weight = &of.weight[first / filters.part * packed..];
            for block in &filters.blocks {
                let mut tiles = Band::<T, LANES> {
                    tall,
                    x: copy,
                    weight: &weight[..block.width * depth],
                    bias: &filters.bias[first + block.first..],
                    rectified: filters.rectified,
                    start: ROWS * rows.start,
                    products,
                };
                let out = &mut out[block.first * plane..];
                tiles.run(block.width, vectors, out);
                weight = &weight[block.width * depth..];
            }
        }
    }
}

/// A band of tiles of a block of filters.
struct Band<'a, T, const LANES: usize> {
    tall: &'a Tall,
    /// A transformed copy of the channels.
    x: &'a [T],
    weight: &'a [T],
    /// The bias from the first filter.
    bias: &'a [T],
    rectified: bool,
    /// The band's first row.
    start: usize,
    /// Room for products by element, filter and vector.
    products: &'a mut [[T; LANES]],
}

impl<T: Float, const LANES: usize> Tiles<T, LANES> for Band<'_, T, LANES> {
    type Vector = Vector;

    /// Computes a tile. What vectors have beyond the ends of short rows is overwritten by those of the next rows.
    #[inline(always)]
    fn tile<const FILTERS: usize, const VECTORS: usize>(&mut self, vectors: &[Vector; VECTORS], out: &mut [T]) {
        let of_element = self.weight.len() / ELEMENTS;
        for element in 0..ELEMENTS {
            let x = &self.x[element * self.tall.element..];
            let sums = self.sums::<FILTERS, VECTORS>(vectors, x, &self.weight[element * of_element..][..of_element]);
            let products = &mut self.products[element * FILTERS * VECTORS..][..FILTERS * VECTORS];
            products.copy_from_slice(sums.as_flattened());
        }
        let [height, width] = self.tall.frame.output;
        let planes = out.chunks_exact_mut(height * width).zip(self.bias).take(FILTERS);
        for (filter, (out, bias)) in planes.enumerate() {
            for (at, vector) in vectors.iter().enumerate() {
                let mut products = [[T::default(); LANES]; ELEMENTS];
                for (element, product) in products.iter_mut().enumerate() {
                    *product = self.products[(element * FILTERS + filter) * VECTORS + at];
                }
                let first = self.start + ROWS * vector.row;
                let rows = transform_back(products);
                for i in 0..ROWS.min(height - first) {
                    write(finished(rows[i], *bias, self.rectified), &mut out[(first + i) * width + vector.column..]);
                }
            }
        }
    }
}

impl<T: Float, const LANES: usize> Band<'_, T, LANES> {
    /// Returns the convolution of an element's rows, a vector for each filter. Sums stay in registers because indices
    /// are constants and nothing refers to them.
    #[inline(always)]
    fn sums<const FILTERS: usize, const VECTORS: usize>(
        &self,
        vectors: &[Vector; VECTORS],
        mut x: &[T],
        weight: &[T],
    ) -> [[[T; LANES]; VECTORS]; FILTERS] {
        let mut places = [0; VECTORS];
        for vector in 0..VECTORS {
            places[vector] = vectors[vector].row * self.tall.row + vectors[vector].column;
        }
        let mut sums = [[[T::default(); LANES]; VECTORS]; FILTERS];
        for weight in weight.as_chunks::<FILTERS>().0.as_chunks::<TAPS>().0 {
            let mut rows = [x; VECTORS];
            for vector in 0..VECTORS {
                rows[vector] = &x[places[vector]..][..LANES + TAPS - 1];
            }
            x = x.get(self.tall.plane..).unwrap_or_default();
            for tap in 0..TAPS {
                let mut x = [[T::default(); LANES]; VECTORS];
                for vector in 0..VECTORS {
                    x[vector].copy_from_slice(&rows[vector][tap..][..LANES]);
                }
                for filter in 0..FILTERS {
                    for vector in 0..VECTORS {
                        for lane in 0..LANES {
                            let sum = sums[filter][vector][lane];
                            sums[filter][vector][lane] = x[vector][lane].mul_add(weight[tap][filter], sum);
                        }
                    }
                }
            }
        }
        sums
    }
}

/// The number of elements of a transformed column.
const ELEMENTS: usize = 6;

/// The number of rows of a tile.
const ROWS: usize = 4;

/// The number of columns of a kernel.
const TAPS: usize = 3;
