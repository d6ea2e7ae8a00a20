//! The outer parameters of a fragment, and when the changes of islands make an outer step.
//!
//! A core without sockets, threads and clocks: callers pass the time, and ask when to look again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use distribute_cluster::Task;
use distribute_strategy::OuterNesterov;

/// When outer steps are made, and by which optimizer. All islands agree on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rules {
    pub(crate) outer: OuterNesterov,
    /// The number of islands whose changes make an outer step, at least 1.
    pub(crate) quorum: usize,
    /// How long changes of further islands are waited for once the quorum is reached.
    pub(crate) grace: Duration,
    /// The number of outer steps that changes may be late.
    pub(crate) staleness: u64,
}

/// The outer parameters of a fragment, and the changes that count in its next outer step.
#[derive(Debug)]
pub(crate) struct OuterFragment {
    values: Vec<f32>,
    /// Empty if the outer optimizer has none.
    momentum: Vec<f32>,
    /// The number of outer steps.
    version: u64,
    round: BTreeMap<Task, Contribution>,
    /// Instant at which the quorum was reached, if it is.
    quorum_at: Option<Instant>,
}

/// The changes of one island since the last outer step.
#[derive(Debug)]
struct Contribution {
    changes: Vec<f32>,
    examples: u64,
}

/// The fate of an island's changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    /// They count in the outer step with this number, and are `late` outer steps late.
    Counted { step: u64, late: u64 },
    /// They are too many outer steps late, and do not count.
    TooLate { late: u64 },
}

/// Why changes cannot count, whenever they come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unfit {
    /// They begin at an outer step that has not been made.
    FromTheFuture { version: u64 },
    /// The element with this index is not finite, alone or added to what the island has sent before.
    NotFinite { at: usize },
    /// Their number is not that of the parameters.
    OtherLength,
}

impl OuterFragment {
    /// Creates a fragment with these values. The momentum of a checkpoint is kept if the optimizer uses one.
    pub(crate) fn new(rules: &Rules, values: Vec<f32>, momentum: Vec<f32>, version: u64) -> OuterFragment {
        let mut momentum = if rules.outer.momentum > 0.0 { momentum } else { Vec::new() };
        if rules.outer.momentum > 0.0 {
            momentum.resize(values.len(), 0.0);
        }
        OuterFragment { values, momentum, version, round: BTreeMap::new(), quorum_at: None }
    }

    /// Returns the outer parameters.
    pub(crate) fn values(&self) -> &[f32] {
        &self.values
    }

    /// Returns the outer momentum, which is empty if there is none.
    pub(crate) fn momentum(&self) -> &[f32] {
        &self.momentum
    }

    /// Returns the number of outer steps.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    /// Returns whether all outer parameters are finite.
    pub(crate) fn is_finite(&self) -> bool {
        self.values.iter().all(|value| value.is_finite())
    }

    /// Returns when the grace window closes, if it is open.
    pub(crate) fn closes_at(&self, rules: &Rules) -> Option<Instant> {
        self.quorum_at.and_then(|quorum_at| quorum_at.checked_add(rules.grace))
    }

    /// Takes an island's changes since the outer step `version`, or since those that it has sent after it. Call
    /// [`advance`](OuterFragment::advance) before, so that they do not count in a step whose window has closed, and
    /// afterwards.
    ///
    /// # Errors
    /// [`Unfit`], after which nothing has changed.
    pub(crate) fn take(
        &mut self,
        now: Instant,
        rules: &Rules,
        (island, version, examples): (Task, u64, u64),
        changes: Vec<f32>,
    ) -> Result<Taken, Unfit> {
        let Some(late) = self.version.checked_sub(version) else {
            return Err(Unfit::FromTheFuture { version: self.version });
        };
        if changes.len() != self.values.len() {
            return Err(Unfit::OtherLength);
        }
        let earlier = self.round.get(&island).map(|earlier| &earlier.changes[..]);
        let is_finite = |at: usize| (changes[at] + earlier.map_or(0.0, |earlier| earlier[at])).is_finite();
        if let Some(at) = (0..changes.len()).find(|at| !is_finite(*at)) {
            return Err(Unfit::NotFinite { at });
        }
        if late > rules.staleness {
            return Ok(Taken::TooLate { late });
        }
        match self.round.get_mut(&island) {
            // One after another, so that together they are how far the island has moved.
            Some(earlier) => {
                earlier.changes.iter_mut().zip(&changes).for_each(|(sum, change)| *sum += change);
                earlier.examples = earlier.examples.saturating_add(examples);
            }
            None => drop(self.round.insert(island, Contribution { changes, examples })),
        }
        if self.quorum_at.is_none() && self.round.len() >= rules.quorum {
            self.quorum_at = Some(now);
        }
        Ok(Taken::Counted { step: self.version.saturating_add(1), late })
    }

    /// Makes the outer step if it is due: the quorum is reached, and since then the grace window has passed, or all
    /// `known` islands have contributed. Returns whether it was made.
    pub(crate) fn advance(&mut self, now: Instant, rules: &Rules, known: &BTreeSet<Task>) -> bool {
        let Some(quorum_at) = self.quorum_at else { return false };
        let has_passed = now.saturating_duration_since(quorum_at) >= rules.grace;
        if !has_passed && !known.iter().all(|island| self.round.contains_key(island)) {
            return false;
        }
        let round = std::mem::take(&mut self.round);
        self.quorum_at = None;
        let gradient = weighted_mean(self.values.len(), round.into_values());
        let momentum = (!self.momentum.is_empty()).then_some(&mut self.momentum[..]);
        rules.outer.step(&mut self.values, momentum, &gradient);
        self.version = self.version.saturating_add(1);
        true
    }
}

/// Returns the mean of changes, weighted by examples: added in f64, in the order of islands, and rounded once.
fn weighted_mean(len: usize, round: impl Iterator<Item = Contribution>) -> Vec<f32> {
    let round: Vec<Contribution> = round.collect();
    let examples: f64 = round.iter().map(|of| of.examples as f64).sum();
    let mean = |at: usize| {
        let sum: f64 = round.iter().map(|of| of.examples as f64 * f64::from(of.changes[at])).sum();
        (sum / examples) as f32
    };
    (0..len).map(mean).collect()
}

#[cfg(test)]
mod tests;
