//! Nests of tensors, which runs take and return besides single tensors.

use std::any::Any;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::fmt;
use std::hash::{BuildHasher, Hash};
use std::marker::PhantomData;

use distribute_collectives::{ProcessGroup, ReduceOp};

use crate::combine::{Form, Pending, begin_gather, begin_reduce};
use crate::indexed_rows::begin_reduce_rows;
use crate::{Axis, Error, HostTensor, IndexedRows, Result, TensorStorage};

/// A tensor, some [rows](IndexedRows) of one, a number, or a nest of them: tuples, vectors, arrays, options, maps, and
/// structs that derive it.
///
/// Operations apply to the leaves one by one; all replicas must have structures of the same form. `M` is inferred; it
/// lets the trait be implemented for tensors of any library.
///
/// # Examples
/// ```
/// use std::collections::BTreeMap;
/// use distribute_collectives::{ProcessGroup, ReduceOp};
/// use distribute_values::{Axis, reduce_structure};
///
/// let groups = ProcessGroup::local(2)?;
/// let metrics = |loss: f64, right: u64| (loss, BTreeMap::from([("right", right)]));
/// let (first, second) = (metrics(0.5, 3), metrics(1.5, 4));    // of two replicas
/// let (loss, counts) = reduce_structure(&groups, ReduceOp::Sum, &[&first, &second], &Axis::None)?;
/// assert_eq!((loss, counts["right"]), (2.0, 7));
/// # Ok::<(), distribute_values::Error>(())
/// ```
///
/// # Source
/// The nested structures of `tf.nest`, with the rules by which `tf.distribute.Strategy.run` regroups results.
pub trait Structure<M>: Sized {
    /// Combines several structures of the same form to one, leaf by leaf, in the order of leaves.
    ///
    /// # Errors
    /// [`Error::Structure`] if forms differ, else the error of `leaves`.
    fn combine(parts: &[&Self], leaves: &mut impl Leaves) -> Result<Self>;
}

/// An operation on the leaves of a [`Structure`].
pub trait Leaves {
    /// Takes notice of a container before its leaves: of its kind, and its keys or length. Operations between processes
    /// compare it.
    fn enter(&mut self, _container: fmt::Arguments<'_>) {}

    /// Combines the tensors at one leaf of all parts.
    ///
    /// # Errors
    /// The operation's error if the tensors cannot be combined.
    fn combine<L, T: TensorStorage<L>>(&mut self, parts: &[&T]) -> Result<T>;

    /// Combines the rows at one leaf of all parts.
    ///
    /// # Errors
    /// [`Error::Rows`] if the operation is not defined for rows, else the operation's error.
    fn combine_rows<L, T: TensorStorage<L>>(&mut self, parts: &[&IndexedRows<T>]) -> Result<IndexedRows<T>>;
}

/// Marks the implementation of [`Structure`] for single tensors.
pub struct Single<L>(PhantomData<L>);

/// Marks the implementations of [`Structure`] for containers of structures.
pub struct Nested<M>(PhantomData<M>);

/// Marks the implementations of [`Structure`] for numbers.
pub enum Number {}

impl<L, T: TensorStorage<L>> Structure<Single<L>> for T {
    fn combine(parts: &[&T], leaves: &mut impl Leaves) -> Result<T> {
        leaves.combine(parts)
    }
}

macro_rules! numbers {
    ($($number:ty),*) => {$(
        impl Structure<Number> for $number {
            fn combine(parts: &[&$number], leaves: &mut impl Leaves) -> Result<$number> {
                let tensors: Vec<HostTensor<$number>> = parts.iter().map(|part| HostTensor::scalar(**part)).collect();
                let combined = leaves.combine(&tensors.iter().collect::<Vec<_>>())?.to_elements::<$number>()?;
                combined.first().copied().ok_or_else(|| differs("a number", 0, "no value", "one value"))
            }
        }
    )*};
}

numbers!(f32, f64, i32, i64, u32, u64);

impl<M, S: Structure<M>> Structure<Nested<M>> for Vec<S> {
    fn combine(parts: &[&Vec<S>], leaves: &mut impl Leaves) -> Result<Vec<S>> {
        let expected = parts.first().map_or(0, |part| part.len());
        if let Some(other) = parts.iter().position(|part| part.len() != expected) {
            return Err(differs("a list", other, parts[other].len(), expected));
        }
        leaves.enter(format_args!("list of {expected}"));
        (0..expected).map(|at| S::combine(&parts.iter().map(|part| &part[at]).collect::<Vec<_>>(), leaves)).collect()
    }
}

impl<M, S: Structure<M>, const N: usize> Structure<Nested<M>> for [S; N] {
    fn combine(parts: &[&[S; N]], leaves: &mut impl Leaves) -> Result<[S; N]> {
        let combined: Result<Vec<S>> =
            (0..N).map(|at| S::combine(&parts.iter().map(|part| &part[at]).collect::<Vec<_>>(), leaves)).collect();
        combined?.try_into().map_err(|other: Vec<S>| differs("an array", 0, other.len(), N))
    }
}

impl<M, S: Structure<M>> Structure<Nested<M>> for Option<S> {
    fn combine(parts: &[&Option<S>], leaves: &mut impl Leaves) -> Result<Option<S>> {
        let present: Vec<&S> = parts.iter().filter_map(|part| part.as_ref()).collect();
        match present.len() {
            0 => {
                leaves.enter(format_args!("None"));
                Ok(None)
            }
            all if all == parts.len() => {
                leaves.enter(format_args!("Some"));
                S::combine(&present, leaves).map(Some)
            }
            _ => {
                let first = parts[0].is_some();
                let other = parts.iter().position(|part| part.is_some() != first).unwrap_or(0);
                let said = |some| if some { "Some" } else { "None" };
                Err(differs("an option", other, said(!first), said(first)))
            }
        }
    }
}

impl<M, K: Clone + Ord + fmt::Debug, S: Structure<M>> Structure<Nested<M>> for BTreeMap<K, S> {
    fn combine(parts: &[&BTreeMap<K, S>], leaves: &mut impl Leaves) -> Result<BTreeMap<K, S>> {
        combine_maps(parts, leaves, |part| part.keys().cloned().collect(), |part, key| part.get(key))
    }
}

impl<M, K, S, H> Structure<Nested<M>> for HashMap<K, S, H>
where
    K: Clone + Ord + Hash + fmt::Debug,
    S: Structure<M>,
    H: BuildHasher + Default,
{
    fn combine(parts: &[&HashMap<K, S, H>], leaves: &mut impl Leaves) -> Result<HashMap<K, S, H>> {
        combine_maps(parts, leaves, |part| part.keys().cloned().collect(), |part, key| part.get(key))
    }
}

/// Visits ascending keys, which is the same order on every process.
fn combine_maps<M, K: Clone + Ord + std::fmt::Debug, S: Structure<M>, Map: FromIterator<(K, S)>>(
    parts: &[&Map],
    leaves: &mut impl Leaves,
    keys: impl Fn(&Map) -> Vec<K>,
    get: impl for<'a> Fn(&'a Map, &K) -> Option<&'a S>,
) -> Result<Map> {
    let sorted = |part: &Map| {
        let mut keys = keys(part);
        keys.sort();
        keys
    };
    let expected = parts.first().map_or_else(Vec::new, |part| sorted(part));
    for (replica, part) in parts.iter().enumerate() {
        let got = sorted(part);
        if got != expected {
            return Err(differs("a map", replica, format_args!("keys {got:?}"), format_args!("keys {expected:?}")));
        }
    }
    leaves.enter(format_args!("map of {expected:?}"));
    let combine = |key: K| {
        let values: Vec<&S> = parts.iter().filter_map(|part| get(part, &key)).collect();
        Ok((key, S::combine(&values, leaves)?))
    };
    expected.into_iter().map(combine).collect()
}

impl Structure<Nested<()>> for () {
    fn combine(_: &[&()], _: &mut impl Leaves) -> Result<()> {
        Ok(())
    }
}

macro_rules! tuples {
    ($(($($name:ident $mark:ident $at:tt),+);)*) => {$(
        impl<$($mark, $name: Structure<$mark>),+> Structure<Nested<($($mark,)+)>> for ($($name,)+) {
            fn combine(parts: &[&Self], leaves: &mut impl Leaves) -> Result<Self> {
                Ok(($($name::combine(&parts.iter().map(|part| &part.$at).collect::<Vec<_>>(), leaves)?,)+))
            }
        }
    )*};
}

tuples! {
    (A MA 0);
    (A MA 0, B MB 1);
    (A MA 0, B MB 1, C MC 2);
    (A MA 0, B MB 1, C MC 2, D MD 3);
    (A MA 0, B MB 1, C MC 2, D MD 3, E ME 4);
    (A MA 0, B MB 1, C MC 2, D MD 3, E ME 4, F MF 5);
}

fn differs(what: &'static str, replica: usize, got: impl ToString, expected: impl ToString) -> Error {
    Error::Structure { what, replica, got: got.to_string(), expected: expected.to_string() }
}

/// Reduces the structures of all replicas of all processes, leaf by leaf, as [`reduce_values`](crate::reduce_values)
/// does single values. `values` holds one for each local replica. The reductions of all leaves are in flight together.
///
/// # Errors
/// [`Error::Structure`] if forms differ within this process, and the errors of [`reduce_values`](crate::reduce_values).
pub fn reduce_structure<M, S: Structure<M>>(
    groups: &[ProcessGroup],
    op: ReduceOp,
    values: &[&S],
    axis: &Axis,
) -> Result<S> {
    reduce_leaves(groups, op, values, axis, None)
}

/// Reduces structures as [`reduce_structure`] does; a mean over replicas divides by `with_examples` if given.
pub(crate) fn reduce_leaves<M, S: Structure<M>>(
    groups: &[ProcessGroup],
    op: ReduceOp,
    values: &[&S],
    axis: &Axis,
    with_examples: Option<f64>,
) -> Result<S> {
    structure(groups, values, Reduce { groups, op, axis, with_examples, form: Form::BARE, begun: VecDeque::new() })
}

/// Concatenates the structures of all replicas of all processes, leaf by leaf, as
/// [`gather_values`](crate::gather_values) does single values.
///
/// # Errors
/// [`Error::Structure`] if forms differ within this process, and the errors of [`gather_values`](crate::gather_values).
pub fn gather_structure<M, S: Structure<M>>(groups: &[ProcessGroup], values: &[&S], axis: usize) -> Result<S> {
    structure(groups, values, Gather { groups, axis, form: Form::BARE, begun: VecDeque::new() })
}

fn structure<M, S: Structure<M>>(groups: &[ProcessGroup], values: &[&S], mut begin: impl Leaves + Begun) -> Result<S> {
    if values.len() != groups.len() {
        return Err(Error::Components { what: "the value", got: values.len(), expected: groups.len() });
    }
    S::combine(values, &mut begin)?;
    S::combine(values, &mut Finish(begin.begun()))
}

/// Operations in flight, in the order of leaves; each is a [`Pending`] of the leaf's type.
type Queue = VecDeque<Box<dyn Any>>;

trait Begun {
    fn begun(self) -> Queue;
}

struct Reduce<'a> {
    groups: &'a [ProcessGroup],
    op: ReduceOp,
    axis: &'a Axis,
    with_examples: Option<f64>,
    form: Form,
    begun: Queue,
}

struct Gather<'a> {
    groups: &'a [ProcessGroup],
    axis: usize,
    form: Form,
    begun: Queue,
}

impl Leaves for Reduce<'_> {
    fn enter(&mut self, container: fmt::Arguments<'_>) {
        self.form = self.form.within(&container.to_string());
    }

    fn combine<L, T: TensorStorage<L>>(&mut self, parts: &[&T]) -> Result<T> {
        let pending: Pending<T> =
            begin_reduce(self.groups, self.op, parts, self.axis, (self.with_examples, self.form))?;
        self.begun.push_back(Box::new(pending));
        Ok(parts[0].clone())
    }

    fn combine_rows<L, T: TensorStorage<L>>(&mut self, parts: &[&IndexedRows<T>]) -> Result<IndexedRows<T>> {
        let pending: Pending<IndexedRows<T>> =
            begin_reduce_rows(self.groups, self.op, parts, self.axis, (self.with_examples, self.form))?;
        self.begun.push_back(Box::new(pending));
        Ok(parts[0].clone())
    }
}

impl Leaves for Gather<'_> {
    fn enter(&mut self, container: fmt::Arguments<'_>) {
        self.form = self.form.within(&container.to_string());
    }

    fn combine<L, T: TensorStorage<L>>(&mut self, parts: &[&T]) -> Result<T> {
        let pending: Pending<T> = begin_gather(self.groups, parts, self.axis, self.form)?;
        self.begun.push_back(Box::new(pending));
        Ok(parts[0].clone())
    }

    fn combine_rows<L, T: TensorStorage<L>>(&mut self, _: &[&IndexedRows<T>]) -> Result<IndexedRows<T>> {
        let problem = "they cannot be concatenated; gather indices and rows as two tensors, or reduce them";
        Err(Error::Rows { problem: problem.to_owned() })
    }
}

impl Begun for Reduce<'_> {
    fn begun(self) -> Queue {
        self.begun
    }
}

impl Begun for Gather<'_> {
    fn begun(self) -> Queue {
        self.begun
    }
}

/// Takes the results in the order in which the operations were started.
struct Finish(Queue);

impl Leaves for Finish {
    fn combine<L, T: TensorStorage<L>>(&mut self, _: &[&T]) -> Result<T> {
        self.next()
    }

    fn combine_rows<L, T: TensorStorage<L>>(&mut self, _: &[&IndexedRows<T>]) -> Result<IndexedRows<T>> {
        self.next()
    }
}

impl Finish {
    fn next<T: 'static>(&mut self) -> Result<T> {
        let pending = self.0.pop_front().and_then(|pending| pending.downcast::<Pending<T>>().ok());
        let pending = pending.ok_or_else(|| differs("a structure", 0, "another order of leaves", "the same twice"))?;
        pending()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum<M, S: Structure<M>>(a: S, b: S) -> Result<S> {
        reduce_structure(&ProcessGroup::local(2)?, ReduceOp::Sum, &[&a, &b], &Axis::None)
    }

    /// Reduces one nest on each of two ranks, which are in step but do not see each other's, and returns the outcomes.
    fn apart<M, S: Structure<M> + Send>(a: S, b: S) -> [Result<S>; 2] {
        let groups = ProcessGroup::local(2).unwrap();
        let reduce = |group: &ProcessGroup, nest: S| {
            reduce_structure(std::slice::from_ref(group), ReduceOp::Sum, &[&nest], &Axis::None)
        };
        std::thread::scope(|scope| {
            let (group, reduce) = (&groups[1], &reduce);
            let other = scope.spawn(move || reduce(group, b));
            let one = reduce(&groups[0], a);
            [one, other.join().unwrap()]
        })
    }

    #[test]
    fn ranks_whose_nests_have_other_forms_get_an_error() {
        let map = |name: &str, value: f64| BTreeMap::from([("loss".to_owned(), 1.0), (name.to_owned(), value)]);
        assert!(apart(map("hits", 3.0), map("hits", 8.0)).iter().all(Result::is_ok));
        assert!(apart(map("hits", 3.0), map("total", 8.0)).iter().all(Result::is_err));
        assert!(apart((Some(1.0), 10.0), (None, 20.0)).iter().all(Result::is_err));
        assert!(apart(vec![vec![1.0], vec![2.0, 3.0]], vec![vec![1.0, 2.0], vec![3.0]]).iter().all(Result::is_err));
        let tensor = |shape: &[usize]| HostTensor::new(shape, vec![1.0; 6]).unwrap();
        assert!(apart(tensor(&[2, 3]), tensor(&[3, 2])).iter().all(Result::is_err));
        assert!(apart(tensor(&[2, 3]), tensor(&[2, 3])).iter().all(Result::is_ok));
    }

    #[test]
    fn every_kind_of_nest_is_summed_leaf_by_leaf() {
        let tensor = |value: f64| HostTensor::new(&[2], vec![value; 2]).unwrap();
        let nest = |k: i64| {
            let map = HashMap::from([("a".to_owned(), k), ("b".to_owned(), 10 * k)]);
            (vec![tensor(k as f64), tensor(0.5)], [k as f32; 2], Some(k), (), map, (k as u32,))
        };
        let (list, array, option, (), map, (single,)) = sum(nest(1), nest(2)).unwrap();
        assert_eq!(list[0].to_elements::<f64>().unwrap(), [3.0, 3.0]);
        assert_eq!(list[1].to_elements::<f64>().unwrap(), [1.0, 1.0]);
        assert_eq!((array, option, single), ([3.0, 3.0], Some(3), 3));
        assert_eq!((map["a"], map["b"]), (3, 30));
        assert_eq!(sum(None::<f64>, None).unwrap(), None);
    }

    #[test]
    fn structures_of_other_forms_are_named() {
        for (error, named) in [
            (sum(vec![1.0], vec![1.0, 2.0]).unwrap_err(), ["2", "1"]),
            (sum(Some(1.0), None).unwrap_err(), ["None", "Some"]),
            (sum(BTreeMap::from([("a", 1.0)]), BTreeMap::from([("b", 1.0)])).unwrap_err(), ["\"b\"", "\"a\""]),
        ] {
            let error = error.to_string();
            assert!(named.iter().all(|part| error.contains(part)) && error.contains("replica 1"), "{error}");
        }
    }

    #[test]
    fn a_gather_joins_each_leaf() {
        let rows = |n: usize| HostTensor::new(&[n], vec![n as f64; n]).unwrap();
        let values = [&(rows(1), rows(2)), &(rows(3), rows(0))];
        let (first, second) = gather_structure(&ProcessGroup::local(2).unwrap(), &values, 0).unwrap();
        assert_eq!(first.to_elements::<f64>().unwrap(), [1.0, 3.0, 3.0, 3.0]);
        assert_eq!(second.to_elements::<f64>().unwrap(), [2.0, 2.0]);
    }
}
