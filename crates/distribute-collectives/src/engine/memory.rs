//! The memory of one rank, which other threads of the process read and write while an operation runs.
#![expect(unsafe_code, reason = "ranks of one process reduce straight in each other's memory")]

use std::marker::PhantomData;
use std::ops::Range;

use distribute_device::{BufferMut, BufferRef, DType, Element};
use smallvec::{SmallVec, smallvec};

use crate::reduction::Combiner;

mod chunks;
mod exchanged;
mod staging;

pub(crate) use exchanged::{ExchangedMemory, Received, Sent};
pub(crate) use staging::Staging;

/// Contiguous memory of one rank, by address.
///
/// Holding a value gives no right to access the memory. That right comes from the protocol of [`crate::engine`], which
/// defines which thread may access which range when, and never lets the owner continue while other threads may.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawSlice {
    address: *mut u8,
    len_bytes: usize,
}

// SAFETY: a RawSlice is an address and a length; code that dereferences it (`bytes`, `bytes_mut`) is responsible for
// exclusive or shared access, from any thread.
unsafe impl Send for RawSlice {}
// SAFETY: as above; the type has no interior mutability of its own.
unsafe impl Sync for RawSlice {}

impl RawSlice {
    pub(crate) fn of_mut(bytes: &mut [u8]) -> RawSlice {
        RawSlice { address: bytes.as_mut_ptr(), len_bytes: bytes.len() }
    }

    /// Wraps memory that the operation only reads.
    pub(crate) fn of_ref(bytes: &[u8]) -> RawSlice {
        RawSlice { address: bytes.as_ptr().cast_mut(), len_bytes: bytes.len() }
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Returns the slice's bytes in `range`, truncated at its end.
    pub(crate) fn part(&self, range: Range<usize>) -> RawSlice {
        let start = range.start.min(self.len_bytes);
        RawSlice { address: self.address.wrapping_add(start), len_bytes: range.end.min(self.len_bytes) - start }
    }

    /// Returns whether both refer to the same memory.
    pub(crate) fn is(&self, other: &RawSlice) -> bool {
        self.address == other.address && self.len_bytes == other.len_bytes
    }

    /// # Safety
    /// The memory must be valid, no thread may write to it during `'a`, and `range` must lie inside it.
    pub(crate) unsafe fn bytes<'a>(&self, range: Range<usize>) -> &'a [u8] {
        debug_assert!(range.start <= range.end && range.end <= self.len_bytes);
        // SAFETY: `range` lies inside the allocation.
        let start = unsafe { self.address.add(range.start) };
        // SAFETY: the caller guarantees that these bytes are valid and not written.
        unsafe { std::slice::from_raw_parts(start, range.len()) }
    }

    /// # Safety
    /// The memory must be valid and writable, no other code may access this range during `'a`, and `range` must lie
    /// inside it.
    pub(crate) unsafe fn bytes_mut<'a>(&self, range: Range<usize>) -> &'a mut [u8] {
        debug_assert!(range.start <= range.end && range.end <= self.len_bytes);
        // SAFETY: `range` lies inside the allocation.
        let start = unsafe { self.address.add(range.start) };
        // SAFETY: the caller guarantees that these bytes are valid and accessed exclusively.
        unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
    }
}

/// Memory that an asynchronous operation owns until it is complete.
///
/// Implemented for `Vec<T>` and `Box<[T]>`; tensor libraries implement it for lists of their tensors.
///
/// # Safety
/// The slices passed to `visit` must stay valid, at the same address, and must not be accessed by other code until the
/// value is dropped or returned by [`Work::wait`](crate::Work::wait), even if the value itself is moved. All slices
/// must have the type that [`dtype`](OwnedBuffers::dtype) returns and be aligned for it.
pub unsafe trait OwnedBuffers: Send + 'static {
    /// Returns the type of all elements; `None` if there are no slices.
    fn dtype(&self) -> Option<DType>;

    /// Calls `visitor` with every slice, in an order that is the same on all ranks.
    fn visit(&mut self, visitor: &mut dyn FnMut(&mut [u8]));
}

// SAFETY: a Vec's heap memory does not move with the Vec, and the Vec is owned.
unsafe impl<T: Element> OwnedBuffers for Vec<T> {
    fn dtype(&self) -> Option<DType> {
        Some(T::DTYPE)
    }

    fn visit(&mut self, visitor: &mut dyn FnMut(&mut [u8])) {
        visitor(bytemuck::cast_slice_mut(self));
    }
}

// SAFETY: a boxed slice's heap memory does not move with the box, and the box is owned.
unsafe impl<T: Element> OwnedBuffers for Box<[T]> {
    fn dtype(&self) -> Option<DType> {
        Some(T::DTYPE)
    }

    fn visit(&mut self, visitor: &mut dyn FnMut(&mut [u8])) {
        visitor(bytemuck::cast_slice_mut(self));
    }
}

// SAFETY: as for Vec<T>, for each of the two vectors.
unsafe impl<T: Element> OwnedBuffers for [Vec<T>; 2] {
    fn dtype(&self) -> Option<DType> {
        Some(T::DTYPE)
    }

    fn visit(&mut self, visitor: &mut dyn FnMut(&mut [u8])) {
        for inner in self {
            visitor(bytemuck::cast_slice_mut(inner));
        }
    }
}

/// The division of a call's elements among ranks.
#[derive(Clone, Debug, Default)]
pub(crate) enum Counts {
    /// Equal parts, or no parts.
    #[default]
    Even,
    /// The number of elements of each rank's part; equal on all ranks.
    PerRank(Vec<usize>),
    /// The numbers of elements that this rank sends to, and receives from, each rank.
    Exchange { send: Vec<usize>, receive: Vec<usize> },
}

/// The slices of one rank's part in a call.
#[derive(Clone, Debug, Default)]
pub(crate) struct Buffers {
    /// Memory that is read, and maybe overwritten.
    pub(crate) inputs: Vec<RawSlice>,
    /// Memory that is written; in operations in place also read.
    pub(crate) outputs: SmallVec<[RawSlice; 1]>,
    pub(crate) counts: Counts,
    /// The reduction, if it is a custom one.
    pub(crate) user: Option<Combiner>,
    pub(crate) use_of_inputs: UseOfInputs,
}

/// The use that an operation may make of its inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum UseOfInputs {
    /// They are only read.
    #[default]
    Read,
    /// They may be overwritten: the operation owns them, and their owner needs no values of them again.
    Spare,
    /// They may be overwritten like [`Spare`](UseOfInputs::Spare) ones. A reduce-scatter leaves each rank's part of the
    /// result at its position in the rank's input, which is its output too.
    Result,
}

impl Buffers {
    /// Returns whether another rank's buffers of the same call have the same layout, so that a chunk has the same
    /// elements in both.
    ///
    /// Between processes, comparing digests of the layout is enough to find mistakes. Within a process, memory safety
    /// depends on this comparison.
    pub(crate) fn fit(&self, other: &Buffers) -> bool {
        let counts = match (&self.counts, &other.counts) {
            (Counts::PerRank(mine), Counts::PerRank(theirs)) => mine == theirs,
            // Counts of exchanges between ranks are compared in pairs, when the blocks are laid out.
            (Counts::Even, Counts::Even) | (Counts::Exchange { .. }, Counts::Exchange { .. }) => true,
            _ => false,
        };
        // In place all ranks have the same slices; otherwise their lengths follow from the counts.
        let in_place = self.inputs.is_empty() && other.inputs.is_empty();
        let theirs = other.outputs.iter().map(RawSlice::len_bytes);
        let same = !in_place || self.outputs.iter().map(RawSlice::len_bytes).eq(theirs);
        let is_result = |buffers: &Buffers| buffers.use_of_inputs == UseOfInputs::Result;
        counts
            && same
            && is_result(self) == is_result(other)
            && self.inputs.len() == other.inputs.len()
            && self.user.is_some() == other.user.is_some()
    }
}

/// [`Buffers`] that borrow the caller's memory.
#[derive(Debug)]
pub(crate) struct Borrowed<'a> {
    pub(crate) buffers: Buffers,
    memory: PhantomData<&'a mut [u8]>,
}

impl<'a> Borrowed<'a> {
    pub(crate) fn in_place(slices: impl IntoIterator<Item = BufferMut<'a>>) -> Borrowed<'a> {
        let outputs = slices.into_iter().map(|mut slice| RawSlice::of_mut(slice.as_bytes_mut())).collect();
        Borrowed { buffers: Buffers { outputs, ..Buffers::default() }, memory: PhantomData }
    }

    pub(crate) fn apart(input: BufferRef<'a>, mut output: BufferMut<'a>, counts: Counts) -> Borrowed<'a> {
        let buffers = Buffers {
            inputs: vec![RawSlice::of_ref(input.as_bytes())],
            outputs: smallvec![RawSlice::of_mut(output.as_bytes_mut())],
            counts,
            ..Buffers::default()
        };
        Borrowed { buffers, memory: PhantomData }
    }

    /// Adds a custom reduction.
    pub(crate) fn with(mut self, combiner: Combiner) -> Borrowed<'a> {
        self.buffers.user = Some(combiner);
        self
    }
}

/// Finds the slices, and the bytes of each, that lie in `range` of the concatenated `slices`.
pub(crate) fn locate(slices: &[RawSlice], range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
    let mut start = 0;
    slices.iter().enumerate().filter_map(move |(index, slice)| {
        let (from, to) = (range.start.max(start), range.end.min(start + slice.len_bytes));
        let found = (from < to).then(|| (index, from - start..to - start));
        start += slice.len_bytes;
        found
    })
}
