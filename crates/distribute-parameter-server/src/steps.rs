//! Numbered steps of a training: which have ended, and which may be scheduled.
//!
//! A step's number is the program's own, so that a coordinator that is started again, and servers that have outlived
//! the one before, mean the same step by it.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use tonic::Status;

use crate::wire::proto::StepRecord;
use crate::{Error, Result};

/// The steps that have ended: all below `begun` except those in `open`. A step that has ended stays so, thus what two
/// records know can be united.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct EndedSteps {
    begun: u64,
    open: BTreeSet<u64>,
}

impl EndedSteps {
    /// Reads a record of a message.
    ///
    /// # Errors
    /// `invalid_argument` if it has too many open steps, or one that has not begun.
    pub(crate) fn of(record: Option<&StepRecord>) -> Result<EndedSteps, Status> {
        let Some(StepRecord { begun, open }) = record else { return Ok(EndedSteps::default()) };
        if open.len() > MAX_OPEN {
            let given = open.len();
            return Err(Status::invalid_argument(format!(
                "{given} steps are open, and at most {MAX_OPEN} are expected"
            )));
        }
        if let Some(step) = open.iter().find(|step| *step >= begun) {
            let problem = format!("step {step} is open, and the steps below {begun} alone have begun");
            return Err(Status::invalid_argument(problem));
        }
        Ok(EndedSteps { begun: *begun, open: open.iter().copied().collect() })
    }

    /// Returns the record for a message.
    pub(crate) fn record(&self) -> StepRecord {
        StepRecord { begun: self.begun, open: self.open.iter().copied().collect() }
    }

    /// Returns whether a step has ended.
    pub(crate) fn has_ended(&self, step: u64) -> bool {
        step < self.begun && !self.open.contains(&step)
    }

    /// Returns the first step that has not ended.
    pub(crate) fn first(&self) -> u64 {
        self.open.first().copied().unwrap_or(self.begun)
    }

    /// Adds what another record knows.
    pub(crate) fn learn(&mut self, other: &EndedSteps) {
        if self == other {
            return;
        }
        let mut open: BTreeSet<u64> = self.open.iter().copied().filter(|step| !other.has_ended(*step)).collect();
        open.extend(other.open.iter().copied().filter(|step| !self.has_ended(*step)));
        *self = EndedSteps { begun: self.begun.max(other.begun), open };
    }

    /// Returns whether it knows everything that another record knows.
    pub(crate) fn covers(&self, other: &EndedSteps) -> bool {
        other.begun <= self.begun && self.open.range(..other.begun).all(|step| other.open.contains(step))
    }
}

/// The steps of a coordinator: those that were scheduled, and those that an earlier coordinator has left.
#[derive(Debug)]
pub(crate) struct Ledger(Mutex<Steps>);

#[derive(Debug, Default)]
struct Steps {
    /// The step with which the first call must begin, where steps were made before.
    first: Option<u64>,
    /// The step that follows the greatest one that was scheduled.
    next: Option<u64>,
    /// One more than the greatest step that has started.
    begun: u64,
    /// Steps that were scheduled, or had begun before, and have not succeeded.
    pending: BTreeSet<u64>,
    /// The pending steps that wait or run.
    active: BTreeSet<u64>,
}

/// A step that waits or runs. It may be scheduled again when this is dropped, unless it has succeeded.
#[derive(Debug)]
pub(crate) struct ActiveStep {
    ledger: Arc<Ledger>,
    number: u64,
}

impl Ledger {
    /// Creates the ledger of a training that begins.
    pub(crate) fn new() -> Ledger {
        Ledger(Mutex::default())
    }

    /// Continues a training whose steps have ended up to here.
    pub(crate) fn continue_after(&self, ended: &EndedSteps) {
        *self.0.lock() =
            Steps { first: Some(ended.first()), begun: ended.begun, pending: ended.open.clone(), ..Steps::default() };
    }

    /// Returns the step with which training continues.
    pub(crate) fn first(&self) -> u64 {
        self.0.lock().first.unwrap_or(0)
    }

    /// Returns whether a step was scheduled.
    pub(crate) fn has_begun(&self) -> bool {
        self.0.lock().next.is_some()
    }

    /// Returns whether steps wait or run.
    pub(crate) fn is_active(&self) -> bool {
        !self.0.lock().active.is_empty()
    }

    /// Records that all steps before `until` have ended, unless one was scheduled; returns the step with which training
    /// continues.
    ///
    /// # Errors
    /// [`Error::Step`] if these steps have not begun.
    pub(crate) fn confirm(&self, until: u64) -> Result<u64> {
        let mut steps = self.0.lock();
        let (Some(first), None) = (steps.first, steps.next) else { return Ok(until) };
        if until > steps.begun {
            let problem = format!(
                "it is said to follow steps that have ended, and the servers know only of steps before {}; restore a \
                 checkpoint of this training",
                steps.begun
            );
            return Err(Error::Step { step: until, problem });
        }
        if until > first {
            steps.first = Some(until);
            steps.pending = steps.pending.split_off(&until);
        }
        Ok(first.max(until))
    }

    /// Forgets all steps, since variables were restored: the next one may have any number.
    pub(crate) fn reset(&self) {
        let mut steps = self.0.lock();
        let active = std::mem::take(&mut steps.active);
        *steps = Steps { active, ..Steps::default() };
    }

    /// Admits a step.
    ///
    /// # Errors
    /// [`Error::Step`] if it waits or runs, if it is neither the next one nor one that has failed, or if too many have
    /// failed.
    pub(crate) fn schedule(self: &Arc<Self>, number: u64) -> Result<ActiveStep> {
        let wrong = |problem: String| Err(Error::Step { step: number, problem });
        let mut steps = self.0.lock();
        if steps.active.contains(&number) {
            return wrong("it waits or runs already; schedule each step once".to_owned());
        }
        let expected = steps.next.or(steps.first);
        let failed = steps.next.is_some_and(|next| number < next) && steps.pending.contains(&number);
        if let Some(expected) = expected.filter(|expected| *expected != number && !failed) {
            return wrong(match steps.next {
                Some(_) => format!("step {expected} is next; schedule steps in the order of their numbers"),
                None => format!(
                    "the servers have kept what all steps before {expected} have made; continue with step {expected}, \
                     which first_step returns"
                ),
            });
        }
        let unfinished = steps.pending.len().saturating_sub(steps.active.len());
        if unfinished > MAX_FAILED && !failed {
            return wrong(format!(
                "{unfinished} steps before it have failed or were cancelled; schedule them again, or end the training"
            ));
        }
        let Some(next) = number.checked_add(1) else {
            return wrong("it is the greatest number; count steps from 0".to_owned());
        };
        steps.next = Some(steps.next.unwrap_or(0).max(next));
        steps.pending.insert(number);
        steps.active.insert(number);
        Ok(ActiveStep { ledger: self.clone(), number })
    }
}

impl ActiveStep {
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Records that it starts; returns which steps have ended.
    pub(crate) fn start(&self) -> StepRecord {
        let mut steps = self.ledger.0.lock();
        steps.begun = steps.begun.max(self.number + 1);
        StepRecord { begun: steps.begun, open: steps.pending.range(..steps.begun).copied().collect() }
    }

    /// Records that it has succeeded.
    pub(crate) fn succeed(&self) {
        self.ledger.0.lock().pending.remove(&self.number);
    }
}

impl Drop for ActiveStep {
    fn drop(&mut self) {
        self.ledger.0.lock().active.remove(&self.number);
    }
}

/// The most open steps in a message.
const MAX_OPEN: usize = 16 << 10;

/// The most steps that may have failed without being scheduled again, since each is told with every later one.
const MAX_FAILED: usize = 1024;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ended(begun: u64, open: &[u64]) -> EndedSteps {
        EndedSteps::of(Some(&StepRecord { begun, open: open.to_vec() })).unwrap()
    }

    proptest! {
        #[test]
        fn records_are_united_as_the_sets_that_they_describe(
            sets in proptest::collection::vec(proptest::collection::btree_set(0u64..12, 0..12), 2),
        ) {
            let of = |set: &BTreeSet<u64>| {
                let begun = set.last().map_or(0, |last| last + 1);
                ended(begun, &(0..begun).filter(|step| !set.contains(step)).collect::<Vec<_>>())
            };
            let [a, b] = [&sets[0], &sets[1]].map(of);
            let mut both = a.clone();
            both.learn(&b);
            let union: BTreeSet<u64> = sets[0].union(&sets[1]).copied().collect();
            for step in 0..14 {
                prop_assert_eq!(both.has_ended(step), union.contains(&step), "{} of {:?}", step, both);
            }
            prop_assert_eq!(a.covers(&b), sets[1].is_subset(&sets[0]));
            prop_assert!(both.covers(&a) && both.covers(&b));
            prop_assert_eq!(both.first(), (0..).find(|step| !union.contains(step)).unwrap());
            prop_assert_eq!(EndedSteps::of(Some(&both.record())).unwrap(), both);
        }
    }

    #[test]
    fn records_that_cannot_be_are_refused() {
        let of = |begun, open| EndedSteps::of(Some(&StepRecord { begun, open })).unwrap_err().message().to_owned();
        assert!(of(3, vec![3]).contains("step 3 is open"));
        assert!(of(u64::MAX, (0..=MAX_OPEN as u64).collect()).contains("at most"));
        assert_eq!(EndedSteps::of(None).unwrap(), EndedSteps::default());
    }

    #[test]
    fn steps_are_scheduled_in_order_and_again_when_they_have_failed() {
        let ledger = Arc::new(Ledger::new());
        let first = ledger.schedule(7).unwrap();
        assert!(ledger.schedule(7).unwrap_err().to_string().contains("already"));
        assert!(ledger.schedule(9).unwrap_err().to_string().contains("step 8 is next"));
        let (second, third) = (ledger.schedule(8).unwrap(), ledger.schedule(9).unwrap());
        assert_eq!(second.start(), StepRecord { begun: 9, open: vec![7, 8] });
        second.succeed();
        drop(second);
        // It has failed, so that it stays open.
        drop(first);
        assert_eq!(third.start(), StepRecord { begun: 10, open: vec![7, 9] });
        assert!(ledger.schedule(8).is_err());
        let again = ledger.schedule(7).unwrap();
        assert_eq!(again.start(), StepRecord { begun: 10, open: vec![7, 9] });
        again.succeed();
        assert_eq!(third.start(), StepRecord { begun: 10, open: vec![9] });
        assert!(ledger.schedule(u64::MAX).is_err());
    }

    #[test]
    fn a_training_continues_with_the_first_step_that_has_not_ended() {
        let ledger = Arc::new(Ledger::new());
        ledger.continue_after(&ended(10, &[6, 8]));
        assert_eq!(ledger.first(), 6);
        for wrong in [0, 5, 8, 10] {
            assert!(ledger.schedule(wrong).unwrap_err().to_string().contains("continue with step 6"), "{wrong}");
        }
        // The seventh has ended, and is scheduled again with the others.
        let steps: Vec<ActiveStep> = (6..11).map(|number| ledger.schedule(number).unwrap()).collect();
        assert_eq!(steps[0].start(), StepRecord { begun: 10, open: vec![6, 7, 8, 9] });
        steps.iter().for_each(ActiveStep::succeed);
        assert_eq!(steps[4].start(), StepRecord { begun: 11, open: Vec::new() });
        drop(steps);
        ledger.reset();
        ledger.schedule(3).unwrap();
    }

    #[test]
    fn a_checkpoint_may_know_that_further_steps_have_ended() {
        let ledger = Arc::new(Ledger::new());
        assert_eq!(ledger.confirm(5).unwrap(), 5);
        ledger.continue_after(&ended(10, &[6, 8]));
        assert_eq!((ledger.confirm(3).unwrap(), ledger.confirm(8).unwrap()), (6, 8));
        assert!(ledger.confirm(11).unwrap_err().to_string().contains("only of steps before 10"));
        assert_eq!(ledger.schedule(8).unwrap().start(), StepRecord { begun: 10, open: vec![8] });
    }

    #[test]
    fn too_many_failed_steps_are_an_error() {
        let ledger = Arc::new(Ledger::new());
        (0..=MAX_FAILED as u64).for_each(|number| drop(ledger.schedule(number).unwrap()));
        let error = ledger.schedule(MAX_FAILED as u64 + 1).unwrap_err().to_string();
        assert!(error.contains("have failed or were cancelled"), "{error}");
        ledger.schedule(0).unwrap().succeed();
        ledger.schedule(MAX_FAILED as u64 + 1).unwrap();
    }
}
