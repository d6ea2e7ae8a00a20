//! One pass over a distributed dataset.

use super::Step;
use crate::dataset::Items;
use crate::{InputPosition, Result};

/// The kind of item that a pass yields next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum More {
    /// Nothing: this worker has no data left.
    Nothing,
    /// A step in which some replica has fewer rows than a full batch gives it.
    Partial,
    /// A step in which all replicas of this worker have all of their rows.
    Full,
    /// An error, which is not the end of the data.
    Failed,
}

/// An iterator over one pass of a [`WorkerDataset`](crate::WorkerDataset): each step yields one element per
/// local replica, in replica order. It ends after the first error.
pub struct WorkerIterator<T> {
    steps: Option<Items<Step<T>>>,
    /// A step that was read ahead by `more`.
    next: Option<Result<Step<T>>>,
    position: InputPosition,
    only_full: bool,
    examples: Vec<bool>,
}

impl<T> WorkerIterator<T> {
    pub(super) fn new(steps: Items<Step<T>>, position: InputPosition, only_full: bool) -> WorkerIterator<T> {
        WorkerIterator { steps: Some(steps), next: None, position, only_full, examples: Vec::new() }
    }

    /// Returns whether each replica's part of the last step has rows of the data: false for an empty part and for a
    /// [stand-in row](crate::WorkerDataset::with_stand_ins). Empty before the first step.
    pub fn examples(&self) -> &[bool] {
        &self.examples
    }

    /// Returns this worker's position after the steps that it has yielded. [`InputPosition::of_all`] joins the
    /// positions of all workers for a checkpoint.
    pub fn position(&self) -> &InputPosition {
        &self.position
    }

    /// Waits for the next item and returns what it is, without taking it.
    pub fn more(&mut self) -> More {
        if self.next.is_none() {
            self.next = self.read();
        }
        match &self.next {
            None => More::Nothing,
            Some(Ok(step)) if step.full => More::Full,
            Some(Ok(_)) => More::Partial,
            Some(Err(_)) => More::Failed,
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

impl<T> Iterator for WorkerIterator<T> {
    type Item = Result<Vec<T>>;

    fn next(&mut self) -> Option<Result<Vec<T>>> {
        let step = match self.next.take() {
            Some(step) => step,
            None => self.read()?,
        };
        Some(step.map(|step| {
            self.position.steps = self.position.steps.saturating_add(1);
            self.position.lanes = step.lanes;
            self.examples = step.examples;
            step.parts
        }))
    }
}

impl<T> std::fmt::Debug for WorkerIterator<T> {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("WorkerIterator").field("position", &self.position).finish_non_exhaustive()
    }
}
