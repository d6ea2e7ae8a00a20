//! What a tensor library gives an optimizer.

use std::fmt::Debug;

use distribute_types::{DType, ErrorClass};
use distribute_values::TensorStorage;

use crate::Error;

mod device;
mod host;

pub use device::{DeviceExchange, DeviceUpdate, NoDevices};
pub use host::{HostError, HostLoss, HostModel};

/// A tensor library, as far as optimizers need one: everything else they do in the storage that [`TensorStorage`] lends.
///
/// A marker type of the crate that adapts the library implements this, the same that names the library in [`TensorStorage`].
/// [`Host`](distribute_values::Host), whose gradients a program computes itself, is an implementation of one page.
pub trait TensorLibrary: Sized + Debug + Send + Sync + 'static {
    /// The library's tensors. Cloning one gives another handle on the same storage.
    type Tensor: TensorStorage<Self> + Debug;

    /// What backward begins at: a scalar tensor, in most libraries.
    type Loss;

    /// What backward returns.
    type Gradients;

    /// The error of everything that a user of this library calls.
    type Error: From<Error>
        + From<distribute_collectives::Error>
        + From<distribute_strategy::Error>
        + From<distribute_values::Error>
        + ErrorClass
        + Send
        + Sync
        + 'static;

    /// How gradients are reduced and applied in the memory of accelerators; [`NoDevices`](crate::NoDevices) where there is no
    /// such way.
    type Devices: DeviceExchange<Self>;

    /// What cuts a graph of this library without a word, and what to use instead: for the warning that names variables without
    /// gradients.
    const CUT_GRAPH: &'static str;

    /// Runs backward from `loss`. Variables made to do so report their gradients to their replica's [`Tape`](crate::Tape)
    /// meanwhile.
    ///
    /// # Errors
    /// The library's.
    fn backward(loss: &Self::Loss) -> Result<Self::Gradients, Self::Error>;

    /// Returns the gradient of a variable that did not report it, `variable` being the component of the variable with this
    /// index; `None` if the loss does not depend on it.
    fn gradient(gradients: &Self::Gradients, index: usize, variable: &Self::Tensor) -> Option<Self::Tensor>;

    /// Multiplies a loss, so that its gradients are multiplied too.
    ///
    /// # Errors
    /// The library's.
    fn scale(loss: &Self::Loss, factor: f64) -> Result<Self::Loss, Self::Error>;

    /// Returns a handle on the same storage that takes no part in backward.
    fn detach(tensor: &Self::Tensor) -> Self::Tensor;

    /// Returns a contiguous tensor of the same shape, type and device, filled with zeros.
    ///
    /// # Errors
    /// The library's.
    fn zeros_like(tensor: &Self::Tensor) -> Result<Self::Tensor, Self::Error>;

    /// Returns the elements in another type, outside of backward; the storage may be shared if the type is the same.
    ///
    /// # Errors
    /// The library's.
    fn cast(tensor: &Self::Tensor, dtype: DType) -> Result<Self::Tensor, Self::Error>;

    /// Adds two tensors of equal shape and type into a third, outside of backward.
    ///
    /// # Errors
    /// The library's.
    fn add(a: &Self::Tensor, b: &Self::Tensor) -> Result<Self::Tensor, Self::Error>;

    /// Returns a gradient that backward has handed over as a contiguous tensor whose storage is its own: the same tensor where
    /// it is that already, else a copy.
    ///
    /// # Errors
    /// The library's.
    fn own(gradient: Self::Tensor) -> Result<Self::Tensor, Self::Error>;

    /// Returns whether the storage is in host memory, where a collective can reduce it in place.
    fn is_on_host(tensor: &Self::Tensor) -> bool;
}

/// Returns whether elements have 16 bits, so that training keeps a wider copy of them.
pub fn is_short(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// The element type of a tensor that is known to be one of the workspace's.
pub(crate) fn dtype<L: TensorLibrary>(tensor: &L::Tensor) -> Result<DType, L::Error> {
    Ok(tensor.dtype()?)
}

/// The number of elements.
pub(crate) fn len<L: TensorLibrary>(tensor: &L::Tensor) -> usize {
    tensor.shape().iter().product()
}

/// The number of bytes of the elements; 0 for a type that cannot be distributed.
pub(crate) fn bytes<L: TensorLibrary>(tensor: &L::Tensor) -> usize {
    len::<L>(tensor) * tensor.dtype().map_or(0, |dtype| dtype.size_bytes())
}

/// Returns a detached copy in f32 of a tensor of 16 bits, else a detached handle.
pub(crate) fn wide<L: TensorLibrary>(tensor: &L::Tensor) -> Result<L::Tensor, L::Error> {
    let detached = L::detach(tensor);
    if is_short(dtype::<L>(tensor)?) { L::cast(&detached, DType::F32) } else { Ok(detached) }
}
