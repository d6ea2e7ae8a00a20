//! Pooling of images.

use std::ops::Range;

use distribute_rows::{Blocks, Float, compiled, simd};

use crate::parallel::check;

/// Max-pooling: the largest element of each window of an image. Windows that would go beyond the image are left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pooling {
    /// Height and width of the image.
    pub size: [usize; 2],
    /// Height and width of a window.
    pub window: [usize; 2],
    /// Distance between windows, vertically and horizontally.
    pub stride: [usize; 2],
}

impl Pooling {
    /// Returns height and width of the result.
    ///
    /// # Panics
    /// If a window is empty or larger than the image, or a stride is 0.
    pub fn output_size(&self) -> [usize; 2] {
        let Pooling { size, window, stride } = self;
        [0, 1].map(|axis| {
            let fits = (1..=size[axis]).contains(&window[axis]) && stride[axis] > 0;
            assert!(fits, "windows of {window:?} by {stride:?} do not fit images of {size:?}");
            (size[axis] - window[axis]) / stride[axis] + 1
        })
    }

    /// Computes the largest element of each window; NaN, if there is one.
    ///
    /// # Shapes
    /// `x`: images, of all channels, × height × width. The result: as many × its height × width.
    pub fn forward<T: Compiled>(&self, x: &[T]) -> Vec<T> {
        T::forward(self, x)
    }

    fn forward_generic<T: Float>(&self, x: &[T]) -> Vec<T> {
        let (pairs, Images { count, from, to, width }) = (self.pairs(), self.images(x.len()));
        let images = (BLOCK / from).max(1);
        let blocks = Blocks { count: count * to, size: images * to, cost: images * from };
        let write = |room: &mut Vec<T>, block: usize, out: &mut [T]| {
            simd(
                #[inline(always)]
                || {
                    let all = out.chunks_exact_mut(to).zip(x[block * images * from..].chunks_exact(from));
                    for (out, x) in all {
                        if let Some(pairs) = pairs {
                            pairs.forward(x, out, room);
                            continue;
                        }
                        for (row, out) in out.chunks_exact_mut(width).enumerate() {
                            for (column, out) in out.iter_mut().enumerate() {
                                *out = x[self.place(x, row, column)];
                            }
                        }
                    }
                },
            );
        };
        blocks.computed(Vec::new, write).0
    }

    /// Computes the gradient of the input: a window's gradient is that of its largest element, the first of equal ones.
    ///
    /// # Shapes
    /// `x` and its gradient: images × height × width. `gradient`, that of the result: images × the result's height ×
    /// width.
    pub fn backward<T: Compiled>(&self, x: &[T], gradient: &[T]) -> Vec<T> {
        T::backward(self, x, gradient)
    }

    fn backward_generic<T: Float>(&self, x: &[T], gradient: &[T]) -> Vec<T> {
        let (pairs, Images { count, from, to, width }) = (self.pairs(), self.images(x.len()));
        check("the gradient", gradient.len(), count * to);
        let images = (BLOCK / from).max(1);
        let blocks = Blocks { count: x.len(), size: images * from, cost: images * from };
        let write = |room: &mut Vec<T>, block: usize, out: &mut [T]| {
            simd(
                #[inline(always)]
                || {
                    let all = out.chunks_exact_mut(from).zip(x[block * images * from..].chunks_exact(from));
                    for ((out, x), gradient) in all.zip(gradient[block * images * to..].chunks_exact(to)) {
                        if pairs.is_none() || 4 * to < from {
                            out.fill(T::default());
                        }
                        if let Some(pairs) = pairs {
                            pairs.backward(x, gradient, out, room);
                            continue;
                        }
                        for (row, gradient) in gradient.chunks_exact(width).enumerate() {
                            for (column, gradient) in gradient.iter().enumerate() {
                                out[self.place(x, row, column)] += *gradient;
                            }
                        }
                    }
                },
            );
        };
        blocks.computed(Vec::new, write).0
    }

    /// Returns the images' rows, if windows are of two by two elements and do not overlap.
    fn pairs(&self) -> Option<Pairs> {
        let of_pairs = self.window == [2, 2] && self.stride == [2, 2];
        of_pairs.then(|| Pairs { row: self.size[1], width: self.output_size()[1] })
    }

    /// Returns the place of a window's largest element in an image.
    #[inline(always)]
    fn place<T: Float>(&self, x: &[T], row: usize, column: usize) -> usize {
        let first = row * self.stride[0] * self.size[1] + column * self.stride[1];
        let mut place = first;
        for line in 0..self.window[0] {
            for at in first + line * self.size[1]..first + line * self.size[1] + self.window[1] {
                if beats(x[at], x[place]) {
                    place = at;
                }
            }
        }
        place
    }

    /// Divides an input into images.
    fn images(&self, input: usize) -> Images {
        let [height, width] = self.output_size();
        let (from, to) = (self.size[0] * self.size[1], height * width);
        assert!(input.is_multiple_of(from), "the input: {input} elements do not make images of {:?}", self.size);
        Images { count: input / from, from, to, width }
    }
}

/// Windows of two by two: first the larger one of each pair of neighbours in a row is found, by loops over all rows
/// at once, and then the larger one of two rows.
#[derive(Clone, Copy)]
struct Pairs {
    /// The elements of a row of an image.
    row: usize,
    /// The windows of a row.
    width: usize,
}

impl Pairs {
    #[inline(always)]
    fn forward<T: Float>(self, x: &[T], out: &mut [T], room: &mut Vec<T>) {
        let band = self.band();
        for (x, out) in x.chunks(2 * band * self.row).zip(out.chunks_mut(band * self.width)) {
            self.fill(x, out.len(), room);
            for (out, rows) in out.chunks_exact_mut(self.width).zip(room.chunks_exact(2 * self.width)) {
                let (above, below) = rows.split_at(self.width);
                for (out, (above, below)) in out.iter_mut().zip(above.iter().zip(below)) {
                    *out = larger(*above, *below);
                }
            }
        }
    }

    /// Writes the gradient of all elements that are in a window.
    #[inline(always)]
    fn backward<T: Float>(self, x: &[T], gradient: &[T], out: &mut [T], room: &mut Vec<T>) {
        let (band, zero) = (self.band(), T::default());
        let images = x.chunks(2 * band * self.row).zip(out.chunks_mut(2 * band * self.row));
        for ((x, out), gradient) in images.zip(gradient.chunks(band * self.width)) {
            self.fill(x, gradient.len(), room);
            // The gradient of each pair takes the place of its larger element.
            for (rows, gradient) in room.chunks_exact_mut(2 * self.width).zip(gradient.chunks_exact(self.width)) {
                let (above, below) = rows.split_at_mut(self.width);
                for ((above, below), gradient) in above.iter_mut().zip(below).zip(gradient) {
                    let is_below = beats(*below, *above);
                    *above = if is_below { zero } else { *gradient };
                    *below = if is_below { *gradient } else { zero };
                }
            }
            for (elements, pairs) in self.runs(gradient.len()) {
                let pairs = x[elements.clone()].as_chunks::<2>().0.iter().zip(&room[pairs]);
                for (out, ([left, right], gradient)) in out[elements].as_chunks_mut::<2>().0.iter_mut().zip(pairs) {
                    let is_right = beats(*right, *left);
                    *out = [if is_right { zero } else { *gradient }, if is_right { *gradient } else { zero }];
                }
            }
        }
    }

    /// Sets `larger` to the larger element of each pair in the rows of some windows.
    #[inline(always)]
    fn fill<T: Float>(self, x: &[T], windows: usize, larger_of: &mut Vec<T>) {
        larger_of.resize(2 * windows, T::default());
        for (elements, pairs) in self.runs(windows) {
            for (out, [left, right]) in larger_of[pairs].iter_mut().zip(x[elements].as_chunks::<2>().0) {
                *out = larger(*left, *right);
            }
        }
    }

    /// Returns where the elements of the rows of some windows are, and their pairs: all at once, if rows have nothing
    /// else.
    #[inline(always)]
    fn runs(self, windows: usize) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        let rows = 2 * windows / self.width;
        let (runs, in_run) = if self.row == 2 * self.width { (1, rows) } else { (rows, 1) };
        let of = move |run: usize, len: usize| run * len..(run + in_run) * len;
        (0..runs).map(move |run| {
            let elements = of(run, self.row);
            (elements.start..elements.start + in_run * 2 * self.width, of(run, self.width))
        })
    }

    /// Returns the number of rows of windows whose pairs a first-level cache holds.
    fn band(self) -> usize {
        (BAND / self.width).max(1)
    }
}

/// The windows of a band.
const BAND: usize = 1024;

/// Numbers of images and of their elements.
struct Images {
    count: usize,
    /// The elements of an image.
    from: usize,
    /// The elements of an image of the result.
    to: usize,
    /// The result's width.
    width: usize,
}

/// Returns whether an element takes the place of the largest one so far. There is no branch, which would be predicted
/// badly.
#[inline(always)]
#[expect(clippy::eq_op, reason = "NaN alone does not equal itself")]
fn beats<T: Float>(x: T, largest: T) -> bool {
    (x > largest) | ((x != x) & (largest == largest))
}

#[inline(always)]
fn larger<T: Float>(one: T, other: T) -> T {
    if beats(other, one) { other } else { one }
}

/// The elements of the images that are computed at once, which a first-level cache holds.
const BLOCK: usize = 4 * 1024;

compiled! {
    fn forward(of: &Pooling, x: &[Self]) -> Vec<Self> = Pooling::forward_generic;
    fn backward(of: &Pooling, x: &[Self], gradient: &[Self]) -> Vec<Self> = Pooling::backward_generic;
}
