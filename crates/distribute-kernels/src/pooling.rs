//! Pooling of images.

use distribute_rows::{Blocks, Float, compiled, simd};

use self::pairs::{Lines, Pairs};
use crate::parallel::check;

pub(crate) mod pairs;

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
        let write = |(places, lines): &mut (Vec<u8>, Lines<T>), block: usize, out: &mut [T]| {
            let x = &x[block * images * from..];
            places.resize(out.len(), 0);
            simd(
                #[inline(always)]
                || match pairs {
                    Some(pairs) => pairs.forward(x, out, places, lines),
                    None => {
                        for (out, x) in out.chunks_exact_mut(to).zip(x.chunks_exact(from)) {
                            for (row, out) in out.chunks_exact_mut(width).enumerate() {
                                for (column, out) in out.iter_mut().enumerate() {
                                    *out = x[self.place(x, row, column)];
                                }
                            }
                        }
                    }
                },
            );
        };
        blocks.computed(Default::default, write).0
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
        let write = |(y, places, lines): &mut (Vec<T>, Vec<u8>, Lines<T>), block: usize, out: &mut [T]| {
            let (x, gradient) = (&x[block * images * from..], &gradient[block * images * to..]);
            let windows = out.len() / from * to;
            y.resize(windows, T::default());
            places.resize(windows, 0);
            simd(
                #[inline(always)]
                || match pairs {
                    Some(pairs) => {
                        pairs.forward(x, y, places, lines);
                        pairs.backward(places, gradient, out, lines);
                    }
                    None => {
                        out.fill(T::default());
                        let images = out.chunks_exact_mut(from).zip(x.chunks_exact(from));
                        for ((out, x), gradient) in images.zip(gradient.chunks_exact(to)) {
                            for (row, gradient) in gradient.chunks_exact(width).enumerate() {
                                for (column, gradient) in gradient.iter().enumerate() {
                                    out[self.place(x, row, column)] += *gradient;
                                }
                            }
                        }
                    }
                },
            );
        };
        blocks.computed(Default::default, write).0
    }

    /// Returns the windows, if they are of two by two elements and do not overlap.
    pub(crate) fn pairs(&self) -> Option<Pairs> {
        let of_pairs = self.window == [2, 2] && self.stride == [2, 2];
        of_pairs.then(|| Pairs { size: self.size, windows: self.output_size() })
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

/// The elements of the images that are computed at once, which a first-level cache holds.
const BLOCK: usize = 4 * 1024;

compiled! {
    fn forward(of: &Pooling, x: &[Self]) -> Vec<Self> = Pooling::forward_generic;
    fn backward(of: &Pooling, x: &[Self], gradient: &[Self]) -> Vec<Self> = Pooling::backward_generic;
}
