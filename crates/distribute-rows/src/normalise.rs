//! Layer normalisation, and root mean square normalisation.

use rayon::prelude::*;

use crate::float::{sum, sum_of_pairs};
use crate::parallel::{check, each_row, simd};
use crate::{Float, compiled};

/// The kind of a normalisation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normalise {
    /// Added to the mean square.
    pub epsilon: f64,
    /// Whether the mean is subtracted first: layer normalisation; else root mean square normalisation.
    pub remove_mean: bool,
}

/// The gradients of a normalisation.
#[derive(Clone, Debug, PartialEq)]
pub struct Gradients<T> {
    /// That of the weight.
    pub weight: Vec<T>,
    /// That of the bias.
    pub bias: Vec<T>,
}

/// The mean and the reciprocal deviation of a row.
#[derive(Clone, Copy)]
struct Moments<T> {
    /// The mean is the sum of these, so that a large one loses no precision.
    near: T,
    rest: T,
    scale: T,
}

impl Normalise {
    #[inline(always)]
    fn moments<T: Float>(self, x: &[T]) -> Moments<T> {
        let size = T::from_f64(x.len() as f64);
        let (near, rest) = match self.remove_mean {
            true => (x[0], sum(x, |element| element - x[0]) / size),
            false => (T::default(), T::default()),
        };
        let square = |element: T| {
            let centred = element - near - rest;
            centred * centred
        };
        let scale = T::ONE / (sum(x, square) / size + T::from_f64(self.epsilon)).sqrt();
        Moments { near, rest, scale }
    }

    /// Normalises each row, multiplies it by `weight`, and adds `bias`.
    ///
    /// # Shapes
    /// `x` and `out`: rows of as many elements as `weight` and `bias` have.
    ///
    /// # Source
    /// Ba, Kiros and Hinton, "Layer normalization", 2016; Zhang and Sennrich, "Root mean square layer normalization",
    /// 2019.
    pub fn forward<T: Compiled>(self, x: &[T], weight: &[T], bias: Option<&[T]>, out: &mut [T]) {
        T::forward(self, x, weight, bias, out)
    }

    fn forward_generic<T: Float>(self, x: &[T], weight: &[T], bias: Option<&[T]>, out: &mut [T]) {
        let size = weight.len();
        check("the input", x.len(), size, out.len());
        if let Some(bias) = bias {
            check("the bias", bias.len(), size, size);
        }
        each_row(
            out,
            size,
            size,
            #[inline(always)]
            |row, out| {
                let x = &x[row * size..][..size];
                let Moments { near, rest, scale } = self.moments(x);
                for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
                    *out = (*x - near - rest) * scale * *weight;
                }
                for (out, bias) in out.iter_mut().zip(bias.unwrap_or_default()) {
                    *out += *bias;
                }
            },
        );
    }

    /// Computes the gradient of the input into `out`, and returns those of weight and bias.
    ///
    /// # Shapes
    /// `x`, `gradient` and `out`: rows of as many elements as `weight` has.
    pub fn backward<T: Compiled>(self, x: &[T], weight: &[T], gradient: &[T], out: &mut [T]) -> Gradients<T> {
        T::backward(self, x, weight, gradient, out)
    }

    fn backward_generic<T: Float>(self, x: &[T], weight: &[T], gradient: &[T], out: &mut [T]) -> Gradients<T> {
        let size = weight.len();
        check("the input", x.len(), size, out.len());
        check("the gradient", gradient.len(), size, out.len());
        let block = |((out, x), gradient): ((&mut [T], &[T]), &[T])| {
            simd(
                #[inline(always)]
                || self.backward_block(x, weight, gradient, out),
            )
        };
        // A pool of one thread would only be waited for.
        let sums: Vec<Gradients<T>> = if rayon::current_num_threads() == 1 {
            let blocks = out.chunks_mut(BLOCK * size).zip(x.chunks(BLOCK * size));
            blocks.zip(gradient.chunks(BLOCK * size)).map(block).collect()
        } else {
            let blocks = out.par_chunks_mut(BLOCK * size).zip(x.par_chunks(BLOCK * size));
            blocks.zip(gradient.par_chunks(BLOCK * size)).map(block).collect()
        };
        let mut all = Gradients { weight: vec![T::default(); size], bias: vec![T::default(); size] };
        for sum in &sums {
            add(&mut all.weight, &sum.weight);
            add(&mut all.bias, &sum.bias);
        }
        all
    }

    #[inline(always)]
    fn backward_block<T: Float>(self, x: &[T], weight: &[T], gradient: &[T], out: &mut [T]) -> Gradients<T> {
        let size = weight.len();
        let count = T::from_f64(size as f64);
        let mut sums = Gradients { weight: vec![T::default(); size], bias: vec![T::default(); size] };
        // The normalised row, of one row at a time.
        let mut normed = vec![T::default(); size];
        let rows = x.chunks_exact(size).zip(gradient.chunks_exact(size)).zip(out.chunks_exact_mut(size));
        for ((x, gradient), out) in rows {
            let Moments { near, rest, scale } = self.moments(x);
            for (normed, x) in normed.iter_mut().zip(x) {
                *normed = (*x - near - rest) * scale;
            }
            add(&mut sums.bias, gradient);
            for ((sum, normed), gradient) in sums.weight.iter_mut().zip(&normed).zip(gradient) {
                *sum += *normed * *gradient;
            }
            // The gradient of the normalised row.
            for ((out, weight), gradient) in out.iter_mut().zip(weight).zip(gradient) {
                *out = *weight * *gradient;
            }
            let along = sum_of_pairs(out, &normed, |gradient, normed| gradient * normed) / count;
            let mean = if self.remove_mean { sum(out, |gradient| gradient) / count } else { T::default() };
            for (out, normed) in out.iter_mut().zip(&normed) {
                *out = (*out - mean - *normed * along) * scale;
            }
        }
        sums
    }
}

#[inline(always)]
fn add<T: Float>(sums: &mut [T], others: &[T]) {
    for (sum, other) in sums.iter_mut().zip(others) {
        *sum += *other;
    }
}

/// The number of rows whose gradients of weight and bias are summed together.
const BLOCK: usize = 64;

compiled! {
    fn forward(
        of: Normalise,
        x: &[Self],
        weight: &[Self],
        bias: Option<&[Self]>,
        out: &mut [Self],
    ) = Normalise::forward_generic;
    fn backward(
        of: Normalise,
        x: &[Self],
        weight: &[Self],
        gradient: &[Self],
        out: &mut [Self],
    ) -> Gradients<Self> = Normalise::backward_generic;
}
