//! Operations that return at once.

use distribute_device::{DType, Element};

use super::pairs::{receiving, sending};
use super::{ProcessGroup, Request, Work};
use crate::call::{Call, Kind, Reducing};
use crate::engine::memory::{Buffers, Counts, OwnedBuffers, RawSlice};
use crate::{Rank, ReduceOp, Result};

/// The operations of [`ProcessGroup`], which return at once: each takes the memory, works on it while the caller does
/// something else, and hands it back by [`Work::wait`] or as a future. From [`ProcessGroup::start`].
///
/// # Ordering
/// Calls stand in the same order as the blocking ones of this rank; several may be under way.
///
/// # Errors
/// Arguments that do not fit are errors at once, as those of the blocking operation, and
/// [`Error::Aborted`](crate::Error::Aborted) where the group is aborted already; other errors come from [`Work::wait`].
///
/// # Examples
/// ```
/// use distribute_collectives::{ProcessGroup, ReduceOp};
///
/// let ranks = ProcessGroup::local(2)?;
/// std::thread::scope(|scope| {
///     for group in &ranks {
///         scope.spawn(move || {
///             let work = group.start().all_reduce(vec![1.0f32; 4], ReduceOp::Sum)?;
///             // … compute meanwhile …
///             assert_eq!(work.wait()?, [2.0; 4]);
///             Ok::<(), distribute_collectives::Error>(())
///         });
///     }
/// });
/// # Ok::<(), distribute_collectives::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Start<'a> {
    group: &'a ProcessGroup,
}

impl ProcessGroup {
    /// Returns the operations that return at once.
    pub fn start(&self) -> Start<'_> {
        Start { group: self }
    }
}

impl Start<'_> {
    /// Begins [`ProcessGroup::all_reduce`]; `buffers` are a vector, several, or tensors of the caller's own
    /// ([`OwnedBuffers`]).
    ///
    /// # Errors
    /// See [`Start`].
    pub fn all_reduce<B: OwnedBuffers>(self, buffers: B, op: ReduceOp) -> Result<Work<B>> {
        self.group.begin_in_place(Kind::AllReduce, buffers, Some(op.into()), None)
    }

    /// Begins [`ProcessGroup::broadcast`].
    ///
    /// # Errors
    /// See [`Start`].
    pub fn broadcast<B: OwnedBuffers>(self, buffers: B, root: Rank) -> Result<Work<B>> {
        self.group.begin_in_place(Kind::Broadcast, buffers, None, Some(root))
    }

    /// Begins [`ProcessGroup::reduce`].
    ///
    /// # Errors
    /// See [`Start`].
    pub fn reduce<B: OwnedBuffers>(self, buffers: B, op: ReduceOp, root: Rank) -> Result<Work<B>> {
        self.group.begin_in_place(Kind::Reduce, buffers, Some(op.into()), Some(root))
    }

    /// Begins [`ProcessGroup::all_gather`]; `wait` hands back input and output.
    ///
    /// # Errors
    /// See [`Start`].
    pub fn all_gather<T: Element>(self, input: Vec<T>, output: Vec<T>) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.group.all_gather_request(T::DTYPE, input.len(), output.len(), None)?;
        self.group.begin_apart(request, [input, output])
    }

    /// Begins [`ProcessGroup::reduce_scatter`]; `wait` hands back input and output.
    ///
    /// # Errors
    /// See [`Start`].
    pub fn reduce_scatter<T: Element>(self, input: Vec<T>, output: Vec<T>, op: ReduceOp) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.group.reduce_scatter_request(T::DTYPE, input.len(), output.len(), None, op.into())?;
        self.group.begin_apart(request, [input, output])
    }

    /// Begins [`ProcessGroup::gather`]; `wait` hands back input and output.
    ///
    /// # Errors
    /// See [`Start`].
    pub fn gather<T: Element>(self, input: Vec<T>, output: Vec<T>, root: Rank) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.group.gather_request(T::DTYPE, input.len(), output.len(), None, root)?;
        self.group.begin_apart(request, [input, output])
    }

    /// Begins [`ProcessGroup::scatter`]; `wait` hands back input and output.
    ///
    /// # Errors
    /// See [`Start`].
    pub fn scatter<T: Element>(self, input: Vec<T>, output: Vec<T>, root: Rank) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.group.scatter_request(T::DTYPE, input.len(), output.len(), None, root)?;
        self.group.begin_apart(request, [input, output])
    }

    /// Begins [`ProcessGroup::all_to_all`]; `wait` hands back input and output.
    ///
    /// # Errors
    /// See [`Start`].
    pub fn all_to_all<T: Element>(self, input: Vec<T>, output: Vec<T>) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.group.all_to_all_request(T::DTYPE, input.len(), output.len(), None)?;
        self.group.begin_apart(request, [input, output])
    }

    /// Begins [`ProcessGroup::barrier`].
    ///
    /// # Errors
    /// See [`Start`].
    pub fn barrier(self) -> Result<Work<Vec<u8>>> {
        self.group.begin_in_place(Kind::Barrier, Vec::new(), None, None)
    }

    /// Begins [`ProcessGroup::send`]; `wait` hands the values back, in the first place.
    ///
    /// # Errors
    /// See [`Start`]; also [`Error::Connect`](crate::Error::Connect) for the first message of a pair.
    pub fn send<T: Element>(self, values: Vec<T>, to: Rank) -> Result<Work<[Vec<T>; 2]>> {
        let pair = self.group.pair(self.group.rank(), to)?;
        pair.begin_apart(sending(T::DTYPE, values.len()), [values, Vec::new()])
    }

    /// Begins [`ProcessGroup::recv`]; `wait` hands the values back, in the second place.
    ///
    /// # Errors
    /// See [`Start`]; also [`Error::Connect`](crate::Error::Connect) for the first message of a pair.
    pub fn recv<T: Element>(self, values: Vec<T>, from: Rank) -> Result<Work<[Vec<T>; 2]>> {
        let pair = self.group.pair(from, self.group.rank())?;
        pair.begin_apart(receiving(T::DTYPE, values.len()), [Vec::new(), values])
    }
}

impl ProcessGroup {
    fn begin_in_place<B: OwnedBuffers>(
        &self,
        kind: Kind,
        mut owned: B,
        op: Option<Reducing>,
        root: Option<Rank>,
    ) -> Result<Work<B>> {
        let dtype = owned.dtype().unwrap_or(DType::U8);
        let mut outputs = Vec::new();
        owned.visit(&mut |bytes| outputs.push(RawSlice::of_mut(bytes)));
        let elements = |slice: &RawSlice| slice.len_bytes() / dtype.size_bytes();
        let count = outputs.iter().map(elements).sum();
        let layout = Call::layout_of(outputs.iter().map(elements));
        let request = Request { layout, op, root, ..Request::new(kind, dtype, count) };
        self.begin(request, Buffers { outputs, ..Buffers::default() }, owned)
    }

    pub(super) fn begin_apart<T: Element>(
        &self,
        (request, counts): (Request, Counts),
        mut owned: [Vec<T>; 2],
    ) -> Result<Work<[Vec<T>; 2]>> {
        let [input, output] = &mut owned;
        let buffers = Buffers {
            inputs: vec![RawSlice::of_mut(bytemuck::cast_slice_mut(input))],
            outputs: vec![RawSlice::of_mut(bytemuck::cast_slice_mut(output))],
            counts,
            user: None,
        };
        self.begin(request, buffers, owned)
    }
}
