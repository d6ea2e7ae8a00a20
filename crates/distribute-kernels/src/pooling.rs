//! Pooling of images.

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

/// Runs a block for runs of 8 elements from `$at` to `$end`, and for shorter ones at the end; `$lanes` is the number of
/// a run's elements, a constant, so that compilers make SIMD instructions of loops over them.
macro_rules! by_lanes {
    ($at:ident, $end:expr, $lanes:ident => $body:block) => {
        by_lanes!($at, $end, $lanes, 8 => $body);
        by_lanes!($at, $end, $lanes, 4 => $body);
        by_lanes!($at, $end, $lanes, 2 => $body);
        by_lanes!($at, $end, $lanes, 1 => $body);
    };
    ($at:ident, $end:expr, $lanes:ident, $count:literal => $body:block) => {
        while $end - $at >= $count {
            const $lanes: usize = $count;
            $body
            $at += $count;
        }
    };
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
        let (pairs, Images { count, from, to, width }) = (self.is_of_pairs(), self.images(x.len()));
        Blocks { count: count * to, size: BLOCK * to, cost: BLOCK * from }.results(|block, out| {
            simd(
                #[inline(always)]
                || {
                    let images = out.chunks_exact_mut(to).zip(x[block * BLOCK * from..].chunks_exact(from));
                    for (out, x) in images {
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
                },
            );
        })
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
        let (pairs, Images { count, from, to, width }) = (self.is_of_pairs(), self.images(x.len()));
        check("the gradient", gradient.len(), count * to);
        Blocks { count: x.len(), size: BLOCK * from, cost: BLOCK * from }.results(|block, out| {
            simd(
                #[inline(always)]
                || {
                    let images = out.chunks_exact_mut(from).zip(x[block * BLOCK * from..].chunks_exact(from));
                    for ((out, x), gradient) in images.zip(gradient[block * BLOCK * to..].chunks_exact(to)) {
                        if !pairs || self.size.iter().any(|size| !size.is_multiple_of(2)) {
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
                },
            );
        })
    }

    /// Returns whether windows are of two by two elements and do not overlap.
    fn is_of_pairs(&self) -> bool {
        self.window == [2, 2] && self.stride == [2, 2]
    }

    /// Computes a row of windows of two by two.
    #[inline(always)]
    fn forward_pairs<T: Float>(&self, x: &[T], out: &mut [T]) {
        let mut at = 0;
        by_lanes!(at, out.len(), LANES => {
            let [a, b, c, d] = self.windows::<T, LANES>(x, at);
            let out = &mut out[at..][..LANES];
            for lane in 0..LANES {
                out[lane] = larger(larger(a[lane], b[lane]), larger(c[lane], d[lane]));
            }
        });
    }

    /// Computes the gradient of a row of windows of two by two.
    #[inline(always)]
    fn backward_pairs<T: Float>(&self, x: &[T], gradient: &[T], out: &mut [T]) {
        let (out_above, out_below) = out.split_at_mut(self.size[1]);
        let mut at = 0;
        by_lanes!(at, gradient.len(), LANES => {
            let [a, b, c, d] = self.windows::<T, LANES>(x, at);
            let gradient = &gradient[at..][..LANES];
            let mut changes = [[T::default(); LANES]; 4];
            for lane in 0..LANES {
                let (a, b, c, d) = (a[lane], b[lane], c[lane], d[lane]);
                let (right_above, right_below) = (beats(b, a), beats(d, c));
                let is_below = beats(larger(c, d), larger(a, b));
                let only_if = |is: bool| if is { gradient[lane] } else { T::default() };
                changes[0][lane] = only_if(!is_below & !right_above);
                changes[1][lane] = only_if(!is_below & right_above);
                changes[2][lane] = only_if(is_below & !right_below);
                changes[3][lane] = only_if(is_below & right_below);
            }
            let (above, below) = (&mut out_above[2 * at..][..2 * LANES], &mut out_below[2 * at..][..2 * LANES]);
            for lane in 0..LANES {
                (above[2 * lane], above[2 * lane + 1]) = (changes[0][lane], changes[1][lane]);
                (below[2 * lane], below[2 * lane + 1]) = (changes[2][lane], changes[3][lane]);
            }
        });
    }

    /// Returns the elements of some windows of two by two in a row, from the one at `at` on: those above, left and
    /// right, and those below.
    #[inline(always)]
    fn windows<T: Float, const LANES: usize>(&self, x: &[T], at: usize) -> [[T; LANES]; 4] {
        let (above, below) = x[..2 * self.size[1]].split_at(self.size[1]);
        let (above, below) = (&above[2 * at..][..2 * LANES], &below[2 * at..][..2 * LANES]);
        let mut windows = [[T::default(); LANES]; 4];
        for lane in 0..LANES {
            (windows[0][lane], windows[1][lane]) = (above[2 * lane], above[2 * lane + 1]);
            (windows[2][lane], windows[3][lane]) = (below[2 * lane], below[2 * lane + 1]);
        }
        windows
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

#[inline(always)]
fn larger<T: Float>(one: T, other: T) -> T {
    if beats(other, one) { other } else { one }
}

/// The number of images that one thread takes at once.
const BLOCK: usize = 16;

compiled! {
    fn forward(of: &Pooling, x: &[Self]) -> Vec<Self> = Pooling::forward_generic;
    fn backward(of: &Pooling, x: &[Self], gradient: &[Self]) -> Vec<Self> = Pooling::backward_generic;
}
