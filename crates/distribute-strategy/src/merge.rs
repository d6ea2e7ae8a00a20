//! Where replicas meet to let one of them speak for all.

use std::any::Any;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use distribute_values::PerReplica;

use crate::{Error, Result};

/// The meeting point of one run's replicas.
pub(crate) struct Meeting {
    state: Mutex<State>,
    changed: Condvar,
    first_replica: usize,
}

struct State {
    /// What each replica brought to the present round.
    brought: Vec<Option<Box<dyn Any + Send>>>,
    /// What each replica takes home from it.
    results: Vec<Option<Box<dyn Any + Send>>>,
    round: u64,
    /// Replicas whose closure has ended, and how.
    ended: Vec<Option<&'static str>>,
}

impl Meeting {
    pub(crate) fn new(replicas: usize, first_replica: usize) -> Meeting {
        let none = || (0..replicas).map(|_| None).collect();
        let state = State { brought: none(), results: none(), round: 0, ended: vec![None; replicas] };
        Meeting { state: Mutex::new(state), changed: Condvar::new(), first_replica }
    }

    /// Waits for all replicas; the last to come calls `merge` with what all brought, and everybody gets its result.
    pub(crate) fn merge<T: Send + 'static, R: Clone + Send + 'static>(
        &self,
        local: usize,
        brought: T,
        timeout: Duration,
        merge: impl FnOnce(PerReplica<T>) -> Result<R>,
    ) -> Result<R> {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        let round = state.round;
        state.brought[local] = Some(Box::new(brought));
        if state.brought.iter().all(Option::is_some) {
            let values: Option<Vec<T>> = state
                .brought
                .iter_mut()
                .map(|value| value.take().and_then(|value| value.downcast::<T>().ok()).map(|value| *value))
                .collect();
            let Some(values) = values else {
                state.ended[local] = Some("brought a value of another type");
                self.changed.notify_all();
                return Err(self.failed(local, "the values brought have different types".to_owned()));
            };
            match merge(PerReplica::new(values)) {
                Ok(result) => {
                    for slot in &mut state.results {
                        *slot = Some(Box::new(result.clone()));
                    }
                    state.round += 1;
                    self.changed.notify_all();
                }
                Err(error) => {
                    state.ended[local] = Some("failed in the merged function");
                    self.changed.notify_all();
                    return Err(error);
                }
            }
        }
        while state.round == round {
            if let Some((other, how)) = state.ended.iter().enumerate().find_map(|(other, how)| Some((other, (*how)?))) {
                return Err(self.failed(local, format!("replica {} {how}", self.first_replica + other)));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.failed(local, format!("they did not come within {timeout:.1?}")));
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        let result = state.results[local].take().and_then(|result| result.downcast::<R>().ok());
        result.map(|result| *result).ok_or_else(|| self.failed(local, "they merged to another type".to_owned()))
    }

    /// Says that a replica's closure has ended, so that nobody waits for it.
    pub(crate) fn end(&self, local: usize, how: &'static str) {
        self.lock().ended[local].get_or_insert(how);
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, local: usize, problem: String) -> Error {
        Error::Merge { replica: self.first_replica + local, problem }
    }
}
