//! Gradients, once they are summed over all replicas.

use distribute_device::DType;

use crate::library::dtype;
use crate::{TensorLibrary, is_short};

mod accumulate;
mod clip;
mod loss_scale;

pub(crate) use accumulate::Accumulated;
pub use clip::Clip;
pub(crate) use clip::{change, is_finite};
pub use loss_scale::LossScale;
pub(crate) use loss_scale::Scaling;

/// The gradient of a variable, in 32 bits at least.
#[derive(Debug)]
pub struct Reduced<L: TensorLibrary> {
    /// The variable, in the order of [`Parameters::variables`](crate::Parameters::variables).
    pub index: usize,
    /// Its gradient, in storage of its own.
    pub gradient: L::Tensor,
}

impl<L: TensorLibrary> Reduced<L> {
    /// Widens a gradient of 16 bits to f32; what follows computes in 32 bits at least.
    ///
    /// # Errors
    /// The library's.
    pub fn new(index: usize, gradient: L::Tensor) -> Result<Reduced<L>, L::Error> {
        let is_short = is_short(dtype::<L>(&gradient)?);
        let gradient = if is_short { L::cast(&gradient, DType::F32)? } else { gradient };
        Ok(Reduced { index, gradient })
    }
}
