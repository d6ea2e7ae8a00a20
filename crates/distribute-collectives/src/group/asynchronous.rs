//! Asynchronous operations.

use distribute_device::{DType, Element};

use super::{ProcessGroup, Request, Work};
use crate::call::{Call, Kind};
use crate::engine::memory::{Buffers, Counts, OwnedBuffers, RawSlice};
use crate::{Rank, ReduceOp, Result};

impl ProcessGroup {
    /// Begins an [`all_reduce`](ProcessGroup::all_reduce) and returns at once; the result comes from [`Work::wait`].
    ///
    /// # Errors
    /// [`Error::Aborted`](crate::Error::Aborted) where the group is aborted already; other errors come from
    /// [`Work::wait`].
    pub fn all_reduce_async<B: OwnedBuffers>(&self, buffers: B, op: ReduceOp) -> Result<Work<B>> {
        self.begin_in_place(Kind::AllReduce, buffers, Some(op), None)
    }

    /// Begins a [`broadcast`](ProcessGroup::broadcast) and returns at once.
    ///
    /// # Errors
    /// [`Error::RankOutside`](crate::Error::RankOutside) where `root` is no member,
    /// [`Error::Aborted`](crate::Error::Aborted) where the group is aborted already; other errors come from
    /// [`Work::wait`].
    pub fn broadcast_async<B: OwnedBuffers>(&self, buffers: B, root: Rank) -> Result<Work<B>> {
        self.begin_in_place(Kind::Broadcast, buffers, None, Some(root))
    }

    /// Begins a [`reduce`](ProcessGroup::reduce) and returns at once.
    ///
    /// # Errors
    /// [`Error::RankOutside`](crate::Error::RankOutside) where `root` is no member,
    /// [`Error::Aborted`](crate::Error::Aborted) where the group is aborted already; other errors come from
    /// [`Work::wait`].
    pub fn reduce_async<B: OwnedBuffers>(&self, buffers: B, op: ReduceOp, root: Rank) -> Result<Work<B>> {
        self.begin_in_place(Kind::Reduce, buffers, Some(op), Some(root))
    }

    /// Begins an [`all_gather`](ProcessGroup::all_gather) and returns at once; `wait` hands back input and output.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where lengths do not fit, [`Error::Aborted`](crate::Error::Aborted)
    /// where the group is aborted already; other errors come from [`Work::wait`].
    pub fn all_gather_async<T: Element>(&self, input: Vec<T>, output: Vec<T>) -> Result<Work<[Vec<T>; 2]>> {
        self.begin_apart(self.all_gather_request(T::DTYPE, input.len(), output.len(), None)?, [input, output])
    }

    /// Begins an [`all_gather_v`](ProcessGroup::all_gather_v) and returns at once; `wait` hands back input and output.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where lengths do not fit, [`Error::Aborted`](crate::Error::Aborted)
    /// where the group is aborted already; other errors come from [`Work::wait`].
    pub fn all_gather_v_async<T: Element>(
        &self,
        input: Vec<T>,
        output: Vec<T>,
        counts: &[usize],
    ) -> Result<Work<[Vec<T>; 2]>> {
        self.begin_apart(self.all_gather_request(T::DTYPE, input.len(), output.len(), Some(counts))?, [input, output])
    }

    /// Begins a [`reduce_scatter`](ProcessGroup::reduce_scatter) and returns at once; `wait` hands back input and
    /// output.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where lengths do not fit, [`Error::Aborted`](crate::Error::Aborted)
    /// where the group is aborted already; other errors come from [`Work::wait`].
    pub fn reduce_scatter_async<T: Element>(
        &self,
        input: Vec<T>,
        output: Vec<T>,
        op: ReduceOp,
    ) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.reduce_scatter_request(T::DTYPE, input.len(), output.len(), None, op)?;
        self.begin_apart(request, [input, output])
    }

    /// Begins a [`reduce_scatter_v`](ProcessGroup::reduce_scatter_v) and returns at once; `wait` hands back input and
    /// output.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where lengths do not fit, [`Error::Aborted`](crate::Error::Aborted)
    /// where the group is aborted already; other errors come from [`Work::wait`].
    pub fn reduce_scatter_v_async<T: Element>(
        &self,
        input: Vec<T>,
        output: Vec<T>,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.reduce_scatter_request(T::DTYPE, input.len(), output.len(), Some(counts), op)?;
        self.begin_apart(request, [input, output])
    }

    /// Begins a [`gather`](ProcessGroup::gather) and returns at once; `wait` hands back input and output.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where lengths do not fit,
    /// [`Error::RankOutside`](crate::Error::RankOutside) where `root` is no member,
    /// [`Error::Aborted`](crate::Error::Aborted) where the group is aborted already; other errors come from
    /// [`Work::wait`].
    pub fn gather_async<T: Element>(&self, input: Vec<T>, output: Vec<T>, root: Rank) -> Result<Work<[Vec<T>; 2]>> {
        self.begin_apart(self.gather_request(T::DTYPE, input.len(), output.len(), None, root)?, [input, output])
    }

    /// Begins a [`gather_v`](ProcessGroup::gather_v) and returns at once; `wait` hands back input and output.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where lengths do not fit,
    /// [`Error::RankOutside`](crate::Error::RankOutside) where `root` is no member,
    /// [`Error::Aborted`](crate::Error::Aborted) where the group is aborted already; other errors come from
    /// [`Work::wait`].
    pub fn gather_v_async<T: Element>(
        &self,
        input: Vec<T>,
        output: Vec<T>,
        counts: &[usize],
        root: Rank,
    ) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.gather_request(T::DTYPE, input.len(), output.len(), Some(counts), root)?;
        self.begin_apart(request, [input, output])
    }

    /// Begins a [`scatter`](ProcessGroup::scatter) and returns at once; `wait` hands back input and output.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where lengths do not fit,
    /// [`Error::RankOutside`](crate::Error::RankOutside) where `root` is no member,
    /// [`Error::Aborted`](crate::Error::Aborted) where the group is aborted already; other errors come from
    /// [`Work::wait`].
    pub fn scatter_async<T: Element>(&self, input: Vec<T>, output: Vec<T>, root: Rank) -> Result<Work<[Vec<T>; 2]>> {
        self.begin_apart(self.scatter_request(T::DTYPE, input.len(), output.len(), None, root)?, [input, output])
    }

    /// Begins a [`scatter_v`](ProcessGroup::scatter_v) and returns at once; `wait` hands back input and output.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where lengths do not fit,
    /// [`Error::RankOutside`](crate::Error::RankOutside) where `root` is no member,
    /// [`Error::Aborted`](crate::Error::Aborted) where the group is aborted already; other errors come from
    /// [`Work::wait`].
    pub fn scatter_v_async<T: Element>(
        &self,
        input: Vec<T>,
        output: Vec<T>,
        counts: &[usize],
        root: Rank,
    ) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.scatter_request(T::DTYPE, input.len(), output.len(), Some(counts), root)?;
        self.begin_apart(request, [input, output])
    }

    /// Begins an [`all_to_all`](ProcessGroup::all_to_all) and returns at once; `wait` hands back input and output.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where lengths do not fit, [`Error::Aborted`](crate::Error::Aborted)
    /// where the group is aborted already; other errors come from [`Work::wait`].
    pub fn all_to_all_async<T: Element>(&self, input: Vec<T>, output: Vec<T>) -> Result<Work<[Vec<T>; 2]>> {
        self.begin_apart(self.all_to_all_request(T::DTYPE, input.len(), output.len(), None)?, [input, output])
    }

    /// Begins an [`all_to_all_v`](ProcessGroup::all_to_all_v) and returns at once; `wait` hands back input and output.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where lengths do not fit, [`Error::Aborted`](crate::Error::Aborted)
    /// where the group is aborted already; other errors come from [`Work::wait`].
    pub fn all_to_all_v_async<T: Element>(
        &self,
        input: Vec<T>,
        send_counts: &[usize],
        output: Vec<T>,
        receive_counts: &[usize],
    ) -> Result<Work<[Vec<T>; 2]>> {
        let counts = Some((send_counts, receive_counts));
        self.begin_apart(self.all_to_all_request(T::DTYPE, input.len(), output.len(), counts)?, [input, output])
    }

    /// Begins a [`barrier`](ProcessGroup::barrier) and returns at once.
    ///
    /// # Errors
    /// [`Error::Aborted`](crate::Error::Aborted) where the group is aborted already; other errors come from
    /// [`Work::wait`].
    pub fn barrier_async(&self) -> Result<Work<Vec<u8>>> {
        self.begin_in_place(Kind::Barrier, Vec::new(), None, None)
    }

    fn begin_in_place<B: OwnedBuffers>(
        &self,
        kind: Kind,
        mut owned: B,
        op: Option<ReduceOp>,
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
