//! The steps of an epoch, and the sums of their losses and metrics.

use distribute_strategy::DistributedIterator;

use super::Session;
use crate::trainer::{Trainee, add, by_replica, sums};
use crate::{Error, Result};

impl<T: Trainee> Session<'_, T> {
    /// Begins an epoch, or continues in it.
    pub(super) fn begin_epoch(&mut self, epoch: u32) {
        (self.epoch, self.without_training) = (epoch, false);
        let strategy = self.trainer.strategy();
        if strategy.is_chief() {
            // The sums saved before a restart are counted on one replica only, on all of its ranks.
            for of_rank in self.sums.iter_mut().take(strategy.tensor_parallel()) {
                of_rank.iter_mut().zip(&self.standing.sums).for_each(|(sum, before)| *sum += before);
            }
        }
        self.standing.sums.clear();
    }

    /// Runs the next steps of the epoch. Returns whether there were any.
    pub(super) fn execute(&mut self, steps_per_epoch: Option<u64>, at_once: usize) -> Result<bool, T::Error> {
        let (mut batches, mut positions) = (Vec::new(), Vec::new());
        let is_elastic = self.trainer.strategy().elastic().is_some();
        // Whether this call has started the pass, and no batch has been read from it yet.
        let mut is_new = false;
        while batches.len() < at_once
            && steps_per_epoch.is_none_or(|steps| self.standing.steps + (batches.len() as u64) < steps)
        {
            let pass = match &mut self.batches {
                Some(pass) => pass,
                none => {
                    is_new = self.standing.position.is_none();
                    let pass = match self.standing.position.take() {
                        Some(position) => self.data.iter_from(&position)?,
                        // The pass is chosen by its number, so that a resumed run reads the same data.
                        None => self.data.iter_epoch(self.standing.pass),
                    };
                    none.insert(pass)
                }
            };
            match pass.next() {
                Some(batch) => {
                    batches.push(batch?);
                    is_new = false;
                    if is_elastic {
                        positions.push((self.standing.pass, Some(DistributedIterator::position(pass)?)));
                    }
                }
                // The pass ends with the epoch, after the last steps have run; it may have to be saved before that.
                None if steps_per_epoch.is_none() && !batches.is_empty() => break,
                None => {
                    self.batches = None;
                    self.standing.pass += 1;
                    if batches.is_empty() {
                        self.after = (self.standing.pass, None);
                    }
                    match steps_per_epoch {
                        None => break,
                        Some(_) if is_new => return Err(Error::NoExamples { what: "train on" }.into()),
                        Some(_) => {}
                    }
                }
            }
        }
        let count = batches.len() as u64;
        if count > 0 {
            let strategy = self.trainer.strategy();
            let (batches, before) = (by_replica(batches, strategy.num_local_replicas()), strategy.commits());
            let outcome = self.trainer.train_on(batches, self.batch_size, &self.class_weights);
            let made = match outcome {
                Ok(_) => count,
                // Steps that were made before another failed count, except in the sums.
                Err(_) => strategy.commits().saturating_sub(before).min(count),
            };
            self.commits = strategy.commits();
            self.steps += made;
            self.standing.steps += made;
            self.examples += made * self.batch_size as u64;
            if let Some(after) =
                usize::try_from(made).ok().and_then(|made| positions.into_iter().take(made).next_back())
            {
                self.after = after;
            }
            add(&mut self.sums, outcome?);
        }
        Ok(count > 0)
    }

    /// Returns the mean loss of this process's replicas.
    pub(super) fn loss_so_far(&self) -> f64 {
        let sums = self.sums.iter().fold((0.0, 0.0), |(loss, count), sums| (loss + sums[0], count + sums[1]));
        sums.0 / f64::max(sums.1, 1.0)
    }

    /// Adds the sums of steps that are still under way.
    pub(super) fn settle(&mut self) -> Result<()> {
        add(&mut self.sums, self.trainer.settle().map_err(Error::Part)?);
        Ok(())
    }
}

/// Returns zeros for the sums of each local replica.
pub(super) fn zeros<T: Trainee>(trainer: &T) -> Vec<Vec<f64>> {
    vec![sums(trainer.metrics()); trainer.strategy().num_local_replicas()]
}
