//! State with a component per replica.

use distribute::prelude::*;
use distribute::strategy::in_cross_replica_context;
use distribute::values::{
    Aggregation, Assignment, CallContext, DistributedVariable, HostTensor, Synchronization, TensorStorage,
    VariableOptions,
};

use crate::check::{Fault, Stop, check, check_eq};
use crate::conditions::local_ids;

fn variable(
    strategy: &Strategy,
    synchronization: Synchronization,
    aggregation: Aggregation,
) -> Result<DistributedVariable<HostTensor>, Stop> {
    Ok(strategy.variable(
        "v",
        &HostTensor::scalar(1.0),
        VariableOptions::default().synchronization(synchronization).aggregation(aggregation).local_writes(false),
    )?)
}

fn locals(variable: &DistributedVariable<HostTensor>) -> Result<Vec<f64>, Stop> {
    let mut all = Vec::new();
    for component in variable.components() {
        all.extend(component.to_elements::<f64>()?);
    }
    Ok(all)
}

fn read(strategy: &Strategy, variable: &DistributedVariable<HostTensor>) -> Result<f64, Stop> {
    let value = strategy.with_call_context(|context| variable.read_value(context))?;
    Ok(value.to_elements::<f64>()?[0])
}

pub(crate) fn on_write_outside(strategy: &Strategy) -> Result<(), Stop> {
    let v = variable(strategy, Synchronization::OnWrite, Aggregation::None)?;
    for (assignment, value, expected) in
        [(Assignment::Set, 2.0, 2.0), (Assignment::Add, 3.0, 5.0), (Assignment::Sub, 1.0, 4.0)]
    {
        strategy.with_call_context(|context| v.assign(context, assignment, &HostTensor::scalar(value)))?;
        check_eq!(
            locals(&v)?,
            vec![expected; strategy.num_local_replicas()],
            format!("components after {assignment:?}")
        );
        check_eq!(read(strategy, &v)?, expected, "the value outside");
    }
    Ok(())
}

/// Lets each replica add its id + 1 to 1, and checks every component.
fn written(strategy: &Strategy, aggregation: Aggregation, expected: f64) -> Result<(), Stop> {
    let v = variable(strategy, Synchronization::OnWrite, aggregation)?;
    let seen = strategy.run_with((), |context, ()| {
        let own = HostTensor::scalar(context.replica_id() as f64 + 1.0);
        v.assign(context.call_context(), Assignment::Add, &own)?;
        Ok::<_, Fault>(v.read_value(context.call_context())?.to_elements::<f64>()?[0])
    })?;
    check!(seen.iter().all(|value| *value == expected), "replicas see {seen:?}, expected {expected}");
    check_eq!(read(strategy, &v)?, expected, "the value outside");
    Ok(())
}

pub(crate) fn on_write_sum(strategy: &Strategy) -> Result<(), Stop> {
    let n = strategy.num_replicas_in_sync() as f64;
    written(strategy, Aggregation::Sum, 1.0 + n * (n + 1.0) / 2.0)
}

pub(crate) fn on_write_mean(strategy: &Strategy) -> Result<(), Stop> {
    let n = strategy.num_replicas_in_sync() as f64;
    written(strategy, Aggregation::Mean, 1.0 + (n + 1.0) / 2.0)
}

pub(crate) fn on_write_first(strategy: &Strategy) -> Result<(), Stop> {
    written(strategy, Aggregation::OnlyFirstReplica, 2.0)
}

pub(crate) fn on_write_none(strategy: &Strategy) -> Result<(), Stop> {
    let v = variable(strategy, Synchronization::OnWrite, Aggregation::None)?;
    let refused = strategy.run_with((), |context, ()| {
        let outcome = v.assign(context.call_context(), Assignment::Set, &HostTensor::scalar(7.0));
        Ok::<_, Fault>(outcome.is_err_and(|error| error.to_string().contains("give it an aggregation")))
    })?;
    check!(refused.iter().all(|refused| *refused), "a write without aggregation was accepted in a replica");
    check_eq!(locals(&v)?, vec![1.0; strategy.num_local_replicas()], "components");
    Ok(())
}

/// Lets each replica set its component to its id + 1.
fn on_read(strategy: &Strategy, aggregation: Aggregation) -> Result<DistributedVariable<HostTensor>, Stop> {
    let v = variable(strategy, Synchronization::OnRead, aggregation)?;
    strategy.run_with((), |context, ()| {
        let own = HostTensor::scalar(context.replica_id() as f64 + 1.0);
        v.assign(context.call_context(), Assignment::Set, &own)?;
        check_eq!(
            v.read_value(context.call_context())?.to_elements::<f64>()?,
            own.to_elements::<f64>()?,
            "a replica's own"
        );
        Ok::<(), Fault>(())
    })?;
    Ok(v)
}

pub(crate) fn on_read_sum(strategy: &Strategy) -> Result<(), Stop> {
    let n = strategy.num_replicas_in_sync() as f64;
    check_eq!(read(strategy, &on_read(strategy, Aggregation::Sum)?)?, n * (n + 1.0) / 2.0, "the sum");
    Ok(())
}

pub(crate) fn on_read_mean(strategy: &Strategy) -> Result<(), Stop> {
    let n = strategy.num_replicas_in_sync() as f64;
    check_eq!(read(strategy, &on_read(strategy, Aggregation::Mean)?)?, (n + 1.0) / 2.0, "the mean");
    Ok(())
}

pub(crate) fn on_read_first(strategy: &Strategy) -> Result<(), Stop> {
    check_eq!(read(strategy, &on_read(strategy, Aggregation::OnlyFirstReplica)?)?, 1.0, "the first");
    Ok(())
}

pub(crate) fn on_read_none(strategy: &Strategy) -> Result<(), Stop> {
    let v = on_read(strategy, Aggregation::None)?;
    check!(strategy.with_call_context(|context| v.read_value(context)).is_err(), "it was read outside");
    Ok(())
}

pub(crate) fn on_read_set(strategy: &Strategy) -> Result<(), Stop> {
    let v = variable(strategy, Synchronization::OnRead, Aggregation::Sum)?;
    strategy.with_call_context(|context| v.assign(context, Assignment::Set, &HostTensor::scalar(6.0)))?;
    let n = strategy.num_replicas_in_sync();
    check_eq!(locals(&v)?, vec![6.0 / n as f64; strategy.num_local_replicas()], "shares");
    check_eq!(read(strategy, &v)?, 6.0, "the sum");
    let options = VariableOptions::on_read(Aggregation::Sum);
    let count = strategy.variable("count", &HostTensor::new(&[], vec![0i64])?, options)?;
    strategy.with_call_context(|context| count.assign(context, Assignment::Set, &HostTensor::new(&[], vec![7i64])?))?;
    let whole = strategy.with_call_context(|context| count.read_value(context))?;
    check_eq!(whole.to_elements::<i64>()?, [7], "the sum of whole numbers");
    let mut shares = Vec::new();
    for component in count.components() {
        shares.extend(component.to_elements::<i64>()?);
    }
    let share = |id: usize| (7 / n + usize::from(id < 7 % n)) as i64;
    check_eq!(shares, local_ids(strategy).into_iter().map(share).collect::<Vec<_>>(), "shares of whole numbers");
    Ok(())
}

pub(crate) fn on_read_add(strategy: &Strategy) -> Result<(), Stop> {
    for (aggregation, allowed) in [(Aggregation::Sum, false), (Aggregation::Mean, true), (Aggregation::None, true)] {
        let v = variable(strategy, Synchronization::OnRead, aggregation)?;
        let outcome =
            strategy.with_call_context(|context| v.assign(context, Assignment::Add, &HostTensor::scalar(2.0)));
        check_eq!(outcome.is_ok(), allowed, format!("adding outside with {aggregation:?}"));
        let expected = if allowed { 3.0 } else { 1.0 };
        check_eq!(locals(&v)?, vec![expected; strategy.num_local_replicas()], "components");
    }
    Ok(())
}

pub(crate) fn initial(strategy: &Strategy) -> Result<(), Stop> {
    // Every worker passes another initial value; the chief's counts.
    let own = HostTensor::scalar(strategy.topology().worker() as f64 + 5.0);
    let v = strategy.variable("v", &own, VariableOptions::default())?;
    check_eq!(locals(&v)?, vec![5.0; strategy.num_local_replicas()], "components");
    Ok(())
}

pub(crate) fn update(strategy: &Strategy) -> Result<(), Stop> {
    let v = variable(strategy, Synchronization::OnWrite, Aggregation::None)?;
    let updated = strategy.update(&v, |context, v| {
        check!(matches!(context, CallContext::Update { .. }), "the context is {context:?}");
        check!(get_replica_context().is_none() && !in_cross_replica_context(), "an update is another context");
        check_eq!(get_strategy()?.name(), strategy.name(), "the strategy of the update");
        v.assign(context, Assignment::Add, &HostTensor::scalar(2.0))?;
        Ok::<(), Fault>(())
    })?;
    check_eq!(updated.len(), if v.is_shared() { 1 } else { strategy.num_local_replicas() }, "updates");
    check_eq!(locals(&v)?, vec![3.0; strategy.num_local_replicas()], "components");
    Ok(())
}

pub(crate) fn integer_mean(strategy: &Strategy) -> Result<(), Stop> {
    let options = VariableOptions::on_write(Aggregation::Mean);
    let outcome = strategy.variable("count", &HostTensor::new(&[], vec![1i32])?, options);
    check!(outcome.is_err(), "a mean of integers was accepted");
    Ok(())
}
