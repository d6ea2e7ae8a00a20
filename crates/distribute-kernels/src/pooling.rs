//! Pooling of images.

use distribute_rows::simd;
use rayon::prelude::*;

use crate::Float;
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
    /// `x`: images, of all channels, × height × width. `out`: as many × height × width of the result.
    pub fn forward<T: Float>(&self, x: &[T], out: &mut [T]) {
        let pairs = self.is_of_pairs();
        self.each_image(x.len(), out.len(), |from, to, [height, width]| {
            let blocks = out.par_chunks_mut(BLOCK * height * width).zip(x.par_chunks(BLOCK * from));
            blocks.for_each(|(out, x)| {
                simd(|| {
                    for (out, x) in out.chunks_exact_mut(to).zip(x.chunks_exact(from)) {
                        for (row, out) in out.chunks_exact_mut(width).enumerate() {
                            if pairs {
                                self.forward_pairs(&x[row * 2 * self.size[1]..], out);
                                continue;
                            }
                            for (column, out) in out.iter_mut().enumerate() {
                                *out = x[self.place(x, row, column)];
                            }
                        }
                    }
                });
            });
        });
    }

    /// Computes the gradient of the input: a window's gradient is that of its largest element, the first of equal ones.
    ///
    /// # Shapes
    /// `x` and `out`: images × height × width. `gradient`, that of the result: images × height × width of the result.
    pub fn backward<T: Float>(&self, x: &[T], gradient: &[T], out: &mut [T]) {
        check("the gradient of the input", out.len(), x.len());
        let pairs = self.is_of_pairs();
        self.each_image(x.len(), gradient.len(), |from, to, [_, width]| {
            let blocks = out.par_chunks_mut(BLOCK * from).zip(x.par_chunks(BLOCK * from));
            blocks.zip(gradient.par_chunks(BLOCK * to)).for_each(|((out, x), gradient)| {
                simd(|| {
                    let images = out.chunks_exact_mut(from).zip(x.chunks_exact(from));
                    for ((out, x), gradient) in images.zip(gradient.chunks_exact(to)) {
                        if !pairs || self.size[0] % 2 != 0 || self.size[1] % 2 != 0 {
                            out.fill(T::default());
                        }
                        for (row, gradient) in gradient.chunks_exact(width).enumerate() {
                            if pairs {
                                let at = row * 2 * self.size[1];
                                self.backward_pairs(&x[at..], gradient, &mut out[at..]);
                                continue;
                            }
                            for (column, gradient) in gradient.iter().enumerate() {
                                out[self.place(x, row, column)] += *gradient;
                            }
                        }
                    }
                });
            });
        });
    }

    /// Returns whether windows are of two by two elements and do not overlap.
    fn is_of_pairs(&self) -> bool {
        self.window == [2, 2] && self.stride == [2, 2]
    }

    /// Computes a row of windows of two by two.
    #[inline(always)]
    fn forward_pairs<T: Float>(&self, x: &[T], out: &mut [T]) {
        let (above, below) = x.split_at(self.size[1]);
        let columns = above.chunks_exact(2).zip(below.chunks_exact(2));
        for (out, (above, below)) in out.iter_mut().zip(columns) {
            *out = larger(larger(above[0], above[1]), larger(below[0], below[1]));
        }
    }

    /// Computes the gradient of a row of windows of two by two, without branches.
    #[inline(always)]
    fn backward_pairs<T: Float>(&self, x: &[T], gradient: &[T], out: &mut [T]) {
        let (above, below) = x.split_at(self.size[1]);
        let (out_above, out_below) = out.split_at_mut(self.size[1]);
        let columns = above.chunks_exact(2).zip(below.chunks_exact(2));
        let outs = out_above.chunks_exact_mut(2).zip(out_below.chunks_exact_mut(2));
        for ((gradient, (above, below)), (out_above, out_below)) in gradient.iter().zip(columns).zip(outs) {
            let (upper, lower) = (larger(above[0], above[1]), larger(below[0], below[1]));
            let is_lower = beats(lower, upper);
            let (right_above, right_below) = (beats(above[1], above[0]), beats(below[1], below[0]));
            let zero = T::default();
            let (of_upper, of_lower) = if is_lower { (zero, *gradient) } else { (*gradient, zero) };
            (out_above[0], out_above[1]) = if right_above { (zero, of_upper) } else { (of_upper, zero) };
            (out_below[0], out_below[1]) = if right_below { (zero, of_lower) } else { (of_lower, zero) };
        }
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

    /// Checks lengths, and calls `f` with the elements of an image and of its result, and the result's size.
    fn each_image(&self, input: usize, output: usize, f: impl FnOnce(usize, usize, [usize; 2])) {
        let [height, width] = self.output_size();
        let (from, to) = (self.size[0] * self.size[1], height * width);
        assert!(input.is_multiple_of(from), "the input: {input} elements do not make images of {:?}", self.size);
        check("the result", output, input / from * to);
        f(from, to, [height, width]);
    }
}

/// Returns whether an element takes the place of the largest one so far.
#[inline(always)]
#[expect(clippy::eq_op, reason = "NaN alone does not equal itself")]
fn beats<T: Float>(x: T, largest: T) -> bool {
    x > largest || (x != x && largest == largest)
}

#[inline(always)]
fn larger<T: Float>(one: T, other: T) -> T {
    if beats(other, one) { other } else { one }
}

/// The number of images that one thread takes at once.
const BLOCK: usize = 16;
