//! burn's tensors as distributed values, and the tensors that optimizers write in place.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use burn::tensor::{DType as BurnType, Device, Float, GradientCheckpointingStrategy, Int, Tensor};
use burn_backend::TensorData;
use burn_backend::backend::AutodiffBackend;
use burn_flex::{Flex, FlexTensor};
use distribute_device::{BufferMut, BufferRef, DType, Element};
use distribute_types::with_dtype;
use distribute_values::TensorStorage;
use parking_lot::RwLock;

use crate::backend::{Diff, DiffTensor, Recomputing, is_whole, whole};
#[cfg(feature = "pjrt")]
use crate::pjrt::Resident;

mod held;

use held::Held;

/// The marker type of burn's tensors, for traits that take a tensor library.
#[derive(Clone, Copy, Debug)]
pub enum Burn {}

/// A tensor in host memory, of any rank, whose elements are written in place: a replica's copy of a variable, an
/// optimizer's slot, or a gradient.
///
/// burn's own tensors are values: an operation makes a new one. A clone of a `BurnTensor` is another handle on the same
/// elements. A [`Tensor`] that was [made](BurnTensor::to_tensor) from it keeps the elements of that moment.
#[derive(Clone, Debug)]
pub struct BurnTensor(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    held: RwLock<Held>,
    /// The number of writes.
    version: AtomicU64,
}

impl BurnTensor {
    /// Copies the elements only if they are not contiguous.
    pub(crate) fn new(tensor: FlexTensor) -> BurnTensor {
        BurnTensor(Arc::new(Shared { held: RwLock::new(Held::Host(whole(tensor))), version: AtomicU64::new(0) }))
    }

    /// Returns the elements as a tensor of burn, without a copy and outside the graph. A later write to this tensor
    /// does not change it.
    ///
    /// # Errors
    /// [`distribute_values::Error::Tensor`] if the rank is not `D`, or the elements are not floating-point numbers.
    pub fn to_tensor<const D: usize>(&self) -> distribute_values::Result<Tensor<D>> {
        let tensor = self.flex();
        let rank = tensor.layout().shape().num_dims();
        if rank != D || !is_float(tensor.dtype()) {
            let problem =
                format!("it is of {:?} and rank {rank}, not of floating-point numbers and rank {D}", tensor.dtype());
            return Err(refused("take a tensor of burn", problem));
        }
        Ok(Tensor::from_primitive::<Flex>(tensor))
    }

    /// Returns a handle on the elements as they are now. If they are in a device's memory only and cannot be read, the
    /// error is [raised](distribute_strategy::raise).
    pub(crate) fn flex(&self) -> FlexTensor {
        self.fetched().unwrap_or_else(|error| distribute_strategy::raise(error.into()))
    }

    /// Returns a handle on the elements as they are now, which are copied to host memory if they are not there.
    pub(crate) fn fetched(&self) -> distribute_values::Result<FlexTensor> {
        if let Some(tensor) = self.0.held.read().host() {
            return Ok(tensor.clone());
        }
        Ok(self.0.held.write().on_host()?.clone())
    }

    /// Returns the copy in a device's memory, if it has the present elements.
    #[cfg(feature = "pjrt")]
    pub(crate) fn on_device(&self) -> Option<Arc<Resident>> {
        match &*self.0.held.read() {
            Held::Device(resident) | Held::Both(_, resident) => Some(resident.clone()),
            Held::Host(_) => None,
        }
    }

    /// Adds a copy of the present elements in a device's memory.
    #[cfg(feature = "pjrt")]
    pub(crate) fn add_device_copy(&self, resident: Arc<Resident>) {
        let mut held = self.0.held.write();
        if let Held::Host(tensor) = &*held {
            *held = Held::Both(tensor.clone(), resident);
        }
    }

    /// Takes elements in a device's memory, of the same shape and type.
    #[cfg(feature = "pjrt")]
    pub(crate) fn replace_on_device(&self, resident: Arc<Resident>) {
        *self.0.held.write() = Held::Device(resident);
        self.0.version.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns whether both are handles on the same elements.
    #[cfg(feature = "pjrt")]
    pub(crate) fn is_same(&self, other: &BurnTensor) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns a number that every write increases.
    pub(crate) fn version(&self) -> u64 {
        self.0.version.load(Ordering::Acquire)
    }

    /// Takes the elements of another tensor of the same shape and type, without a copy.
    pub(crate) fn replace(&self, tensor: FlexTensor) {
        *self.0.held.write() = Held::Host(whole(tensor));
        self.0.version.fetch_add(1, Ordering::AcqRel);
    }

    /// Returns whether no other handle reads or writes the elements.
    pub(crate) fn is_alone(&self) -> bool {
        Arc::strong_count(&self.0) == 1 && matches!(&*self.0.held.read(), Held::Host(tensor) if tensor.is_unique())
    }
}

impl TensorStorage<Burn> for BurnTensor {
    fn dtype(&self) -> distribute_values::Result<DType> {
        self.0.held.read().dtype()
    }

    fn shape(&self) -> Vec<usize> {
        self.0.held.read().shape()
    }

    fn read(&self, visit: &mut dyn FnMut(BufferRef<'_>)) -> distribute_values::Result<()> {
        see(&self.fetched()?, visit)
    }

    /// Copies the elements first if a tensor of burn shares them.
    fn write(&self, visit: &mut dyn FnMut(BufferMut<'_>)) -> distribute_values::Result<()> {
        fn show<E: burn_backend::Element + Element>(tensor: &mut FlexTensor, visit: &mut dyn FnMut(BufferMut<'_>)) {
            visit(BufferMut::from(tensor.storage_mut::<E>()));
        }
        let mut held = self.0.held.write();
        self.0.version.fetch_add(1, Ordering::AcqRel);
        // Copies in a device's memory are not written.
        let tensor = held.only_on_host()?;
        with_dtype!(dtype_of(tensor.dtype())?, E => show::<E>(tensor, visit));
        Ok(())
    }

    fn beside(&self, shape: &[usize], elements: BufferRef<'_>) -> distribute_values::Result<BurnTensor> {
        Ok(BurnTensor::new(made(shape, elements)?))
    }

    fn of_elements<T: Element>(&self, shape: &[usize], elements: Vec<T>) -> distribute_values::Result<BurnTensor> {
        let mut elements = Some(elements);
        with_dtype!(T::DTYPE, E => {
            // E is T.
            let elements = (&mut elements as &mut dyn Any).downcast_mut::<Option<Vec<E>>>().and_then(Option::take);
            Ok(BurnTensor::new(owned(shape, elements.unwrap_or_default())?))
        })
    }

    fn into_elements<T: Element>(self) -> distribute_values::Result<Vec<T>> {
        let held = match Arc::try_unwrap(self.0) {
            Ok(shared) => shared.held.into_inner().into_host()?,
            Err(shared) => return BurnTensor(shared).to_elements(),
        };
        if dtype_of(held.dtype())? != T::DTYPE {
            return BurnTensor::new(held).to_elements();
        }
        match held.into_data().into_bytes().try_into_vec::<T>() {
            Ok(elements) => Ok(elements),
            Err(bytes) => Ok(BufferRef::from_bytes(T::DTYPE, &bytes)?.as_slice::<T>()?.to_vec()),
        }
    }
}

macro_rules! storage_of_tensors {
    ($($kind:ident $action:literal),*) => {$(
        /// A tensor of burn is a value, so it cannot be written in place.
        impl<const D: usize> TensorStorage<Burn> for Tensor<D, $kind> {
            fn dtype(&self) -> distribute_values::Result<DType> {
                dtype_of(Tensor::dtype(self))
            }

            fn shape(&self) -> Vec<usize> {
                self.dims().to_vec()
            }

            fn read(&self, visit: &mut dyn FnMut(BufferRef<'_>)) -> distribute_values::Result<()> {
                let tensor = self.clone().without_autodiff().try_into_primitive::<Flex>();
                see(&tensor.map_err(|error| refused("read a tensor", format!("{error:?}")))?, visit)
            }

            fn write(&self, _: &mut dyn FnMut(BufferMut<'_>)) -> distribute_values::Result<()> {
                let problem = "a tensor of burn is a value; hold the elements in a BurnTensor".to_owned();
                Err(refused("write a tensor in place", problem))
            }

            fn beside(&self, shape: &[usize], elements: BufferRef<'_>) -> distribute_values::Result<Self> {
                if shape.len() != D {
                    let problem = format!(
                        "the result has rank {}, and the type of the tensor says {D}; reduce over replicas only \
                         (Axis::None), and over axes by burn's own operations",
                        shape.len()
                    );
                    return Err(refused($action, problem));
                }
                let inner = Self::from_primitive::<Flex>(made(shape, elements)?);
                Ok(if self.device().is_autodiff() { Self::from_inner(inner) } else { inner })
            }

            fn copied(&self) -> distribute_values::Result<Self> {
                Ok(self.clone())
            }
        }
    )*};
}

storage_of_tensors!(Float "make a tensor of numbers", Int "make a tensor of integers");

/// Returns the elements of a tensor of [`Diff`], of [`Recomputing`], or of the backend inside them.
pub(crate) fn flex_of<const D: usize>(tensor: Tensor<D>) -> distribute_values::Result<FlexTensor> {
    let taken = if tensor.is_autodiff() {
        node_of(tensor).map(|tensor| tensor.into_primitive())
    } else {
        tensor.try_into_primitive::<Flex>().map_err(not_flex)
    };
    taken.map_err(|problem| refused("read a tensor", problem))
}

/// Returns the tensor with its node in the graph.
pub(crate) fn node_of<const D: usize>(tensor: Tensor<D>) -> std::result::Result<DiffTensor, String> {
    match tensor.device().gradient_checkpointing_strategy() {
        Some(GradientCheckpointingStrategy::Balanced) => tensor.try_into_primitive::<Recomputing>().map_err(not_flex),
        _ => tensor.try_into_primitive::<Diff>().map_err(not_flex),
    }
}

pub(crate) fn not_flex(error: impl std::fmt::Debug) -> String {
    format!("{error:?}; models are trained on burn's Flex backend, on Device::flex()")
}

/// Returns a tensor with its place in the graph, on the backend of a device.
pub(crate) fn on_device_of<const D: usize>(node: DiffTensor, device: &Device) -> Tensor<D> {
    match device.gradient_checkpointing_strategy() {
        Some(GradientCheckpointingStrategy::Balanced) => Tensor::from_primitive::<Recomputing>(node),
        _ => Tensor::from_primitive::<Diff>(node),
    }
}

/// Creates a tensor of numbers on a device.
pub(crate) fn tensor_on<const D: usize>(flex: FlexTensor, device: &Device) -> Tensor<D> {
    match device.is_autodiff() {
        true => on_device_of(Diff::from_inner(flex), device),
        false => Tensor::from_primitive::<Flex>(flex),
    }
}

/// Returns the workspace's element type for one of burn's.
pub(crate) fn dtype_of(dtype: BurnType) -> distribute_values::Result<DType> {
    Ok(match dtype {
        BurnType::F32 => DType::F32,
        BurnType::F64 => DType::F64,
        BurnType::F16 => DType::F16,
        BurnType::BF16 => DType::BF16,
        BurnType::I8 => DType::I8,
        BurnType::U8 => DType::U8,
        BurnType::I32 => DType::I32,
        BurnType::U32 => DType::U32,
        BurnType::I64 => DType::I64,
        BurnType::U64 => DType::U64,
        other => {
            let problem = format!("type {other:?} cannot be distributed; cast it first");
            return Err(refused("read the type of a tensor", problem));
        }
    })
}

/// Returns burn's element type for one of the workspace's.
pub(crate) fn burn_type(dtype: DType) -> BurnType {
    match dtype {
        DType::F32 => BurnType::F32,
        DType::F64 => BurnType::F64,
        DType::F16 => BurnType::F16,
        DType::BF16 => BurnType::BF16,
        DType::I8 => BurnType::I8,
        DType::U8 => BurnType::U8,
        DType::I32 => BurnType::I32,
        DType::U32 => BurnType::U32,
        DType::I64 => BurnType::I64,
        DType::U64 => BurnType::U64,
    }
}

/// Creates a contiguous tensor with these elements.
pub(crate) fn made(shape: &[usize], elements: BufferRef<'_>) -> distribute_values::Result<FlexTensor> {
    with_dtype!(elements.dtype(), E => owned(shape, elements.as_slice::<E>()?.to_vec()))
}

/// Creates a contiguous tensor of these elements.
fn owned<E: burn_backend::Element>(shape: &[usize], elements: Vec<E>) -> distribute_values::Result<FlexTensor> {
    let expected: usize = shape.iter().product();
    if elements.len() != expected {
        let problem = format!("shape {shape:?} has {expected} elements, not {}", elements.len());
        return Err(refused("make a tensor", problem));
    }
    Ok(FlexTensor::from_data(TensorData::new(elements, shape.to_vec())))
}

fn is_float(dtype: BurnType) -> bool {
    matches!(dtype, BurnType::F32 | BurnType::F64 | BurnType::F16 | BurnType::BF16)
}

fn see(tensor: &FlexTensor, visit: &mut dyn FnMut(BufferRef<'_>)) -> distribute_values::Result<()> {
    let dtype = dtype_of(tensor.dtype())?;
    let copy;
    let tensor = if is_whole(tensor) {
        tensor
    } else {
        copy = tensor.to_contiguous();
        &copy
    };
    visit(BufferRef::from_bytes(dtype, tensor.bytes())?);
    Ok(())
}

/// Returns the error of an operation that burn, or its way of holding tensors, does not allow.
pub(crate) fn refused(action: &'static str, problem: String) -> distribute_values::Error {
    distribute_values::Error::Tensor { action, source: problem.into() }
}
