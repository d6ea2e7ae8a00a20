//! Layers' operations on tensors in host memory, forward and backward, by matrix products.
//!
//! Tensors are slices in row-major order. All functions divide their work among the threads of the rayon pool that they
//! are called in. Results do not depend on the number of threads: sums over a batch are made in parts whose number and
//! order depend on shapes alone.
//!
//! | module | operation |
//! |---|---|
//! | [`linear`] | linear layer |
//! | [`convolution`] | convolution of images, with stride, padding, dilation and groups |
//! | [`pooling`] | max-pooling of images |
//! | [`batch_norm`] | batch normalisation, in parts between which replicas exchange sums |
//! | [`attention`] | scaled dot-product attention that keeps no matrix of queries and keys |
//!
//! Operations on single rows, as softmax and normalisation, are in `distribute-rows`.
//!
//! # Panics
//! All functions panic if the lengths of slices do not fit the shapes, like the operations of slices themselves.
//!
//! # Examples
//! ```
//! use distribute_kernels::pooling::Pooling;
//!
//! let pooling = Pooling { size: [2, 2], window: [2, 2], stride: [2, 2] };
//! assert_eq!(pooling.forward(&[1f32, 4.0, 2.0, 3.0]), [4.0]);
//! ```

pub mod attention;
pub mod batch_norm;
pub mod convolution;
pub mod linear;
mod parallel;
pub mod pooling;
mod product;

/// A type of elements: `f32` or `f64`.
pub trait Float:
    attention::Compiled + batch_norm::Compiled + convolution::Compiled + linear::Compiled + pooling::Compiled
{
}
impl Float for f32 {}
impl Float for f64 {}

// The examples of the README are tests of the crate.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
