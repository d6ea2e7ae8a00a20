//! Nests of values as arguments and results of runs.

use std::collections::BTreeMap;

use distribute::prelude::*;
use distribute::values::{HostTensor, IndexedRows, TensorStorage};
use distribute_testkit::apart;

use crate::check::{Fault, Stop, check, check_eq};
use crate::conditions::{in_one_process, with_several_replicas};

#[derive(ReplicaArgs)]
struct Inputs<A, B> {
    weights: A,
    names: &'static str,
    batches: B,
}

#[derive(Structure, Debug)]
struct Metrics {
    loss: HostTensor,
    counts: (u64, Option<i64>),
    by_class: BTreeMap<&'static str, Vec<f64>>,
}

pub(crate) fn nested(strategy: &Strategy) -> Result<(), Stop> {
    let ids = |factor: u64| {
        strategy.distribute_values_from_function(|context| Ok::<_, Fault>(context.replica_id as u64 * factor))
    };
    let inputs = Inputs { weights: [ids(1)?, ids(10)?], names: "both", batches: (Some(ids(100)?), vec![ids(1000)?]) };
    let metrics = strategy.run_with(inputs, |context, inputs| {
        let id = context.replica_id() as u64;
        check_eq!(inputs.weights, [id, 10 * id], "an array");
        check_eq!(inputs.batches, (Some(100 * id), vec![1000 * id]), "an option and a list");
        check_eq!(inputs.names, "both", "what is the same for all");
        Ok::<_, Fault>(Metrics {
            loss: HostTensor::new(&[2], vec![id as f64, 1.0])?,
            counts: (id, Some(1)),
            by_class: BTreeMap::from([("cat", vec![0.5]), ("dog", vec![])]),
        })
    })?;
    let n = strategy.num_replicas_in_sync() as f64;
    let sum = strategy.reduce(ReduceOp::Sum, &metrics, Axis::None)?;
    check_eq!(sum.loss.to_elements::<f64>()?, [n * (n - 1.0) / 2.0, n], "a tensor in a struct");
    check_eq!(sum.counts, ((n * (n - 1.0) / 2.0) as u64, Some(n as i64)), "numbers in a tuple");
    check_eq!(sum.by_class, BTreeMap::from([("cat", vec![0.5 * n]), ("dog", vec![])]), "a map of lists");
    let largest = strategy.run_with((), |context, ()| {
        Ok::<_, Fault>(context.all_reduce(ReduceOp::Max, &(context.replica_id() as u64, [0.5]))?)
    })?;
    check!(largest.iter().all(|both| *both == (n as u64 - 1, [0.5])), "in replicas: {largest:?}");
    Ok(())
}

pub(crate) fn of_other_forms(strategy: &Strategy) -> Result<(), Stop> {
    in_one_process(strategy)?;
    with_several_replicas(strategy)?;
    let lists = strategy.run_with((), |context, ()| Ok::<_, Fault>(vec![1.0; context.replica_id() + 1]))?;
    let refused = strategy.reduce(ReduceOp::Sum, &lists, Axis::None);
    // Values are counted by component, of which a replica has one for each of its ranks.
    let expected = format!("replica {} has 2, replica 0 has 1", strategy.tensor_parallel());
    check!(refused.as_ref().is_err_and(|error| error.to_string().contains(&expected)), "{refused:?}");
    let too_many = PerReplica::new(vec![0; strategy.num_local_replicas() + 1]);
    let refused = strategy.run_with(vec![too_many], |_, _| Ok::<(), Fault>(()));
    check!(refused.is_err_and(|error| error.0.contains("components")), "arguments for other replicas were accepted");
    Ok(())
}

pub(crate) fn broadcast(strategy: &Strategy) -> Result<(), Stop> {
    let own = HostTensor::new(&[2], vec![strategy.topology().worker() as f64, 3.0])?;
    let everywhere = strategy.broadcast_to(&own)?;
    let seen = strategy.run_with(&everywhere, |_, value| Ok::<_, Fault>(value.to_elements::<f64>()?))?;
    check!(seen.iter().all(|value| *value == [0.0, 3.0]), "replicas see {seen:?}");
    check_eq!(seen.len(), strategy.num_local_replicas(), "copies");
    Ok(())
}

pub(crate) fn rows(strategy: &Strategy) -> Result<(), Stop> {
    let values = strategy.run_with((), |_, ()| Ok::<_, Fault>(HostTensor::new(&[2], vec![1.0, 2.0])?))?;
    let mean = strategy.reduce(ReduceOp::Mean, &values, Axis::At(0))?;
    check_eq!(mean.to_elements::<f64>()?, [1.5], "the mean over rows");
    let sum = strategy.reduce(ReduceOp::Sum, &values, Axis::At(0))?;
    check_eq!(sum.to_elements::<f64>()?, [3.0 * strategy.num_replicas_in_sync() as f64], "the sum over rows");
    Ok(())
}

pub(crate) fn indexed_rows(strategy: &Strategy) -> Result<(), Stop> {
    // Replica r has r + 1 rows of index 7 and one of index 100 + r, each of the elements r and 1.
    let of_replica = |context: &ReplicaContext| {
        let id = context.replica_id() as i64;
        let mut indices = vec![7; context.replica_id() + 1];
        indices.push(100 + id);
        let elements = indices.iter().flat_map(|_| [id as f32, 1.0]).collect();
        Ok::<_, Fault>(IndexedRows { rows: HostTensor::new(&[indices.len(), 2], elements)?, indices })
    };
    let nests = strategy.run_with((), |context, ()| {
        let nest = BTreeMap::from([("table", of_replica(context)?)]);
        // With a dense value, in one call.
        let (within, one) = context.all_reduce(ReduceOp::Mean, &(nest.clone(), 1.0))?;
        check_eq!(one, 1.0, "the dense value of the nest");
        Ok::<_, Fault>((nest, within))
    })?;
    let n = strategy.num_replicas_in_sync();
    let ids = (0..n).map(|id| id as f32);
    let mut expected: Vec<f32> =
        vec![ids.clone().map(|id| id * (id + 1.0)).sum(), ids.clone().map(|id| id + 1.0).sum()];
    expected.extend(ids.flat_map(|id| [id, 1.0]));
    let indices: Vec<i64> = [7].into_iter().chain((0..n as i64).map(|id| 100 + id)).collect();
    let (own, within) = strategy.reduce(ReduceOp::Sum, &nests, Axis::None)?;
    check_eq!(own["table"].indices, indices, "the indices");
    check_eq!(own["table"].rows.shape(), [n + 1, 2], "the shape");
    check_eq!(own["table"].rows.to_elements::<f32>()?, expected, "the sums");
    // Every replica has the same means.
    check_eq!(within["table"].indices, indices, "the indices of the means");
    let means = within["table"].rows.to_elements::<f32>()?;
    check!(apart(&means, &expected) < 1e-5, "the sums of all replicas' means are {means:?}, and the sums {expected:?}");
    Ok(())
}

pub(crate) fn gather_shapes(strategy: &Strategy) -> Result<(), Stop> {
    if strategy.num_replicas_in_sync() == 1 {
        return Err(Stop::NotApplicable("shapes of one replica cannot differ"));
    }
    let width = |context: &ReplicaContext| context.replica_id() + 1;
    let values = strategy.run_with((), |context, ()| {
        Ok::<_, Fault>(HostTensor::new(&[1, width(context)], vec![0.0; width(context)])?)
    })?;
    check!(strategy.gather(&values, 0).is_err(), "parts of other widths were joined by rows");
    check_eq!(strategy.gather(&values, 1)?.shape()[0], 1, "joined by columns");
    let scalars = strategy.run_with((), |_, ()| Ok::<_, Fault>(HostTensor::scalar(1.0)))?;
    check!(strategy.gather(&scalars, 0).is_err(), "values without an axis were joined along one");
    Ok(())
}
