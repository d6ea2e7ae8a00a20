//! Memory of one rank that other threads of the process read and write while an operation runs.
#![expect(unsafe_code, reason = "ranks of one process reduce straight in each other's memory")]

use std::marker::PhantomData;
use std::ops::Range;

use distribute_device::{BufferMut, BufferRef, DType, Element};

use crate::reduction::Combiner;

mod chunks;
mod exchanged;
mod staging;

pub(crate) use exchanged::{ExchangedMemory, Received, Sent};
pub(crate) use staging::Staging;

/// Contiguous memory of one rank, by address.
///
/// Holding one gives no right to access the memory: that comes from the protocol of [`crate::engine`], which says who
/// may access which range when, and never lets the owner continue while others may.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawSlice {
    address: *mut u8,
    len_bytes: usize,
}

// SAFETY: a RawSlice is an address and a length; whoever dereferences it (`bytes`, `bytes_mut`) answers for exclusive
// or shared access, from whichever thread.
unsafe impl Send for RawSlice {}
// SAFETY: as above; the type has no interior mutability of its own.
unsafe impl Sync for RawSlice {}

impl RawSlice {
    pub(crate) fn of_mut(bytes: &mut [u8]) -> RawSlice {
        RawSlice { address: bytes.as_mut_ptr(), len_bytes: bytes.len() }
    }

    /// Names memory that the operation only reads.
    pub(crate) fn of_ref(bytes: &[u8]) -> RawSlice {
        RawSlice { address: bytes.as_ptr().cast_mut(), len_bytes: bytes.len() }
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Returns the slice's bytes in `range`, cut off at its end.
    pub(crate) fn part(&self, range: Range<usize>) -> RawSlice {
        let start = range.start.min(self.len_bytes);
        RawSlice { address: self.address.wrapping_add(start), len_bytes: range.end.min(self.len_bytes) - start }
    }

    /// Returns whether both are the same memory.
    pub(crate) fn is(&self, other: &RawSlice) -> bool {
        self.address == other.address && self.len_bytes == other.len_bytes
    }

    /// # Safety
    /// The memory is alive, nobody writes to it during `'a`, and `range` lies inside it.
    pub(crate) unsafe fn bytes<'a>(&self, range: Range<usize>) -> &'a [u8] {
        debug_assert!(range.start <= range.end && range.end <= self.len_bytes);
        // SAFETY: `range` lies inside the allocation.
        let start = unsafe { self.address.add(range.start) };
        // SAFETY: the caller promises life and absence of writers for these bytes.
        unsafe { std::slice::from_raw_parts(start, range.len()) }
    }

    /// # Safety
    /// The memory is alive, writable, nobody else accesses this range during `'a`, and `range` lies inside it.
    pub(crate) unsafe fn bytes_mut<'a>(&self, range: Range<usize>) -> &'a mut [u8] {
        debug_assert!(range.start <= range.end && range.end <= self.len_bytes);
        // SAFETY: `range` lies inside the allocation.
        let start = unsafe { self.address.add(range.start) };
        // SAFETY: the caller promises life and exclusive access for these bytes.
        unsafe { std::slice::from_raw_parts_mut(start, range.len()) }
    }
}

/// Memory that an asynchronous operation owns until it is done.
///
/// Implemented for `Vec<T>` and `Box<[T]>`; tensor libraries implement it for lists of their tensors.
///
/// # Safety
/// The slices passed to `visit` stay valid, at the same address, and are touched by nobody else until the value is
/// dropped or handed back by [`Work::wait`](crate::Work::wait), also when the value itself is moved. All slices have
/// the type that [`dtype`](OwnedBuffers::dtype) returns and are aligned for it.
pub unsafe trait OwnedBuffers: Send + 'static {
    /// Returns the type of all elements; `None` where there is no slice at all.
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
    /// Evenly, or not at all.
    #[default]
    Even,
    /// Elements of each rank's part; alike on all ranks.
    PerRank(Vec<usize>),
    /// Elements that this rank sends to, and gets from, each rank.
    Exchange { send: Vec<usize>, receive: Vec<usize> },
}

/// The slices of one rank's part in a call.
#[derive(Clone, Debug, Default)]
pub(crate) struct Buffers {
    /// Read only.
    pub(crate) inputs: Vec<RawSlice>,
    /// Written; for operations in place also read.
    pub(crate) outputs: Vec<RawSlice>,
    pub(crate) counts: Counts,
    /// The reduction, where it is the caller's own.
    pub(crate) user: Option<Combiner>,
}

impl Buffers {
    /// Returns whether another rank's buffers of the same call have the same layout, so that a chunk is the same
    /// elements of both.
    ///
    /// Between processes a digest in the call is enough to find mistakes; within a process memory safety depends on
    /// this.
    pub(crate) fn fit(&self, other: &Buffers) -> bool {
        let counts = match (&self.counts, &other.counts) {
            (Counts::PerRank(mine), Counts::PerRank(theirs)) => mine == theirs,
            // What ranks send each other is compared in pairs, when it is laid out.
            (Counts::Even, Counts::Even) | (Counts::Exchange { .. }, Counts::Exchange { .. }) => true,
            _ => false,
        };
        // In place all ranks have the same slices; apart their lengths follow from the counts.
        let in_place = self.inputs.is_empty() && other.inputs.is_empty();
        let theirs = other.outputs.iter().map(RawSlice::len_bytes);
        let same = !in_place || self.outputs.iter().map(RawSlice::len_bytes).eq(theirs);
        counts && same && self.inputs.len() == other.inputs.len() && self.user.is_some() == other.user.is_some()
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
            outputs: vec![RawSlice::of_mut(output.as_bytes_mut())],
            counts,
            user: None,
        };
        Borrowed { buffers, memory: PhantomData }
    }

    /// Adds a reduction of the caller's own.
    pub(crate) fn with(mut self, combiner: Combiner) -> Borrowed<'a> {
        self.buffers.user = Some(combiner);
        self
    }
}

/// Finds the slices, and the bytes of each, that lie in `range` when `slices` are taken as one long slice.
pub(crate) fn locate(slices: &[RawSlice], range: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
    let mut start = 0;
    slices.iter().enumerate().filter_map(move |(index, slice)| {
        let (from, to) = (range.start.max(start), range.end.min(start + slice.len_bytes));
        let found = (from < to).then(|| (index, from - start..to - start));
        start += slice.len_bytes;
        found
    })
}
