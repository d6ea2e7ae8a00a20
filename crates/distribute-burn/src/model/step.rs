//! Steps of a custom loop, compiled for PJRT devices.

use distribute_strategy::{ReplicaArgs, ReplicaContext, Strategy};
use distribute_values::PerReplica;

use crate::pjrt::{Fill, Programs, record_with};
use crate::{Error, Inputs, Result};

/// Records a step on each replica, and runs its program on all devices.
pub(super) fn compiled<A, R, E>(
    strategy: &Strategy,
    args: A,
    body: impl Fn(&ReplicaContext, A::Local) -> Result<R, E> + Sync,
) -> Result<PerReplica<R>, E>
where
    A: ReplicaArgs,
    R: Inputs,
    E: From<distribute_strategy::Error> + From<Error> + std::fmt::Display + Send,
{
    let recorded = strategy.run_with(args, |context, part| {
        let mut failure = None;
        let recorded = record_with(|| {
            body(context, part).map_err(|error| {
                failure = Some(error);
                Error::Trace { problem: "the step failed".to_owned() }
            })
        });
        match (recorded, failure) {
            (Ok(recorded), _) => Ok(recorded),
            (Err(_), Some(error)) => Err(error),
            (Err(error), None) => Err(E::from(error)),
        }
    })?;
    // Of replicas without examples nothing is reduced or gathered.
    let has_examples: Vec<bool> = (0..recorded.len()).map(|local| recorded.has_examples(local)).collect();
    let (traces, results): (Vec<_>, Vec<R>) = recorded.into_values().into_iter().unzip();
    let run = || -> Result<_> {
        let none = || Error::Program { problem: "the devices are used by another tensor library".to_owned() };
        let programs = strategy.pjrt().and_then(|pjrt| pjrt.programs::<Programs>()).ok_or_else(none)?;
        programs.run_recorded(strategy, traces)?.wait(strategy)
    };
    let outputs = run().map_err(E::from)?;
    let fill = |(result, outputs): (R, Vec<_>)| result.map_tensors(&mut Fill(outputs.into_iter()));
    let results = results.into_iter().zip(outputs).map(fill).collect();
    Ok(PerReplica::new(results).with_examples(&has_examples))
}
