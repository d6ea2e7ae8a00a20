//! Tensors in host memory as slices.

use std::marker::PhantomData;
use std::sync::OnceLock;

use candle_core::{CpuStorage, DType, Device, Error, Layout, Result, Storage, Tensor, WithDType};
use distribute_kernels::Float;
use distribute_rows::{cross_entropy, gelu, normalise, pairs, relu, softmax};

/// Returns whether a tensor's operations are those of kernels in host memory.
pub(crate) fn is_fused(x: &Tensor) -> bool {
    x.device().is_cpu() && matches!(x.dtype(), DType::F32 | DType::F64)
}

/// An element of these operations.
pub(crate) trait Element: WithDType + Float + Rows + pairs::Compiled {}
impl Element for f32 {}
impl Element for f64 {}

/// An element of operations on rows.
pub(crate) trait Rows:
    cross_entropy::Compiled + gelu::Compiled + normalise::Compiled + relu::Compiled + softmax::Compiled
{
}
impl Rows for f32 {}
impl Rows for f64 {}

/// Returns the elements of a contiguous tensor in host memory.
pub(crate) fn elements<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    let (start, end) = layout.contiguous_offsets().ok_or_else(|| Error::Msg("elements are apart".to_owned()))?;
    let all = T::cpu_storage_as_slice(storage)?;
    all.get(start..end).ok_or_else(|| Error::Msg("a tensor is longer than its memory".to_owned()))
}

/// Calls `f` with the elements of tensors in host memory.
pub(crate) fn with<T: WithDType, R, const N: usize>(
    tensors: [&Tensor; N],
    f: impl FnOnce([&[T]; N]) -> R,
) -> Result<R> {
    let tensors: Vec<Tensor> = tensors.into_iter().map(Tensor::contiguous).collect::<Result<_>>()?;
    let held: Vec<_> = tensors.iter().map(Tensor::storage_and_layout).collect();
    let mut slices: [&[T]; N] = [&[]; N];
    for (slice, (storage, layout)) in slices.iter_mut().zip(&held) {
        let Storage::Cpu(storage) = &**storage else { candle_core::bail!("a tensor is not in host memory") };
        *slice = elements(storage, layout)?;
    }
    Ok(f(slices))
}

/// Makes a tensor of elements in host memory.
pub(crate) fn tensor<T: Element>(elements: Vec<T>, like: &Tensor) -> Result<Tensor> {
    Tensor::from_vec(elements, like.shape(), &Device::Cpu)
}

/// Runs a generic function for the element type of a storage or a tensor.
macro_rules! by_type {
    ($dtype:expr, $f:ident $(::<$of:ident>)? ( $($argument:expr),* )) => {
        match $dtype {
            candle_core::DType::F32 => $f::<f32 $(, $of)?>($($argument),*),
            candle_core::DType::F64 => $f::<f64 $(, $of)?>($($argument),*),
            // Tensors of other types do not come here, but a parameter or a result that is not in memory may.
            other => return Err(candle_core::Error::UnsupportedDTypeForOp(other, "fused operation").bt()),
        }
    };
}

pub(crate) use by_type;

/// Elements that an operation keeps from forward for backward, in a tensor, whose memory a recomputed block can drop
/// and put back.
pub(crate) struct Kept<T>(OnceLock<Tensor>, PhantomData<fn(T)>);

impl<T: WithDType> Kept<T> {
    /// Creates the place, which is empty before forward.
    pub(crate) fn none() -> Kept<T> {
        Kept(OnceLock::new(), PhantomData)
    }

    /// Keeps elements; forward does so once.
    pub(crate) fn set(&self, elements: Vec<T>) -> Result<()> {
        let len = elements.len();
        let _ = self.0.set(Tensor::from_vec(elements, len, &Device::Cpu)?);
        Ok(())
    }

    /// Returns the elements as a tensor of one axis.
    pub(crate) fn tensor(&self) -> Result<&Tensor> {
        self.0.get().ok_or_else(|| Error::Msg("backward comes before forward".to_owned()))
    }

    /// Returns the elements as a tensor of one axis; `None` before forward.
    pub(crate) fn get(&self) -> Option<&Tensor> {
        self.0.get()
    }
}

/// Adds two tensors of one shape in host memory.
pub(crate) fn added(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    fn run<T: Element>(x: &Tensor, y: &Tensor) -> Result<Tensor> {
        tensor(with([x, y], |[a, b]: [&[T]; 2]| pairs::add(a, b))?, x)
    }
    by_type!(x.dtype(), run(x, y))
}

/// Returns the type of the elements of a storage.
pub(crate) fn dtype(storage: &CpuStorage) -> DType {
    use candle_core::backend::BackendStorage;
    BackendStorage::dtype(storage)
}

/// An argument of an operation.
pub(crate) type Stored<'a> = (&'a CpuStorage, &'a Layout);

/// Returns the gradient of a tensor; `None` if it has no variables, so that nothing is computed.
pub(crate) fn gradient_of<T: Element>(of: Option<&Tensor>, f: impl FnOnce() -> Vec<T>) -> Result<Option<Tensor>> {
    of.filter(|of| of.track_op()).map(|of| tensor(f(), of)).transpose()
}
