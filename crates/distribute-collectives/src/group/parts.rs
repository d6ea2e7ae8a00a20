//! Operations whose parts have different lengths.

use distribute_device::{BufferMut, BufferRef, Element};

use super::{ProcessGroup, Work};
use crate::engine::memory::Borrowed;
use crate::{Operator, Rank, ReduceOp, Result};

/// The operations on parts of different lengths: the part of rank r has `counts[r]` elements. From
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
/// MPI's operations that end in v, under whose names errors speak of them, without displacements: parts lie one after
/// another.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    group: &'a ProcessGroup,
    counts: &'a [usize],
}

impl ProcessGroup {
    /// Returns the operations on parts of different lengths. `counts` has one length per rank and is the same on all
    /// ranks, except in [`Parts::all_to_all`].
    pub fn parts<'a>(&'a self, counts: &'a [usize]) -> Parts<'a> {
        Parts { group: self, counts }
    }
}

impl<'a> Parts<'a> {
    /// Returns the same operations, which return at once.
    pub fn start(self) -> StartParts<'a> {
        StartParts { group: self.group, counts: self.counts }
    }

    /// Collects every rank's values, in rank order: rank r brings `counts[r]` elements.
    ///
    /// # Shapes
    /// `input` holds this rank's count, `output` the sum of counts.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where lengths do not fit, and those of every operation: see
    /// [`ProcessGroup`].
    pub fn all_gather<T: Element>(self, input: &[T], output: &mut [T]) -> Result<()> {
        let (request, counts) =
            self.group.all_gather_request(T::DTYPE, input.len(), output.len(), Some(self.counts))?;
        self.group.blocking(request, Borrowed::apart(BufferRef::from(input), BufferMut::from(output), counts))
    }

    /// Reduces every rank's input and leaves `counts[r]` elements of the result with rank r.
    ///
    /// # Shapes
    /// `input` holds the sum of counts, `output` this rank's count.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where lengths do not fit, and those of every operation: see
    /// [`ProcessGroup`].
    pub fn reduce_scatter<'o, T: Element>(
        self,
        input: &[T],
        output: &mut [T],
        op: impl Into<Operator<'o, T>>,
    ) -> Result<()> {
        self.group.reduce_scatter_parts(input, output, Some(self.counts), op.into())
    }

    /// Collects every rank's values at the root, in rank order: rank r brings `counts[r]` elements.
    ///
    /// # Shapes
    /// `input` holds this rank's count, the root's `output` the sum of counts. Other ranks' outputs are not touched and
    /// may be empty.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where lengths do not fit,
    /// [`Error::RankOutside`](crate::Error::RankOutside) where `root` is no member, and those of every operation: see
    /// [`ProcessGroup`].
    pub fn gather<T: Element>(self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        let (request, counts) =
            self.group.gather_request(T::DTYPE, input.len(), output.len(), Some(self.counts), root)?;
        self.group.blocking(request, Borrowed::apart(BufferRef::from(input), BufferMut::from(output), counts))
    }

    /// Gives each rank its part of the root's values: rank r gets `counts[r]` elements.
    ///
    /// # Shapes
    /// `output` holds this rank's count, the root's `input` the sum of counts. Other ranks' inputs are not read and may
    /// be empty.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where lengths do not fit,
    /// [`Error::RankOutside`](crate::Error::RankOutside) where `root` is no member, and those of every operation: see
    /// [`ProcessGroup`].
    pub fn scatter<T: Element>(self, input: &[T], output: &mut [T], root: Rank) -> Result<()> {
        let (request, counts) =
            self.group.scatter_request(T::DTYPE, input.len(), output.len(), Some(self.counts), root)?;
        self.group.blocking(request, Borrowed::apart(BufferRef::from(input), BufferMut::from(output), counts))
    }

    /// Sends `counts[s]` elements to each rank s, and receives `receive_counts[s]` of it.
    ///
    /// # Shapes
    /// `input` holds the sum of `counts`, `output` that of `receive_counts`. What one rank sends, the other must
    /// expect; a difference is an error that names both.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where lengths do not fit, and those of every operation: see
    /// [`ProcessGroup`].
    pub fn all_to_all<T: Element>(self, input: &[T], output: &mut [T], receive_counts: &[usize]) -> Result<()> {
        let counts = Some((self.counts, receive_counts));
        let (request, counts) = self.group.all_to_all_request(T::DTYPE, input.len(), output.len(), counts)?;
        self.group.blocking(request, Borrowed::apart(BufferRef::from(input), BufferMut::from(output), counts))
    }
}

/// The operations of [`Parts`], which return at once. From [`Parts::start`].
///
/// [`Work::wait`] hands back input and output.
///
/// # Errors
/// Arguments that do not fit are errors at once, as those of [`Parts`], and
/// [`Error::Aborted`](crate::Error::Aborted) where the group is aborted already; other errors come from [`Work::wait`].
#[derive(Clone, Copy, Debug)]
pub struct StartParts<'a> {
    group: &'a ProcessGroup,
    counts: &'a [usize],
}

impl StartParts<'_> {
    /// Begins [`Parts::all_gather`].
    ///
    /// # Errors
    /// See [`StartParts`].
    pub fn all_gather<T: Element>(self, input: Vec<T>, output: Vec<T>) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.group.all_gather_request(T::DTYPE, input.len(), output.len(), Some(self.counts))?;
        self.group.begin_apart(request, [input, output])
    }

    /// Begins [`Parts::reduce_scatter`].
    ///
    /// # Errors
    /// See [`StartParts`].
    pub fn reduce_scatter<T: Element>(self, input: Vec<T>, output: Vec<T>, op: ReduceOp) -> Result<Work<[Vec<T>; 2]>> {
        let request =
            self.group.reduce_scatter_request(T::DTYPE, input.len(), output.len(), Some(self.counts), op.into())?;
        self.group.begin_apart(request, [input, output])
    }

    /// Begins [`Parts::gather`].
    ///
    /// # Errors
    /// See [`StartParts`].
    pub fn gather<T: Element>(self, input: Vec<T>, output: Vec<T>, root: Rank) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.group.gather_request(T::DTYPE, input.len(), output.len(), Some(self.counts), root)?;
        self.group.begin_apart(request, [input, output])
    }

    /// Begins [`Parts::scatter`].
    ///
    /// # Errors
    /// See [`StartParts`].
    pub fn scatter<T: Element>(self, input: Vec<T>, output: Vec<T>, root: Rank) -> Result<Work<[Vec<T>; 2]>> {
        let request = self.group.scatter_request(T::DTYPE, input.len(), output.len(), Some(self.counts), root)?;
        self.group.begin_apart(request, [input, output])
    }

    /// Begins [`Parts::all_to_all`].
    ///
    /// # Errors
    /// See [`StartParts`].
    pub fn all_to_all<T: Element>(
        self,
        input: Vec<T>,
        output: Vec<T>,
        receive_counts: &[usize],
    ) -> Result<Work<[Vec<T>; 2]>> {
        let counts = Some((self.counts, receive_counts));
        let request = self.group.all_to_all_request(T::DTYPE, input.len(), output.len(), counts)?;
        self.group.begin_apart(request, [input, output])
    }
}
