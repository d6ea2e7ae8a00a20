//! Watching for the checkpoints of another process, to evaluate them while training continues.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use super::disk::{Disk, Entry};
use super::folder::Found;
use super::names::{STATE, group_of};
use super::task::{Awaited, TIMEOUT, Task};
use super::{OPTIMIZER, RunId, Snapshot, folder};
use crate::objects;
use crate::{Error, Result};

/// Looks for new checkpoints in a folder, logs regularly that it waits, and gives up after a limit.
#[derive(Debug)]
pub struct CheckpointWatch {
    root: PathBuf,
    first: Duration,
    next: Duration,
    newest: Option<FoundCheckpoint>,
    /// Whether the newest has been processed.
    done: bool,
    /// When something last happened.
    since: Instant,
    said: Option<Instant>,
}

/// A checkpoint that a [`CheckpointWatch`] has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FoundCheckpoint {
    /// The step after which it was saved.
    pub step: u64,
    /// Its folder.
    pub path: PathBuf,
    /// The run that it belongs to.
    pub run: RunId,
    /// Its sequence number in the run, since a step may be written again.
    pub sequence: u64,
    /// Lengths and checksums of the files that the scores depend on.
    files: BTreeMap<String, Entry>,
}

impl FoundCheckpoint {
    /// Returns whether an evaluation gives the scores of another checkpoint: both are of one step of one run, and the
    /// files of their tensors are equal, other than the optimizer's; of checkpoints without such files, those of the
    /// state. A step that is written again with another state of the program has the same scores; one that is trained
    /// anew, from an earlier checkpoint, has its own.
    pub fn has_scores_of(&self, other: &FoundCheckpoint) -> bool {
        (self.run, self.step) == (other.run, other.step) && self.files == other.files
    }

    /// Describes a whole checkpoint; `None` for another one.
    fn of(found: Found) -> Option<FoundCheckpoint> {
        let Found { step, path, manifest, .. } = found.is_whole().then_some(found)?;
        let manifest = manifest?;
        let of_tensors = |name: &str| group_of(name).is_some_and(|group| group != OPTIMIZER);
        let mut files = manifest.files;
        match files.keys().any(|name| of_tensors(name)) {
            true => files.retain(|name, _| of_tensors(name)),
            false => files.retain(|name, _| name == STATE),
        }
        Some(FoundCheckpoint { step, path, run: manifest.run, sequence: manifest.sequence, files })
    }
}

impl CheckpointWatch {
    /// Watches a folder that another process writes to. Waits an hour for the first checkpoint, and an hour for each
    /// further one.
    pub fn new(root: impl Into<PathBuf>) -> CheckpointWatch {
        let hour = Duration::from_secs(3600);
        CheckpointWatch {
            root: objects::resolved(root.into()),
            first: hour,
            next: hour,
            newest: None,
            done: false,
            since: Instant::now(),
            said: None,
        }
    }

    /// Sets how long to wait for the first checkpoint, and for each further one.
    pub fn limits(self, first: Duration, next: Duration) -> CheckpointWatch {
        CheckpointWatch { first, next, ..self }
    }

    /// Returns the newest checkpoint until it is [`done`](CheckpointWatch::done); `None` if there is no new one. It
    /// does not wait. Checkpoints with missing or truncated files are skipped. If a new run has started in the folder,
    /// its checkpoints follow, even those of earlier steps.
    ///
    /// # Errors
    /// [`Error::NoNewCheckpoint`] if none has appeared within the limit; [`Error::SeveralRuns`] and [`Error::Format`]
    /// if the folder holds checkpoints of several runs or of another version; [`Error::File`] or [`Error::DiskHangs`]
    /// if the folder cannot be read.
    pub fn look(&mut self) -> Result<Option<FoundCheckpoint>> {
        let (root, what) = (self.root.clone(), format!("listing {}", self.root.display()));
        let list = move |disk: &Disk| folder::list(disk, &root);
        let found = Task::start(&Disk::default(), what, TIMEOUT, list).wait()?;
        folder::run_of(&self.root, &found)?;
        let newest = found.into_iter().find_map(FoundCheckpoint::of);
        if let Some(found) = newest
            && self.newest.as_ref() != Some(&found)
        {
            if let Some(before) = self.newest.as_ref().filter(|before| before.run != found.run) {
                let folder = self.root.display();
                tracing::info!("run {} has begun in {folder}, where run {} was before", found.run, before.run);
            }
            self.newest = Some(found);
            (self.done, self.since) = (false, Instant::now());
        }
        match &self.newest {
            Some(newest) if !self.done => Ok(Some(newest.clone())),
            _ => self.check().map(|()| None),
        }
    }

    /// Marks the newest checkpoint as processed; the time limit for the next one starts.
    pub fn done(&mut self) {
        // The time spent evaluating does not count.
        (self.done, self.since, self.said) = (true, Instant::now(), None);
    }

    fn check(&mut self) -> Result<()> {
        let (limit, awaited) = match &self.newest {
            None => (self.first, "a first checkpoint".to_owned()),
            Some(newest) => (self.next, format!("a checkpoint after step {}", newest.step)),
        };
        let (waited, folder) = (self.since.elapsed(), self.root.as_path());
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
}

/// Evaluates each new checkpoint of a training run elsewhere, in a separate process that only reads a folder and joins
/// no group.
///
/// # Examples
/// ```
/// use distribute_strategy::Strategy;
/// use distribute_train::checkpoint::{CheckpointManager, SidecarEvaluator};
///
/// # let folder = tempfile::tempdir()?;
/// let mut training = CheckpointManager::new(folder.path());
/// training.save(&Strategy::default_strategy()?, 100, &[], &())?;
/// training.finish()?;
///
/// let mut evaluated = Vec::new();
/// SidecarEvaluator::new(folder.path()).until_step(100).run(|snapshot| {
///     evaluated.push(snapshot.step());             // load the snapshot into a model, and look at its scores
///     Ok::<_, distribute_train::Error>(())
/// })?;
/// assert_eq!(evaluated, [100]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Source
/// `tf.keras.utils.SidecarEvaluator`.
#[derive(Debug)]
pub struct SidecarEvaluator {
    watch: CheckpointWatch,
    until_step: Option<u64>,
    max_evaluations: Option<u64>,
}

impl SidecarEvaluator {
    /// Evaluates the checkpoints of a folder.
    pub fn new(root: impl Into<PathBuf>) -> SidecarEvaluator {
        SidecarEvaluator { watch: CheckpointWatch::new(root), until_step: None, max_evaluations: None }
    }

    /// Ends after a checkpoint of this step, or of a later one.
    pub fn until_step(self, step: u64) -> SidecarEvaluator {
        SidecarEvaluator { until_step: Some(step), ..self }
    }

    /// Ends after this many evaluations.
    pub fn max_evaluations(self, count: u64) -> SidecarEvaluator {
        SidecarEvaluator { max_evaluations: Some(count), ..self }
    }

    /// Sets how long to wait for the first checkpoint, and for each further one. Default: an hour each.
    pub fn limits(self, first: Duration, next: Duration) -> SidecarEvaluator {
        SidecarEvaluator { watch: self.watch.limits(first, next), ..self }
    }

    /// Calls `evaluate` with each new checkpoint, or, if there are several, with the newest. One that would give the
    /// scores of the last one ([`FoundCheckpoint::has_scores_of`]), and one that is removed while it is read, is
    /// skipped.
    ///
    /// # Errors
    /// [`Error::NoNewCheckpoint`] if none comes within the limit, the errors of [`CheckpointWatch::look`] and of
    /// reading a checkpoint, else the error of `evaluate`.
    pub fn run<E: From<Error>>(mut self, mut evaluate: impl FnMut(&Snapshot) -> Result<(), E>) -> Result<(), E> {
        let (mut count, mut last) = (0, None::<FoundCheckpoint>);
        loop {
            let Some(found) = self.watch.look()? else {
                thread::sleep(BETWEEN_LOOKS);
                continue;
            };
            let step = found.step;
            if last.as_ref().is_none_or(|last| !found.has_scores_of(last)) {
                match Snapshot::read(&found.path) {
                    Ok(snapshot) => evaluate(&snapshot)?,
                    Err(error @ Error::Damaged { .. }) => {
                        warn_if_there(&found.path, &error);
                        self.watch.done();
                        continue;
                    }
                    Err(error) => return Err(error.into()),
                }
                (count, last) = (count + 1, Some(found));
            }
            let is_last = self.until_step.is_some_and(|until| step >= until);
            if is_last || self.max_evaluations.is_some_and(|most| count >= most) {
                return Ok(());
            }
            self.watch.done();
        }
    }
}

/// Warns unless the checkpoint has been removed, since a training run keeps a limited number of checkpoints.
fn warn_if_there(path: &Path, error: &Error) {
    let place = path.to_owned();
    let looked = Task::start(&Disk::default(), format!("looking for {}", path.display()), TIMEOUT, move |disk| {
        disk.is_published(&place)
    });
    if Task::wait(looked).unwrap_or(true) {
        tracing::warn!("{error}; waiting for the next checkpoint");
    }
}

/// Listing a folder is cheap, and the evaluator is not time-critical.
const BETWEEN_LOOKS: Duration = Duration::from_millis(200);

const BETWEEN_WORDS: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use distribute_strategy::Strategy;
    use distribute_types::ErrorClass;
    use distribute_values::{Host, HostTensor};

    use super::super::{CheckpointManager, Checkpointed, MODEL};
    use super::*;
    use crate::BoxError;

    #[test]
    fn each_new_checkpoint_is_evaluated_until_the_last() {
        let folder = tempfile::tempdir().unwrap();
        let save = |step| {
            let mut training = CheckpointManager::new(folder.path());
            training.restore::<()>(&Strategy::default_strategy().unwrap(), &[]).unwrap();
            training.save(&Strategy::default_strategy().unwrap(), step, &[], &()).unwrap();
            training.finish().unwrap();
        };
        save(1);
        let mut seen = Vec::new();
        let evaluator = SidecarEvaluator::new(folder.path()).until_step(30);
        evaluator
            .run(|snapshot| {
                seen.push(snapshot.step());
                save(10 * seen.len() as u64);
                Ok::<_, Error>(())
            })
            .unwrap();
        assert_eq!(seen, [1, 10, 20, 30]);
        let mut count = 0;
        let evaluator = SidecarEvaluator::new(folder.path()).max_evaluations(1);
        evaluator
            .run(|_| {
                count += 1;
                Ok::<_, Error>(())
            })
            .unwrap();
        assert_eq!(count, 1);
    }

    /// A number in the file of the model.
    struct Number(f32);

    impl Checkpointed for Number {
        fn save(&self, _: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
            Ok(snapshot.put::<Host, _>(MODEL, "w", &HostTensor::scalar(self.0))?)
        }

        fn load(&self, _: &Strategy, _: &Snapshot) -> Result<(), BoxError> {
            Ok(())
        }
    }

    #[test]
    fn a_step_that_is_trained_anew_is_evaluated_again() {
        let folder = tempfile::tempdir().unwrap();
        let strategy = Strategy::default_strategy().unwrap();
        let save = |manager: &mut CheckpointManager, step: u64, number: f32, program: u64| {
            manager.save(&strategy, step, &[&Number(number)], &program).unwrap();
            manager.finish().unwrap();
        };
        let mut training = CheckpointManager::new(folder.path());
        save(&mut training, 400, 4.0, 0);
        save(&mut training, 500, 5.0, 0);
        let mut seen = Vec::new();
        let limits = (Duration::from_secs(60), Duration::from_millis(500));
        let evaluated = SidecarEvaluator::new(folder.path()).limits(limits.0, limits.1).run(|snapshot| {
            seen.push((snapshot.step(), snapshot.numbers(MODEL, "w").unwrap()[0]));
            match seen.len() {
                1 => {
                    let mut again = CheckpointManager::new(folder.path());
                    let earlier = folder.path().join("step-00000400");
                    let earlier = again.restore_from(&strategy, &earlier, &[&Number(0.0)]).unwrap();
                    again.continue_run(earlier.run().unwrap());
                    save(&mut again, 500, 5.5, 0);
                }
                // The same model again, with another state of the program.
                2 => save(&mut training, 500, 5.5, 1),
                _ => {}
            }
            Ok::<_, Error>(())
        });
        assert!(matches!(evaluated, Err(Error::NoNewCheckpoint { .. })), "{evaluated:?}");
        assert_eq!(seen, [(500, 5.0), (500, 5.5)]);
    }

    #[test]
    fn a_new_run_is_followed_and_damaged_checkpoints_are_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        let strategy = Strategy::default_strategy().unwrap();
        let save = |mut manager: CheckpointManager, steps: &[u64]| {
            for step in steps {
                manager.save(&strategy, *step, &[], &()).unwrap();
            }
            manager.finish().unwrap();
            manager.run().unwrap()
        };
        let mut runs = vec![save(CheckpointManager::new(folder.path()), &[5, 10])];
        let mut seen = Vec::new();
        SidecarEvaluator::new(folder.path())
            .max_evaluations(3)
            .run(|snapshot| {
                seen.push((snapshot.run().unwrap(), snapshot.step()));
                match seen.len() {
                    1 => runs.push(save(CheckpointManager::new(folder.path()).set_aside_other_runs(), &[1])),
                    2 => {
                        let mut again = CheckpointManager::new(folder.path());
                        again.restore::<()>(&strategy, &[]).unwrap();
                        save(again, &[2, 3]);
                        std::fs::write(folder.path().join("step-00000003/state.json"), "cut").unwrap();
                    }
                    _ => {}
                }
                Ok::<_, Error>(())
            })
            .unwrap();
        assert_eq!(seen, [(runs[0], 10), (runs[1], 1), (runs[1], 2)]);
    }

    #[test]
    fn it_does_not_wait_for_ever() {
        let folder = tempfile::tempdir().unwrap();
        let short = Duration::from_millis(1);
        let error = SidecarEvaluator::new(folder.path()).limits(short, short).run(|_| Ok::<_, Error>(())).unwrap_err();
        assert!(error.to_string().contains("a first checkpoint"), "{error}");
        assert!(error.is_retryable());
    }
}
