//! The interface to the tensors of any library.

use std::sync::{Arc, RwLock};

use distribute_device::{BufferMut, BufferRef, DType, Element};

use crate::{Error, Result};

/// A tensor: elements of one type in contiguous storage on some device.
///
/// Cloning gives another handle on the same storage. `L` identifies the library by a marker type of the implementing
/// crate, so that a crate can implement the trait for tensors that it does not own. Callers never name `L`; it is
/// inferred.
pub trait TensorStorage<L>: Clone + Send + Sync + Sized + 'static {
    /// Returns the element type.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the library's type is not one of [`DType`].
    fn dtype(&self) -> Result<DType>;

    /// Returns the length of each dimension; empty for a scalar.
    fn shape(&self) -> Vec<usize>;

    /// Passes the elements to `visit` in row-major order.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the library cannot read them.
    fn read(&self, visit: &mut dyn FnMut(BufferRef<'_>)) -> Result<()>;

    /// Passes the storage itself to `visit`, to be changed in place.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the storage is not contiguous, or the library cannot write it.
    fn write(&self, visit: &mut dyn FnMut(BufferMut<'_>)) -> Result<()>;

    /// Writes elements of the same type and number over the storage's, in row-major order. A library with accelerators
    /// copies them to the tensor's device without reading what is there.
    ///
    /// # Errors
    /// [`Error::Device`] or [`Error::Tensor`] if type or number differ; [`Error::Tensor`] if the storage is not
    /// contiguous, or the library cannot write it.
    fn overwrite(&self, elements: BufferRef<'_>) -> Result<()> {
        let (len, given): (usize, usize) = (self.shape().iter().product(), elements.len());
        if given != len {
            return Err(distribute_device::Error::OutOfRange { start: 0, end: len, len: given }.into());
        }
        let (asked, held) = (elements.dtype(), self.dtype()?);
        if asked != held {
            return Err(distribute_device::Error::WrongDType { asked, held }.into());
        }
        self.write(&mut |mut buffer| buffer.as_bytes_mut().copy_from_slice(elements.as_bytes()))
    }

    /// Creates a tensor of the same library, on the same device, with the given shape and elements.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the library cannot create it; [`Error::Device`] if the elements do not fit the type or
    /// shape.
    fn beside(&self, shape: &[usize], elements: BufferRef<'_>) -> Result<Self>;

    /// Creates a tensor of the same library, on the same device, of a vector's memory if the library can.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the library cannot create it; [`Error::Device`] if the elements do not fit the type or
    /// shape.
    fn of_elements<T: Element>(&self, shape: &[usize], elements: Vec<T>) -> Result<Self> {
        self.beside(shape, BufferRef::from(&elements[..]))
    }

    /// Copies the elements to a tensor with storage of its own.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the library cannot read the elements or create the copy.
    fn copied(&self) -> Result<Self> {
        let shape = self.shape();
        let mut copy = None;
        self.read(&mut |elements| copy = Some(self.beside(&shape, elements)))?;
        copy.unwrap_or_else(|| Ok(self.clone()))
    }

    /// Turns the tensor into a vector of its elements, in row-major order, without a copy if the library can and no
    /// other handle shares the storage.
    ///
    /// # Errors
    /// The errors of [`to_elements`](TensorStorage::to_elements) occur in the same cases.
    fn into_elements<T: Element>(self) -> Result<Vec<T>> {
        self.to_elements()
    }

    /// Copies the elements to a vector, in row-major order.
    ///
    /// # Errors
    /// [`Error::Device`] if the elements are not of type `T`; [`Error::Tensor`] if the library cannot read them.
    fn to_elements<T: Element>(&self) -> Result<Vec<T>> {
        let mut elements = Ok(Vec::new());
        self.read(&mut |buffer| elements = buffer.as_slice::<T>().map(<[T]>::to_vec))?;
        Ok(elements?)
    }
}

/// Passes the storage of several tensors to `visit` at once, to be changed in place.
///
/// # Errors
/// [`Error::Tensor`] if one of the tensors cannot be written; `visit` is then not called.
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

/// Marks [`HostTensor`] as a tensor library of its own.
#[derive(Clone, Copy, Debug)]
pub enum Host {}

impl<T: Element> HostTensor<T> {
    /// Creates a tensor of this shape and these elements in row-major order.
    ///
    /// # Errors
    /// [`Error::Device`] if the number of elements is not the product of the shape.
    pub fn new(shape: &[usize], elements: Vec<T>) -> Result<HostTensor<T>> {
        let expected: usize = shape.iter().product();
        if elements.len() != expected {
            return Err(distribute_device::Error::OutOfRange { start: 0, end: expected, len: elements.len() }.into());
        }
        Ok(HostTensor { shape: shape.to_vec(), elements: Arc::new(RwLock::new(elements)) })
    }

    /// Creates a tensor without dimensions.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overwriting_takes_all_elements_of_the_same_type() {
        let tensor = HostTensor::new(&[2, 1], vec![1.0f32, 2.0]).unwrap();
        tensor.overwrite(BufferRef::from(&[3.0f32, 4.0][..])).unwrap();
        assert_eq!(tensor.to_elements::<f32>().unwrap(), [3.0, 4.0]);
        let told = |refused: Result<()>| refused.unwrap_err().to_string();
        assert!(told(tensor.overwrite(BufferRef::from(&[5.0f32][..]))).contains("holds 1"));
        // As many bytes.
        assert!(told(tensor.overwrite(BufferRef::from(&[5i32, 6][..]))).contains("buffer holds f32"));
        assert_eq!(tensor.to_elements::<f32>().unwrap(), [3.0, 4.0]);
    }
}
