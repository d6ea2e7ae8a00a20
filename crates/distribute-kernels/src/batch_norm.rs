//! Batch normalisation, in the parts between which replicas exchange sums.

use distribute_rows::relu::rectified;
use distribute_rows::{Blocks, Float, compiled, simd, sum, sums_of_pairs};

use crate::parallel::{check, mapped};

/// The shape of a batch: examples × channels × elements of a channel.
///
/// All functions are one pass over memory. Sums within an example are of the type of elements, and those over examples
/// of f64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Batch {
    /// The number of examples.
    pub examples: usize,
    /// The number of channels, each of which is normalised by itself.
    pub channels: usize,
    /// The number of elements of a channel of one example: the pixels of an image.
    pub size: usize,
}

/// The moments of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Moments {
    /// The first element. The mean is stored as its difference from this element, so that a large mean loses no
    /// precision.
    pub origin: f64,
    /// The mean minus the origin.
    pub offset: f64,
    /// The sum of squared deviations from the mean.
    pub deviations: f64,
}

/// The mean of a channel, which is subtracted from its elements. Of its two parts the first is near the elements, so
/// that a large mean loses no precision.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Centre<T> {
    /// An element, as [`Moments::origin`].
    pub near: T,
    /// The rest of the mean.
    pub rest: T,
}

impl<T: Float> Centre<T> {
    #[inline(always)]
    fn deviation(self, x: T) -> T {
        x - self.near - self.rest
    }
}

/// The gradient of the input as a function of the gradient of the result and of the input's deviation from the mean.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Slope<T> {
    /// The factor of the gradient of the result.
    pub of_gradient: T,
    /// The factor of the deviation.
    pub of_deviation: T,
    /// The term that is added.
    pub constant: T,
}

/// The scale and the shift of each channel of a result that was rectified, by which a pass over the input finds the
/// elements that are 0: their gradients count as 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rectified<'a, T> {
    /// As `forward_relu` had them.
    pub scales: &'a [T],
    /// As `forward_relu` had them.
    pub shifts: &'a [T],
}

impl Batch {
    /// Returns the moments of each channel.
    ///
    /// # Shapes
    /// `x`: the batch.
    ///
    /// # Source
    /// Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983: the corrected two-pass algorithm
    /// within an example, and pairwise updates over examples.
    pub fn moments<T: Compiled>(&self, x: &[T]) -> Vec<Moments> {
        T::moments(self, x)
    }

    fn moments_generic<T: Float>(&self, x: &[T]) -> Vec<Moments> {
        self.check("the input", x);
        let size = self.size as f64;
        self.each_channel(
            #[inline(always)]
            |channel| {
                let Some(origin) = self.planes(x, channel).next().and_then(|plane| plane.first()) else {
                    return Moments::default();
                };
                let (mut offset, mut deviations) = (0.0, 0.0);
                for (example, plane) in self.planes(x, channel).enumerate() {
                    let (of_plane, own) = moments_of_plane(plane, *origin);
                    let (before, apart) = (example as f64, of_plane - offset);
                    offset += apart / (before + 1.0);
                    deviations += own + apart * apart * size * (before / (before + 1.0));
                }
                Moments { origin: (*origin).into(), offset, deviations }
            },
        )
    }

    /// Multiplies the deviations of each channel's elements from its centre by a scale, and adds a shift.
    ///
    /// # Shapes
    /// `x` and the result: the batch. The others have an element for each channel.
    pub fn forward<T: Compiled>(&self, x: &[T], centres: &[Centre<T>], scales: &[T], shifts: &[T]) -> Vec<T> {
        T::forward(self, x, centres, scales, shifts)
    }

    fn forward_generic<T: Float>(&self, x: &[T], centres: &[Centre<T>], scales: &[T], shifts: &[T]) -> Vec<T> {
        self.check_forward(x, centres, scales, shifts);
        self.each_plane(
            #[inline(always)]
            |at, out| {
                let channel = at % self.channels;
                let (centre, scale, shift) = (centres[channel], scales[channel], shifts[channel]);
                for (out, x) in out.iter_mut().zip(&x[at * self.size..]) {
                    *out = centre.deviation(*x) * scale + shift;
                }
            },
        )
    }

    /// Computes [`forward`](Self::forward), adds a shortcut if there is one, and replaces elements below 0 by 0; NaN
    /// stays.
    ///
    /// # Shapes
    /// `x`, the shortcut and the result: the batch. The others have an element for each channel.
    pub fn forward_relu<T: Compiled>(
        &self,
        x: &[T],
        centres: &[Centre<T>],
        scales: &[T],
        shifts: &[T],
        shortcut: Option<&[T]>,
    ) -> Vec<T> {
        T::forward_relu(self, x, centres, scales, shifts, shortcut)
    }

    fn forward_relu_generic<T: Float>(
        &self,
        x: &[T],
        centres: &[Centre<T>],
        scales: &[T],
        shifts: &[T],
        shortcut: Option<&[T]>,
    ) -> Vec<T> {
        self.check_forward(x, centres, scales, shifts);
        if let Some(shortcut) = shortcut {
            self.check("the shortcut", shortcut);
        }
        self.each_plane(
            #[inline(always)]
            |at, out| {
                let channel = at % self.channels;
                let (centre, scale, shift) = (centres[channel], scales[channel], shifts[channel]);
                let normed = x[at * self.size..].iter().map(|x| centre.deviation(*x) * scale + shift);
                match shortcut {
                    Some(shortcut) => {
                        let sums = normed.zip(&shortcut[at * self.size..]).map(|(normed, shortcut)| normed + *shortcut);
                        out.iter_mut().zip(sums).for_each(|(out, x)| *out = rectified(x));
                    }
                    None => out.iter_mut().zip(normed).for_each(|(out, x)| *out = rectified(x)),
                }
            },
        )
    }

    /// Returns the sums, over each channel, of the gradient of the result and of its products with deviations.
    ///
    /// The gradient is that of [`forward`](Self::forward)'s result or, with `rectified`, of that of
    /// [`forward_relu`](Self::forward_relu) without a shortcut.
    ///
    /// # Shapes
    /// `x` and `gradient`: the batch. `centres` has an element for each channel, as the parts of `rectified` have.
    pub fn sums<T: Compiled>(
        &self,
        x: &[T],
        centres: &[Centre<T>],
        gradient: &[T],
        rectified: Option<Rectified<'_, T>>,
    ) -> Vec<[f64; 2]> {
        T::sums(self, x, centres, gradient, rectified)
    }

    fn sums_generic<T: Float>(
        &self,
        x: &[T],
        centres: &[Centre<T>],
        gradient: &[T],
        rectified: Option<Rectified<'_, T>>,
    ) -> Vec<[f64; 2]> {
        self.check("the gradient", gradient);
        self.check_backward(x, centres, rectified);
        self.each_channel(
            #[inline(always)]
            |channel| {
                let (centre, rectified) = (centres[channel], rectified.map(|of| of.channel(channel)));
                let [mut of_gradient, mut of_product] = [0.0; 2];
                let mut passed = Vec::new();
                for (x, gradient) in self.planes(x, channel).zip(self.planes(gradient, channel)) {
                    let gradient = match rectified {
                        None => gradient,
                        Some(of) => {
                            // A condition within the sums would keep compilers from vectors.
                            passed.resize(self.size, T::default());
                            for (out, (x, gradient)) in passed.iter_mut().zip(x.iter().zip(gradient)) {
                                *out = of.passed(centre.deviation(*x), *gradient);
                            }
                            &passed
                        }
                    };
                    let [sum, product] =
                        sums_of_pairs(x, gradient, |x, gradient| [gradient, centre.deviation(x) * gradient]);
                    of_gradient += sum.into();
                    of_product += product.into();
                }
                [of_gradient, of_product]
            },
        )
    }

    /// Computes the gradient of the input.
    ///
    /// The gradient of the result is as [`sums`](Self::sums) has it.
    ///
    /// # Shapes
    /// `x`, `gradient` and the gradient of `x`: the batch. The others have an element for each channel.
    pub fn backward<T: Compiled>(
        &self,
        x: &[T],
        centres: &[Centre<T>],
        gradient: &[T],
        slopes: &[Slope<T>],
        rectified: Option<Rectified<'_, T>>,
    ) -> Vec<T> {
        T::backward(self, x, centres, gradient, slopes, rectified)
    }

    fn backward_generic<T: Float>(
        &self,
        x: &[T],
        centres: &[Centre<T>],
        gradient: &[T],
        slopes: &[Slope<T>],
        rectified: Option<Rectified<'_, T>>,
    ) -> Vec<T> {
        self.check("the gradient", gradient);
        self.check_backward(x, centres, rectified);
        check("the slopes", slopes.len(), self.channels);
        self.each_plane(
            #[inline(always)]
            |at, out| {
                let channel = at % self.channels;
                let (centre, Slope { of_gradient, of_deviation, constant }) = (centres[channel], slopes[channel]);
                let elements = out.iter_mut().zip(x[at * self.size..].iter().zip(&gradient[at * self.size..]));
                match rectified.map(|of| of.channel(channel)) {
                    None => elements.for_each(|(out, (x, gradient))| {
                        *out = *gradient * of_gradient + centre.deviation(*x) * of_deviation + constant;
                    }),
                    Some(of) => elements.for_each(|(out, (x, gradient))| {
                        let deviation = centre.deviation(*x);
                        let gradient = of.passed(deviation, *gradient);
                        *out = gradient * of_gradient + deviation * of_deviation + constant;
                    }),
                }
            },
        )
    }

    /// Returns the elements of a channel, by example.
    fn planes<'a, T>(&self, x: &'a [T], channel: usize) -> impl Iterator<Item = &'a [T]> {
        x.chunks_exact(self.size.max(1)).skip(channel).step_by(self.channels)
    }

    /// Returns a result for each channel, in order.
    fn each_channel<R: Send>(&self, f: impl Fn(usize) -> R + Sync) -> Vec<R> {
        mapped(self.channels, |channel| {
            simd(
                #[inline(always)]
                || f(channel),
            )
        })
    }

    /// Returns the results that `f` writes, which gets the number of each example's channel and room for its elements.
    fn each_plane<T: Float>(&self, f: impl Fn(usize, &mut [T]) + Sync + Send) -> Vec<T> {
        let planes = BLOCK.div_ceil(self.size.max(1));
        let (count, block) = (self.examples * self.channels * self.size, planes * self.size);
        Blocks { count, size: block, cost: block }.results(|block, out| {
            simd(
                #[inline(always)]
                || {
                    for (at, out) in out.chunks_exact_mut(self.size).enumerate() {
                        f(block * planes + at, out);
                    }
                },
            );
        })
    }

    fn check_forward<T>(&self, x: &[T], centres: &[Centre<T>], scales: &[T], shifts: &[T]) {
        self.check("the input", x);
        check("the centres", centres.len(), self.channels);
        check("the scales", scales.len(), self.channels);
        check("the shifts", shifts.len(), self.channels);
    }

    fn check_backward<T>(&self, x: &[T], centres: &[Centre<T>], rectified: Option<Rectified<'_, T>>) {
        self.check("the input", x);
        check("the centres", centres.len(), self.channels);
        if let Some(Rectified { scales, shifts }) = rectified {
            check("the scales", scales.len(), self.channels);
            check("the shifts", shifts.len(), self.channels);
        }
    }

    fn check<T>(&self, what: &str, x: &[T]) {
        check(what, x.len(), self.examples * self.channels * self.size);
    }
}

/// The scale and the shift of one channel that was rectified.
#[derive(Clone, Copy)]
struct RectifiedChannel<T> {
    scale: T,
    shift: T,
}

impl<T: Float> Rectified<'_, T> {
    #[inline(always)]
    fn channel(self, channel: usize) -> RectifiedChannel<T> {
        RectifiedChannel { scale: self.scales[channel], shift: self.shifts[channel] }
    }
}

impl<T: Float> RectifiedChannel<T> {
    /// Returns the gradient that passes an element whose deviation this is: computed as forward did, its result is 0 or
    /// not in the same places, and NaN where it was.
    #[inline(always)]
    fn passed(self, deviation: T, gradient: T) -> T {
        if rectified(deviation * self.scale + self.shift) == T::default() { T::default() } else { gradient }
    }
}

/// Returns the mean of some elements, less `origin`, and the sum of squares of their deviations from it.
#[inline(always)]
fn moments_of_plane<T: Float>(plane: &[T], origin: T) -> (f64, f64) {
    let size = plane.len() as f64;
    let offset = sum(plane, |x| x - origin) / T::from_f64(size);
    let centre = Centre { near: origin, rest: offset };
    let rest = sum(plane, |x| centre.deviation(x)).into() / size;
    let squares: f64 = sum(plane, |x| centre.deviation(x) * centre.deviation(x)).into();
    (offset.into() + rest, squares - rest * rest * size)
}

/// The fewest elements of a block.
const BLOCK: usize = 4 * 1024;

compiled! {
    fn moments(of: &Batch, x: &[Self]) -> Vec<Moments> = Batch::moments_generic;
    fn forward(
        of: &Batch,
        x: &[Self],
        centres: &[Centre<Self>],
        scales: &[Self],
        shifts: &[Self],
    ) -> Vec<Self> = Batch::forward_generic;
    fn forward_relu(
        of: &Batch,
        x: &[Self],
        centres: &[Centre<Self>],
        scales: &[Self],
        shifts: &[Self],
        shortcut: Option<&[Self]>,
    ) -> Vec<Self> = Batch::forward_relu_generic;
    fn sums(
        of: &Batch,
        x: &[Self],
        centres: &[Centre<Self>],
        gradient: &[Self],
        rectified: Option<Rectified<'_, Self>>,
    ) -> Vec<[f64; 2]> = Batch::sums_generic;
    fn backward(
        of: &Batch,
        x: &[Self],
        centres: &[Centre<Self>],
        gradient: &[Self],
        slopes: &[Slope<Self>],
        rectified: Option<Rectified<'_, Self>>,
    ) -> Vec<Self> = Batch::backward_generic;
}
