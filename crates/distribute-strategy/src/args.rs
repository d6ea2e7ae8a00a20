//! What a replica gets of the arguments of a run.

use distribute_values::{Mirrored, PerReplica};

use crate::{Error, Result};

/// Arguments of [`Strategy::run_with`](crate::Strategy::run_with): each replica gets its own part.
///
/// Implemented for [`PerReplica`] (by value: each replica gets its component; by reference: a reference to it), for
/// references to [`Mirrored`] values and whatever else has components, and for tuples of these. Everything that is the same
/// on all replicas is simply borrowed by the closure.
pub trait ReplicaArgs {
    /// What one replica gets.
    type Local: Send;

    /// The part of each of `replicas` local replicas.
    ///
    /// # Errors
    /// [`Error::Arguments`] where there is not one component for each.
    fn split(self, replicas: usize) -> Result<Vec<Self::Local>>;
}

impl<T: Send> ReplicaArgs for PerReplica<T> {
    type Local = T;

    fn split(self, replicas: usize) -> Result<Vec<T>> {
        counted(self.into_values(), replicas)
    }
}

impl<'a, T: Sync> ReplicaArgs for &'a PerReplica<T> {
    type Local = &'a T;

    fn split(self, replicas: usize) -> Result<Vec<&'a T>> {
        counted(self.values().iter().collect(), replicas)
    }
}

impl<'a, T: Sync> ReplicaArgs for &'a Mirrored<T> {
    type Local = &'a T;

    fn split(self, replicas: usize) -> Result<Vec<&'a T>> {
        counted(self.values().iter().collect(), replicas)
    }
}

impl ReplicaArgs for () {
    type Local = ();

    fn split(self, replicas: usize) -> Result<Vec<()>> {
        Ok(vec![(); replicas])
    }
}

/// The components, if there is one for each replica.
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
        let error = PerReplica::new(vec![1, 2, 3]).split(2).unwrap_err().to_string();
        assert!(error.contains("3 components") && error.contains("2 replicas"), "{error}");
    }
}
