//! Owned host memory.

use std::fmt;
use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use crate::{BufferMut, BufferRef, DType, Element, Error, Result};

/// The alignment of a [`HostBuffer`]: a cache line, and a vector of AVX-512.
pub const HOST_ALIGN_BYTES: usize = 64;

/// Host memory of another owner, such as pages pinned by a GPU's driver.
///
/// # Source
/// `cuMemHostAlloc` without `CU_MEMHOSTALLOC_WRITECOMBINED`, which would make reads by the CPU slow;
/// `cuMemHostRegister`.
pub trait HostMemory: Send + Sync {
    /// Returns the memory, always at the same address and with the same size.
    fn as_bytes(&self) -> &[u8];

    /// Returns the memory for writing.
    fn as_bytes_mut(&mut self) -> &mut [u8];

    /// Returns whether the pages are locked, so that a device can access them by DMA.
    fn is_pinned(&self) -> bool;
}

/// Zero-initialised host memory of a fixed size, aligned to [`HOST_ALIGN_BYTES`].
///
/// # Examples
/// ```
/// use distribute_device::HostBuffer;
/// let mut buffer = HostBuffer::zeroed(12)?;
/// buffer.as_mut_slice::<f32>()?[2] = 1.5;
/// assert_eq!(buffer.as_slice::<f32>()?, [0.0, 0.0, 1.5]);
/// assert!(buffer.as_slice::<f64>().is_err(), "12 bytes are one and a half f64");
/// # Ok::<(), distribute_device::Error>(())
/// ```
pub struct HostBuffer {
    storage: Storage,
    len_bytes: usize,
}

enum Storage {
    Lines(Box<[Line]>),
    Lent(Box<dyn HostMemory>),
}

/// One cache line; a slice of these is aligned without a manual allocation.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; HOST_ALIGN_BYTES]);

impl HostBuffer {
    /// Allocates `len_bytes` bytes of zeroed memory.
    ///
    /// The system maps pages on their first write, so a large buffer takes no memory until it is used.
    ///
    /// # Errors
    /// [`Error::HostMemory`] if the allocation fails.
    pub fn zeroed(len_bytes: usize) -> Result<HostBuffer> {
        let lines = bytemuck::allocation::try_zeroed_slice_box(len_bytes.div_ceil(HOST_ALIGN_BYTES))
            .map_err(|()| Error::HostMemory { len_bytes })?;
        Ok(HostBuffer { storage: Storage::Lines(lines), len_bytes })
    }

    /// Copies `elements` into a new buffer.
    ///
    /// # Errors
    /// [`Error::HostMemory`] if the allocation fails.
    pub fn from_slice<T: Element>(elements: &[T]) -> Result<HostBuffer> {
        let mut buffer = HostBuffer::zeroed(size_of_val(elements))?;
        buffer.as_bytes_mut().copy_from_slice(bytemuck::cast_slice(elements));
        Ok(buffer)
    }

    /// Wraps memory of another owner, such as pinned pages.
    ///
    /// # Errors
    /// [`Error::Misaligned`] if it is not aligned to [`HOST_ALIGN_BYTES`].
    pub fn from_memory(memory: Box<dyn HostMemory>) -> Result<HostBuffer> {
        let bytes = memory.as_bytes();
        if !bytes.is_empty() && !bytes.as_ptr().addr().is_multiple_of(HOST_ALIGN_BYTES) {
            return Err(Error::Misaligned { needed_bytes: HOST_ALIGN_BYTES });
        }
        let len_bytes = bytes.len();
        Ok(HostBuffer { storage: Storage::Lent(memory), len_bytes })
    }

    /// Returns all bytes for writing.
    pub fn as_bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.storage {
            Storage::Lines(lines) => &mut bytemuck::cast_slice_mut(lines)[..self.len_bytes],
            Storage::Lent(memory) => memory.as_bytes_mut(),
        }
    }

    /// Returns all memory as elements for writing.
    ///
    /// # Errors
    /// [`Error::PartialElement`] if the size is not a multiple of the element size.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        whole_elements(self.len_bytes, T::DTYPE)?;
        if self.is_empty() {
            return Ok(&mut []);
        }
        Ok(bytemuck::cast_slice_mut(self.as_bytes_mut()))
    }

    /// Returns a mutable view of all memory as elements of `dtype`.
    ///
    /// # Errors
    /// [`Error::PartialElement`] if the size is not a multiple of the element size.
    pub fn view_mut(&mut self, dtype: DType) -> Result<BufferMut<'_>> {
        BufferMut::from_bytes(dtype, self.as_bytes_mut())
    }

    /// Returns the size in bytes.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Returns whether the size is 0.
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// Returns whether the pages are locked; see [`HostMemory::is_pinned`].
    pub fn is_pinned(&self) -> bool {
        match &self.storage {
            Storage::Lines(_) => false,
            Storage::Lent(memory) => memory.is_pinned(),
        }
    }

    /// Returns all bytes.
    pub fn as_bytes(&self) -> &[u8] {
        match &self.storage {
            Storage::Lines(lines) => &bytemuck::cast_slice(lines)[..self.len_bytes],
            Storage::Lent(memory) => memory.as_bytes(),
        }
    }

    /// Returns all memory as elements.
    ///
    /// # Errors
    /// [`Error::PartialElement`] if the size is not a multiple of the element size.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.view(T::DTYPE)?.as_slice()
    }

    /// Returns a view of all memory as elements of `dtype`.
    ///
    /// # Errors
    /// [`Error::PartialElement`] if the size is not a multiple of the element size.
    pub fn view(&self, dtype: DType) -> Result<BufferRef<'_>> {
        BufferRef::from_bytes(dtype, self.as_bytes())
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostBuffer").field("len_bytes", &self.len_bytes).field("pinned", &self.is_pinned()).finish()
    }
}

/// Returns the range of `len` bytes from `start`, or an error if a buffer of `len_bytes` does not contain it.
pub(crate) fn byte_range(what: &'static str, start: usize, len: usize, len_bytes: usize) -> Result<Range<usize>> {
    match start.checked_add(len) {
        Some(end) if end <= len_bytes => Ok(start..end),
        end => Err(Error::ByteRange { what, start, end: end.unwrap_or(usize::MAX), len_bytes }),
    }
}

pub(crate) fn whole_elements(len_bytes: usize, dtype: DType) -> Result<()> {
    if len_bytes.is_multiple_of(dtype.size_bytes()) { Ok(()) } else { Err(Error::PartialElement { len_bytes, dtype }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_aligned_and_of_the_size_asked() {
        for len_bytes in [0, 1, 63, 64, 65, 1000, 4096, 1 << 20] {
            let mut buffer = HostBuffer::zeroed(len_bytes).unwrap();
            assert_eq!((buffer.len_bytes(), buffer.as_bytes().len()), (len_bytes, len_bytes));
            assert_eq!(buffer.as_bytes().as_ptr().addr() % HOST_ALIGN_BYTES, 0);
            assert!(buffer.as_bytes().iter().all(|byte| *byte == 0));
            buffer.as_bytes_mut().fill(7);
            assert!(buffer.as_bytes().iter().all(|byte| *byte == 7));
            assert!(!buffer.is_pinned());
        }
    }

    #[test]
    fn every_data_type_views_whole_elements_only() {
        for dtype in DType::ALL {
            let mut buffer = HostBuffer::zeroed(3 * dtype.size_bytes()).unwrap();
            assert_eq!(buffer.view(dtype).unwrap().len(), 3);
            assert_eq!(buffer.view_mut(dtype).unwrap().dtype(), dtype);
        }
        let mut buffer = HostBuffer::zeroed(6).unwrap();
        assert!(matches!(buffer.as_slice::<f32>(), Err(Error::PartialElement { len_bytes: 6, dtype: DType::F32 })));
        assert!(matches!(buffer.as_mut_slice::<i64>(), Err(Error::PartialElement { .. })));
        assert!(matches!(buffer.view(DType::F64), Err(Error::PartialElement { .. })));
        assert_eq!(buffer.as_slice::<half::bf16>().unwrap().len(), 3);
        let error = buffer.view_mut(DType::I32).unwrap_err().to_string();
        assert!(error.contains("6 bytes") && error.contains("i32") && error.contains("4 bytes"), "{error}");
    }

    #[test]
    fn too_much_memory_is_an_error() {
        for len_bytes in [usize::MAX, usize::MAX / 2, 1 << 60] {
            assert!(matches!(HostBuffer::zeroed(len_bytes), Err(Error::HostMemory { .. })));
        }
    }

    /// Substitute for pinned pages: memory of another owner, at a given offset from a line's beginning.
    struct Lent(Vec<u8>, usize, usize);

    impl Lent {
        fn boxed(offset: usize, len_bytes: usize) -> Box<dyn HostMemory> {
            let memory = vec![0; len_bytes + 2 * HOST_ALIGN_BYTES];
            let start = memory.as_ptr().align_offset(HOST_ALIGN_BYTES) + offset;
            Box::new(Lent(memory, start, len_bytes))
        }
    }

    impl HostMemory for Lent {
        fn as_bytes(&self) -> &[u8] {
            &self.0[self.1..][..self.2]
        }
        fn as_bytes_mut(&mut self) -> &mut [u8] {
            &mut self.0[self.1..][..self.2]
        }
        fn is_pinned(&self) -> bool {
            true
        }
    }

    #[test]
    fn memory_of_another_owner_keeps_its_property_and_must_be_aligned() {
        let mut buffer = HostBuffer::from_memory(Lent::boxed(0, 16)).unwrap();
        buffer.as_mut_slice::<f64>().unwrap()[1] = 2.5;
        assert_eq!(buffer.as_slice::<f64>().unwrap(), [0.0, 2.5]);
        assert!(buffer.is_pinned());
        assert!(matches!(HostBuffer::from_memory(Lent::boxed(8, 16)), Err(Error::Misaligned { .. })));
    }
}
