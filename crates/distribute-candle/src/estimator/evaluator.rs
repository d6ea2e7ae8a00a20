//! The task that evaluates what others train.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use distribute_train::checkpoint::{CheckpointManager, Snapshot};

use super::training::Standing;
use super::{Estimator, EstimatorModel, EvalSpec, Scores};
use crate::{Error, Result};

impl<M: EstimatorModel + Sync> Estimator<M> {
    /// Evaluates the newest checkpoint again and again, until it is the last one; its scores.
    pub(super) fn evaluate_until_the_end(&self, max_steps: Option<u64>, eval: &EvalSpec<'_>) -> Result<Scores> {
        let limits = (self.config.first_checkpoint, self.config.next_checkpoint);
        let mut watch = Watch::new(self.checkpoints(), max_steps, limits);
        let mut newest: Option<(u64, Scores)> = None;
        let mut not_before = Instant::now() + eval.start_delay;
        loop {
            let Some(Found { step, path, is_last, .. }) = watch.look()? else {
                thread::sleep(BETWEEN_LOOKS);
                continue;
            };
            if let Some((evaluated, scores)) = &newest
                && *evaluated == step
            {
                // Written once more, with the word that it is the last.
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
                    newest = Some((step, scores));
                }
                Err(Error::Train(error @ distribute_train::Error::Damaged { .. })) => {
                    // Those who train keep only so many, and may have removed this one meanwhile.
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

/// Looks for checkpoints, waits for them, and says so.
struct Watch {
    checkpoints: CheckpointManager,
    max_steps: Option<u64>,
    first: Duration,
    next: Duration,
    newest: Option<Found>,
    /// Whether the newest has been evaluated.
    done: bool,
    /// Since when nothing has happened.
    since: Instant,
    said: Option<Instant>,
}

/// A checkpoint.
#[derive(Clone)]
struct Found {
    step: u64,
    path: PathBuf,
    written: Option<SystemTime>,
    is_last: bool,
}

impl Watch {
    fn new(checkpoints: CheckpointManager, max_steps: Option<u64>, (first, next): (Duration, Duration)) -> Watch {
        Watch { checkpoints, max_steps, first, next, newest: None, done: false, since: Instant::now(), said: None }
    }

    /// The newest checkpoint, unless it is done already.
    fn look(&mut self) -> Result<Option<Found>> {
        if let Some((step, path)) = self.checkpoints.list()?.into_iter().next() {
            let written = path.metadata().and_then(|about| about.modified()).ok();
            if self.newest.as_ref().is_none_or(|newest| (newest.step, newest.written) != (step, written)) {
                let is_last = self.is_last(step, &path);
                self.newest = Some(Found { step, path, written, is_last });
                (self.done, self.since) = (false, Instant::now());
            }
        }
        match &self.newest {
            Some(newest) if !self.done => return Ok(Some(newest.clone())),
            _ => self.wait()?,
        }
        Ok(None)
    }

    /// Whether training has ended with it, as far as that can be read.
    fn is_last(&self, step: u64, path: &Path) -> bool {
        let standing = || Snapshot::read(path).and_then(|snapshot| snapshot.program::<Standing>());
        let ended = |standing: Standing| standing.ended && standing.max_steps == self.max_steps;
        self.max_steps.is_some_and(|max_steps| step >= max_steps) || standing().is_ok_and(ended)
    }

    /// Says now and then what is waited for, and gives up in the end.
    fn wait(&mut self) -> Result<()> {
        let (limit, awaited) = match &self.newest {
            None => (self.first, "a first checkpoint".to_owned()),
            Some(newest) => (self.next, format!("a checkpoint after step {}", newest.step)),
        };
        let (waited, folder) = (self.since.elapsed(), self.checkpoints.root());
        if waited >= limit {
            return Err(Error::NoNewCheckpoint { awaited, folder: folder.to_owned(), waited });
        }
        if self.said.is_none_or(|said| said.elapsed() >= BETWEEN_WORDS) {
            let left = (limit - waited).as_secs();
            tracing::info!("the evaluator waits for {awaited} in {}, for {left} s more", folder.display());
            self.said = Some(Instant::now());
        }
        Ok(())
    }

    fn done(&mut self) {
        // Evaluating took time too.
        (self.done, self.since, self.said) = (true, Instant::now(), None);
    }
}

/// Scores in a line.
fn shown(scores: &Scores) -> String {
    scores.iter().map(|(name, value)| format!("{name} {value:.6}")).collect::<Vec<_>>().join(", ")
}

/// Reading a folder's names is cheap, and nobody waits for the evaluator.
const BETWEEN_LOOKS: Duration = Duration::from_millis(200);

const BETWEEN_WORDS: Duration = Duration::from_secs(60);
