//! One value per replica.

use std::sync::Arc;

/// Values that may differ between the replicas of this process, in the order of replicas.
///
/// # Source
/// `tf.distribute.DistributedValues` with per-replica components.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct PerReplica<T> {
    values: Vec<T>,
    /// Whether each replica's value is of examples of its own; `None` where all are, or it is no matter of examples.
    examples: Option<Arc<[bool]>>,
}

impl<T> PerReplica<T> {
    /// One value per local replica.
    pub fn new(values: Vec<T>) -> PerReplica<T> {
        PerReplica { values, examples: None }
    }

    /// The same values, and whether each is of examples of its replica's own: for batches of which some replicas have none,
    /// and for what they compute of them. Replicas for which nothing is said have examples.
    #[must_use]
    pub fn with_examples(self, examples: &[bool]) -> PerReplica<T> {
        PerReplica { examples: Some(examples.into()), ..self }
    }

    /// What was said by [`with_examples`](PerReplica::with_examples).
    pub fn examples(&self) -> Option<&[bool]> {
        self.examples.as_deref()
    }

    /// Whether a local replica's value is of examples of its own.
    pub fn has_examples(&self, local: usize) -> bool {
        self.examples().and_then(|examples| examples.get(local)).copied().unwrap_or(true)
    }

    /// All values, in the order of local replicas.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// All values, in the order of local replicas.
    pub fn into_values(self) -> Vec<T> {
        self.values
    }

    /// The value of one local replica.
    pub fn replica(&self, local: usize) -> Option<&T> {
        self.values.get(local)
    }

    /// The number of local replicas.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there is no replica.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Applies a function to every component.
    pub fn map<U>(&self, function: impl FnMut(&T) -> U) -> PerReplica<U> {
        PerReplica { values: self.values.iter().map(function).collect(), examples: self.examples.clone() }
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
    /// One equal value per local replica; that they are equal is the caller's promise.
    pub fn new(values: Vec<T>) -> Mirrored<T> {
        Mirrored { values }
    }

    /// The component of one local replica.
    pub fn replica(&self, local: usize) -> Option<&T> {
        self.values.get(local)
    }

    /// All components.
    pub fn values(&self) -> &[T] {
        &self.values
    }
}
