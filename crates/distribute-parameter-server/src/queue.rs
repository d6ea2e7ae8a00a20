//! The queue of closures that wait and run: when one may start, and the effect of an error on the others.
//!
//! A pure state machine: threads, clocks and connections are in [`crate::dispatch`].

use std::collections::{BTreeMap, VecDeque};

use crate::Error;
use crate::updates::Updates;

/// The state of a coordinator's closures; `C` is the data of one.
#[derive(Debug)]
pub(crate) struct ClosureQueue<C> {
    capacity: usize,
    gate: Gate,
    /// Closures that start again, then those that have not started.
    waiting: VecDeque<Entry<C>>,
    running: BTreeMap<u64, Running>,
    /// The number of the next closure.
    next: u64,
    /// One more than the greatest number that has started.
    begun: u64,
    error: Option<Error>,
}

/// A closure.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Entry<C> {
    pub(crate) number: u64,
    /// How often it has started.
    pub(crate) attempts: u32,
    /// How often it was restarted because of a server that was lost and recovered.
    pub(crate) spared: u32,
    /// The round in which it has started. It keeps its place there when it starts again, since servers may hold its
    /// gradients for this round already.
    round: Option<u64>,
    pub(crate) closure: C,
}

#[derive(Debug)]
struct Running {
    round: u64,
}

/// A closure that may start.
#[derive(Debug)]
pub(crate) struct Begin<C> {
    pub(crate) entry: Entry<C>,
    pub(crate) round: u64,
    /// Closures below this number have ended, except those in `live`.
    pub(crate) horizon: u64,
    pub(crate) live: Vec<u64>,
}

/// Determines which closures may run concurrently.
#[derive(Debug)]
enum Gate {
    Asynchronous,
    /// Stale synchronous parallel: round `r` waits until rounds before `r - staleness` have ended.
    Bounded {
        workers: u64,
        staleness: u64,
        started: u64,
    },
    Synchronous {
        contributions: u64,
        backups: u64,
        round: u64,
        started: u64,
        finished: u64,
    },
}

impl<C> ClosureQueue<C> {
    /// Numbers closures and rounds from `first`.
    pub(crate) fn new(capacity: usize, updates: Updates, workers: usize, first: u64) -> ClosureQueue<C> {
        let gate = match updates {
            Updates::Asynchronous => Gate::Asynchronous,
            Updates::BoundedStaleness { rounds } => {
                Gate::Bounded { workers: workers.max(1) as u64, staleness: rounds, started: 0 }
            }
            Updates::Synchronous { contributions, backups } => Gate::Synchronous {
                contributions: contributions as u64,
                backups: backups as u64,
                round: first,
                started: 0,
                finished: 0,
            },
        };
        let (waiting, running) = (VecDeque::new(), BTreeMap::new());
        ClosureQueue { capacity: capacity.max(1), gate, waiting, running, next: first, begun: first, error: None }
    }

    /// Returns whether there is room for another closure.
    pub(crate) fn has_room(&self) -> bool {
        self.waiting.len() < self.capacity
    }

    /// Appends a closure and returns its number.
    pub(crate) fn put(&mut self, closure: C) -> u64 {
        let number = self.next;
        self.next += 1;
        self.waiting.push_back(Entry { number, attempts: 0, spared: 0, round: None, closure });
        number
    }

    /// Returns the closure to start now, if one may start.
    pub(crate) fn begin(&mut self) -> Option<Begin<C>> {
        if self.error.is_some() {
            return None;
        }
        let round = match self.waiting.front()?.round {
            Some(round) => round,
            None => self.gate.admit(&self.running)?,
        };
        let mut entry = self.waiting.pop_front()?;
        entry.attempts += 1;
        entry.round = Some(round);
        self.running.insert(entry.number, Running { round });
        self.begun = self.begun.max(entry.number + 1);
        let again = self.waiting.iter().take_while(|entry| entry.round.is_some()).map(|entry| entry.number);
        let live = self.running.keys().copied().chain(again).collect();
        Some(Begin { entry, round, horizon: self.begun, live })
    }

    /// Records that a closure has run, and whether it has pushed gradients of its round. One that has not, such as a
    /// part of an evaluation, or a step that had counted before it failed, leaves its place in the round to another
    /// one.
    pub(crate) fn done(&mut self, number: u64, has_pushed: bool) {
        if let Some(running) = self.running.remove(&number) {
            match has_pushed {
                true => self.gate.finished(running.round),
                false => self.gate.withdrawn(running.round),
            }
        }
    }

    /// Lets the closure of a lost worker start again, before others and in its round; returns it instead if everything
    /// is cancelled.
    #[must_use]
    pub(crate) fn put_back(&mut self, entry: Entry<C>) -> Option<C> {
        self.running.remove(&entry.number);
        if self.error.is_some() {
            return Some(entry.closure);
        }
        self.waiting.push_front(entry);
        None
    }

    /// Begins another round, since servers hold no contributions to the current one any more.
    pub(crate) fn abandon_round(&mut self) {
        self.gate.restart();
    }

    /// Records the failure of a closure, or with `None` of something else: no closure starts until the error is taken.
    /// Waiting closures are cancelled and returned.
    pub(crate) fn fail(&mut self, number: Option<u64>, error: Error) -> Vec<C> {
        if let Some(running) = number.and_then(|number| self.running.remove(&number)) {
            self.gate.withdrawn(running.round);
        }
        // The first error counts.
        self.error.get_or_insert(error);
        self.waiting.drain(..).map(|entry| entry.closure).collect()
    }

    /// Returns whether there is an error that was not taken yet.
    pub(crate) fn has_failed(&self) -> bool {
        self.error.is_some()
    }

    /// Returns the error that was not taken yet, if any.
    pub(crate) fn error(&self) -> Option<&Error> {
        self.error.as_ref()
    }

    /// Takes the error once nothing runs any more; the queue can then be used again.
    pub(crate) fn take_error(&mut self) -> Option<Error> {
        if !self.running.is_empty() {
            return None;
        }
        let error = self.error.take();
        if error.is_some() {
            self.gate.restart();
        }
        error
    }

    /// Returns whether no closure waits or runs.
    pub(crate) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Returns the numbers of waiting and of running closures.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.waiting.len(), self.running.len())
    }
}

impl Gate {
    /// Returns the round of the next closure, if it may start.
    fn admit(&mut self, running: &BTreeMap<u64, Running>) -> Option<u64> {
        match self {
            Gate::Asynchronous => Some(0),
            Gate::Bounded { workers, staleness, started } => {
                let round = *started / *workers;
                let slowest = running.values().map(|running| running.round).min().unwrap_or(round);
                (round <= slowest.saturating_add(*staleness)).then(|| {
                    *started += 1;
                    round
                })
            }
            Gate::Synchronous { contributions, backups, round, started, .. } => {
                (*started < contributions.saturating_add(*backups)).then(|| {
                    *started += 1;
                    *round
                })
            }
        }
    }

    fn finished(&mut self, of: u64) {
        if let Gate::Synchronous { contributions, round, started, finished, .. } = self
            && of == *round
        {
            *finished += 1;
            if finished == contributions {
                *round += 1;
                (*started, *finished) = (0, 0);
            }
        }
    }

    fn withdrawn(&mut self, of: u64) {
        if let Gate::Synchronous { round, started, .. } = self
            && of == *round
        {
            *started -= 1;
        }
    }

    /// Abandons a started round once nothing runs, since failed functions may have contributed to it. Servers see this
    /// by the number of the next round.
    fn restart(&mut self) {
        if let Gate::Synchronous { round, started, finished, .. } = self {
            *round += 1;
            (*started, *finished) = (0, 0);
        }
    }
}

#[cfg(test)]
mod tests;
