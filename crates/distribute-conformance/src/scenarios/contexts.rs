//! Contexts: where code runs, and what it may do there.

use std::sync::atomic::{AtomicUsize, Ordering};

use distribute::prelude::*;
use distribute::strategy::{has_strategy, in_cross_replica_context, set_strategy};

use crate::check::{Fault, Stop, check, check_eq};
use crate::conditions::{in_one_process, local_ids, with_several_replicas};

pub(crate) fn outside(_: &Strategy) -> Result<(), Stop> {
    check!(!has_strategy(), "a strategy is current outside of all scopes");
    let (first, second) = (get_strategy()?, get_strategy()?);
    check_eq!(first.name(), "Default", "the strategy outside of all scopes");
    first.within(|| second.within(|| Ok::<(), Fault>(())))?;
    check!(get_replica_context().is_none() && !in_cross_replica_context(), "there is a context outside of all scopes");
    Ok(())
}

pub(crate) fn scope(strategy: &Strategy) -> Result<(), Stop> {
    strategy.within(|| {
        check!(has_strategy() && in_cross_replica_context(), "a scope is not a cross-replica context");
        check!(get_replica_context().is_none(), "there is a replica in a scope");
        check_eq!(get_strategy()?.name(), strategy.name(), "the strategy of the scope");
        Ok::<(), Fault>(())
    })?;
    check!(!has_strategy(), "the strategy is still there after its scope");
    Ok(())
}

pub(crate) fn replica(strategy: &Strategy) -> Result<(), Stop> {
    strategy.run_with((), |context, ()| {
        let current = get_replica_context().map(|context| context.replica_id());
        check_eq!(current, Some(context.replica_id()), "the replica that runs");
        check!(!in_cross_replica_context(), "a replica is a cross-replica context");
        check_eq!(get_strategy()?.describe(), strategy.describe(), "the strategy of the replica");
        check_eq!(context.num_replicas_in_sync(), strategy.num_replicas_in_sync(), "replicas in sync");
        Ok::<(), Fault>(())
    })?;
    check!(get_replica_context().is_none(), "the replica is still there after the run");
    Ok(())
}

pub(crate) fn mixing(strategy: &Strategy) -> Result<(), Stop> {
    let other = Strategy::default_strategy()?;
    let mixed = strategy.within(|| other.within(|| Ok::<(), Fault>(())));
    check!(mixed.is_err_and(|error| error.0.contains("another strategy")), "scopes of two strategies could be mixed");
    strategy.within(|| strategy.within(|| Ok::<(), Fault>(())))?;
    strategy.run_with((), |_, ()| {
        let nested = strategy.run_with((), |_, ()| Ok::<(), Fault>(()));
        check!(nested.is_err_and(|error| error.0.contains("inside a replica")), "a run could be nested");
        check!(strategy.within(|| Ok::<(), Fault>(())).is_err(), "a scope could be entered inside a replica");
        Ok::<(), Fault>(())
    })?;
    Ok(())
}

pub(crate) fn set(strategy: &Strategy) -> Result<(), Stop> {
    check!(set_strategy(Some(strategy))?.is_none(), "a strategy was set before");
    check!(has_strategy() && in_cross_replica_context(), "a strategy that is set is not a cross-replica context");
    check_eq!(get_strategy()?.name(), strategy.name(), "the strategy that is set");
    let other = Strategy::default_strategy()?;
    check!(other.within(|| Ok::<(), Fault>(())).is_err(), "another strategy's scope could be entered");
    strategy.within(|| {
        check!(set_strategy(None).is_err(), "a strategy could be set inside a scope");
        Ok::<(), Fault>(())
    })?;
    strategy.run_with((), |_, ()| {
        check!(set_strategy(None).is_err(), "a strategy could be set inside a replica");
        Ok::<(), Fault>(())
    })?;
    let taken = set_strategy(None)?.map(|strategy| strategy.name());
    check_eq!(taken, Some(strategy.name()), "the strategy that is taken away");
    check!(!has_strategy(), "the strategy is still there");
    Ok(())
}

pub(crate) fn merge(strategy: &Strategy) -> Result<(), Stop> {
    let merges = AtomicUsize::new(0);
    let results = strategy.run_with((), |context, ()| {
        let mut results = Vec::new();
        for round in 0..3 {
            let brought = context.replica_id() + round;
            results.push(context.merge_call(brought, |strategy, brought| {
                merges.fetch_add(1, Ordering::Relaxed);
                let right = in_cross_replica_context() && get_replica_context().is_none();
                Ok((right, strategy.name(), brought.into_values()))
            })?);
        }
        Ok::<_, Fault>(results)
    })?;
    check_eq!(merges.into_inner(), 3, "merged functions of this process");
    let ids = local_ids(strategy);
    for result in results.values() {
        for (round, (right, name, brought)) in result.iter().enumerate() {
            check!(*right, "a merged function runs in another context than the cross-replica one");
            check_eq!(*name, strategy.name(), "the strategy of the merged function");
            let expected: Vec<usize> = ids.iter().map(|id| id + round).collect();
            check_eq!(*brought, expected, "what replicas brought");
        }
    }
    Ok(())
}

pub(crate) fn merge_disagrees(strategy: &Strategy) -> Result<(), Stop> {
    in_one_process(strategy)?;
    with_several_replicas(strategy)?;
    let outcome = strategy.run_with((), |context, ()| {
        if context.replica_id() > 0 {
            context.merge_call((), |_, _| Ok(()))?;
        }
        Ok::<(), Fault>(())
    });
    check!(
        outcome.is_err_and(|error| error.0.contains("merge_call")),
        "different numbers of merge calls were accepted"
    );
    strategy.run_with((), |context, ()| context.merge_call((), |_, _| Ok(())))?;
    Ok(())
}

pub(crate) fn failing(strategy: &Strategy) -> Result<(), Stop> {
    in_one_process(strategy)?;
    let last = strategy.num_replicas_in_sync() - 1;
    let outcome = strategy.run_with((), |context, ()| {
        if context.replica_id() == last {
            return Err(Fault("as planned".to_owned()));
        }
        // The others wait for this one, and must not wait for long.
        Ok(context.barrier()?)
    });
    check!(outcome.as_ref().is_err_and(|error| error.0 == "as planned"), "the first failure is lost: {outcome:?}");
    strategy.run_with((), |context, ()| context.barrier())?;
    Ok(())
}

pub(crate) fn panicking(strategy: &Strategy) -> Result<(), Stop> {
    in_one_process(strategy)?;
    let last = strategy.num_replicas_in_sync() - 1;
    let quiet = std::panic::take_hook();
    // The panic is intended, so its message is suppressed.
    std::panic::set_hook(Box::new(|_| ()));
    let outcome = strategy.run_with((), |context, ()| {
        assert!(context.replica_id() != last, "as planned");
        Ok::<(), Fault>(context.barrier()?)
    });
    std::panic::set_hook(quiet);
    check!(outcome.as_ref().is_err_and(|error| error.0.contains("as planned")), "the panic is lost: {outcome:?}");
    strategy.run_with((), |context, ()| context.barrier())?;
    Ok(())
}
