//! The evaluator task, which evaluates the checkpoints of a training run.

use std::thread;
use std::time::{Duration, Instant};

use distribute_train::checkpoint::{CheckpointWatch, FoundCheckpoint, Snapshot};

use super::training::Standing;
use super::{Estimator, EstimatorModel, EvalSpec, Scores};
use crate::{Error, Result};

impl<M: EstimatorModel + Sync> Estimator<M> {
    /// Evaluates the newest checkpoint repeatedly until it has evaluated the last one; returns its scores.
    ///
    /// A checkpoint that was there from the beginning may be the end of an earlier job, or of this one. It counts as
    /// the last one if it has reached `max_steps`, or if no other follows within the time limit.
    pub(super) fn evaluate_until_the_end(&self, max_steps: Option<u64>, eval: &EvalSpec<'_>) -> Result<Scores> {
        let limits = (self.config.first_checkpoint, self.config.next_checkpoint);
        let mut watch = CheckpointWatch::new(self.checkpoints().root()).limits(limits.0, limits.1);
        let mut present: Option<(FoundCheckpoint, Place)> = None;
        let mut newest: Option<(FoundCheckpoint, Scores)> = None;
        let mut pause = Pause::new(eval.start_delay);
        let mut is_first_look = true;
        loop {
            let was_there = std::mem::take(&mut is_first_look);
            let found = match (watch.look(), &present, &newest) {
                (Ok(Some(found)), ..) => found,
                (Ok(None), ..) => {
                    thread::sleep(BETWEEN_LOOKS);
                    continue;
                }
                (
                    Err(error @ distribute_train::Error::NoNewCheckpoint { .. }),
                    Some((_, Place::EndOfSomeJob)),
                    Some((_, scores)),
                ) => {
                    tracing::warn!("{error}; the checkpoint that was there already is taken as the last one");
                    return Ok(scores.clone());
                }
                (Err(error), ..) => return Err(error.into()),
            };
            // Each checkpoint is read once.
            let known = present.as_ref().filter(|(known, _)| *known == found).map(|(_, place)| *place);
            let place = known.unwrap_or_else(|| Place::of(&found, max_steps, was_there));
            let is_last = place == Place::Last;
            present = Some((found.clone(), place));
            if let Some((evaluated, scores)) = &newest
                && found.has_scores_of(evaluated)
            {
                // The same checkpoint was written again, now marked as the last one.
                if is_last {
                    return Ok(scores.clone());
                }
                watch.done();
                continue;
            }
            if !is_last && !pause.is_over() {
                thread::sleep(BETWEEN_LOOKS);
                continue;
            }
            pause = Pause::new(eval.throttle);
            match self.evaluated(eval, Some(&found.path)) {
                Ok((_, scores)) if is_last => return Ok(scores),
                Ok((_, scores)) => {
                    tracing::info!("step {}: {}", found.step, shown(&scores));
                    newest = Some((found, scores));
                }
                Err(Error::Train(error @ distribute_train::Error::Damaged { .. })) => {
                    // Training keeps a limited number of checkpoints and may have removed this one meanwhile.
                    if found.path.exists() {
                        tracing::warn!("{error}; waiting for the next checkpoint");
                    }
                    pause = Pause::new(Duration::ZERO);
                }
                Err(error) => return Err(error),
            }
            watch.done();
        }
    }
}

/// A time in which only the last checkpoint is evaluated.
struct Pause {
    began: Instant,
    lasts: Duration,
}

impl Pause {
    fn new(lasts: Duration) -> Pause {
        Pause { began: Instant::now(), lasts }
    }

    fn is_over(&self) -> bool {
        self.began.elapsed() >= self.lasts
    }
}

/// The place of a checkpoint in the training of this job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Training continues after it, or it cannot be read.
    Further,
    /// A training call ended with it before the evaluator began: of this job, or of an earlier one.
    EndOfSomeJob,
    Last,
}

impl Place {
    fn of(found: &FoundCheckpoint, max_steps: Option<u64>, was_there: bool) -> Place {
        let standing = || Snapshot::read(&found.path).and_then(|snapshot| snapshot.program::<Standing>());
        let ended = |standing: Standing| standing.ended && standing.max_steps == max_steps;
        if max_steps.is_some_and(|max_steps| found.step >= max_steps) {
            return Place::Last;
        }
        match standing().is_ok_and(ended) {
            true if was_there => Place::EndOfSomeJob,
            true => Place::Last,
            false => Place::Further,
        }
    }
}

/// Formats scores in one line.
fn shown(scores: &Scores) -> String {
    scores.iter().map(|(name, value)| format!("{name} {value:.6}")).collect::<Vec<_>>().join(", ")
}

/// Listing a folder is cheap, and no task waits for the evaluator.
const BETWEEN_LOOKS: Duration = Duration::from_millis(200);
