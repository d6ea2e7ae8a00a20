//! A tensor library with a simulated accelerator, which counts its memory and the bytes that cross.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use distribute_device::{BufferMut, BufferRef, DType, Element, bf16};
use distribute_values::TensorStorage;
use parking_lot::RwLock;

use crate::HostError;
use crate::backend::{NoDevices, TensorLibrary};

/// The marker type of the library.
#[derive(Debug)]
pub(super) enum Counted {}

/// An accelerator. All of its tensors count together.
#[derive(Debug, Default)]
pub(super) struct Accelerator {
    held: AtomicUsize,
    peak: AtomicUsize,
    down: AtomicUsize,
    up: AtomicUsize,
}

impl Accelerator {
    /// Returns the bytes of all tensors.
    pub(super) fn held(&self) -> usize {
        self.held.load(Ordering::SeqCst)
    }

    /// Returns the most bytes that were held at once since the last call, or since the beginning.
    pub(super) fn peak(&self) -> usize {
        self.peak.swap(self.held(), Ordering::SeqCst)
    }

    /// Returns the bytes that were copied to the host, and those that were copied from it, since the last call.
    pub(super) fn crossed(&self) -> [usize; 2] {
        [&self.down, &self.up].map(|count| count.swap(0, Ordering::SeqCst))
    }
}

/// A tensor on an accelerator, or in host memory.
#[derive(Clone, Debug)]
pub(super) struct CountedTensor {
    shape: Vec<usize>,
    storage: Arc<Storage>,
}

#[derive(Debug)]
struct Storage {
    elements: RwLock<Elements>,
    bytes: usize,
    place: Option<Arc<Accelerator>>,
}

#[derive(Clone, Debug)]
enum Elements {
    F32(Vec<f32>),
    BF16(Vec<bf16>),
}

impl Drop for Storage {
    fn drop(&mut self) {
        if let Some(place) = &self.place {
            place.held.fetch_sub(self.bytes, Ordering::SeqCst);
        }
    }
}

impl CountedTensor {
    /// Creates a tensor whose elements were computed where it is; in host memory without an accelerator.
    pub(super) fn new<T: Element>(place: Option<&Arc<Accelerator>>, shape: &[usize], elements: &[T]) -> CountedTensor {
        CountedTensor::of(place.cloned(), shape, Elements::of(BufferRef::from(elements)))
    }

    fn of(place: Option<Arc<Accelerator>>, shape: &[usize], elements: Elements) -> CountedTensor {
        let bytes = match &elements {
            Elements::F32(all) => size_of_val(&all[..]),
            Elements::BF16(all) => size_of_val(&all[..]),
        };
        assert_eq!(bytes, shape.iter().product::<usize>() * elements.dtype().size_bytes());
        if let Some(place) = &place {
            let held = place.held.fetch_add(bytes, Ordering::SeqCst) + bytes;
            place.peak.fetch_max(held, Ordering::SeqCst);
        }
        CountedTensor {
            shape: shape.to_vec(),
            storage: Arc::new(Storage { elements: RwLock::new(elements), bytes, place }),
        }
    }

    /// Computes a tensor in the same place.
    fn map(&self, dtype: DType, f: impl Fn(f32) -> f32) -> CountedTensor {
        let wide: Vec<f32> = self.storage.elements.read().wide().into_iter().map(f).collect();
        let elements = match dtype {
            DType::BF16 => Elements::BF16(wide.into_iter().map(bf16::from_f32).collect()),
            _ => Elements::F32(wide),
        };
        CountedTensor::of(self.storage.place.clone(), &self.shape, elements)
    }

    fn cross(&self, down: bool, up: bool) {
        if let Some(place) = &self.storage.place {
            place.down.fetch_add(usize::from(down) * self.storage.bytes, Ordering::SeqCst);
            place.up.fetch_add(usize::from(up) * self.storage.bytes, Ordering::SeqCst);
        }
    }
}

impl Elements {
    fn of(elements: BufferRef<'_>) -> Elements {
        match elements.dtype() {
            DType::BF16 => Elements::BF16(elements.as_slice().unwrap().to_vec()),
            _ => Elements::F32(elements.as_slice().unwrap().to_vec()),
        }
    }

    fn dtype(&self) -> DType {
        match self {
            Elements::F32(_) => DType::F32,
            Elements::BF16(_) => DType::BF16,
        }
    }

    fn wide(&self) -> Vec<f32> {
        match self {
            Elements::F32(all) => all.clone(),
            Elements::BF16(all) => all.iter().map(|x| x.to_f32()).collect(),
        }
    }

    fn buffer(&mut self) -> BufferMut<'_> {
        match self {
            Elements::F32(all) => BufferMut::from(&mut all[..]),
            Elements::BF16(all) => BufferMut::from(&mut all[..]),
        }
    }
}

impl TensorStorage<Counted> for CountedTensor {
    fn dtype(&self) -> distribute_values::Result<DType> {
        Ok(self.storage.elements.read().dtype())
    }

    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn read(&self, visit: &mut dyn FnMut(BufferRef<'_>)) -> distribute_values::Result<()> {
        self.cross(true, false);
        match &*self.storage.elements.read() {
            Elements::F32(all) => visit(BufferRef::from(&all[..])),
            Elements::BF16(all) => visit(BufferRef::from(&all[..])),
        }
        Ok(())
    }

    fn write(&self, visit: &mut dyn FnMut(BufferMut<'_>)) -> distribute_values::Result<()> {
        self.cross(true, true);
        visit(self.storage.elements.write().buffer());
        Ok(())
    }

    fn overwrite(&self, elements: BufferRef<'_>) -> distribute_values::Result<()> {
        self.cross(false, true);
        self.storage.elements.write().buffer().as_bytes_mut().copy_from_slice(elements.as_bytes());
        Ok(())
    }

    fn beside(&self, shape: &[usize], elements: BufferRef<'_>) -> distribute_values::Result<CountedTensor> {
        let made = CountedTensor::of(self.storage.place.clone(), shape, Elements::of(elements));
        made.cross(false, true);
        Ok(made)
    }

    fn copied(&self) -> distribute_values::Result<CountedTensor> {
        Ok(CountedTensor::of(self.storage.place.clone(), &self.shape, self.storage.elements.read().clone()))
    }
}

/// The gradients that a program has computed, by variable.
pub(super) struct CountedLoss(pub(super) Vec<Option<CountedTensor>>);

impl TensorLibrary for Counted {
    type Tensor = CountedTensor;
    type Loss = CountedLoss;
    type Gradients = Vec<Option<CountedTensor>>;
    type Error = HostError;
    type Devices = NoDevices;

    const CUT_GRAPH: &'static str = "Give CountedLoss a gradient for each variable.";

    fn backward(loss: &CountedLoss) -> Result<Self::Gradients, HostError> {
        Ok(loss.0.clone())
    }

    fn gradient(gradients: &Self::Gradients, index: usize, _: &CountedTensor) -> Option<CountedTensor> {
        gradients.get(index).cloned().flatten()
    }

    fn scale(loss: &CountedLoss, factor: f64) -> Result<CountedLoss, HostError> {
        let scale = |gradient: &CountedTensor| {
            let dtype = gradient.storage.elements.read().dtype();
            gradient.map(dtype, |x| (f64::from(x) * factor) as f32)
        };
        Ok(CountedLoss(loss.0.iter().map(|gradient| gradient.as_ref().map(scale)).collect()))
    }

    fn detach(tensor: &CountedTensor) -> CountedTensor {
        tensor.clone()
    }

    fn zeros_like(tensor: &CountedTensor) -> Result<CountedTensor, HostError> {
        Ok(tensor.map(tensor.dtype()?, |_| 0.0))
    }

    fn cast(tensor: &CountedTensor, dtype: DType) -> Result<CountedTensor, HostError> {
        Ok(tensor.map(dtype, |x| x))
    }

    fn add(a: &CountedTensor, b: &CountedTensor) -> Result<CountedTensor, HostError> {
        let other = b.storage.elements.read().wide();
        let sum: Vec<f32> = a.storage.elements.read().wide().into_iter().zip(other).map(|(a, b)| a + b).collect();
        let sum = CountedTensor::of(a.storage.place.clone(), &a.shape, Elements::F32(sum));
        Ok(if a.dtype()? == DType::F32 { sum } else { sum.map(a.dtype()?, |x| x) })
    }

    fn own(gradient: CountedTensor) -> Result<CountedTensor, HostError> {
        Ok(gradient.copied()?)
    }

    fn is_on_host(tensor: &CountedTensor) -> bool {
        tensor.storage.place.is_none()
    }

    fn on_host(tensor: &CountedTensor) -> Result<CountedTensor, HostError> {
        if Counted::is_on_host(tensor) {
            return Ok(tensor.clone());
        }
        tensor.cross(true, false);
        Ok(CountedTensor::of(None, &tensor.shape, tensor.storage.elements.read().clone()))
    }
}
