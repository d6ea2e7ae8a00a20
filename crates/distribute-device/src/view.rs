//! Borrowed views of contiguous host memory that carry their data type.

use std::ops::Range;

use crate::{DType, Element, Error, Result};

/// A shared view of elements of some data type.
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

/// An exclusive view of elements of some data type.
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
    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size_bytes()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The size of all elements.
    pub fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The memory itself, aligned for the data type.
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The elements.
    ///
    /// # Errors
    /// [`Error::WrongDType`] unless `T` is the view's type.
    pub fn as_slice<T: Element>(&self) -> Result<&'a [T]> {
        check::<T>(self.dtype)?;
        Ok(bytemuck::cast_slice(self.bytes))
    }

    /// The elements of a range.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where the range is not inside the view.
    pub fn slice(&self, range: Range<usize>) -> Result<BufferRef<'a>> {
        let bytes = byte_range(self.dtype, self.len(), range)?;
        Ok(BufferRef { dtype: self.dtype, bytes: &self.bytes[bytes] })
    }
}

impl<'a> BufferMut<'a> {
    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.bytes.len() / self.dtype.size_bytes()
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The size of all elements.
    pub fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// The memory itself, aligned for the data type.
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes
    }

    /// The memory itself, aligned for the data type.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        self.bytes
    }

    /// The elements.
    ///
    /// # Errors
    /// [`Error::WrongDType`] unless `T` is the view's type.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        check::<T>(self.dtype)?;
        Ok(bytemuck::cast_slice(self.bytes))
    }

    /// The elements, to write.
    ///
    /// # Errors
    /// [`Error::WrongDType`] unless `T` is the view's type.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        check::<T>(self.dtype)?;
        Ok(bytemuck::cast_slice_mut(self.bytes))
    }

    /// The same view for a shorter time.
    pub fn reborrow(&mut self) -> BufferMut<'_> {
        BufferMut { dtype: self.dtype, bytes: self.bytes }
    }

    /// The same view, shared.
    pub fn as_ref(&self) -> BufferRef<'_> {
        BufferRef { dtype: self.dtype, bytes: self.bytes }
    }

    /// The elements of a range.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] where the range is not inside the view.
    pub fn slice(self, range: Range<usize>) -> Result<BufferMut<'a>> {
        let bytes = byte_range(self.dtype, self.len(), range)?;
        Ok(BufferMut { dtype: self.dtype, bytes: &mut self.bytes[bytes] })
    }

    /// The elements before `mid`, and the others.
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
