//! Layers' operations on rows of floats in host memory, forward and backward.
//!
//! A slice holds rows of `size` elements, one after another. All functions work in one or two passes over memory, with
//! the widest SIMD instructions that the processor has, and divide long slices among the threads of the rayon pool that
//! they are called in. Results do not depend on the number of threads: rows are independent, and sums over rows are
//! made in blocks of a fixed number of rows, whose sums are added in order.
//!
//! | module | operation |
//! |---|---|
//! | [`normalise`] | layer normalisation, and root mean square normalisation |
//! | [`softmax`] | softmax |
//! | [`cross_entropy`] | softmax cross-entropy with class indices |
//! | [`gelu`] | Gaussian error linear unit, in its approximation by tanh |
//! | [`relu`] | rectified linear unit |
//! | [`pairs`] | sums and products of two tensors |
//!
//! [`sum`], [`sum_of_pairs`] and [`greatest`] are what rows are reduced by; call them, and write loops of one's own, in
//! [`simd`]. [`Blocks`] divides results among threads, and spares memory from being cleared before they are written.
//!
//! NaN in a row gives NaN in that row, and in no other one.
//!
//! # Panics
//! All functions panic if the lengths of slices do not fit together, like the operations of slices themselves.
//!
//! # Examples
//! ```
//! use distribute_rows::softmax;
//!
//! assert_eq!(softmax::forward(&[0f32, 0.0, 1.0, f32::NEG_INFINITY], 2), [0.5, 0.5, 1.0, 0.0]);
//! ```

mod blocks;
mod compiled;
pub mod cross_entropy;
mod float;
pub mod gelu;
pub mod normalise;
pub mod pairs;
mod parallel;
pub mod relu;
pub mod softmax;

pub use blocks::Blocks;
pub use float::{Float, greatest, sum, sum_of_pairs, sums_of_pairs};
pub use parallel::simd;

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
