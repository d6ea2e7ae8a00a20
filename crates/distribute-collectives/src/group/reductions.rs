//! Operations that combine or spread values: all-reduce, reduce, broadcast, reduce-scatter, barrier.

use distribute_device::{BufferMut, BufferRef, DType, Element};

use super::{ProcessGroup, Request};
use crate::call::{Call, Kind, Reducing};
use crate::engine::memory::{Borrowed, Counts};
use crate::{Error, Operator, Rank, ReduceOp, Result};

impl ProcessGroup {
    /// Replaces every rank's values with their reduction over ranks, in place. `op` is a [`ReduceOp`] or a reference to
    /// a custom [`Reduction`](crate::Reduction).
    ///
    /// # Shapes
    /// Lengths must be equal on all ranks.
    ///
    /// # Cost
    /// Ranks of one process read and write each element once per rank. Between processes: see
    /// [`schedule`](crate::schedule).
    ///
    /// # Errors
    /// The errors of every operation: see [`ProcessGroup`]. If one rank passes a built-in operator and another a custom
    /// reduction, that is a mismatch; two different custom reductions cannot be distinguished.
    pub fn all_reduce<'a, T: Element>(&self, values: &mut [T], op: impl Into<Operator<'a, T>>) -> Result<()> {
        match op.into() {
            Operator::BuiltIn(op) => self.all_reduce_list(&mut [BufferMut::from(values)], op),
            Operator::User(reduction) => {
                let request = Request::new(Kind::AllReduce, T::DTYPE, values.len());
                let borrowed = Borrowed::in_place([BufferMut::from(values)]).with(reduction.combiner());
                self.blocking(Request { op: Some(Reducing::User), ..request }, borrowed)
            }
        }
    }

    /// Reduces several slices of one data type like [`all_reduce`](ProcessGroup::all_reduce), in one operation.
    ///
    /// The slices are never copied into a common buffer. All ranks must pass slices of the same lengths in the same
    /// order.
    ///
    /// # Errors
    /// [`Error::MixedTypes`] if slices differ in type, and the errors of every operation: see [`ProcessGroup`].
    pub fn all_reduce_list(&self, slices: &mut [BufferMut<'_>], op: ReduceOp) -> Result<()> {
        self.in_place(Kind::AllReduce, slices, Some(op.into()), None)
    }

    /// Replaces every rank's values with the root's, in place.
    ///
    /// # Shapes
    /// Lengths must be equal on all ranks.
    ///
    /// # Ordering
    /// Between processes a root may return before the others have made the call. If processes name different roots, the
    /// error may therefore come from a later call: see [`ProcessGroup`].
    ///
    /// # Errors
    /// [`Error::RankOutside`] if `root` is not a member, and the errors of every operation: see [`ProcessGroup`].
    pub fn broadcast<T: Element>(&self, values: &mut [T], root: Rank) -> Result<()> {
        self.broadcast_list(&mut [BufferMut::from(values)], root)
    }

    /// Broadcasts several slices of one data type like [`broadcast`](ProcessGroup::broadcast), in one operation.
    ///
    /// # Errors
    /// [`Error::MixedTypes`] if slices differ in type, [`Error::RankOutside`] if `root` is not a member, and the errors
    /// of every operation: see [`ProcessGroup`].
    pub fn broadcast_list(&self, slices: &mut [BufferMut<'_>], root: Rank) -> Result<()> {
        self.in_place(Kind::Broadcast, slices, None, Some(root))
    }

    /// Replaces the root's values with the reduction over ranks; other ranks' values are unspecified afterwards. `op`
    /// is as for [`all_reduce`](ProcessGroup::all_reduce).
    ///
    /// # Shapes
    /// Lengths must be equal on all ranks.
    ///
    /// # Errors
    /// [`Error::RankOutside`] if `root` is not a member, and the errors of every operation: see [`ProcessGroup`].
    pub fn reduce<'a, T: Element>(&self, values: &mut [T], op: impl Into<Operator<'a, T>>, root: Rank) -> Result<()> {
        match op.into() {
            Operator::BuiltIn(op) => {
                self.in_place(Kind::Reduce, &mut [BufferMut::from(values)], Some(op.into()), Some(root))
            }
            Operator::User(reduction) => {
                let request = Request::new(Kind::Reduce, T::DTYPE, values.len());
                let borrowed = Borrowed::in_place([BufferMut::from(values)]).with(reduction.combiner());
                self.blocking(Request { op: Some(Reducing::User), root: Some(root), ..request }, borrowed)
            }
        }
    }

    /// Reduces every rank's input; rank r gets part r of the result. `op` is as for
    /// [`all_reduce`](ProcessGroup::all_reduce).
    ///
    /// # Shapes
    /// `output` has the same length on all ranks, and `input` has that length times the world size.
    ///
    /// # Errors
    /// [`Error::Length`] if lengths do not fit, and the errors of every operation: see [`ProcessGroup`].
    pub fn reduce_scatter<'a, T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: impl Into<Operator<'a, T>>,
    ) -> Result<()> {
        self.reduce_scatter_parts(input, output, None, op.into(), 0)
    }

    /// Waits until every rank has called this.
    ///
    /// # Errors
    /// The errors of every operation: see [`ProcessGroup`].
    pub fn barrier(&self) -> Result<()> {
        self.in_place(Kind::Barrier, &mut [], None, None)
    }

    pub(super) fn reduce_scatter_parts<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        counts: Option<&[usize]>,
        op: Operator<'_, T>,
        tag: u32,
    ) -> Result<()> {
        let (request, counts) =
            self.reduce_scatter_request(T::DTYPE, input.len(), output.len(), counts, op.fingerprint())?;
        let request = request.tagged(tag);
        let borrowed = Borrowed::apart(BufferRef::from(input), BufferMut::from(output), counts);
        self.blocking(
            request,
            match op {
                Operator::BuiltIn(_) => borrowed,
                Operator::User(reduction) => borrowed.with(reduction.combiner()),
            },
        )
    }

    fn in_place(
        &self,
        kind: Kind,
        slices: &mut [BufferMut<'_>],
        op: Option<Reducing>,
        root: Option<Rank>,
    ) -> Result<()> {
        let dtype = slices.first().map_or(DType::U8, |slice| slice.dtype());
        if let Some(index) = slices.iter().position(|slice| slice.dtype() != dtype) {
            return Err(Error::MixedTypes { index, got: slices[index].dtype(), expected: dtype });
        }
        let count = slices.iter().map(|slice| slice.len()).sum();
        let layout = Call::layout_of(slices.iter().map(|slice| slice.len()));
        let borrowed = Borrowed::in_place(slices.iter_mut().map(BufferMut::reborrow));
        self.blocking(Request { layout, op, root, ..Request::new(kind, dtype, count) }, borrowed)
    }

    pub(super) fn reduce_scatter_request(
        &self,
        dtype: DType,
        input: usize,
        output: usize,
        counts: Option<&[usize]>,
        op: Reducing,
    ) -> Result<(Request, Counts)> {
        let (kind, layout) = match counts {
            None => {
                let remedy = "the input of reduce_scatter holds the output's length times the world size";
                check_len("input of reduce_scatter", input, output * self.world_size(), remedy)?;
                (Kind::ReduceScatter, 0)
            }
            Some(counts) => {
                let remedy = "the input of reduce_scatter_v holds the sum of counts, the output this rank's count";
                self.check_counts("counts of reduce_scatter_v", counts)?;
                check_len("input of reduce_scatter_v", input, counts.iter().sum(), remedy)?;
                check_len("output of reduce_scatter_v", output, counts[self.rank().index()], remedy)?;
                (Kind::ReduceScatterV, Call::layout_of(counts.iter().copied()))
            }
        };
        let counts = counts.map_or(Counts::Even, |counts| Counts::PerRank(counts.to_vec()));
        Ok((Request { layout, op: Some(op), ..Request::new(kind, dtype, input) }, counts))
    }

    /// Checks that there is one count per rank, and that memory can hold their sum, from which offsets are computed.
    pub(super) fn check_counts(&self, what: &'static str, counts: &[usize]) -> Result<()> {
        check_len(what, counts.len(), self.world_size(), "give one count for each rank of the group")?;
        let sum = counts.iter().fold(0usize, |sum, count| sum.saturating_add(*count));
        check_at_most(what, sum, isize::MAX as usize, "give counts of elements that there are")
    }
}

pub(super) fn check_len(what: &'static str, got: usize, expected: usize, remedy: &'static str) -> Result<()> {
    if got == expected { Ok(()) } else { Err(Error::Length { what, got, expected, remedy }) }
}

pub(super) fn check_at_most(what: &'static str, got: usize, expected: usize, remedy: &'static str) -> Result<()> {
    if got <= expected { Ok(()) } else { Err(Error::Length { what, got, expected, remedy }) }
}
