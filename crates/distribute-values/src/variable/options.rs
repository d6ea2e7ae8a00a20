//! How a variable is combined and written.

/// When the components of a variable are combined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Synchronization {
    /// On every write: components are always equal. For model parameters and optimizer slots.
    #[default]
    OnWrite,
    /// On every read outside a replica: components differ in between. For metrics and statistics.
    OnRead,
}

/// How the components, or the values that replicas write, are combined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Aggregation {
    /// Not at all: a replica's write, or a read outside a replica, is an error, unless
    /// [`local_writes`](VariableOptions::local_writes) is set.
    #[default]
    None,
    /// Their sum.
    Sum,
    /// Their mean.
    Mean,
    /// The first replica's value; the others' are ignored.
    OnlyFirstReplica,
}

/// The effect of a write on the present value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Assignment {
    /// Replaces it.
    Set,
    /// Adds to it.
    Add,
    /// Subtracts from it.
    Sub,
}

/// Options of a variable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct VariableOptions {
    /// When components are combined.
    pub synchronization: Synchronization,
    /// How components are combined.
    pub aggregation: Aggregation,
    /// Whether replicas may write an on-write variable without aggregation, each its own copy alone. Copies then
    /// differ; a read outside the replicas returns the first one.
    pub local_writes: bool,
}

distribute_types::setters! {
    VariableOptions {
        synchronization: Synchronization,
        aggregation: Aggregation,
        local_writes: bool,
    }
}

impl VariableOptions {
    /// Returns the options of a variable whose components are kept equal on every write.
    pub fn on_write(aggregation: Aggregation) -> VariableOptions {
        VariableOptions { synchronization: Synchronization::OnWrite, aggregation, local_writes: false }
    }

    /// Returns the options of a variable that is combined on every read outside the replicas.
    pub fn on_read(aggregation: Aggregation) -> VariableOptions {
        VariableOptions { synchronization: Synchronization::OnRead, aggregation, local_writes: false }
    }
}
