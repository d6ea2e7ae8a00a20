//! One pass.

use super::{Start, Step};
use crate::dataset::Items;
use crate::{InputPosition, Result};

/// What comes next in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum More {
    /// Nothing: this worker's data are at their end.
    Nothing,
    /// A step in which some replica has fewer rows than it should, or an error.
    Partial,
    /// A step in which all replicas of this worker have all their rows.
    Full,
}

/// One pass over a [`DistributedDataset`](crate::DistributedDataset): for each step, one element per local replica, in their
/// order. After an error it yields nothing more.
pub struct DistributedIter<T> {
    steps: Option<Items<Step<T>>>,
    /// Read ahead to look at it.
    next: Option<Result<Step<T>>>,
    position: InputPosition,
    only_full: bool,
    examples: Vec<bool>,
}

impl<T> DistributedIter<T> {
    pub(super) fn new(steps: Items<Step<T>>, start: Start, only_full: bool) -> DistributedIter<T> {
        let Start { epoch, way, lanes, .. } = start;
        let position = InputPosition { epoch, way, lanes };
        DistributedIter { steps: Some(steps), next: None, position, only_full, examples: Vec::new() }
    }

    /// Whether each replica's part of the last step has rows of the data: false for one without rows, and for a row that
    /// [stands in](crate::DistributedDataset::with_stand_ins). Empty before the first step.
    pub fn examples(&self) -> &[bool] {
        &self.examples
    }

    /// Where this worker stands after the steps it was given: what [`InputPosition::of_all`] joins to a part of a checkpoint.
    pub fn position(&self) -> &InputPosition {
        &self.position
    }

    /// What comes next, without taking it; waits until that is known.
    pub fn more(&mut self) -> More {
        if self.next.is_none() {
            self.next = self.read();
        }
        match &self.next {
            None => More::Nothing,
            Some(Ok(step)) if step.full => More::Full,
            Some(_) => More::Partial,
        }
    }

    fn read(&mut self) -> Option<Result<Step<T>>> {
        loop {
            let step = self.steps.as_mut()?.next();
            match &step {
                Some(Ok(step)) if self.only_full && !step.full => continue,
                Some(Ok(_)) => {}
                _ => self.steps = None,
            }
            return step;
        }
    }
}

impl<T> Iterator for DistributedIter<T> {
    type Item = Result<Vec<T>>;

    fn next(&mut self) -> Option<Result<Vec<T>>> {
        let step = match self.next.take() {
            Some(step) => step,
            None => self.read()?,
        };
        Some(step.map(|step| {
            self.position.lanes = step.lanes;
            self.examples = step.examples;
            step.parts
        }))
    }
}

impl<T> std::fmt::Debug for DistributedIter<T> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("DistributedIter").field("position", &self.position).finish_non_exhaustive()
    }
}
