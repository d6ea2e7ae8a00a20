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
    /// For each island its inner steps at the last changes that have counted in an outer step, or were refused.
    sent_after: BTreeMap<Task, u64>,
    /// Instant at which the quorum was reached, if it is.
    quorum_at: Option<Instant>,
}

/// The changes of one island since the last outer step.
#[derive(Debug)]
struct Contribution {
    changes: Vec<f32>,
    examples: u64,
    /// The island's inner steps.
    steps: u64,
    process: u64,
}

/// Where changes come from.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    pub(crate) island: Task,
    /// The outer step that they begin at.
    pub(crate) version: u64,
    pub(crate) examples: u64,
    /// The island's inner steps.
    pub(crate) steps: u64,
    /// The island's process.
    pub(crate) process: u64,
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
        let (round, sent_after) = (BTreeMap::new(), BTreeMap::new());
        OuterFragment { values, momentum, version, round, sent_after, quorum_at: None }
    }

    /// Continues with what islands had sent when a checkpoint was saved.
    pub(crate) fn sent_after(mut self, sent_after: BTreeMap<Task, u64>) -> OuterFragment {
        self.sent_after = sent_after;
        self
    }

    /// Returns the inner steps of each island at the last changes that the values contain, or that were refused.
    pub(crate) fn contained(&self) -> &BTreeMap<Task, u64> {
        &self.sent_after
    }

    /// Returns an island's inner steps at the last changes that it has sent; 0 if there are none.
    pub(crate) fn steps_of(&self, island: Task) -> u64 {
        let waiting = self.round.get(&island).map(|contribution| contribution.steps);
        waiting.or_else(|| self.sent_after.get(&island).copied()).unwrap_or(0)
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
        from: Origin,
        changes: Vec<f32>,
    ) -> Result<Taken, Unfit> {
        let Origin { island, version, examples, steps, process } = from;
        let Some(late) = self.version.checked_sub(version) else {
            return Err(Unfit::FromTheFuture { version: self.version });
        };
        if changes.len() != self.values.len() {
            return Err(Unfit::OtherLength);
        }
        // A process continues from where it was; another one that takes its place begins with the outer parameters.
        let own = self.round.get(&island).filter(|earlier| earlier.process == process);
        let earlier = own.map(|earlier| &earlier.changes[..]);
        let is_finite = |at: usize| (changes[at] + earlier.map_or(0.0, |earlier| earlier[at])).is_finite();
        if let Some(at) = (0..changes.len()).find(|at| !is_finite(*at)) {
            return Err(Unfit::NotFinite { at });
        }
        if late > rules.staleness {
            self.sent_after.insert(island, steps);
            return Ok(Taken::TooLate { late });
        }
        match self.round.get_mut(&island).filter(|earlier| earlier.process == process) {
            // One after another, so that together they are how far the island has moved.
            Some(earlier) => {
                earlier.changes.iter_mut().zip(&changes).for_each(|(sum, change)| *sum += change);
                earlier.examples = earlier.examples.saturating_add(examples);
                earlier.steps = steps;
            }
            None => {
                let replaced = self.round.insert(island, Contribution { changes, examples, steps, process });
                if let Some(Contribution { examples, .. }) = replaced {
                    tracing::warn!(
                        "{island} has another process since it sent changes by {examples} examples, which do not \
                         count: the next outer step has those of the new process"
                    );
                }
            }
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
        self.sent_after.extend(round.iter().map(|(island, contribution)| (*island, contribution.steps)));
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
