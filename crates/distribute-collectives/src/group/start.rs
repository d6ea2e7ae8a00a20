//! Asynchronous operations.

use distribute_device::{DType, Element};
use smallvec::{SmallVec, smallvec};

use super::pairs::{receiving, sending};
use super::{ProcessGroup, Request, Work};
use crate::call::{Call, Kind, Reducing};
use crate::engine::memory::{Buffers, Counts, OwnedBuffers, RawSlice, UseOfInputs};
use crate::{Rank, ReduceOp, Result};

/// The asynchronous operations of [`ProcessGroup`]. Each takes ownership of the memory, works on it while the caller
/// continues, and returns it through [`Work::wait`] or as a future. Created by [`ProcessGroup::start`].
///
/// # Ordering
/// Calls share the order of this rank's blocking calls; several may be in progress.
///
/// # Errors
/// Invalid arguments are errors at once, like those of the blocking operation, and so is
/// [`Error::Aborted`](crate::Error::Aborted) if the group has been aborted already; other errors are returned by
/// [`Work::wait`].
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
    tag: u32,
}

impl ProcessGroup {
    /// Returns the asynchronous operations.
    pub fn start(&self) -> Start<'_> {
        Start { group: self, tag: 0 }
    }
}

impl<'a> Start<'a> {
    /// Adds a tag to the call, such as a digest of shapes or names. All ranks must pass the same; a difference is
    /// [`Error::Mismatch`](crate::Error::Mismatch).
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::{ProcessGroup, ReduceOp};
    ///
    /// let ranks = ProcessGroup::local(2)?;
    /// std::thread::scope(|scope| {
    ///     for group in &ranks {
    ///         scope.spawn(move || {
    ///             let tag = group.rank().0;                        // a mistake: ranks reduce different values
    ///             let work = group.start().tag(tag).all_reduce(vec![1.0f32; 4], ReduceOp::Sum);
    ///             assert!(work.and_then(|work| work.wait()).is_err());
    ///         });
    ///     }
    /// });
    /// # Ok::<(), distribute_collectives::Error>(())
    /// ```
    pub fn tag(self, tag: u32) -> Start<'a> {
        Start { tag, ..self }
    }

    fn tagged(self, (request, counts): (Request, Counts)) -> (Request, Counts) {
        (request.tagged(self.tag), counts)
    }

    /// Starts [`ProcessGroup::all_reduce`]; `buffers` are one vector, several, or tensors of another library
    /// ([`OwnedBuffers`]).
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`Start`].
    pub fn all_reduce<B: OwnedBuffers>(self, buffers: B, op: ReduceOp) -> Result<Work<B>> {
        self.group.begin_in_place(Kind::AllReduce, buffers, (Some(op.into()), None), self.tag)
    }

    /// Starts [`ProcessGroup::broadcast`].
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`Start`].
    pub fn broadcast<B: OwnedBuffers>(self, buffers: B, root: Rank) -> Result<Work<B>> {
        self.group.begin_in_place(Kind::Broadcast, buffers, (None, Some(root)), self.tag)
    }

    /// Starts [`ProcessGroup::reduce`].
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`Start`].
    pub fn reduce<B: OwnedBuffers>(self, buffers: B, op: ReduceOp, root: Rank) -> Result<Work<B>> {
        self.group.begin_in_place(Kind::Reduce, buffers, (Some(op.into()), Some(root)), self.tag)
    }

    /// Starts [`ProcessGroup::all_gather`]; `wait` returns input and output.
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`Start`].
    pub fn all_gather<T: Element>(self, input: Vec<T>, output: Vec<T>) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.group.all_gather_request(T::DTYPE, input.len(), output.len(), None)?;
        self.group.begin_apart(self.tagged(request), [input, output])
    }

    /// Starts [`ProcessGroup::reduce_scatter`]; `wait` returns input and output. The input serves as working memory:
    /// the values that it has afterwards are not specified.
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`Start`].
    pub fn reduce_scatter<T: Element>(self, input: Vec<T>, output: Vec<T>, op: ReduceOp) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.group.reduce_scatter_request(T::DTYPE, input.len(), output.len(), None, op.into())?;
        self.group.begin_apart(self.tagged(request), [input, output])
    }

    /// Starts [`ProcessGroup::gather`]; `wait` returns input and output.
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`Start`].
    pub fn gather<T: Element>(self, input: Vec<T>, output: Vec<T>, root: Rank) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.group.gather_request(T::DTYPE, input.len(), output.len(), None, root)?;
        self.group.begin_apart(self.tagged(request), [input, output])
    }

    /// Starts [`ProcessGroup::scatter`]; `wait` returns input and output.
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`Start`].
    pub fn scatter<T: Element>(self, input: Vec<T>, output: Vec<T>, root: Rank) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.group.scatter_request(T::DTYPE, input.len(), output.len(), None, root)?;
        self.group.begin_apart(self.tagged(request), [input, output])
    }

    /// Starts [`ProcessGroup::all_to_all`]; `wait` returns input and output.
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`Start`].
    pub fn all_to_all<T: Element>(self, input: Vec<T>, output: Vec<T>) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.group.all_to_all_request(T::DTYPE, input.len(), output.len(), None)?;
        self.group.begin_apart(self.tagged(request), [input, output])
    }

    /// Starts [`ProcessGroup::barrier`].
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`Start`].
    pub fn barrier(self) -> Result<Work<Vec<u8>>> {
        self.group.begin_in_place(Kind::Barrier, Vec::new(), (None, None), self.tag)
    }

    /// Starts [`ProcessGroup::send`]; `wait` returns the values as the first element.
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`Start`]; also [`Error::Connect`](crate::Error::Connect) for
    /// the first message of a pair.
    pub fn send<T: Element>(self, values: Vec<T>, to: Rank) -> Result<Work<[Vec<T>; 2]>> {
        let pair = self.group.pair(self.group.rank(), to)?;
        pair.begin_apart(self.tagged(sending(T::DTYPE, values.len())), [values, Vec::new()])
    }

    /// Starts [`ProcessGroup::recv`]; `wait` returns the values as the second element.
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`Start`]; also [`Error::Connect`](crate::Error::Connect) for
    /// the first message of a pair.
    pub fn recv<T: Element>(self, values: Vec<T>, from: Rank) -> Result<Work<[Vec<T>; 2]>> {
        let pair = self.group.pair(from, self.group.rank())?;
        pair.begin_apart(self.tagged(receiving(T::DTYPE, values.len())), [Vec::new(), values])
    }
}

impl ProcessGroup {
    fn begin_in_place<B: OwnedBuffers>(
        &self,
        kind: Kind,
        mut owned: B,
        (op, root): (Option<Reducing>, Option<Rank>),
        tag: u32,
    ) -> Result<Work<B>> {
        let dtype = owned.dtype().unwrap_or(DType::U8);
        let mut outputs = SmallVec::new();
        owned.visit(&mut |bytes| outputs.push(RawSlice::of_mut(bytes)));
        let elements = |slice: &RawSlice| slice.len_bytes() / dtype.size_bytes();
        let count = outputs.iter().map(elements).sum();
        let layout = Call::layout_of(outputs.iter().map(elements)) ^ tag;
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
            outputs: smallvec![RawSlice::of_mut(bytemuck::cast_slice_mut(output))],
            counts,
            user: None,
            use_of_inputs: UseOfInputs::Spare,
        };
        self.begin(request, buffers, owned)
    }
}
