//! Reductions of the caller's own, and how the engine carries any reduction.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use distribute_device::{DType, Element};

use crate::kernel::{self, Keep};
use crate::{ReduceOp, kernel::divide};

/// How two values become one, as the caller defines it.
///
/// It must be associative and commutative, up to rounding: in which order ranks are combined is up to the algorithm, though
/// it is the same in every run. All ranks must pass functions that do the same; that cannot be compared.
///
/// # Examples
/// The value of greatest magnitude, with its sign.
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
///             group.all_reduce_with(&mut values, widest).expect("both ranks take part");
///             assert_eq!(values, [-2.0, -5.0]);
///         });
///     }
/// });
/// # Ok::<(), distribute_collectives::Error>(())
/// ```
///
/// # Source
/// `MPI_Op_create` of a commutative operation.
pub struct Reduction<T> {
    combine: Arc<Combine>,
    of: PhantomData<fn(T, T) -> T>,
}

type Combine = dyn Fn(&mut [u8], &[u8]) + Send + Sync;

impl<T: Element> Reduction<T> {
    /// The reduction that `combine` does, element by element.
    pub fn new(combine: impl Fn(T, T) -> T + Send + Sync + 'static) -> Reduction<T> {
        let combine = move |target: &mut [u8], source: &[u8]| {
            let (target, source): (&mut [T], &[T]) = (cast_slice_mut(target), cast_slice(source));
            for (a, b) in target.iter_mut().zip(source) {
                *a = combine(*a, *b);
            }
        };
        Reduction { combine: Arc::new(combine), of: PhantomData }
    }

    pub(crate) fn combiner(&self) -> Combiner {
        Combiner::User(self.combine.clone())
    }
}

impl<T> Clone for Reduction<T> {
    fn clone(&self) -> Reduction<T> {
        Reduction { combine: self.combine.clone(), of: PhantomData }
    }
}

impl<T> fmt::Debug for Reduction<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reduction").finish_non_exhaustive()
    }
}

/// Any reduction, on contiguous memory.
#[derive(Clone)]
pub(crate) enum Combiner {
    BuiltIn(ReduceOp),
    User(Arc<Combine>),
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
            Combiner::User(_) => ReduceOp::User.fmt(f),
        }
    }
}

impl Combiner {
    /// `target = target ∘ source`, element by element.
    pub(crate) fn combine(&self, dtype: DType, target: &mut [u8], source: &[u8]) {
        match self {
            Combiner::BuiltIn(op) => kernel::combine(dtype, *op, target, source),
            Combiner::User(combine) => combine(target, source),
        }
    }

    /// Combines equally long buffers in their order and stores the result in those that `keep` names.
    pub(crate) fn reduce_in_place(&self, dtype: DType, divisor: Option<u32>, keep: Keep, buffers: &mut [&mut [u8]]) {
        match self {
            Combiner::BuiltIn(op) => kernel::reduce_in_place(dtype, *op, divisor, keep, buffers),
            Combiner::User(combine) => {
                let Some((first, others)) = buffers.split_first_mut() else { return };
                others.iter().for_each(|other| combine(first, other));
                if let Some(n) = divisor {
                    divide(dtype, first, n);
                }
                for (index, other) in others.iter_mut().enumerate() {
                    if matches!(keep, Keep::All) || matches!(keep, Keep::One(one) if one == index + 1) {
                        other.copy_from_slice(first);
                    }
                }
            }
        }
    }

    /// Combines equally long sources in their order into `target`, which is none of them.
    pub(crate) fn reduce_to_one(&self, dtype: DType, divisor: Option<u32>, sources: &[&[u8]], target: &mut [u8]) {
        match self {
            Combiner::BuiltIn(op) => kernel::reduce_to_one(dtype, *op, divisor, sources, target),
            Combiner::User(combine) => {
                let Some((first, others)) = sources.split_first() else { return };
                target.copy_from_slice(first);
                others.iter().for_each(|other| combine(target, other));
                if let Some(n) = divisor {
                    divide(dtype, target, n);
                }
            }
        }
    }
}
