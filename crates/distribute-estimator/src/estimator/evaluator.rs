//! The evaluator task, which evaluates the checkpoints of a training run.

use std::thread;
use std::time::{Duration, Instant};

use distribute_train::checkpoint::{CheckpointWatch, FoundCheckpoint, RunId, Snapshot};

use super::training::Standing;
use super::{Estimator, EstimatorModel, EvalSpec, Scores};
use crate::{Error, Result};

impl<M: EstimatorModel + Sync> Estimator<M> {
    /// Evaluates the newest checkpoint repeatedly until it has evaluated the last one; returns its scores.
    pub(super) fn evaluate_until_the_end(&self, max_steps: Option<u64>, eval: &EvalSpec<'_>) -> Result<Scores> {
        let limits = (self.config.first_checkpoint, self.config.next_checkpoint);
        let mut watch = CheckpointWatch::new(self.checkpoints().root()).limits(limits.0, limits.1);
        let mut present: Option<(FoundCheckpoint, bool)> = None;
        let mut newest: Option<((RunId, u64), Scores)> = None;
        let mut not_before = Instant::now() + eval.start_delay;
        loop {
            let Some(found) = watch.look()? else {
                thread::sleep(BETWEEN_LOOKS);
                continue;
            };
            // Each checkpoint is read once.
            let known = present.as_ref().filter(|(known, _)| *known == found).map(|(_, is_last)| *is_last);
            let is_last = known.unwrap_or_else(|| is_last(&found, max_steps));
            present = Some((found.clone(), is_last));
            let FoundCheckpoint { step, path, run, .. } = found;
            if let Some((evaluated, scores)) = &newest
                && *evaluated == (run, step)
            {
                // The same checkpoint was written again, now marked as the last one.
                if is_last {
                    return Ok(scores.clone());
                }
                watch.done();
                continue;
            }
            if !is_last && Instant::now() < not_before {
                thread::sleep(BETWEEN_LOOKS);
                continue;
            }
            not_before = Instant::now() + eval.throttle;
            match self.evaluated(eval, Some(&path)) {
                Ok((_, scores)) if is_last => return Ok(scores),
                Ok((_, scores)) => {
                    tracing::info!("step {step}: {}", shown(&scores));
                    newest = Some(((run, step), scores));
                }
                Err(Error::Train(error @ distribute_train::Error::Damaged { .. })) => {
                    // Training keeps a limited number of checkpoints and may have removed this one meanwhile.
                    if path.exists() {
                        tracing::warn!("{error}; waiting for the next checkpoint");
                    }
                    not_before = Instant::now();
                }
                Err(error) => return Err(error),
            }
            watch.done();
        }
    }
}

/// Returns whether training has ended with a checkpoint, if that can be read.
fn is_last(found: &FoundCheckpoint, max_steps: Option<u64>) -> bool {
    let standing = || Snapshot::read(&found.path).and_then(|snapshot| snapshot.program::<Standing>());
    let ended = |standing: Standing| standing.ended && standing.max_steps == max_steps;
    max_steps.is_some_and(|max_steps| found.step >= max_steps) || standing().is_ok_and(ended)
}

/// Formats scores in one line.
fn shown(scores: &Scores) -> String {
    scores.iter().map(|(name, value)| format!("{name} {value:.6}")).collect::<Vec<_>>().join(", ")
}

/// Listing a folder is cheap, and no task waits for the evaluator.
const BETWEEN_LOOKS: Duration = Duration::from_millis(200);
