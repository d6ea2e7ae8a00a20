//! Writes to rows of variables, and saved variables.

use distribute::prelude::*;
use distribute::values::{
    Aggregation, Assignment, DistributedVariable, HostTensor, PerWorkerVariable, Scatter, TensorStorage,
    VariableOptions,
};

use crate::check::{Fault, Stop, check, check_eq};

fn table(strategy: &Strategy, options: VariableOptions) -> Result<DistributedVariable<HostTensor>, Stop> {
    let n = strategy.num_replicas_in_sync();
    Ok(strategy.variable("table", &HostTensor::new(&[n + 1, 1], vec![1.0; n + 1])?, options)?)
}

/// Lets replica r write rows r and r + 1, all with the value 2.
fn scatter(strategy: &Strategy, v: &DistributedVariable<HostTensor>, scatter: Scatter) -> Result<(), Fault> {
    strategy.run_with((), |context, ()| {
        let id = context.replica_id() as i64;
        let rows = HostTensor::new(&[2, 1], vec![2.0, 2.0])?;
        Ok::<_, Fault>(v.scatter(context.call_context(), scatter, &[id, id + 1], &rows)?)
    })?;
    Ok(())
}

/// Returns how many replicas write each row.
fn writers(strategy: &Strategy) -> Vec<f64> {
    let n = strategy.num_replicas_in_sync();
    (0..=n).map(|row| if row == 0 || row == n { 1.0 } else { 2.0 }).collect()
}

fn check_copies(v: &DistributedVariable<HostTensor>, expected: &[f64], what: &str) -> Result<(), Stop> {
    for component in v.components() {
        check_eq!(component.to_elements::<f64>()?, expected, what);
    }
    Ok(())
}

pub(crate) fn scatter_sum(strategy: &Strategy) -> Result<(), Stop> {
    let writers = writers(strategy);
    for (how, expected) in [
        (Scatter::Add, writers.iter().map(|n| 1.0 + 2.0 * n).collect::<Vec<_>>()),
        (Scatter::Sub, writers.iter().map(|n| 1.0 - 2.0 * n).collect()),
        (Scatter::Mul, writers.iter().map(|n| 2f64.powf(*n)).collect()),
        (Scatter::Div, writers.iter().map(|n| 0.5f64.powf(*n)).collect()),
    ] {
        let v = table(strategy, VariableOptions::on_write(Aggregation::Sum))?;
        scatter(strategy, &v, how)?;
        check_copies(&v, &expected, &format!("{how:?}"))?;
    }
    Ok(())
}

pub(crate) fn scatter_mean(strategy: &Strategy) -> Result<(), Stop> {
    let n = strategy.num_replicas_in_sync() as f64;
    let v = table(strategy, VariableOptions::on_write(Aggregation::Mean))?;
    scatter(strategy, &v, Scatter::Add)?;
    let expected: Vec<f64> =
        writers(strategy).iter().map(|writers| (0..*writers as usize).fold(1.0, |sum, _| sum + 2.0 / n)).collect();
    check_copies(&v, &expected, "a mean divides by all replicas, also those that did not write the row")
}

pub(crate) fn scatter_first(strategy: &Strategy) -> Result<(), Stop> {
    for (how, written) in [(Scatter::Update, 2.0), (Scatter::Max, 2.0), (Scatter::Min, 1.0)] {
        let v = table(strategy, VariableOptions::on_write(Aggregation::OnlyFirstReplica))?;
        scatter(strategy, &v, how)?;
        let mut expected = vec![1.0; strategy.num_replicas_in_sync() + 1];
        expected[..2].fill(written);
        check_copies(&v, &expected, &format!("{how:?}"))?;
    }
    Ok(())
}

pub(crate) fn scatter_refused(strategy: &Strategy) -> Result<(), Stop> {
    for (options, how) in [
        (VariableOptions::default(), Scatter::Add),
        (VariableOptions::on_write(Aggregation::Sum), Scatter::Max),
        (VariableOptions::on_write(Aggregation::Mean), Scatter::Update),
        (VariableOptions::on_read(Aggregation::Sum), Scatter::Add),
    ] {
        let v = table(strategy, options)?;
        let refused = strategy.run_with((), |context, ()| {
            let row = HostTensor::new(&[1, 1], vec![2.0])?;
            Ok::<_, Fault>(v.scatter(context.call_context(), how, &[0], &row).is_err())
        })?;
        check!(refused.iter().all(|refused| *refused), "{how:?} with {options:?} was accepted");
    }
    Ok(())
}

pub(crate) fn scatter_outside(strategy: &Strategy) -> Result<(), Stop> {
    let v = table(strategy, VariableOptions::default())?;
    let rows = HostTensor::new(&[2, 1], vec![5.0, 6.0])?;
    strategy.with_call_context(|place| v.scatter(place, Scatter::Update, &[0, 0], &rows))?;
    let mut expected = vec![1.0; strategy.num_replicas_in_sync() + 1];
    expected[0] = 6.0;
    check_copies(&v, &expected, "the last of two writes of one row")
}

pub(crate) fn local_writes(strategy: &Strategy) -> Result<(), Stop> {
    if strategy.shares_variables() {
        return Err(Stop::NotApplicable("replicas that share variables have no copies of their own"));
    }
    let options = VariableOptions::default().local_writes(true);
    let v = strategy.variable("v", &HostTensor::scalar(0.0), options)?;
    let seen = strategy.run_with((), |context, ()| {
        let own = HostTensor::scalar(context.replica_id() as f64);
        v.assign(context.call_context(), Assignment::Add, &own)?;
        Ok::<_, Fault>(v.read_value(context.call_context())?.to_elements::<f64>()? == own.to_elements::<f64>()?)
    })?;
    check!(seen.iter().all(|own| *own), "a replica sees another's write");
    Ok(())
}

pub(crate) fn saved(strategy: &Strategy) -> Result<(), Stop> {
    let one = Strategy::default_strategy()?;
    let n = strategy.num_replicas_in_sync() as f64;
    for (options, expected, share) in [
        (VariableOptions::on_read(Aggregation::Sum), n * (n + 1.0) / 2.0, (n + 1.0) / 2.0),
        (VariableOptions::on_read(Aggregation::Mean), (n + 1.0) / 2.0, (n + 1.0) / 2.0),
        (VariableOptions::on_read(Aggregation::OnlyFirstReplica), 1.0, 1.0),
        (VariableOptions::on_write(Aggregation::Sum), n * (n + 1.0) / 2.0, n * (n + 1.0) / 2.0),
    ] {
        let v = strategy.variable("v", &HostTensor::scalar(0.0), options)?;
        strategy.run_with((), |context, ()| {
            let own = HostTensor::scalar(context.replica_id() as f64 + 1.0);
            Ok::<_, Fault>(v.assign(context.call_context(), Assignment::Add, &own)?)
        })?;
        let kept = v.save(&strategy.groups())?;
        check_eq!(kept.to_elements::<f64>()?, [expected], format!("{options:?} as saved"));
        // Restored on one replica, and back.
        let alone = one.variable("v", &HostTensor::scalar(0.0), options)?;
        alone.restore(&one.groups(), &kept)?;
        check_eq!(alone.components()[0].to_elements::<f64>()?, [expected], "restored on one replica");
        let again = strategy.variable("v", &HostTensor::scalar(0.0), options)?;
        again.restore(&strategy.groups(), &alone.save(&one.groups())?)?;
        check_copies(&again, &[share], &format!("{options:?} as restored"))?;
    }
    let v = strategy.variable("v", &HostTensor::scalar(0.0), VariableOptions::on_read(Aggregation::None))?;
    check!(v.save(&strategy.groups()).is_err(), "an on-read variable without aggregation was saved");
    Ok(())
}

pub(crate) fn of_workers(strategy: &Strategy) -> Result<(), Stop> {
    let topology = strategy.topology();
    let v = PerWorkerVariable::new("read", HostTensor::scalar(topology.worker() as f64 * 100.0));
    strategy.run_with((), |_, ()| Ok::<_, Fault>(v.assign(Assignment::Add, &HostTensor::scalar(1.0))?))?;
    let mut all = Vec::new();
    for value in v.read_all(&strategy.groups())? {
        all.extend(value.to_elements::<f64>()?);
    }
    // Every rank of a replica runs the closure.
    let ranks = strategy.num_local_replicas() as f64;
    let expected: Vec<f64> = (0..topology.workers()).map(|worker| worker as f64 * 100.0 + ranks).collect();
    check_eq!(all, expected, "values of all workers");
    Ok(())
}
