//! Splits the arguments of a run among replicas.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hash};

use distribute_values::{Mirrored, PerReplica};

use crate::{Error, Result};

/// Arguments of [`Strategy::run_with`](crate::Strategy::run_with), which are split among the replicas.
///
/// Implemented for [`PerReplica`] (by value, each replica gets its component; by reference, a reference to it), for
/// references to [`Mirrored`] values and other types with components, and for nests of these: tuples, vectors, arrays,
/// options, maps, and structs that derive it. Values that are the same on all replicas are simply borrowed by the
/// closure.
pub trait ReplicaArgs {
    /// The part that one replica gets.
    type Local: Send;

    /// Splits the arguments into one part for each of `replicas` local replicas.
    ///
    /// # Errors
    /// [`Error::Arguments`] if the number of components is not `replicas`.
    fn split(self, replicas: usize) -> Result<Vec<Self::Local>>;

    /// Records which replicas have examples, if this is a batch or contains batches. Default: it contains none.
    fn examples(&self, seen: &mut Examples) {
        let _ = seen;
    }
}

/// Records which replicas have examples in the arguments of a run.
#[derive(Clone, Debug, Default)]
pub struct Examples {
    of_replicas: Option<Vec<bool>>,
    mixed: Option<usize>,
}

impl Examples {
    /// Adds a batch, given for each replica whether it has examples in it.
    pub fn add(&mut self, batch: &[bool]) {
        let known = self.of_replicas.get_or_insert_with(|| batch.to_vec());
        let differs = known.iter().zip(batch).position(|(one, other)| one != other);
        self.mixed = self.mixed.or(differs);
    }

    /// Returns which replicas have examples, or `None` if no batch was added. `id` maps the index of a component to the
    /// id of its replica.
    ///
    /// # Errors
    /// [`Error::MixedExamples`] if a replica has examples in one batch and none in another.
    pub(crate) fn of_replicas(self, id: impl Fn(usize) -> usize) -> Result<Option<Vec<bool>>> {
        match self.mixed {
            None => Ok(self.of_replicas),
            Some(local) => Err(Error::MixedExamples { replica: id(local) }),
        }
    }
}

impl<T: Send> ReplicaArgs for PerReplica<T> {
    type Local = T;

    fn split(self, replicas: usize) -> Result<Vec<T>> {
        counted(self.into_values(), replicas)
    }

    fn examples(&self, seen: &mut Examples) {
        self.examples().into_iter().for_each(|examples| seen.add(examples));
    }
}

impl<'a, T: Sync> ReplicaArgs for &'a PerReplica<T> {
    type Local = &'a T;

    fn split(self, replicas: usize) -> Result<Vec<&'a T>> {
        counted(self.values().iter().collect(), replicas)
    }

    fn examples(&self, seen: &mut Examples) {
        PerReplica::examples(self).into_iter().for_each(|examples| seen.add(examples));
    }
}

impl<'a, T: Sync> ReplicaArgs for &'a Mirrored<T> {
    type Local = &'a T;

    fn split(self, replicas: usize) -> Result<Vec<&'a T>> {
        counted(self.values().iter().collect(), replicas)
    }
}

impl<A: ReplicaArgs> ReplicaArgs for Vec<A> {
    type Local = Vec<A::Local>;

    fn split(self, replicas: usize) -> Result<Vec<Vec<A::Local>>> {
        let mut parts: Vec<Vec<A::Local>> = (0..replicas).map(|_| Vec::with_capacity(self.len())).collect();
        for item in self {
            parts.iter_mut().zip(counted(item.split(replicas)?, replicas)?).for_each(|(part, item)| part.push(item));
        }
        Ok(parts)
    }

    fn examples(&self, seen: &mut Examples) {
        self.iter().for_each(|item| item.examples(seen));
    }
}

impl<A: ReplicaArgs, const N: usize> ReplicaArgs for [A; N] {
    type Local = [A::Local; N];

    fn split(self, replicas: usize) -> Result<Vec<[A::Local; N]>> {
        let parts = Vec::from(self).split(replicas)?.into_iter();
        let arrays: Vec<[A::Local; N]> = parts.filter_map(|part| part.try_into().ok()).collect();
        counted(arrays, replicas)
    }

    fn examples(&self, seen: &mut Examples) {
        self.iter().for_each(|item| item.examples(seen));
    }
}

impl<A: ReplicaArgs> ReplicaArgs for Option<A> {
    type Local = Option<A::Local>;

    fn split(self, replicas: usize) -> Result<Vec<Option<A::Local>>> {
        match self {
            Some(value) => Ok(value.split(replicas)?.into_iter().map(Some).collect()),
            None => Ok((0..replicas).map(|_| None).collect()),
        }
    }

    fn examples(&self, seen: &mut Examples) {
        self.iter().for_each(|item| item.examples(seen));
    }
}

impl<K: Clone + Ord + Send, A: ReplicaArgs> ReplicaArgs for BTreeMap<K, A> {
    type Local = BTreeMap<K, A::Local>;

    fn split(self, replicas: usize) -> Result<Vec<BTreeMap<K, A::Local>>> {
        split_map(self, replicas)
    }

    fn examples(&self, seen: &mut Examples) {
        self.values().for_each(|item| item.examples(seen));
    }
}

impl<K, A, H> ReplicaArgs for HashMap<K, A, H>
where
    K: Clone + Eq + Hash + Send,
    A: ReplicaArgs,
    H: BuildHasher + Default + Send,
{
    type Local = HashMap<K, A::Local, H>;

    fn split(self, replicas: usize) -> Result<Vec<HashMap<K, A::Local, H>>> {
        split_map(self, replicas)
    }

    fn examples(&self, seen: &mut Examples) {
        self.values().for_each(|item| item.examples(seen));
    }
}

fn split_map<K: Clone, A: ReplicaArgs, Map: Default + Extend<(K, A::Local)>>(
    map: impl IntoIterator<Item = (K, A)>,
    replicas: usize,
) -> Result<Vec<Map>> {
    let mut parts: Vec<Map> = (0..replicas).map(|_| Map::default()).collect();
    for (key, value) in map {
        for (part, value) in parts.iter_mut().zip(counted(value.split(replicas)?, replicas)?) {
            part.extend([(key.clone(), value)]);
        }
    }
    Ok(parts)
}

impl ReplicaArgs for () {
    type Local = ();

    fn split(self, replicas: usize) -> Result<Vec<()>> {
        Ok(vec![(); replicas])
    }
}

/// Returns the components if there is one for each replica.
///
/// # Errors
/// [`Error::Arguments`] otherwise.
pub fn counted<T>(components: Vec<T>, replicas: usize) -> Result<Vec<T>> {
    match components.len() {
        got if got == replicas => Ok(components),
        got => Err(Error::Arguments { got, expected: replicas }),
    }
}

macro_rules! tuples {
    ($(($($name:ident),+);)*) => {$(
        impl<$($name: ReplicaArgs),+> ReplicaArgs for ($($name,)+) {
            type Local = ($($name::Local,)+);

            #[expect(non_snake_case, reason = "one name for a type parameter and its value")]
            fn split(self, replicas: usize) -> Result<Vec<Self::Local>> {
                let ($($name,)+) = self;
                $(let mut $name = $name.split(replicas)?.into_iter();)+
                let mut parts = Vec::with_capacity(replicas);
                while let ($(Some($name),)+) = ($($name.next(),)+) {
                    parts.push(($($name,)+));
                }
                counted(parts, replicas)
            }

            #[expect(non_snake_case, reason = "one name for a type parameter and its value")]
            fn examples(&self, seen: &mut Examples) {
                let ($($name,)+) = self;
                $($name.examples(seen);)+
            }
        }
    )*};
}

tuples! {
    (A);
    (A, B);
    (A, B, C);
    (A, B, C, D);
    (A, B, C, D, E);
    (A, B, C, D, E, F);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_replica_gets_its_part() {
        let (mirrored, batch) = (Mirrored::new(vec!["a", "b"]), PerReplica::new(vec![(1, 2), (3, 4)]));
        let parts = (&mirrored, batch).split(2).unwrap();
        assert_eq!(parts, [(&"a", (1, 2)), (&"b", (3, 4))]);
        let values = |a: i32| PerReplica::new(vec![a, a + 1]);
        let nest =
            (vec![values(1), values(5)], [values(3)], None::<PerReplica<()>>, BTreeMap::from([("k", Some(values(7)))]));
        let parts = nest.split(2).unwrap();
        assert_eq!(parts[0], (vec![1, 5], [3], None, BTreeMap::from([("k", Some(7))])));
        assert_eq!(parts[1], (vec![2, 6], [4], None, BTreeMap::from([("k", Some(8))])));
        assert!(vec![values(1), PerReplica::new(vec![1])].split(2).is_err());
        let error = PerReplica::new(vec![1, 2, 3]).split(2).unwrap_err().to_string();
        assert!(error.contains("3 components") && error.contains("2 replicas"), "{error}");
    }
}
