//! An operation's own memory, in which values for other processes are collected.

use std::ops::Range;

use distribute_device::DType;

use super::RawSlice;

/// The reduction of this process's whole inputs, for a reduce-scatter or a mean that spans processes.
#[derive(Debug)]
pub(crate) struct Staging {
    pub(crate) slice: RawSlice,
    /// Owns the memory of `slice`, unless a rank does; in u64 for alignment.
    _memory: Option<Box<[u64]>>,
    /// For means whose sums may overflow the data type: the type of the accumulator, and the number of its elements per
    /// value.
    pub(crate) accumulator: Option<(DType, usize)>,
}

impl Staging {
    pub(crate) fn new(elements: usize, dtype: DType, accumulator: Option<(DType, usize)>) -> Staging {
        let (stored, per_element) = accumulator.unwrap_or((dtype, 1));
        let len_bytes = elements * per_element * stored.size_bytes();
        let mut memory = vec![0u64; len_bytes.div_ceil(8)].into_boxed_slice();
        let slice = RawSlice::of_mut(&mut bytemuck::cast_slice_mut(&mut memory)[..len_bytes]);
        Staging { slice, _memory: Some(memory), accumulator }
    }

    /// Uses the input of the only rank of this process: its values are the sums of this process.
    pub(crate) fn of_input(slice: RawSlice) -> Staging {
        Staging { slice, _memory: None, accumulator: None }
    }

    /// Returns the byte range of some elements, whose size in the data type is `size` bytes.
    pub(crate) fn bytes(&self, elements: &Range<usize>, size: usize) -> Range<usize> {
        let size = self.accumulator.map_or(size, |(dtype, per_element)| per_element * dtype.size_bytes());
        elements.start * size..elements.end * size
    }
}
