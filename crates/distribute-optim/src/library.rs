//! The interface between a tensor library and an optimizer.

use std::any::Any;
use std::fmt::Debug;

use distribute_types::{DType, ErrorClass};
use distribute_values::TensorStorage;

use crate::Error;

mod device;
mod host;

pub use device::{DeviceExchange, DeviceOutcome, DeviceStep, DeviceUpdate, NoDevices};
pub use host::{HostError, HostLoss, HostModel};

/// A tensor library, as far as optimizers need one. They do all other work in the storage that [`TensorStorage`] lends.
///
/// The crate that adapts the library implements this for its marker type, the same type that names the library in
/// [`TensorStorage`]. [`Host`](distribute_values::Host) is a short implementation, for programs that compute gradients
/// themselves.
pub trait TensorLibrary: Sized + Debug + Send + Sync + 'static {
    /// The library's tensor type. Cloning a tensor gives another handle on the same storage.
    type Tensor: TensorStorage<Self> + Debug;

    /// The start of a backward pass: in most libraries, a scalar tensor.
    type Loss;

    /// The gradients that a backward pass returns.
    type Gradients;

    /// The error type of all operations on this library.
    type Error: From<Error>
        + From<distribute_collectives::Error>
        + From<distribute_strategy::Error>
        + From<distribute_values::Error>
        + ErrorClass
        + Send
        + Sync
        + 'static;

    /// The exchange of gradients in the memory of accelerators; [`NoDevices`](crate::backend::NoDevices) if the library
    /// has none.
    type Devices: DeviceExchange<Self>;

    /// A sentence for the warning that names variables without gradients: which operations of this library cut the
    /// graph silently, and what to use instead.
    const CUT_GRAPH: &'static str;

    /// Runs backward from `loss`. Variables with a hook report their gradients to their replica's
    /// [`Tape`](crate::backend::Tape) meanwhile.
    ///
    /// # Errors
    /// [`TensorLibrary::Error`] if the backward pass fails.
    fn backward(loss: &Self::Loss) -> Result<Self::Gradients, Self::Error>;

    /// Returns whether a program is being recorded on this thread. Default: `false`.
    fn is_recording() -> bool {
        false
    }

    /// Takes a loss whose step is to be a part of a program that is being recorded on this thread. Returns `None` if
    /// there is none, so that the step is made now. Default: returns `None`.
    ///
    /// `optimizer` returns the step's `ProgramOptimizer<Self>`, with the feature `hlo`, or the error of a setting that
    /// programs do not have.
    fn record(
        loss: &Self::Loss,
        optimizer: &dyn Fn() -> Result<Box<dyn Any>, Error>,
    ) -> Option<Result<(), Self::Error>> {
        let _ = (loss, optimizer);
        None
    }

    /// Returns the gradient of a variable that did not report it, or `None` if the loss does not depend on it.
    /// `variable` is the replica's component of the variable with this index.
    fn gradient(gradients: &Self::Gradients, index: usize, variable: &Self::Tensor) -> Option<Self::Tensor>;

    /// Multiplies a loss by a factor, and thereby its gradients.
    ///
    /// # Errors
    /// [`TensorLibrary::Error`] if the multiplication fails.
    fn scale(loss: &Self::Loss, factor: f64) -> Result<Self::Loss, Self::Error>;

    /// Returns a handle on the same storage that is not part of the graph.
    fn detach(tensor: &Self::Tensor) -> Self::Tensor;

    /// Returns a contiguous tensor of the same shape, type and device, filled with zeros.
    ///
    /// # Errors
    /// [`TensorLibrary::Error`] if the tensor cannot be created.
    fn zeros_like(tensor: &Self::Tensor) -> Result<Self::Tensor, Self::Error>;

    /// Converts the elements to another type, outside the graph. The result may share the storage if the type is the
    /// same.
    ///
    /// # Errors
    /// [`TensorLibrary::Error`] if the library cannot convert the type.
    fn cast(tensor: &Self::Tensor, dtype: DType) -> Result<Self::Tensor, Self::Error>;

    /// Adds two tensors of equal shape and type into a new one, outside the graph.
    ///
    /// # Errors
    /// [`TensorLibrary::Error`] if the addition fails.
    fn add(a: &Self::Tensor, b: &Self::Tensor) -> Result<Self::Tensor, Self::Error>;

    /// Returns a gradient that backward has returned as a contiguous tensor with its own storage: the same tensor if it
    /// is one, else a copy.
    ///
    /// # Errors
    /// [`TensorLibrary::Error`] if the copy fails.
    fn own(gradient: Self::Tensor) -> Result<Self::Tensor, Self::Error>;

    /// Returns whether the storage is in host memory, where a collective can reduce it in place.
    fn is_on_host(tensor: &Self::Tensor) -> bool;

    /// Returns a tensor of the same shape, type and elements in host memory, outside the graph: a handle on the same
    /// storage if that is there, else a copy.
    ///
    /// # Errors
    /// [`TensorLibrary::Error`] if the copy fails.
    fn on_host(tensor: &Self::Tensor) -> Result<Self::Tensor, Self::Error>;
}

/// Returns whether elements have 16 bits, for which training keeps an f32 copy.
pub fn is_short(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Returns the element type of a tensor that is known to have a type of this workspace.
pub(crate) fn dtype<L: TensorLibrary>(tensor: &L::Tensor) -> Result<DType, L::Error> {
    Ok(tensor.dtype()?)
}

/// Returns the number of elements.
pub(crate) fn len<L: TensorLibrary>(tensor: &L::Tensor) -> usize {
    tensor.shape().iter().product()
}

/// Returns the size of the elements in bytes; 0 for a type that cannot be distributed.
pub(crate) fn bytes<L: TensorLibrary>(tensor: &L::Tensor) -> usize {
    len::<L>(tensor) * tensor.dtype().map_or(0, |dtype| dtype.size_bytes())
}

/// Returns a detached copy in f32 of a tensor of 16 bits, else a detached handle.
pub(crate) fn wide<L: TensorLibrary>(tensor: &L::Tensor) -> Result<L::Tensor, L::Error> {
    let detached = L::detach(tensor);
    if is_short(dtype::<L>(tensor)?) { L::cast(&detached, DType::F32) } else { Ok(detached) }
}
