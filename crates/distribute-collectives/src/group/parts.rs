//! Operations whose parts have different lengths.

use distribute_device::{BufferMut, BufferRef, DType, Element};
use smallvec::smallvec;

use super::{ProcessGroup, Work};
use crate::engine::memory::{Borrowed, Buffers, OwnedBuffers, RawSlice, UseOfInputs};
use crate::{Error, Operator, Rank, ReduceOp, Result};

/// Operations on parts of different lengths: the part of rank r has `counts[r]` elements. Created by
/// [`ProcessGroup::parts`].
///
/// # Examples
/// ```
/// use distribute_collectives::ProcessGroup;
///
/// let ranks = ProcessGroup::local(2)?;
/// std::thread::scope(|scope| {
///     for group in &ranks {
///         scope.spawn(move || {
///             let mine = if group.rank().0 == 0 { vec![1] } else { vec![2, 3] };
///             let mut all = [0; 3];
///             group.parts(&[1, 2]).all_gather(&mine, &mut all).expect("both ranks take part");
///             assert_eq!(all, [1, 2, 3]);
///         });
///     }
/// });
/// # Ok::<(), distribute_collectives::Error>(())
/// ```
///
/// # Source
/// MPI's operations whose names end in v, which errors print, but without displacements: parts are laid out one after
/// another.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    group: &'a ProcessGroup,
    counts: &'a [usize],
    tag: u32,
}

impl ProcessGroup {
    /// Returns the operations on parts of different lengths. `counts` has one length per rank and is the same on all
    /// ranks, except in [`Parts::all_to_all`].
    pub fn parts<'a>(&'a self, counts: &'a [usize]) -> Parts<'a> {
        Parts { group: self, counts, tag: 0 }
    }
}

impl<'a> Parts<'a> {
    /// Marks an operation with a number that identifies its values, such as a digest of their name: if ranks pass
    /// different ones, all of them get [`Error::Mismatch`](crate::Error::Mismatch), although the lengths are equal.
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::ProcessGroup;
    ///
    /// let ranks = ProcessGroup::local(2)?;
    /// std::thread::scope(|scope| {
    ///     for group in &ranks {
    ///         scope.spawn(move || {
    ///             let tag = group.rank().0;                        // a mistake: ranks gather different values
    ///             let outcome = group.parts(&[1, 1]).tag(tag).all_gather(&[1], &mut [0; 2]);
    ///             assert!(outcome.is_err());
    ///         });
    ///     }
    /// });
    /// # Ok::<(), distribute_collectives::Error>(())
    /// ```
    pub fn tag(self, tag: u32) -> Parts<'a> {
        Parts { tag, ..self }
    }

    /// Returns the asynchronous forms of these operations.
    pub fn start(self) -> StartParts<'a> {
        StartParts { parts: self }
    }

    /// Collects every rank's values, in rank order: rank r contributes `counts[r]` elements.
    ///
    /// # Shapes
    /// `input` has this rank's count of elements, `output` the sum of all counts.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) if lengths do not fit, and the errors of every operation: see
    /// [`ProcessGroup`].
    pub fn all_gather<T: Element>(self, input: &[T], output: &mut [T]) -> Result<()> {
        let (request, counts) =
            self.group.all_gather_request(T::DTYPE, input.len(), output.len(), Some(self.counts))?;
        self.group.blocking(
            request.tagged(self.tag),
            Borrowed::apart(BufferRef::from(input), BufferMut::from(output), counts),
        )
    }

    /// Reduces every rank's input; rank r gets its part of the result, `counts[r]` elements.
    ///
    /// # Shapes
    /// `input` has the sum of all counts of elements, `output` this rank's count.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) if lengths do not fit, and the errors of every operation: see
    /// [`ProcessGroup`].
    pub fn reduce_scatter<'o, T: Element>(
        self,
        input: &[T],
        output: &mut [T],
        op: impl Into<Operator<'o, T>>,
    ) -> Result<()> {
        self.group.reduce_scatter_parts(input, output, Some(self.counts), op.into(), self.tag)
    }

    /// Collects every rank's values at the root, in rank order: rank r contributes `counts[r]` elements.
    ///
    /// # Shapes
    /// `input` has this rank's count of elements, the root's `output` the sum of all counts. Other ranks' outputs are
    /// not changed and may be empty.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) if lengths do not fit, [`Error::RankOutside`](crate::Error::RankOutside)
    /// if `root` is not a member, and the errors of every operation: see [`ProcessGroup`].
    pub fn gather<T: Element>(self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        let (request, counts) =
            self.group.gather_request(T::DTYPE, input.len(), output.len(), Some(self.counts), root)?;
        self.group.blocking(
            request.tagged(self.tag),
            Borrowed::apart(BufferRef::from(input), BufferMut::from(output), counts),
        )
    }

    /// Sends each rank its part of the root's values: rank r gets `counts[r]` elements.
    ///
    /// # Shapes
    /// `output` has this rank's count of elements, the root's `input` the sum of all counts. Other ranks' inputs are
    /// not read and may be empty.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) if lengths do not fit, [`Error::RankOutside`](crate::Error::RankOutside)
    /// if `root` is not a member, and the errors of every operation: see [`ProcessGroup`].
    pub fn scatter<T: Element>(self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        let (request, counts) =
            self.group.scatter_request(T::DTYPE, input.len(), output.len(), Some(self.counts), root)?;
        self.group.blocking(
            request.tagged(self.tag),
            Borrowed::apart(BufferRef::from(input), BufferMut::from(output), counts),
        )
    }

    /// Sends `counts[s]` elements to each rank s, and receives `receive_counts[s]` elements from it.
    ///
    /// # Shapes
    /// `input` has the sum of `counts` of elements, `output` the sum of `receive_counts`. If the numbers that one rank
    /// sends and the other expects differ, the error names both.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) if lengths do not fit, and the errors of every operation: see
    /// [`ProcessGroup`].
    pub fn all_to_all<T: Element>(self, input: &[T], output: &mut [T], receive_counts: &[usize]) -> Result<()> {
        let counts = Some((self.counts, receive_counts));
        let (request, counts) = self.group.all_to_all_request(T::DTYPE, input.len(), output.len(), counts)?;
        self.group.blocking(
            request.tagged(self.tag),
            Borrowed::apart(BufferRef::from(input), BufferMut::from(output), counts),
        )
    }
}

/// The asynchronous forms of the operations of [`Parts`]. Created by [`Parts::start`].
///
/// [`Work::wait`] returns input and output. The input of a [`reduce_scatter`](StartParts::reduce_scatter) serves as
/// working memory: the values that it has afterwards are not specified.
///
/// # Errors
/// Invalid arguments are errors at once, like those of [`Parts`], and so is [`Error::Aborted`](crate::Error::Aborted)
/// if the group has been aborted already; other errors are returned by [`Work::wait`].
#[derive(Clone, Copy, Debug)]
pub struct StartParts<'a> {
    parts: Parts<'a>,
}

impl StartParts<'_> {
    /// Starts [`Parts::all_gather`].
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`StartParts`].
    pub fn all_gather<T: Element>(self, input: Vec<T>, output: Vec<T>) -> Result<Work<[Vec<T>; 2]>> {
        let request =
            self.parts.group.all_gather_request(T::DTYPE, input.len(), output.len(), Some(self.parts.counts))?;
        self.parts.group.begin_apart((request.0.tagged(self.parts.tag), request.1), [input, output])
    }

    /// Starts [`Parts::all_gather`] in place: this rank's values are at their position in `values` already, after the
    /// counts of the ranks before it.
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`StartParts`].
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::ProcessGroup;
    ///
    /// let ranks = ProcessGroup::local(2)?;
    /// std::thread::scope(|scope| {
    ///     for group in &ranks {
    ///         scope.spawn(move || {
    ///             let values = if group.rank().0 == 0 { vec![1, 0, 0] } else { vec![0, 2, 3] };
    ///             let work = group.parts(&[1, 2]).start().all_gather_in_place(values).expect("lengths fit");
    ///             assert_eq!(work.wait().expect("both ranks take part"), [1, 2, 3]);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), distribute_collectives::Error>(())
    /// ```
    pub fn all_gather_in_place<T: Element>(self, mut values: Vec<T>) -> Result<Work<Vec<T>>> {
        let (group, counts) = (self.parts.group, self.parts.counts);
        let own = counts.get(group.rank().index()).copied().unwrap_or_default();
        let (request, counts) = group.all_gather_request(T::DTYPE, own, values.len(), Some(counts))?;
        let start: usize = self.parts.counts[..group.rank().index()].iter().sum();
        let output = RawSlice::of_mut(bytemuck::cast_slice_mut(&mut values));
        let size = T::DTYPE.size_bytes();
        let input = output.part(start * size..(start + own) * size);
        let buffers = Buffers { inputs: vec![input], outputs: smallvec![output], counts, ..Buffers::default() };
        group.begin(request.tagged(self.parts.tag), buffers, values)
    }

    /// Starts [`Parts::reduce_scatter`].
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`StartParts`].
    pub fn reduce_scatter<T: Element>(self, input: Vec<T>, output: Vec<T>, op: ReduceOp) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.parts.group.reduce_scatter_request(
            T::DTYPE,
            input.len(),
            output.len(),
            Some(self.parts.counts),
            op.into(),
        )?;
        self.parts.group.begin_apart((request.0.tagged(self.parts.tag), request.1), [input, output])
    }

    /// Starts [`Parts::reduce_scatter`] in place: afterwards this rank's part of the result is at its position in
    /// `values`, after the counts of the ranks before it. The other values are not specified.
    ///
    /// `values` is one slice, with the sum of all counts of elements. All ranks of a process call this form.
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`StartParts`].
    ///
    /// # Examples
    /// ```
    /// use distribute_collectives::{ProcessGroup, ReduceOp};
    ///
    /// let ranks = ProcessGroup::local(2)?;
    /// std::thread::scope(|scope| {
    ///     for group in &ranks {
    ///         scope.spawn(move || {
    ///             let parts = group.parts(&[1, 2]);
    ///             let work = parts.start().reduce_scatter_in_place(vec![1, 2, 3], ReduceOp::Sum).expect("they fit");
    ///             let values = work.wait().expect("both ranks take part");
    ///             match group.rank().0 {
    ///                 0 => assert_eq!(values[..1], [2]),
    ///                 _ => assert_eq!(values[1..], [4, 6]),
    ///             }
    ///         });
    ///     }
    /// });
    /// # Ok::<(), distribute_collectives::Error>(())
    /// ```
    pub fn reduce_scatter_in_place<B: OwnedBuffers>(self, mut values: B, op: ReduceOp) -> Result<Work<B>> {
        let (group, counts) = (self.parts.group, self.parts.counts);
        let dtype = values.dtype().unwrap_or(DType::U8);
        let mut slices = Vec::new();
        values.visit(&mut |bytes| slices.push(RawSlice::of_mut(bytes)));
        let &[input] = &slices[..] else {
            let (what, got) = ("slices of reduce_scatter_in_place", slices.len());
            let remedy = "pass one slice; several reductions in place are several calls";
            return Err(Error::Length { what, got, expected: 1, remedy });
        };
        let size = dtype.size_bytes();
        let own = counts.get(group.rank().index()).copied().unwrap_or_default();
        let (request, layout) =
            group.reduce_scatter_request(dtype, input.len_bytes() / size, own, Some(counts), op.into())?;
        let start: usize = counts[..group.rank().index()].iter().sum();
        let buffers = Buffers {
            inputs: vec![input],
            outputs: smallvec![input.part(start * size..(start + own) * size)],
            counts: layout,
            user: None,
            use_of_inputs: UseOfInputs::Result,
        };
        group.begin(request.tagged(self.parts.tag), buffers, values)
    }

    /// Starts [`Parts::gather`].
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`StartParts`].
    pub fn gather<T: Element>(self, input: Vec<T>, output: Vec<T>, root: Rank) -> Result<Work<[Vec<T>; 2]>> {
        let request =
            self.parts.group.gather_request(T::DTYPE, input.len(), output.len(), Some(self.parts.counts), root)?;
        self.parts.group.begin_apart((request.0.tagged(self.parts.tag), request.1), [input, output])
    }

    /// Starts [`Parts::scatter`].
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`StartParts`].
    pub fn scatter<T: Element>(self, input: Vec<T>, output: Vec<T>, root: Rank) -> Result<Work<[Vec<T>; 2]>> {
        let request =
            self.parts.group.scatter_request(T::DTYPE, input.len(), output.len(), Some(self.parts.counts), root)?;
        self.parts.group.begin_apart((request.0.tagged(self.parts.tag), request.1), [input, output])
    }

    /// Starts [`Parts::all_to_all`].
    ///
    /// # Errors
    /// The errors of every asynchronous operation: see [`StartParts`].
    pub fn all_to_all<T: Element>(
        self,
        input: Vec<T>,
        output: Vec<T>,
        receive_counts: &[usize],
    ) -> Result<Work<[Vec<T>; 2]>> {
        let counts = Some((self.parts.counts, receive_counts));
        let request = self.parts.group.all_to_all_request(T::DTYPE, input.len(), output.len(), counts)?;
        self.parts.group.begin_apart((request.0.tagged(self.parts.tag), request.1), [input, output])
    }
}
