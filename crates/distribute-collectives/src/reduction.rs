//! Custom reductions, and the engine's interface to all reductions.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use distribute_arithmetic::{self as arithmetic, Keep};
use distribute_device::{DType, Element};

use crate::ReduceOp;
use crate::call::Reducing;

/// A custom reduction operator.
///
/// The function must be associative up to rounding, and must not panic: a panic ends the group on all ranks. All ranks
/// must pass equal functions, which cannot be checked. Every rank gets the same bits, whatever the function.
///
/// # Ordering
/// The algorithm determines the order in which ranks are combined, which is the same in every run. A reduction created
/// by [`new`](Reduction::new) should therefore be commutative. One created by [`ordered`](Reduction::ordered) need not
/// be: it is combined in the order of ranks, by a tree.
///
/// # Examples
/// The value of greatest magnitude, with its sign:
/// ```
/// use distribute_collectives::{ProcessGroup, Reduction};
///
/// let widest = Reduction::new(|a: f32, b: f32| if a.abs() >= b.abs() { a } else { b });
/// let ranks = ProcessGroup::local(2)?;
/// std::thread::scope(|scope| {
///     for group in &ranks {
///         let widest = &widest;
///         scope.spawn(move || {
///             let mut values = if group.rank().0 == 0 { [1.0, -5.0] } else { [-2.0, 4.0] };
///             group.all_reduce(&mut values, widest).expect("both ranks take part");
///             assert_eq!(values, [-2.0, -5.0]);
///         });
///     }
/// });
/// # Ok::<(), distribute_collectives::Error>(())
/// ```
///
/// # Source
/// `MPI_Op_create`, with and without `commute`.
pub struct Reduction<T> {
    combine: Arc<Combine>,
    ordered: bool,
    of: PhantomData<fn(T, T) -> T>,
}

/// A function that combines the second slice with the first one, whose values come before or after it in rank order.
type Combine = dyn Fn(&mut [u8], &[u8], Side) + Send + Sync;

/// The side on which other values are combined with the values in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The other values are from a lower rank: `there = other ∘ there`.
    Before,
    /// The other values are from a higher rank: `there = there ∘ other`.
    After,
}

impl<T: Element> Reduction<T> {
    /// Creates a commutative reduction from `combine`, which is called for each element.
    pub fn new(combine: impl Fn(T, T) -> T + Send + Sync + 'static) -> Reduction<T> {
        let combine = move |target: &mut [u8], source: &[u8], side: Side| {
            let (target, source): (&mut [T], &[T]) = (cast_slice_mut(target), cast_slice(source));
            for (a, b) in target.iter_mut().zip(source) {
                *a = if side == Side::After { combine(*a, *b) } else { combine(*b, *a) };
            }
        };
        Reduction { combine: Arc::new(combine), ordered: false, of: PhantomData }
    }

    /// Creates a reduction that need not be commutative: ranks are combined in order, `((r0 ∘ r1) ∘ (r2 ∘ r3)) ∘ …`.
    ///
    /// # Cost
    /// Between processes, a tree to the first process and back, which moves more bytes than a ring.
    ///
    /// # Examples
    /// The last value that is not zero, which is not commutative:
    /// ```
    /// use distribute_collectives::{ProcessGroup, Reduction};
    ///
    /// let last = Reduction::ordered(|a: u32, b: u32| if b != 0 { b } else { a });
    /// let ranks = ProcessGroup::local(3)?;
    /// std::thread::scope(|scope| {
    ///     for group in &ranks {
    ///         let last = &last;
    ///         scope.spawn(move || {
    ///             let mut value = [[7, 9, 0][group.rank().0 as usize]];
    ///             group.all_reduce(&mut value, last).expect("all ranks take part");
    ///             assert_eq!(value, [9]);
    ///         });
    ///     }
    /// });
    /// # Ok::<(), distribute_collectives::Error>(())
    /// ```
    pub fn ordered(combine: impl Fn(T, T) -> T + Send + Sync + 'static) -> Reduction<T> {
        Reduction { ordered: true, ..Reduction::new(combine) }
    }

    pub(crate) fn combiner(&self) -> Combiner {
        Combiner::User { combine: self.combine.clone(), ordered: self.ordered }
    }
}

/// A built-in operator or a custom reduction, the `op` of [`ProcessGroup::all_reduce`](crate::ProcessGroup::all_reduce)
/// and similar methods.
#[derive(Debug)]
pub enum Operator<'a, T> {
    /// A built-in operator.
    BuiltIn(ReduceOp),
    /// A custom reduction.
    User(&'a Reduction<T>),
}

impl<T> Operator<'_, T> {
    /// Returns the part of the operator that ranks compare.
    pub(crate) fn fingerprint(&self) -> Reducing {
        match self {
            Operator::BuiltIn(op) => Reducing::BuiltIn(*op),
            Operator::User(_) => Reducing::User,
        }
    }
}

impl<T> From<ReduceOp> for Operator<'_, T> {
    fn from(op: ReduceOp) -> Self {
        Operator::BuiltIn(op)
    }
}

impl<'a, T> From<&'a Reduction<T>> for Operator<'a, T> {
    fn from(reduction: &'a Reduction<T>) -> Self {
        Operator::User(reduction)
    }
}

impl<T> Clone for Reduction<T> {
    fn clone(&self) -> Reduction<T> {
        Reduction { combine: self.combine.clone(), ordered: self.ordered, of: PhantomData }
    }
}

impl<T> fmt::Debug for Reduction<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reduction").finish_non_exhaustive()
    }
}

/// A reduction of any kind, on contiguous memory.
#[derive(Clone)]
pub(crate) enum Combiner {
    BuiltIn(ReduceOp),
    User { combine: Arc<Combine>, ordered: bool },
}

impl Default for Combiner {
    fn default() -> Combiner {
        Combiner::BuiltIn(ReduceOp::Sum)
    }
}

impl fmt::Debug for Combiner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Combiner::BuiltIn(op) => op.fmt(f),
            Combiner::User { .. } => Reducing::User.fmt(f),
        }
    }
}

impl Combiner {
    /// Returns whether ranks must be combined in order.
    pub(crate) fn is_ordered(&self) -> bool {
        matches!(self, Combiner::User { ordered: true, .. })
    }

    /// Combines `source` with `target`, element by element, on the given side.
    pub(crate) fn combine(&self, dtype: DType, target: &mut [u8], source: &[u8], side: Side) {
        match self {
            // Built-in operators are commutative bit for bit.
            Combiner::BuiltIn(op) => arithmetic::combine(dtype, op.combine(), target, source),
            Combiner::User { combine, .. } => combine(target, source, side),
        }
    }

    /// Combines buffers of equal length in order and stores the result in those that `keep` names.
    ///
    /// With `divisor`, a built-in sum becomes a mean.
    pub(crate) fn reduce_in_place(&self, dtype: DType, divisor: Option<u32>, keep: Keep, buffers: &mut [&mut [u8]]) {
        match self {
            Combiner::BuiltIn(op) => arithmetic::reduce_in_place(dtype, op.reduce(divisor), keep, buffers),
            Combiner::User { combine, .. } => {
                let Some((first, others)) = buffers.split_first_mut() else { return };
                others.iter().for_each(|other| combine(first, other, Side::After));
                for (index, other) in others.iter_mut().enumerate() {
                    if matches!(keep, Keep::All) || matches!(keep, Keep::One(one) if one == index + 1) {
                        other.copy_from_slice(first);
                    }
                }
            }
        }
    }

    /// Combines sources of equal length in order into `target`, which is not a source.
    ///
    /// With `divisor`, a built-in sum becomes a mean.
    pub(crate) fn reduce_to_one(&self, dtype: DType, divisor: Option<u32>, sources: &[&[u8]], target: &mut [u8]) {
        match self {
            Combiner::BuiltIn(op) => arithmetic::reduce_to_one(dtype, op.reduce(divisor), sources, target),
            Combiner::User { combine, .. } => {
                let Some((first, others)) = sources.split_first() else { return };
                target.copy_from_slice(first);
                others.iter().for_each(|other| combine(target, other, Side::After));
            }
        }
    }
}
