//! Values of replicas, and their combination.

use distribute::collectives::Rank;
use distribute::prelude::*;
use distribute::values::{HostTensor, TensorStorage};

use crate::check::{Fault, Stop, check, check_eq};
use crate::conditions::local_ids;

pub(crate) fn ids(strategy: &Strategy) -> Result<(), Stop> {
    let ids = strategy.run_with((), |context, ()| Ok::<_, Fault>(context.replica_id()))?;
    let expected = local_ids(strategy);
    check_eq!(ids.values(), expected, "ids of this process's replicas");
    check_eq!(strategy.local_results(&ids), expected, "local results");
    Ok(())
}

pub(crate) fn from_function(strategy: &Strategy) -> Result<(), Stop> {
    let made = strategy
        .distribute_values_from_function(|context| Ok::<_, Fault>((context.replica_id, context.num_replicas)))?;
    let seen = strategy.run_with(made, |context, (id, count)| {
        Ok::<_, Fault>(id == context.replica_id() && count == context.num_replicas_in_sync())
    })?;
    check!(seen.iter().all(|right| *right), "values went to other replicas than they were made for");
    Ok(())
}

/// Returns the value of each replica.
fn brought(strategy: &Strategy) -> Result<PerReplica<HostTensor>, Stop> {
    Ok(strategy.run_with((), |context, ()| {
        Ok::<_, Fault>(HostTensor::new(&[2], vec![context.replica_id() as f64 + 1.0, 10.0])?)
    })?)
}

pub(crate) fn reduce(strategy: &Strategy) -> Result<(), Stop> {
    let n = strategy.num_replicas_in_sync() as f64;
    let values = brought(strategy)?;
    for (op, expected) in [
        (ReduceOp::Sum, [n * (n + 1.0) / 2.0, 10.0 * n]),
        (ReduceOp::Mean, [(n + 1.0) / 2.0, 10.0]),
        (ReduceOp::Max, [n, 10.0]),
        (ReduceOp::Min, [1.0, 10.0]),
    ] {
        let reduced: HostTensor = strategy.reduce(op, &values, Axis::None)?;
        check_eq!(reduced.to_elements::<f64>()?, expected, op);
    }
    let inside = strategy.run_with((), |_, ()| {
        let refused = strategy.reduce(ReduceOp::Sum, &values, Axis::None).is_err();
        Ok::<_, Fault>(refused)
    })?;
    check!(inside.iter().all(|refused| *refused), "reduce works inside a replica");
    Ok(())
}

/// Returns r + 1 rows of value r for replica r.
fn rows(strategy: &Strategy) -> Result<PerReplica<HostTensor>, Stop> {
    Ok(strategy.run_with((), |context, ()| {
        let id = context.replica_id();
        Ok::<_, Fault>(HostTensor::new(&[id + 1, 1], vec![id as f64; id + 1])?)
    })?)
}

pub(crate) fn reduce_axis(strategy: &Strategy) -> Result<(), Stop> {
    let n = strategy.num_replicas_in_sync();
    let sum: f64 = (0..n).map(|id| (id * (id + 1)) as f64).sum();
    let count: f64 = (0..n).map(|id| id as f64 + 1.0).sum();
    let values = rows(strategy)?;
    let total: HostTensor = strategy.reduce(ReduceOp::Sum, &values, Axis::At(0))?;
    check_eq!(total.to_elements::<f64>()?, [sum], "sum over rows");
    let mean: HostTensor = strategy.reduce(ReduceOp::Mean, &values, Axis::At(0))?;
    check_eq!(mean.to_elements::<f64>()?, [sum / count], "mean over rows");
    check!(strategy.reduce(ReduceOp::Sum, &values, Axis::At(2)).is_err(), "an axis that is not there was accepted");
    Ok(())
}

pub(crate) fn gather(strategy: &Strategy) -> Result<(), Stop> {
    let n = strategy.num_replicas_in_sync();
    let gathered: HostTensor = strategy.gather(&rows(strategy)?, 0)?;
    let expected: Vec<f64> = (0..n).flat_map(|id| vec![id as f64; id + 1]).collect();
    check_eq!(gathered.shape(), [expected.len(), 1], "shape");
    check_eq!(gathered.to_elements::<f64>()?, expected, "rows");
    Ok(())
}

pub(crate) fn in_replicas(strategy: &Strategy) -> Result<(), Stop> {
    strategy.run_with((), |context, ()| {
        let n = context.num_replicas_in_sync() as f64;
        let own = HostTensor::new(&[1], vec![context.replica_id() as f64])?;
        let sum = context.all_reduce(ReduceOp::Sum, &own)?;
        check_eq!(sum.to_elements::<f64>()?, [n * (n - 1.0) / 2.0], "all_reduce");
        let all = context.all_gather(&own, 0)?;
        let expected: Vec<f64> = (0..context.num_replicas_in_sync()).map(|id| id as f64).collect();
        check_eq!(all.to_elements::<f64>()?, expected, "all_gather");
        let last = context.num_replicas_in_sync() - 1;
        let from_last = context.broadcast(&own, Rank::of(last))?;
        check_eq!(from_last.to_elements::<f64>()?, [last as f64], "broadcast");
        check_eq!(own.to_elements::<f64>()?, [context.replica_id() as f64], "what was brought");
        Ok::<(), Fault>(())
    })?;
    Ok(())
}
