//! Max-pooling by windows of two by two elements.

use std::ops::Range;

use distribute_rows::{Blocks, Float, simd};

use super::{BLOCK, beats};

/// Windows of two by two elements that do not overlap.
///
/// The upper lines of many windows are copied next to each other, and so are the lower ones: a loop over all of them is
/// faster than loops over rows, which may be short.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pairs {
    /// Height and width of an image.
    pub(super) size: [usize; 2],
    /// Height and width of the result.
    pub(super) windows: [usize; 2],
}

/// The elements of some windows, a pair of each window in each line.
#[derive(Default)]
pub(crate) struct Lines<T> {
    upper: Vec<T>,
    lower: Vec<T>,
    /// The elements by their places in a window.
    elements: [Vec<T>; 4],
}

impl Pairs {
    /// Returns the number of elements of an image, and of its windows.
    pub(crate) fn counts(self) -> [usize; 2] {
        [self.size, self.windows].map(|[height, width]| height * width)
    }

    /// Computes the largest elements of windows in images, and their places.
    pub(crate) fn largest<T: Float>(self, x: &[T], out: &mut [T], lines: &mut Lines<T>) -> Vec<u8> {
        let mut places = vec![0; out.len()];
        simd(
            #[inline(always)]
            || self.forward(x, out, &mut places, lines),
        );
        places
    }

    /// Computes the gradient of images from the places of the largest elements and the gradients of windows.
    pub(crate) fn gradient<T: Float>(self, places: &[u8], gradient: &[T]) -> Vec<T> {
        let [from, to] = self.counts();
        let images = (BLOCK / from).max(1);
        let blocks = Blocks { count: gradient.len() / to * from, size: images * from, cost: images * from };
        let write = |lines: &mut Lines<T>, block: usize, out: &mut [T]| {
            let all = block * images * to..block * images * to + out.len() / from * to;
            simd(
                #[inline(always)]
                || self.backward(&places[all.clone()], &gradient[all], out, lines),
            );
        };
        blocks.computed(Lines::default, write).0
    }

    /// Writes the largest elements of windows, and their places: 0 and 1 in the upper line, 2 and 3 in the lower one.
    /// `x` begins with the images.
    #[inline(always)]
    pub(super) fn forward<T: Float>(self, x: &[T], out: &mut [T], places: &mut [u8], lines: &mut Lines<T>) {
        let windows = out.len();
        for band in self.bands(windows) {
            let all = band.start * self.windows[1]..band.end * self.windows[1];
            let (out, places) = (&mut out[all.clone()], &mut places[all]);
            self.gather(x, band, lines);
            let pairs = lines.upper.as_chunks::<2>().0.iter().zip(lines.lower.as_chunks::<2>().0);
            for ((out, place), ([a, b], [c, d])) in out.iter_mut().zip(places).zip(pairs) {
                let (right_above, right_below) = (beats(*b, *a), beats(*d, *c));
                let (above, below) = (if right_above { *b } else { *a }, if right_below { *d } else { *c });
                let is_below = beats(below, above);
                *out = if is_below { below } else { above };
                *place = if is_below { 2 + u8::from(right_below) } else { u8::from(right_above) };
            }
        }
    }

    /// Writes the gradient of images, from the places of the largest elements and the gradients of windows.
    #[inline(always)]
    pub(super) fn backward<T: Float>(self, places: &[u8], gradient: &[T], out: &mut [T], lines: &mut Lines<T>) {
        let zero = T::default();
        for band in self.bands(places.len()) {
            let all = band.start * self.windows[1]..band.end * self.windows[1];
            let (places, gradient) = (&places[all.clone()], &gradient[all]);
            lines.resize(places.len());
            for (element, out) in lines.elements.iter_mut().enumerate() {
                for (out, (place, gradient)) in out.iter_mut().zip(places.iter().zip(gradient)) {
                    *out = if *place == element as u8 { *gradient } else { zero };
                }
            }
            self.scatter(lines, band, out);
        }
        // Elements in no window.
        let ([height, width], [rows, columns]) = (self.size, self.windows);
        if height > 2 * rows {
            out.chunks_exact_mut(height * width).for_each(|image| image[2 * rows * width..].fill(zero));
        }
        if width > 2 * columns {
            out.chunks_exact_mut(width).for_each(|row| row[width - 1] = zero);
        }
    }

    /// Copies the lines of some rows of windows.
    #[inline(always)]
    fn gather<T: Float>(self, x: &[T], rows: Range<usize>, lines: &mut Lines<T>) {
        let columns = self.windows[1];
        lines.resize(rows.len() * columns);
        for (at, row) in rows.enumerate() {
            let (from, to) = (self.line(row), 2 * at * columns);
            for column in (0..2 * columns).step_by(LANES) {
                copy(&x[from + column..], &mut lines.upper[to + column..]);
                copy(&x[from + self.size[1] + column..], &mut lines.lower[to + column..]);
            }
        }
    }

    /// Copies the lines of some rows of windows to where they are in images. What vectors have beyond the ends of lines
    /// is overwritten by those of the next lines.
    #[inline(always)]
    fn scatter<T: Float>(self, lines: &Lines<T>, rows: Range<usize>, out: &mut [T]) {
        let columns = self.windows[1];
        let [a, b, c, d] = &lines.elements;
        for (at, row) in rows.enumerate() {
            let (from, to) = (at * columns, self.line(row));
            for (left, right, to) in [(a, b, to), (c, d, to + self.size[1])] {
                for column in (0..columns).step_by(PAIRS) {
                    let at = from + column;
                    interleave(&left[at..], &right[at..], &mut out[to + 2 * column..]);
                }
            }
        }
    }

    /// Divides the rows of windows such that a first-level cache holds their lines.
    #[inline(always)]
    fn bands(self, windows: usize) -> impl Iterator<Item = Range<usize>> {
        let (rows, band) = (windows / self.windows[1], (BAND / self.windows[1]).max(1));
        (0..rows).step_by(band).map(move |first| first..rows.min(first + band))
    }

    /// Returns where the upper line of a row of windows begins.
    #[inline(always)]
    fn line(self, row: usize) -> usize {
        let ([height, width], [rows, _]) = (self.size, self.windows);
        (row / rows * height + row % rows * 2) * width
    }
}

impl<T: Float> Lines<T> {
    #[inline(always)]
    fn resize(&mut self, windows: usize) {
        self.upper.resize(2 * windows, T::default());
        self.lower.resize(2 * windows, T::default());
        self.elements.iter_mut().for_each(|elements| elements.resize(windows, T::default()));
    }
}

/// Copies [`LANES`] elements, or as many as there are and have room.
#[inline(always)]
fn copy<T: Float>(from: &[T], to: &mut [T]) {
    match (from.first_chunk::<LANES>(), to.first_chunk_mut::<LANES>()) {
        (Some(from), Some(to)) => *to = *from,
        _ => copy_few(from, to),
    }
}

#[cold]
#[inline(never)]
fn copy_few<T: Float>(from: &[T], to: &mut [T]) {
    to.iter_mut().zip(from).take(LANES).for_each(|(to, from)| *to = *from);
}

/// Writes [`PAIRS`] elements of each of two slices in turns, or as many as there are and have room.
#[inline(always)]
fn interleave<T: Float>(left: &[T], right: &[T], to: &mut [T]) {
    let all = (left.first_chunk::<PAIRS>(), right.first_chunk::<PAIRS>(), to.first_chunk_mut::<LANES>());
    let (Some(left), Some(right), Some(to)) = all else { return interleave_few(left, right, to) };
    let mut out = [T::default(); LANES];
    for at in 0..PAIRS {
        out[2 * at] = left[at];
        out[2 * at + 1] = right[at];
    }
    *to = out;
}

#[cold]
#[inline(never)]
fn interleave_few<T: Float>(left: &[T], right: &[T], to: &mut [T]) {
    for (to, (left, right)) in to.chunks_mut(2).zip(left.iter().zip(right)).take(PAIRS) {
        to.iter_mut().zip([left, right]).for_each(|(to, from)| *to = *from);
    }
}

/// The windows of a band.
const BAND: usize = 512;

/// The elements that are copied at once, and the pairs of them.
const LANES: usize = 2 * PAIRS;
const PAIRS: usize = 8;
