//! The properties that a scenario requires of a strategy.

use distribute::prelude::*;

use crate::check::Stop;

/// Returns the ids of the replicas that this process's components belong to: the ranks of a tensor group are one
/// replica.
pub(crate) fn local_ids(strategy: &Strategy) -> Vec<usize> {
    let (first, ranks) = (strategy.topology().first_replica(), strategy.tensor_parallel());
    (0..strategy.num_local_replicas()).map(|local| first + local / ranks).collect()
}

/// Skips strategies of several processes: failures end their group, and they restart from a checkpoint.
pub(crate) fn in_one_process(strategy: &Strategy) -> Result<(), Stop> {
    match strategy.topology().workers() {
        1 => Ok(()),
        _ => Err(Stop::NotApplicable("a failed run ends the group of several processes, which are started again")),
    }
}

/// Returns what was built, or `None` if the strategy shards parameters and refuses it in words because it takes whole
/// ones.
pub(crate) fn unless_whole<T, E: std::error::Error>(strategy: &Strategy, built: Result<T, E>) -> Result<Option<T>, E> {
    match built {
        Err(error) if strategy.sharding().is_some() && takes_whole(&error.to_string()) => Ok(None),
        built => built.map(Some),
    }
}

fn takes_whole(error: &str) -> bool {
    error.contains("FullyShardedStrategy does not go with")
        || error.contains("does not go with a strategy that shards parameters")
}

/// Skips strategies of one replica, for promises about replicas that differ.
pub(crate) fn with_several_replicas(strategy: &Strategy) -> Result<(), Stop> {
    match strategy.num_local_replicas() {
        1 => Err(Stop::NotApplicable("it takes several replicas in one process")),
        _ => Ok(()),
    }
}

/// Returns whether a step of the strategy is one compiled program.
pub(crate) fn is_compiled(strategy: &Strategy) -> bool {
    strategy.name() == "Tpu"
}
