//! One value per replica.

use std::ops::Index;
use std::sync::Arc;

/// Values that may differ between the replicas of this process, in the order of replicas.
///
/// # Examples
/// ```
/// use distribute_values::PerReplica;
/// let losses: PerReplica<f32> = [0.5, 1.5].into_iter().collect();
/// assert_eq!(losses[1], 1.5);
/// assert_eq!(losses.iter().sum::<f32>(), 2.0);
/// for loss in losses {
///     assert!(loss < 2.0);
/// }
/// ```
///
/// # Source
/// `tf.distribute.DistributedValues` with per-replica components.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct PerReplica<T> {
    values: Vec<T>,
    /// Whether each replica's value stems from examples of its own; `None` if all do, or if it does not depend on
    /// examples.
    examples: Option<Arc<[bool]>>,
}

impl<T> PerReplica<T> {
    /// Creates the value from one component per local replica.
    pub fn new(values: Vec<T>) -> PerReplica<T> {
        PerReplica { values, examples: None }
    }

    /// Records which replicas have examples of their own: for batches of which some replicas have none, and for results
    /// computed from them. Replicas beyond the slice have examples.
    #[must_use]
    pub fn with_examples(self, examples: &[bool]) -> PerReplica<T> {
        PerReplica { examples: Some(examples.into()), ..self }
    }

    /// Returns the record set by [`with_examples`](PerReplica::with_examples).
    pub fn examples(&self) -> Option<&[bool]> {
        self.examples.as_deref()
    }

    /// Returns whether a local replica's value stems from examples of its own.
    pub fn has_examples(&self, local: usize) -> bool {
        self.examples().and_then(|examples| examples.get(local)).copied().unwrap_or(true)
    }

    /// Returns all values, in the order of local replicas.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// Iterates over the values, in the order of local replicas.
    pub fn iter(&self) -> std::slice::Iter<'_, T> {
        self.values.iter()
    }

    /// Converts to the values of all local replicas, in order.
    pub fn into_values(self) -> Vec<T> {
        self.values
    }

    /// Returns the value of one local replica.
    pub fn replica(&self, local: usize) -> Option<&T> {
        self.values.get(local)
    }

    /// Returns the number of local replicas.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Returns whether there are no replicas.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Applies a function to every component.
    pub fn map<U>(&self, function: impl FnMut(&T) -> U) -> PerReplica<U> {
        PerReplica { values: self.values.iter().map(function).collect(), examples: self.examples.clone() }
    }
}

impl<T> FromIterator<T> for PerReplica<T> {
    fn from_iter<I: IntoIterator<Item = T>>(values: I) -> PerReplica<T> {
        PerReplica::new(values.into_iter().collect())
    }
}

impl<T> IntoIterator for PerReplica<T> {
    type Item = T;
    type IntoIter = std::vec::IntoIter<T>;

    fn into_iter(self) -> Self::IntoIter {
        self.values.into_iter()
    }
}

impl<'a, T> IntoIterator for &'a PerReplica<T> {
    type Item = &'a T;
    type IntoIter = std::slice::Iter<'a, T>;

    fn into_iter(self) -> Self::IntoIter {
        self.values.iter()
    }
}

/// The value of a local replica; panics, as a slice does, where there is none. [`PerReplica::replica`] does not.
impl<T> Index<usize> for PerReplica<T> {
    type Output = T;

    fn index(&self, local: usize) -> &T {
        &self.values[local]
    }
}

/// Values that are equal on every replica.
///
/// # Source
/// `tf.distribute`'s mirrored values.
#[derive(Clone, Debug)]
pub struct Mirrored<T> {
    values: Vec<T>,
}

impl<T> Mirrored<T> {
    /// Creates the value from one component per local replica, which the caller guarantees to be equal.
    pub fn new(values: Vec<T>) -> Mirrored<T> {
        Mirrored { values }
    }

    /// Returns the component of one local replica.
    pub fn replica(&self, local: usize) -> Option<&T> {
        self.values.get(local)
    }

    /// Returns all components.
    pub fn values(&self) -> &[T] {
        &self.values
    }
}
