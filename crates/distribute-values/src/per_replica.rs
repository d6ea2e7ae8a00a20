//! One value per replica.

/// Values that may differ between the replicas of this process, in the order of replicas.
///
/// # Source
/// `tf.distribute.DistributedValues` with per-replica components.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct PerReplica<T> {
    values: Vec<T>,
}

impl<T> PerReplica<T> {
    /// One value per local replica.
    pub fn new(values: Vec<T>) -> PerReplica<T> {
        PerReplica { values }
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
        PerReplica { values: self.values.iter().map(function).collect() }
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
