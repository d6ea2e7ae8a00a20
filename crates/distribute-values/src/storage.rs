//! The one door through which tensors of any library come in.

use std::sync::{Arc, RwLock};

use distribute_device::{BufferMut, BufferRef, DType, Element};

use crate::{Error, Result};

/// A tensor: elements of one type in contiguous storage on some device.
///
/// Cloning gives another handle on the same storage. `L` names the library, by a marker type of the crate that implements
/// this: a crate can so implement the trait for tensors that it does not own. Callers never name `L`; it is inferred.
pub trait TensorStorage<L>: Clone + Send + Sync + Sized + 'static {
    /// The element type.
    ///
    /// # Errors
    /// The library's type is none of [`DType`].
    fn dtype(&self) -> Result<DType>;

    /// The length of each dimension; empty for a scalar.
    fn shape(&self) -> Vec<usize>;

    /// Shows the elements in row-major order.
    ///
    /// # Errors
    /// The library refuses.
    fn read(&self, visit: &mut dyn FnMut(BufferRef<'_>)) -> Result<()>;

    /// Shows the storage itself to change it in place.
    ///
    /// # Errors
    /// The storage is not contiguous, or the library refuses.
    fn write(&self, visit: &mut dyn FnMut(BufferMut<'_>)) -> Result<()>;

    /// A new tensor beside this one (same library, same device) with the given shape and elements.
    ///
    /// # Errors
    /// The library refuses.
    fn beside(&self, shape: &[usize], elements: BufferRef<'_>) -> Result<Self>;

    /// A tensor of the same elements in storage of its own.
    ///
    /// # Errors
    /// The library refuses.
    fn copied(&self) -> Result<Self> {
        let shape = self.shape();
        let mut copy = None;
        self.read(&mut |elements| copy = Some(self.beside(&shape, elements)))?;
        copy.unwrap_or_else(|| Ok(self.clone()))
    }

    /// The elements in row-major order, copied.
    ///
    /// # Errors
    /// The elements are not of type `T`.
    fn to_elements<T: Element>(&self) -> Result<Vec<T>> {
        let mut elements = Ok(Vec::new());
        self.read(&mut |buffer| elements = buffer.as_slice::<T>().map(<[T]>::to_vec))?;
        Ok(elements?)
    }
}

/// Shows the storage of several tensors at once, to change them in place.
///
/// # Errors
/// One of the tensors refuses; `visit` is then not called.
pub fn with_storage<L, T: TensorStorage<L>>(tensors: &[T], visit: &mut dyn FnMut(&mut [BufferMut<'_>])) -> Result<()> {
    fn open<L, T: TensorStorage<L>>(
        tensors: &[T],
        opened: Vec<BufferMut<'_>>,
        visit: &mut dyn FnMut(&mut [BufferMut<'_>]),
    ) -> Result<()> {
        let mut opened = Some(opened);
        let Some((first, rest)) = tensors.split_first() else {
            visit(&mut opened.take().unwrap_or_default());
            return Ok(());
        };
        let mut outcome = Ok(());
        first.write(&mut |buffer| {
            let mut all: Vec<BufferMut<'_>> = opened.take().unwrap_or_default();
            all.push(buffer);
            outcome = open(rest, all, visit);
        })?;
        outcome
    }
    open(tensors, Vec::with_capacity(tensors.len()), visit)
}

/// A tensor in host memory, for programs and tests without a tensor library.
///
/// # Examples
/// ```
/// use distribute_values::{HostTensor, TensorStorage};
/// let tensor = HostTensor::new(&[2, 2], vec![1.0, 2.0, 3.0, 4.0])?;
/// assert_eq!(tensor.to_elements::<f64>()?, [1.0, 2.0, 3.0, 4.0]);
/// # Ok::<(), distribute_values::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct HostTensor<T = f64> {
    shape: Vec<usize>,
    elements: Arc<RwLock<Vec<T>>>,
}

/// The library of [`HostTensor`].
#[derive(Clone, Copy, Debug)]
pub enum Host {}

impl<T: Element> HostTensor<T> {
    /// A tensor of this shape and these elements in row-major order.
    ///
    /// # Errors
    /// The number of elements is not the product of the shape.
    pub fn new(shape: &[usize], elements: Vec<T>) -> Result<HostTensor<T>> {
        let expected: usize = shape.iter().product();
        if elements.len() != expected {
            return Err(distribute_device::Error::OutOfRange { start: 0, end: expected, len: elements.len() }.into());
        }
        Ok(HostTensor { shape: shape.to_vec(), elements: Arc::new(RwLock::new(elements)) })
    }

    /// A tensor without dimensions.
    pub fn scalar(value: T) -> HostTensor<T> {
        HostTensor { shape: Vec::new(), elements: Arc::new(RwLock::new(vec![value])) }
    }
}

impl<T: Element> TensorStorage<Host> for HostTensor<T> {
    fn dtype(&self) -> Result<DType> {
        Ok(T::DTYPE)
    }

    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn read(&self, visit: &mut dyn FnMut(BufferRef<'_>)) -> Result<()> {
        let elements = self.elements.read().map_err(|_| poisoned())?;
        visit(BufferRef::from(&elements[..]));
        Ok(())
    }

    fn write(&self, visit: &mut dyn FnMut(BufferMut<'_>)) -> Result<()> {
        let mut elements = self.elements.write().map_err(|_| poisoned())?;
        visit(BufferMut::from(&mut elements[..]));
        Ok(())
    }

    fn beside(&self, shape: &[usize], elements: BufferRef<'_>) -> Result<Self> {
        HostTensor::new(shape, elements.as_slice::<T>()?.to_vec())
    }
}

fn poisoned() -> Error {
    Error::Tensor { action: "lock the elements", source: "a thread panicked while it wrote them".into() }
}
