//! Operations that move values without combining them: all-gather, gather, scatter, all-to-all.

use distribute_device::{BufferMut, BufferRef, DType, Element};

use super::reductions::check_len;
use super::{ProcessGroup, Request};
use crate::call::{Call, Kind};
use crate::engine::memory::{Borrowed, Counts};
use crate::{Rank, Result};

impl ProcessGroup {
    /// Collects every rank's values, in rank order.
    ///
    /// # Shapes
    /// `input` has the same length on all ranks, `output` that length times the world size.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) if lengths do not fit, and the errors of every operation: see
    /// [`ProcessGroup`].
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let (request, counts) = self.all_gather_request(T::DTYPE, input.len(), output.len(), None)?;
        self.blocking(request, Borrowed::apart(BufferRef::from(input), BufferMut::from(output), counts))
    }

    /// Collects every rank's values at the root, in rank order.
    ///
    /// # Shapes
    /// `input` has the same length on all ranks, and the root's `output` has that length times the world size. Other
    /// ranks' outputs are not changed and may be empty.
    ///
    /// # Cost
    /// Every other process sends directly to the root's process.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) if lengths do not fit, [`Error::RankOutside`](crate::Error::RankOutside)
    /// if `root` is not a member, and the errors of every operation: see [`ProcessGroup`].
    pub fn gather<T: Element>(&self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        let (request, counts) = self.gather_request(T::DTYPE, input.len(), output.len(), None, root)?;
        self.blocking(request, Borrowed::apart(BufferRef::from(input), BufferMut::from(output), counts))
    }

    /// Sends each rank its part of the root's values.
    ///
    /// # Shapes
    /// `output` has the same length on all ranks, and the root's `input` has that length times the world size. Other
    /// ranks' inputs are not read and may be empty.
    ///
    /// # Ordering
    /// Between processes a root may return before the others have made the call. If processes name different roots, the
    /// error may therefore come from a later call: see [`ProcessGroup`].
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) if lengths do not fit, [`Error::RankOutside`](crate::Error::RankOutside)
    /// if `root` is not a member, and the errors of every operation: see [`ProcessGroup`].
    pub fn scatter<T: Element>(&self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        let (request, counts) = self.scatter_request(T::DTYPE, input.len(), output.len(), None, root)?;
        self.blocking(request, Borrowed::apart(BufferRef::from(input), BufferMut::from(output), counts))
    }

    /// Sends part s of each rank's input to rank s, which collects the parts it receives in rank order.
    ///
    /// # Shapes
    /// `input` and `output` have the same length on all ranks, a multiple of the world size.
    ///
    /// # Cost
    /// Every pair of processes exchanges its parts directly, from and into the callers' memory.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) if lengths do not fit, and the errors of every operation: see
    /// [`ProcessGroup`].
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::ProcessGroup;
    ///
    /// let ranks = ProcessGroup::local(2)?;
    /// std::thread::scope(|scope| {
    ///     for group in &ranks {
    ///         scope.spawn(move || {
    ///             let me = group.rank().0;
    ///             let mut output = [0; 2];
    ///             group.all_to_all(&[10 * me, 10 * me + 1], &mut output).expect("both ranks take part");
    ///             assert_eq!(output, [me, 10 + me]);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), distribute_collectives::Error>(())
    /// ```
    pub fn all_to_all<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        let (request, counts) = self.all_to_all_request(T::DTYPE, input.len(), output.len(), None)?;
        self.blocking(request, Borrowed::apart(BufferRef::from(input), BufferMut::from(output), counts))
    }

    pub(super) fn all_gather_request(
        &self,
        dtype: DType,
        input: usize,
        output: usize,
        counts: Option<&[usize]>,
    ) -> Result<(Request, Counts)> {
        let Some(counts) = counts else {
            let remedy = "the output of all_gather holds the input's length times the world size";
            check_len("output of all_gather", output, input * self.world_size(), remedy)?;
            return Ok((Request::new(Kind::AllGather, dtype, input), Counts::Even));
        };
        let remedy = "the input of all_gather_v holds this rank's count, the output the sum of counts";
        self.check_counts("counts of all_gather_v", counts)?;
        check_len("input of all_gather_v", input, counts[self.rank().index()], remedy)?;
        check_len("output of all_gather_v", output, counts.iter().sum(), remedy)?;
        let layout = Call::layout_of(counts.iter().copied());
        Ok((Request { layout, ..Request::new(Kind::AllGatherV, dtype, output) }, Counts::PerRank(counts.to_vec())))
    }

    pub(super) fn gather_request(
        &self,
        dtype: DType,
        input: usize,
        output: usize,
        counts: Option<&[usize]>,
        root: Rank,
    ) -> Result<(Request, Counts)> {
        let words = ["input of gather_v", "output of gather at the root"];
        let (request, parts) = self.parted((Kind::Gather, Kind::GatherV), dtype, input, counts, root, words[0])?;
        let is_root = root == self.rank();
        if is_root {
            let remedy = "the root's output holds all ranks' inputs";
            check_len(words[1], output, parts.iter().sum(), remedy)?;
        }
        let mut send = vec![0; self.world_size()];
        send[root.index()] = input;
        let receive = if is_root { parts } else { vec![0; self.world_size()] };
        Ok((request, Counts::Exchange { send, receive }))
    }

    pub(super) fn scatter_request(
        &self,
        dtype: DType,
        input: usize,
        output: usize,
        counts: Option<&[usize]>,
        root: Rank,
    ) -> Result<(Request, Counts)> {
        let words = ["output of scatter_v", "input of scatter at the root"];
        let (request, parts) = self.parted((Kind::Scatter, Kind::ScatterV), dtype, output, counts, root, words[0])?;
        let is_root = root == self.rank();
        if is_root {
            let remedy = "the root's input holds all ranks' outputs";
            check_len(words[1], input, parts.iter().sum(), remedy)?;
        }
        let mut receive = vec![0; self.world_size()];
        receive[root.index()] = output;
        let send = if is_root { parts } else { vec![0; self.world_size()] };
        Ok((request, Counts::Exchange { send, receive }))
    }

    /// Builds the request of a gather or scatter. Also returns the length of every rank's part.
    fn parted(
        &self,
        (even, uneven): (Kind, Kind),
        dtype: DType,
        own: usize,
        counts: Option<&[usize]>,
        root: Rank,
        what: &'static str,
    ) -> Result<(Request, Vec<usize>)> {
        self.check_rank("root", root)?;
        let request = |kind, count| Request { root: Some(root), ..Request::new(kind, dtype, count) };
        let Some(counts) = counts else { return Ok((request(even, own), vec![own; self.world_size()])) };
        self.check_counts("counts", counts)?;
        check_len(what, own, counts[self.rank().index()], "it holds this rank's count")?;
        let layout = Call::layout_of(counts.iter().copied());
        Ok((Request { layout, ..request(uneven, counts.iter().sum()) }, counts.to_vec()))
    }

    pub(super) fn all_to_all_request(
        &self,
        dtype: DType,
        input: usize,
        output: usize,
        counts: Option<(&[usize], &[usize])>,
    ) -> Result<(Request, Counts)> {
        let Some((send, receive)) = counts else {
            let part = input / self.world_size();
            let remedy = "the input of all_to_all divides evenly among the ranks, and the output is as long";
            check_len("input of all_to_all", input, part * self.world_size(), remedy)?;
            check_len("output of all_to_all", output, input, remedy)?;
            let parts = vec![part; self.world_size()];
            let counts = Counts::Exchange { send: parts.clone(), receive: parts };
            return Ok((Request::new(Kind::AllToAll, dtype, input), counts));
        };
        self.check_counts("send counts of all_to_all_v", send)?;
        self.check_counts("receive counts of all_to_all_v", receive)?;
        check_len("input of all_to_all_v", input, send.iter().sum(), "it holds the sum of the send counts")?;
        check_len("output of all_to_all_v", output, receive.iter().sum(), "it holds the sum of the receive counts")?;
        let counts = Counts::Exchange { send: send.to_vec(), receive: receive.to_vec() };
        // Counts may differ between ranks; each message states its length.
        Ok((Request::new(Kind::AllToAllV, dtype, 0), counts))
    }
}
