//! The rendezvous of the replicas of a run, at which one of them acts for all.

use std::any::Any;
use std::time::{Duration, Instant};

use distribute_values::PerReplica;
use parking_lot::{Condvar, Mutex, MutexGuard};

use crate::{Error, Result};

/// The rendezvous of one run's replicas.
pub(crate) struct Rendezvous {
    state: Mutex<State>,
    changed: Condvar,
    replicas: usize,
    /// The id of the replica that each local rank belongs to.
    ids: Vec<usize>,
}

struct State {
    /// The value of each replica in the current round.
    brought: Vec<Option<Box<dyn Any + Send>>>,
    /// The result that each replica has yet to take.
    results: Vec<Option<Box<dyn Any + Send>>>,
    round: u64,
    /// The replica that executes the merged function.
    merging: Option<usize>,
    /// The number of calls that each replica has made.
    calls: Vec<u64>,
    /// Why each replica takes part in no further merge.
    ended: Vec<Option<Ended>>,
}

/// Why a replica takes part in no further merge.
#[derive(Clone, Copy)]
struct Ended {
    how: &'static str,
    /// The number of the replica's call in which it ended; `None` if its closure has.
    call: Option<u64>,
}

impl Rendezvous {
    /// Creates the rendezvous of the local ranks that belong to the replicas with these ids.
    pub(crate) fn new(ids: Vec<usize>) -> Rendezvous {
        let replicas = ids.len();
        let none = || (0..replicas).map(|_| None).collect();
        let (calls, ended) = (vec![0; replicas], vec![None; replicas]);
        let state = State { brought: none(), results: none(), round: 0, merging: None, calls, ended };
        Rendezvous { state: Mutex::new(state), changed: Condvar::new(), replicas, ids }
    }

    /// Waits for all replicas. The last to arrive calls `merge` with the values of all, and every replica gets its
    /// result; or none does, if one of them has given up waiting. After an error of `merge` no replica merges again,
    /// unless it is the only one: the others have returned another error.
    ///
    /// No lock is held while `merge` runs: it may take long, and may panic.
    pub(crate) fn merge<T: Send + 'static, R: Clone + Send + 'static>(
        &self,
        local: usize,
        brought: T,
        timeout: Duration,
        merge: impl FnOnce(PerReplica<T>) -> Result<R>,
    ) -> Result<R> {
        let mut state = self.lock();
        let round = state.round;
        state.calls[local] += 1;
        if let Some(error) = self.ended(&state, local) {
            return Err(error);
        }
        state.brought[local] = Some(Box::new(brought));
        if state.brought.iter().all(Option::is_some) {
            let brought: Vec<_> = state.brought.iter_mut().filter_map(Option::take).collect();
            state.merging = Some(local);
            drop(state);
            // Reported also if `merge` panics.
            let mut failure = Failure { rendezvous: self, local, how: Some("panicked in the merged function") };
            let values: Option<Vec<T>> =
                brought.into_iter().map(|value| value.downcast::<T>().ok().map(|value| *value)).collect();
            let Some(values) = values else {
                failure.how = Some("brought a value of another type");
                return Err(self.unmet(local, "the values brought have different types"));
            };
            let result = match merge(PerReplica::new(values)) {
                Ok(result) => result,
                Err(error) => {
                    failure.how = (self.replicas > 1).then_some("failed in the merged function");
                    self.lock().merging = None;
                    return Err(error);
                }
            };
            let results: Vec<Option<Box<dyn Any + Send>>> =
                (0..self.replicas).map(|_| Some(Box::new(result.clone()) as Box<dyn Any + Send>)).collect();
            failure.how = None;
            drop(failure);
            state = self.lock();
            state.merging = None;
            if let Some(error) = self.ended(&state, local) {
                // It has returned an error, so no other may return the result.
                return Err(error);
            }
            state.results = results;
            state.round += 1;
            self.changed.notify_all();
        }
        let mut deadline = Instant::now() + timeout;
        let mut merging = None;
        while state.round == round {
            if let Some(error) = self.ended(&state, local) {
                return Err(error);
            }
            if merging != state.merging {
                // All replicas have arrived; from now on the deadline is that of the merged function.
                (merging, deadline) = (state.merging, Instant::now() + timeout);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let problem = match merging {
                    Some(other) => format!(
                        "replica {} has not returned from the merged function within {timeout:.1?}",
                        self.ids[other]
                    ),
                    None => format!("they did not come within {timeout:.1?}"),
                };
                // Under the same lock as the decision, so that no other merges from now on.
                let call = Some(state.calls[local]);
                state.ended[local].get_or_insert(Ended { how: "gave up waiting", call });
                let own = state.brought[local].take();
                drop(state);
                self.changed.notify_all();
                drop(own);
                return Err(self.unmet(local, &problem));
            }
            self.changed.wait_for(&mut state, left);
        }
        let result = state.results[local].take().and_then(|result| result.downcast::<R>().ok());
        result.map(|result| *result).ok_or_else(|| self.unmet(local, "they merged to another type"))
    }

    /// Records that a replica's closure has ended, so that no other waits for it.
    pub(crate) fn end(&self, local: usize, how: &'static str) {
        self.lock().ended[local].get_or_insert(Ended { how, call: None });
        self.changed.notify_all();
    }

    /// Records that a replica's call has ended without a result for the others.
    fn end_call(&self, local: usize, how: &'static str) {
        let mut state = self.lock();
        let call = Some(state.calls[local]);
        state.ended[local].get_or_insert(Ended { how, call });
        drop(state);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Returns the error of a replica's call if a replica takes part in no further merge.
    fn ended(&self, state: &State, local: usize) -> Option<Error> {
        let (other, Ended { how, call }) =
            state.ended.iter().enumerate().find_map(|(at, ended)| Some((at, (*ended)?)))?;
        let who = if other == local { "it".to_owned() } else { format!("replica {}", self.ids[other]) };
        Some(match call {
            None => self.unmet(local, &format!("{who} {how}")),
            Some(call) if call == state.calls[local] => self.unmet(local, &format!("{who} {how} at this merge_call")),
            Some(_) => {
                let problem = format!(
                    "{who} {how} at an earlier merge_call of this run, after which there are no others; return the \
                     error of that call, and merge in another run"
                );
                Error::Merge { replica: self.ids[local], problem }
            }
        })
    }

    /// Returns the error of a replica that waited in vain.
    fn unmet(&self, local: usize, problem: &str) -> Error {
        let problem = format!("it waited for the others, but {problem}; every replica must make the same merge calls");
        Error::Merge { replica: self.ids[local], problem }
    }
}

/// Reports to the other replicas, when dropped, that the merged function returned no result.
struct Failure<'a> {
    rendezvous: &'a Rendezvous,
    local: usize,
    /// How it failed; `None` if it succeeded.
    how: Option<&'static str>,
}

impl Drop for Failure<'_> {
    fn drop(&mut self) {
        if let Some(how) = self.how {
            self.rendezvous.end_call(self.local, how);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    /// Lets two replicas merge their values by `merge`, and returns the results of both.
    fn meet(
        timeout: Duration,
        merge: impl Fn(PerReplica<i32>) -> Result<i32> + Sync,
    ) -> [std::thread::Result<Result<i32>>; 2] {
        let rendezvous = Rendezvous::new((0..2).collect());
        let (rendezvous, merge) = (&rendezvous, &merge);
        std::thread::scope(|scope| {
            let come = |local: usize| scope.spawn(move || rendezvous.merge(local, local as i32 + 1, timeout, merge));
            let handles = [come(0), come(1)];
            handles.map(|handle| handle.join())
        })
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn a_merged_function_runs_under_no_lock() {
        let rendezvous = Rendezvous::new((0..2).collect());
        let merge = |values: PerReplica<i32>| {
            let deadline = Instant::now() + LONG;
            while rendezvous.state.try_lock().is_none() {
                // The other replica checks its deadline periodically.
                assert!(Instant::now() < deadline, "the merged function runs under the lock");
                std::thread::yield_now();
            }
            Ok(values.iter().sum::<i32>())
        };
        std::thread::scope(|scope| {
            let first = scope.spawn(|| rendezvous.merge(0, 1, LONG, merge));
            let second = rendezvous.merge(1, 2, LONG, merge);
            assert_eq!((first.join().unwrap().unwrap(), second.unwrap()), (3, 3));
        });
    }

    #[test]
    fn a_merged_function_that_panics_leaves_nobody_waiting() {
        let outcomes = meet(LONG, |_| panic!("as planned"));
        let told: Vec<String> =
            outcomes.into_iter().filter_map(|outcome| Some(outcome.ok()?.unwrap_err().to_string())).collect();
        assert!(matches!(&told[..], [told] if told.contains("panicked in the merged function")), "{told:?}");
    }

    #[test]
    fn a_merged_function_that_does_not_return_is_named() {
        let (sender, never) = crossbeam_channel::bounded::<()>(0);
        let (sender, rendezvous) = (Mutex::new(Some(sender)), Rendezvous::new((0..2).collect()));
        let come = |local: usize| {
            let outcome = rendezvous.merge(local, (), Duration::from_millis(20), |_| {
                // Returns after the other replica has given up.
                let _ = never.recv();
                Ok(())
            });
            if outcome.is_err() {
                drop(sender.lock().take());
            }
            outcome
        };
        let outcomes = std::thread::scope(|scope| {
            let first = scope.spawn(|| come(0));
            [come(1), first.join().unwrap()]
        });
        // Neither returns the result, since one of them has returned an error.
        let mut told = outcomes.map(|outcome| outcome.unwrap_err().to_string());
        told.sort_by_key(|told| told.contains("gave up waiting"));
        assert!(told[0].contains("has not returned from the merged function"), "{told:?}");
        assert!(told[1].contains("gave up waiting at this merge_call"), "{told:?}");
    }

    #[test]
    fn a_replica_that_comes_after_another_has_given_up_does_not_merge() {
        let rendezvous = Rendezvous::new((0..2).collect());
        let merge = |_: PerReplica<Arc<()>>| -> Result<()> { panic!("a replica has given up") };
        let brought = Arc::new(());
        let first = rendezvous.merge(0, brought.clone(), Duration::from_millis(20), merge).unwrap_err().to_string();
        assert!(first.contains("they did not come within 20.0ms"), "{first}");
        assert_eq!(Arc::strong_count(&brought), 1, "its value is dropped");
        for (late, expected) in [
            (1, "replica 0 gave up waiting at this merge_call;"),
            (1, "replica 1: replica 0 gave up waiting at an earlier merge_call"),
            (0, "replica 0: it gave up waiting at an earlier merge_call"),
        ] {
            let told = rendezvous.merge(late, brought.clone(), LONG, merge).unwrap_err().to_string();
            assert!(told.contains(expected), "{told}");
        }
    }

    #[test]
    fn no_replica_merges_again_after_an_error_of_the_merged_function_unless_there_is_one() {
        let fails = |_: PerReplica<i32>| -> Result<i32> { Err(Error::Fixed) };
        let sum = |values: PerReplica<i32>| Ok(values.iter().sum::<i32>());
        let alone = Rendezvous::new(vec![0]);
        assert!(matches!(alone.merge(0, 1, LONG, fails), Err(Error::Fixed)));
        assert_eq!(alone.merge(0, 1, LONG, sum).unwrap(), 1);
        let two = Rendezvous::new(vec![0, 1]);
        let outcomes = std::thread::scope(|scope| {
            let first = scope.spawn(|| two.merge(0, 1, LONG, fails));
            [two.merge(1, 2, LONG, fails), first.join().unwrap()]
        });
        let told = outcomes.map(|outcome| outcome.unwrap_err());
        let unmet = told.iter().find(|error| !matches!(error, Error::Fixed)).unwrap().to_string();
        assert!(unmet.contains("it waited for the others, but replica"), "{unmet}");
        assert!(unmet.contains("failed in the merged function at this merge_call"), "{unmet}");
        for local in [0, 1] {
            let told = two.merge(local, 1, LONG, sum).unwrap_err().to_string();
            assert!(told.contains("failed in the merged function at an earlier merge_call"), "{told}");
            assert!(!told.contains("waited"), "{told}");
        }
    }
}
