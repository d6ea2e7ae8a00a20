//! Layer normalisation, and root mean square normalisation.

use crate::float::{sum, sum_of_pairs};
use crate::parallel::{check, rows, simd};
use crate::{Blocks, Float, compiled};

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
    /// That of the input.
    pub input: Vec<T>,
    /// That of the weight.
    pub weight: Vec<T>,
    /// That of the bias.
    pub bias: Vec<T>,
}

/// The gradients of a weight and a bias from some rows.
struct Sums<T> {
    weight: Vec<T>,
    bias: Vec<T>,
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
    /// `x` and the result: rows of as many elements as `weight` and `bias` have.
    ///
    /// # Source
    /// Ba, Kiros and Hinton, "Layer normalization", 2016; Zhang and Sennrich, "Root mean square layer normalization",
    /// 2019.
    pub fn forward<T: Compiled>(self, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T> {
        T::forward(self, x, weight, bias)
    }

    fn forward_generic<T: Float>(self, x: &[T], weight: &[T], bias: Option<&[T]>) -> Vec<T> {
        let size = weight.len();
        check("the input", x.len(), size, x.len());
        if let Some(bias) = bias {
            check("the bias", bias.len(), size, size);
        }
        rows(
            x.len() / size,
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
        )
    }

    /// Returns the gradients of the input, weight and bias.
    ///
    /// # Shapes
    /// `x` and `gradient`: rows of as many elements as `weight` has.
    pub fn backward<T: Compiled>(self, x: &[T], weight: &[T], gradient: &[T]) -> Gradients<T> {
        T::backward(self, x, weight, gradient)
    }

    fn backward_generic<T: Float>(self, x: &[T], weight: &[T], gradient: &[T]) -> Gradients<T> {
        let size = weight.len();
        check("the gradient", gradient.len(), size, x.len());
        let blocks = Blocks { count: x.len(), size: BLOCK * size, cost: BLOCK * size };
        let (input, sums) = blocks.computed(
            || (),
            |(), block, out| {
                let rows = block * BLOCK * size..block * BLOCK * size + out.len();
                simd(
                    #[inline(always)]
                    || self.backward_block(&x[rows.clone()], weight, &gradient[rows], out),
                )
            },
        );
        let mut all = Gradients { input, weight: vec![T::default(); size], bias: vec![T::default(); size] };
        for sum in &sums {
            add(&mut all.weight, &sum.weight);
            add(&mut all.bias, &sum.bias);
        }
        all
    }

    /// Writes the gradient of the input, and returns those of weight and bias.
    #[inline(always)]
    fn backward_block<T: Float>(self, x: &[T], weight: &[T], gradient: &[T], out: &mut [T]) -> Sums<T> {
        let size = weight.len();
        let count = T::from_f64(size as f64);
        let mut sums = Sums { weight: vec![T::default(); size], bias: vec![T::default(); size] };
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
    ) -> Vec<Self> = Normalise::forward_generic;
    fn backward(
        of: Normalise,
        x: &[Self],
        weight: &[Self],
        gradient: &[Self],
    ) -> Gradients<Self> = Normalise::backward_generic;
}
