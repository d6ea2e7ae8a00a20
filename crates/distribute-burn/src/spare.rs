//! Memory for whole weights that is used again and again.
//!
//! New memory of this size comes from the kernel, which clears it page after page: that takes longer than the copies of
//! a gather.
#![expect(unsafe_code, reason = "burn's interface for memory of other owners has unsafe methods")]

use std::any::Any;
use std::mem::MaybeUninit;
use std::sync::{Arc, Weak};

use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};
use distribute_device::Element;
use parking_lot::Mutex;

/// The most vectors that are kept: the weight in use, and the one that is gathered ahead.
const KEPT: usize = 2;

/// Vectors of whole weights that are not in use.
#[derive(Default)]
pub(crate) struct Spare(Mutex<Vec<Kept>>);

struct Kept {
    capacity: usize,
    vector: Box<dyn Any + Send>,
}

impl Spare {
    /// Returns a vector with memory for about `len` elements, of any length, or an empty one.
    pub(crate) fn take<T: Element>(&self, len: usize) -> Vec<T> {
        let mut kept = self.0.lock();
        let fits = |kept: &Kept| kept.vector.is::<Vec<T>>() && (len..=2 * len).contains(&kept.capacity);
        let Some(found) = kept.iter().position(fits) else { return Vec::new() };
        kept.swap_remove(found).vector.downcast().map_or_else(|_| Vec::new(), |vector| *vector)
    }

    fn give_back<T: Element>(&self, vector: Vec<T>) {
        let mut kept = self.0.lock();
        kept.push(Kept { capacity: vector.capacity(), vector: Box::new(vector) });
        if kept.len() > KEPT
            && let Some(smallest) = (0..kept.len()).min_by_key(|at| kept[*at].capacity)
        {
            kept.swap_remove(smallest);
        }
    }

    /// Makes memory for a tensor of a vector, which comes back when no tensor uses it any more.
    pub(crate) fn bytes<T: Element>(self: &Arc<Spare>, elements: Vec<T>) -> Bytes {
        let len = size_of_val(&elements[..]);
        // SAFETY: all `len` bytes of the elements are initialized.
        unsafe { Bytes::from_controller(Box::new(Lent { elements, spare: Arc::downgrade(self) }), len) }
    }
}

/// A vector that a tensor uses.
struct Lent<T: Element> {
    elements: Vec<T>,
    spare: Weak<Spare>,
}

impl<T: Element> AllocationController for Lent<T> {
    fn alloc_align(&self) -> usize {
        align_of::<T>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(&mut self, _: AccessPolicy) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        let bytes: *mut [u8] = bytemuck::cast_slice_mut::<T, u8>(&mut self.elements);
        // SAFETY: the types have the same layout, the memory is borrowed from `self`, and the caller promises to write
        // only initialized bytes, of which every value is valid in an Element.
        Ok(unsafe { &mut *(bytes as *mut [MaybeUninit<u8>]) })
    }

    fn memory(&self, _: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        let bytes: *const [u8] = bytemuck::cast_slice::<T, u8>(&self.elements);
        // SAFETY: the types have the same layout, and the memory is borrowed from `self`.
        Ok(unsafe { &*(bytes as *const [MaybeUninit<u8>]) })
    }
}

impl<T: Element> Drop for Lent<T> {
    fn drop(&mut self) {
        if let Some(spare) = self.spare.upgrade() {
            spare.give_back(std::mem::take(&mut self.elements));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_and_is_used_again() {
        let spare = Arc::new(Spare::default());
        let elements = vec![1.0f32, 2.0, 3.0];
        let address = elements.as_ptr();
        let mut bytes = spare.bytes(elements);
        assert_eq!(bytemuck::cast_slice::<u8, f32>(&bytes), [1.0, 2.0, 3.0]);
        bytes[..4].copy_from_slice(&4.0f32.to_ne_bytes());
        assert!(spare.take::<f32>(3).is_empty(), "it is in use");
        let copy = bytes.clone();
        drop(bytes);
        assert_eq!(bytemuck::cast_slice::<u8, f32>(&copy), [4.0, 2.0, 3.0]);
        assert!(spare.take::<f64>(3).is_empty() && spare.take::<f32>(4).is_empty() && spare.take::<f32>(1).is_empty());
        let again = spare.take::<f32>(2);
        assert_eq!((again.as_ptr(), again.len()), (address, 3));
        assert!(spare.take::<f32>(3).is_empty());
        let orphan = spare.bytes(again);
        drop(spare);
        assert_eq!(orphan.len(), 12);
    }

    #[test]
    fn the_largest_vectors_are_kept() {
        let spare = Arc::new(Spare::default());
        for len in [8, 2, 9, 3] {
            drop(spare.bytes(vec![0u8; len]));
        }
        assert!(spare.take::<u8>(2).is_empty() && spare.take::<u8>(3).is_empty());
        assert_eq!((spare.take::<u8>(8).len(), spare.take::<u8>(9).len()), (8, 9));
    }
}
