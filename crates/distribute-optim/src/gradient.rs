//! Gradients that were summed over all replicas.

use distribute_device::DType;

use crate::library::dtype;
use crate::{TensorLibrary, is_short};

mod accumulate;
mod clip;
mod loss_scale;
mod parts;

pub(crate) use accumulate::Accumulated;
pub(crate) use clip::{change, is_finite, square_sum};
pub use loss_scale::LossScale;
pub(crate) use loss_scale::Scaling;
pub(crate) use parts::SquaresOfParts;

/// The summed gradient of a variable, in f32 or f64.
#[derive(Debug)]
pub struct Reduced<L: TensorLibrary> {
    /// The variable's index in [`Parameters::variables`](crate::Parameters::variables).
    pub index: usize,
    /// The gradient, in its own storage.
    pub gradient: L::Tensor,
}

impl<L: TensorLibrary> Reduced<L> {
    /// Creates the gradient of a variable, widening 16 bits to f32: all later computation is in f32 or f64.
    ///
    /// # Errors
    /// The library's error if the tensor cannot be converted.
    pub fn new(index: usize, gradient: L::Tensor) -> Result<Reduced<L>, L::Error> {
        let is_short = is_short(dtype::<L>(&gradient)?);
        let gradient = if is_short { L::cast(&gradient, DType::F32)? } else { gradient };
        Ok(Reduced { index, gradient })
    }
}
