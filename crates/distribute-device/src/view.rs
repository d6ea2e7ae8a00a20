//! Borrowed views of contiguous host memory that carry their data type.

use std::ops::Range;

use crate::host_buffer::whole_elements;
use crate::{DType, Element, Error, Result};

/// A shared view of elements whose data type is known at run time.
///
/// # Examples
/// ```
/// use distribute_device::{BufferRef, DType};
/// let view = BufferRef::from(&[1.0f32, 2.0][..]);
/// assert_eq!((view.dtype(), view.len()), (DType::F32, 2));
/// assert_eq!(view.as_slice::<f32>()?, [1.0, 2.0]);
/// # Ok::<(), distribute_device::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct BufferRef<'a> {
    dtype: DType,
    bytes: &'a [u8],
}

/// An exclusive view of elements whose data type is known at run time.
///
/// # Examples
/// ```
/// use distribute_device::BufferMut;
/// let mut values = [1i32, 2];
/// BufferMut::from(&mut values[..]).as_mut_slice::<i32>()?[0] = 7;
/// assert_eq!(values, [7, 2]);
/// # Ok::<(), distribute_device::Error>(())
/// ```
#[derive(Debug)]
pub struct BufferMut<'a> {
    dtype: DType,
    bytes: &'a mut [u8],
}

impl<'a> BufferRef<'a> {
    /// Creates a view of memory that holds elements of `dtype`.
    ///
    /// # Errors
    /// [`Error::PartialElement`] if the size is not a multiple of the element size, [`Error::Misaligned`] if the
    /// address is not.
    pub fn from_bytes(dtype: DType, bytes: &'a [u8]) -> Result<BufferRef<'a>> {
        check_bytes(dtype, bytes)?;
        // An empty slice at an odd address would fail the cast to elements later.
        let bytes = if bytes.is_empty() { bytemuck::cast_slice::<u64, u8>(&[]) } else { bytes };
        Ok(BufferRef { dtype, bytes })
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size_bytes()
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the size of all elements in bytes.
    pub fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the memory itself, aligned for the data type.
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the elements.
    ///
    /// # Errors
    /// [`Error::WrongDType`] if `T` is not the view's type.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        check::<T>(self.dtype)?;
        Ok(bytemuck::cast_slice(self.bytes))
    }

    /// Returns a view of a range of elements.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the range is not inside the view.
    pub fn slice(&self, range: Range<usize>) -> Result<BufferRef<'a>> {
        let bytes = byte_range(self.dtype, self.len(), range)?;
        Ok(BufferRef { dtype: self.dtype, bytes: &self.bytes[bytes] })
    }

    /// Splits the view into the elements before `mid` and the rest.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if `mid` is beyond the end.
    pub fn split_at(&self, mid: usize) -> Result<(BufferRef<'a>, BufferRef<'a>)> {
        let bytes = byte_range(self.dtype, self.len(), 0..mid)?;
        let (head, tail) = self.bytes.split_at(bytes.end);
        Ok((BufferRef { dtype: self.dtype, bytes: head }, BufferRef { dtype: self.dtype, bytes: tail }))
    }
}

impl<'a> BufferMut<'a> {
    /// Creates a mutable view of memory that holds elements of `dtype`.
    ///
    /// # Errors
    /// [`Error::PartialElement`] if the size is not a multiple of the element size, [`Error::Misaligned`] if the
    /// address is not.
    pub fn from_bytes(dtype: DType, bytes: &'a mut [u8]) -> Result<BufferMut<'a>> {
        check_bytes(dtype, bytes)?;
        let bytes = if bytes.is_empty() { bytemuck::cast_slice_mut::<u64, u8>(&mut []) } else { bytes };
        Ok(BufferMut { dtype, bytes })
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size_bytes()
    }

    /// Returns whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the size of all elements in bytes.
    pub fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Returns the memory itself, aligned for the data type.
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes
    }

    /// Returns the memory itself for writing, aligned for the data type.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }

    /// Returns the elements.
    ///
    /// # Errors
    /// [`Error::WrongDType`] if `T` is not the view's type.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        check::<T>(self.dtype)?;
        Ok(bytemuck::cast_slice(self.bytes))
    }

    /// Returns the elements for writing.
    ///
    /// # Errors
    /// [`Error::WrongDType`] if `T` is not the view's type.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        check::<T>(self.dtype)?;
        Ok(bytemuck::cast_slice_mut(self.bytes))
    }

    /// Returns the same view with a shorter lifetime.
    pub fn reborrow(&mut self) -> BufferMut<'_> {
        BufferMut { dtype: self.dtype, bytes: self.bytes }
    }

    /// Returns the same view as a shared one.
    pub fn as_ref(&self) -> BufferRef<'_> {
        BufferRef { dtype: self.dtype, bytes: self.bytes }
    }

    /// Returns a mutable view of a range of elements.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the range is not inside the view.
    pub fn slice(self, range: Range<usize>) -> Result<BufferMut<'a>> {
        let bytes = byte_range(self.dtype, self.len(), range)?;
        Ok(BufferMut { dtype: self.dtype, bytes: &mut self.bytes[bytes] })
    }

    /// Splits the view into the elements before `mid` and the rest.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where `mid` is beyond the end.
    pub fn split_at_mut(self, mid: usize) -> Result<(BufferMut<'a>, BufferMut<'a>)> {
        let bytes = byte_range(self.dtype, self.len(), 0..mid)?;
        let (head, tail) = self.bytes.split_at_mut(bytes.end);
        Ok((BufferMut { dtype: self.dtype, bytes: head }, BufferMut { dtype: self.dtype, bytes: tail }))
    }
}

impl<'a, T: Element> From<&'a [T]> for BufferRef<'a> {
    fn from(elements: &'a [T]) -> Self {
        BufferRef { dtype: T::DTYPE, bytes: bytemuck::cast_slice(elements) }
    }
}

impl<'a, T: Element> From<&'a mut [T]> for BufferMut<'a> {
    fn from(elements: &'a mut [T]) -> Self {
        BufferMut { dtype: T::DTYPE, bytes: bytemuck::cast_slice_mut(elements) }
    }
}

fn check<T: Element>(dtype: DType) -> Result<()> {
    if T::DTYPE == dtype { Ok(()) } else { Err(Error::WrongDType { asked: T::DTYPE, held: dtype }) }
}

fn check_bytes(dtype: DType, bytes: &[u8]) -> Result<()> {
    whole_elements(bytes.len(), dtype)?;
    // On every target, an element's alignment is at most its size.
    if !bytes.is_empty() && !bytes.as_ptr().addr().is_multiple_of(dtype.size_bytes()) {
        return Err(Error::Misaligned { needed_bytes: dtype.size_bytes() });
    }
    Ok(())
}

fn byte_range(dtype: DType, len: usize, range: Range<usize>) -> Result<Range<usize>> {
    if range.start > range.end || range.end > len {
        return Err(Error::OutOfRange { start: range.start, end: range.end, len });
    }
    Ok(range.start * dtype.size_bytes()..range.end * dtype.size_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn views_cross_threads_and_shorten() {
        fn sendable<T: Send + Sync>() {}
        sendable::<BufferRef<'_>>();
        sendable::<BufferMut<'_>>();
        // These compile only while the views are covariant.
        fn shorten_ref<'short>(view: BufferRef<'static>, _: &'short u8) -> BufferRef<'short> {
            view
        }
        fn shorten_mut<'short>(view: BufferMut<'static>, _: &'short u8) -> BufferMut<'short> {
            view
        }
        let byte = 0;
        assert_eq!(shorten_ref(BufferRef::from(&[1u8, 2][..]), &byte).len(), 2);
        assert!(shorten_mut(BufferMut::from(&mut [0f32; 0][..]), &byte).is_empty());
    }

    #[test]
    fn bytes_must_be_whole_and_aligned() {
        let words = [0u64; 2];
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        assert_eq!(BufferRef::from_bytes(DType::F64, bytes).unwrap().as_slice::<f64>().unwrap(), [0.0, 0.0]);
        assert!(matches!(BufferRef::from_bytes(DType::F64, &bytes[4..12]), Err(Error::Misaligned { needed_bytes: 8 })));
        assert!(matches!(BufferRef::from_bytes(DType::F32, &bytes[..7]), Err(Error::PartialElement { .. })));
        assert!(BufferRef::from_bytes(DType::F64, &bytes[3..3]).unwrap().as_slice::<f64>().unwrap().is_empty());
        let mut halves = [0u16; 3];
        let view = BufferMut::from_bytes(DType::BF16, bytemuck::cast_slice_mut(&mut halves)).unwrap();
        let (head, tail) = view.as_ref().split_at(1).unwrap();
        assert_eq!((head.len(), tail.len()), (1, 2));
        assert!(matches!(view.as_ref().split_at(4), Err(Error::OutOfRange { .. })));
    }

    #[test]
    fn a_reborrow_leaves_the_view_usable() {
        let mut values = [1.0f64, 2.0];
        let mut view = BufferMut::from(&mut values[..]);
        view.reborrow().slice(1..2).unwrap().as_mut_slice::<f64>().unwrap()[0] = 5.0;
        assert_eq!(view.as_slice::<f64>().unwrap(), [1.0, 5.0]);
        assert!(matches!(view.reborrow().split_at_mut(3), Err(Error::OutOfRange { end: 3, len: 2, .. })));
        assert!(matches!(view.as_mut_slice::<f32>(), Err(Error::WrongDType { .. })));
    }

    #[test]
    fn views_slice_split_and_refuse() {
        let mut values: Vec<u32> = (0..10).collect();
        let view = BufferMut::from(&mut values[..]);
        let (head, mut tail) = view.split_at_mut(4).unwrap();
        assert_eq!(head.slice(1..3).unwrap().as_slice::<u32>().unwrap(), [1, 2]);
        tail.as_mut_slice::<u32>().unwrap()[0] = 40;
        assert_eq!(values[4], 40);
        let view = BufferRef::from(&values[..]);
        assert_eq!(view.len_bytes(), 40);
        assert!(matches!(view.as_slice::<f32>(), Err(Error::WrongDType { .. })));
        assert!(matches!(view.slice(3..11), Err(Error::OutOfRange { len: 10, .. })));
    }
}
