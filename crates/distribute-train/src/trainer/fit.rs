//! Epochs of training, for all tensor libraries.

use std::sync::atomic::Ordering;

use distribute_input::InputPosition;
use distribute_strategy::{DistributedDataset, DistributedIterator, Request};

use super::{BATCH_SIZE, Batching, Fit, Trainee, TrainingData, evaluate_distributed, results, sums_of_all};
use crate::callbacks::{Callback, Occasion};
use crate::checkpoint::{Folders, RunId};
use crate::elastic::{self, Joined};
use crate::history::History;
use crate::preemption::{Departures, End, PreemptionHandler};
use crate::progress::{self, Activity, Form, Progress};
use crate::{Error, Result};

mod agreement;
mod backup;
mod hooks;
mod preempted;
mod settings;
mod standing;
mod states;
mod steps;

use settings::Settings;
use standing::{Standing, Whole};
use states::states;
use steps::zeros;

/// A training run in progress.
struct Session<'a, T: Trainee> {
    trainer: &'a T,
    data: DistributedDataset<T::Examples>,
    batch_size: usize,
    class_weights: Vec<f32>,
    settings: Settings,
    /// The current pass.
    batches: Option<DistributedIterator<T::Examples>>,
    /// The pass, and the position in it, after the last step; known in elastic jobs only.
    after: (u64, Option<InputPosition>),
    /// The strategy's commits after the last step.
    commits: u64,
    standing: Standing,
    /// Whether this process joins others, from which it has its state.
    joins: bool,
    /// Whether this process leaves others that train on.
    leaves: bool,
    departures: Departures,
    /// The last step after which a callback has saved.
    saved: Option<u64>,
    epoch: u32,
    epochs: u32,
    steps_per_epoch: Option<u64>,
    /// Steps of all epochs.
    steps: u64,
    examples: u64,
    /// Sums of the current epoch, by local replica.
    sums: Vec<Vec<f64>>,
    /// The reason why training is to end, if this process requests it.
    stop: Option<String>,
    /// Whether there is no validation after this epoch, but after others.
    without_validation: bool,
    /// Whether the sums of this epoch's steps are lost.
    without_training: bool,
    /// The run to which all checkpoints of this training run belong, once it is known.
    run: Option<RunId>,
    folders: Folders,
}

/// Trains, and returns the losses and metrics of each epoch, including those of an earlier run that this one resumes.
/// Passes over the data are numbered over all calls for one trainer, so each shuffles anew.
///
/// Epochs, steps, validation, class weights, the names of metrics, collective callbacks with their
/// [`settings`](Callback::settings), and whether there is [`stop_on`](Fit::stop_on) are compared before a checkpoint is
/// restored: if they differ between workers, all of them fail. A process that joins an elastic job with other settings
/// fails alone.
///
/// Every worker must call this. An error on one of them reaches the others in their next step, if the caller reports it
/// with [`Strategy::report_failure_as`](distribute_strategy::Strategy::report_failure_as).
///
/// # Errors
/// [`Error::NoExamples`] if the data have no elements; [`Error::WithoutEffect`] for a setting without one;
/// [`Error::Preempted`], [`Error::Unsaved`] or [`Error::Left`] if this process was told to stop;
/// [`Error::Metric`] if metrics have equal names; [`Error::Strategy`] if settings differ; the errors of the data, the
/// trainer, callbacks and checkpoints; and the collective's error if a replica is missing or fails.
pub fn fit<T: Trainee>(
    trainer: &T,
    data: &dyn TrainingData<T::Examples, T::Error>,
    mut fit: Fit<T::Examples, T::Error>,
) -> Result<History, T::Error> {
    let every = (fit.validation_every > 1).then_some(fit.validation_every as usize);
    for (setting, given) in [("validation_steps", fit.validation_steps), ("validation_every", every)] {
        if let (Some(given), None) = (given, &fit.validation) {
            let why = "there are no data to validate on; call validation, or leave it out";
            return Err(Error::WithoutEffect { setting, given, why }.into());
        }
    }
    trainer.metrics().check_names()?;
    let strategy = trainer.strategy();
    // Not left to the installation, which follows on the joining of others.
    fit.termination.as_ref().map_or(Ok(()), |config| config.check(strategy))?;
    let (set, batch_size) = (fit.batch_size.is_some(), fit.batch_size.unwrap_or(BATCH_SIZE));
    let batching = Batching { batch_size, is_set: set, shuffle: true };
    let (data, batch_size) = data.distribute(strategy, batching)?;
    let steps_per_epoch = fit.steps_per_epoch.or(data.steps().map(|steps| steps as u64));
    // It may have been set for the training data.
    let unshuffled = Batching { shuffle: false, is_set: false, ..batching };
    let validation = match &fit.validation {
        Some(validation) => Some(validation.distribute(strategy, unshuffled)?.0),
        None => None,
    };
    let settings = Settings::of(&fit, trainer.metrics());
    settings.declare(strategy);
    let class_weights = std::mem::take(&mut fit.class_weights);
    let mut session = Session {
        trainer,
        data,
        batch_size,
        class_weights,
        settings,
        batches: None,
        after: (0, None),
        commits: strategy.commits(),
        standing: Standing { pass: trainer.passes().load(Ordering::Relaxed), ..Standing::default() },
        joins: false,
        leaves: false,
        departures: Departures::default(),
        saved: None,
        epoch: 0,
        epochs: fit.epochs,
        steps_per_epoch,
        steps: 0,
        examples: 0,
        sums: zeros(trainer),
        stop: None,
        without_validation: false,
        without_training: false,
        run: None,
        folders: Folders::default(),
    };
    let mut course = Course { validation, preemption: None, progress: None, is_memory_told: false, fit };
    if strategy.elastic().is_none() {
        let outcome = session.begin(&mut course).and_then(|()| session.train(&mut course));
        session.keep_passes();
        return outcome.map(|()| session.standing.history);
    }
    let mut stands = false;
    loop {
        let own = stands.then(|| session.whole(&course.fit.callbacks));
        if course.preemption.as_ref().is_some_and(PreemptionHandler::is_told) {
            // A step that failed may have taken the signal's request with it.
            strategy.request(Request::Leave);
        }
        let joined = elastic::join(strategy, &[trainer.model(), trainer.optimizer()], own.as_ref());
        let joined = joined.map_err(|error| session.stopped(error, course.preemption.as_ref()))?;
        let outcome = session.continue_with(joined, stands, &mut course).and_then(|()| {
            stands = true;
            session.train(&mut course)?;
            Ok(strategy.end_job()?)
        });
        session.keep_passes();
        match outcome {
            Ok(()) => return Ok(session.standing.history),
            Err(error) if !session.leaves && elastic::is_of_members(&error) => tracing::warn!("{error}"),
            Err(error) => return Err(error),
        }
    }
}

/// The settings of a training run, and what it has shown and watched so far.
struct Course<T: Trainee> {
    validation: Option<DistributedDataset<T::Examples>>,
    preemption: Option<PreemptionHandler>,
    progress: Option<Progress>,
    is_memory_told: bool,
    fit: Fit<T::Examples, T::Error>,
}

impl<T: Trainee> Session<'_, T> {
    /// Begins training, from a checkpoint if a callback restores one.
    fn begin(&mut self, course: &mut Course<T>) -> Result<(), T::Error> {
        let (strategy, callbacks) = (self.trainer.strategy(), &mut course.fit.callbacks);
        // Requests made to an earlier training run are void.
        strategy.cancel_request(Request::End);
        strategy.take_request(Request::End);
        if !self.joins {
            // Not left to the first step: after a checkpoint is restored, some workers may have none left to make.
            self.settings.compare(strategy)?;
        }
        self.tell(callbacks, &[], |callback, training| callback.train_begin(training))?;
        let resumes = self.give_states(callbacks);
        self.catch_up()?;
        if resumes && !self.joins {
            self.tell(callbacks, &[], |callback, training| callback.resumed(training))?;
        }
        self.after = (self.standing.pass, self.standing.position.clone());
        if let Some(config) = course.fit.termination.take() {
            course.preemption = Some(PreemptionHandler::install(strategy, config)?);
        }
        Ok(())
    }

    /// Notes the pass with which a later call begins.
    fn keep_passes(&self) {
        let has_begun = self.batches.is_some() || self.standing.position.is_some();
        self.trainer.passes().store(self.standing.pass + u64::from(has_begun), Ordering::Relaxed);
    }

    /// Continues with the members of a generation; `stands` if this process has trained before.
    fn continue_with(&mut self, joined: Joined<Whole>, stands: bool, course: &mut Course<T>) -> Result<(), T::Error> {
        let has_adopted = joined.adopted.is_some();
        if let Some(whole) = joined.adopted {
            let Whole { standing, steps, examples, run, stop, commits, settings, learning_rate } = whole;
            if !stands && let Err(error) = self.settings.check(self.trainer.strategy(), &settings) {
                // The others train on.
                self.leaves = true;
                self.trainer.strategy().leave_job()?;
                return Err(error.into());
            }
            self.commits = commits;
            // This process's part of the sums is its own, as long as they are of the same epoch.
            if standing.epochs_done != self.standing.epochs_done {
                self.sums = zeros(self.trainer);
            }
            self.after = (standing.pass, standing.position.clone());
            (self.standing, self.steps, self.examples, self.run, self.stop) = (standing, steps, examples, run, stop);
            // A process that lacks no step keeps its optimizer, whose rate may be that of before the end of an epoch.
            if let Some(rate) = learning_rate {
                self.trainer.set_learning_rate(rate);
            }
        }
        self.batches = None;
        (self.standing.pass, self.standing.position) = self.after.clone();
        if !stands {
            self.joins = !joined.begins;
            let begun = self.begin(course);
            self.joins = false;
            begun?;
        } else if has_adopted {
            self.give_states(&mut course.fit.callbacks);
        }
        self.tell(&mut course.fit.callbacks, &[], |callback, training| callback.members_changed(training))?;
        Ok(())
    }

    /// Returns what a process needs that joins this one.
    fn whole(&self, callbacks: &[Box<dyn Callback>]) -> Whole {
        let Session { steps, examples, run, stop, commits, .. } = self;
        let (steps, examples, run, stop, commits) = (*steps, *examples, *run, stop.clone(), *commits);
        let mut standing = self.standing.clone();
        (standing.pass, standing.position) = self.after.clone();
        standing.keep_states(callbacks);
        let (settings, learning_rate) = (self.settings.lines(), Some(self.trainer.learning_rate()));
        Whole { standing, steps, examples, run, stop, commits, settings, learning_rate }
    }

    /// Trains until all epochs are over, or a callback ends it.
    fn train(&mut self, course: &mut Course<T>) -> Result<(), T::Error> {
        let (trainer, strategy) = (self.trainer, self.trainer.strategy());
        let Course { validation, preemption, progress, is_memory_told, fit } = course;
        let progress = match progress {
            // Another process may have been the chief before.
            Some(progress) if progress.is_chief() == strategy.is_chief() => progress,
            other => other.insert(show(trainer, fit.title.as_deref(), fit.epochs, self.steps_per_epoch)?),
        };
        let callbacks = &mut fit.callbacks;
        if self.standing.unsaved {
            let values = self.last_values();
            self.epoch = self.standing.epochs_done;
            self.save(callbacks, &values, Occasion::Epoch)?;
            self.standing.unsaved = false;
        }
        while self.standing.epochs_done < fit.epochs && self.standing.ended.is_none() {
            let epoch = self.standing.epochs_done + 1;
            progress.epoch(epoch);
            progress.continue_after(self.standing.steps);
            self.begin_epoch(epoch);
            let is_validated = epoch.is_multiple_of(fit.validation_every);
            self.without_validation = validation.is_some() && !is_validated;
            self.tell(callbacks, &[], |callback, training| callback.epoch_begin(training))?;
            let (mut values, mut shown) = (vec![("loss".to_owned(), 0.0)], self.examples);
            while !self.standing.all_steps && self.execute(fit.steps_per_epoch, fit.steps_per_execution)? {
                values[0].1 = self.loss_so_far();
                let examples = self.examples - std::mem::replace(&mut shown, self.examples);
                progress.step(self.standing.steps, examples, &[("loss", values[0].1)]);
                self.tell(callbacks, &values, |callback, training| callback.step_end(training))?;
                progress.activity(Activity::Checkpointing);
                self.save(callbacks, &values, Occasion::Step)?;
                progress.activity(Activity::Training);
                self.heed(preemption.as_ref(), callbacks, &values)?;
                if self.stop.is_some() {
                    strategy.request(Request::End);
                }
                if strategy.take_request(Request::End) {
                    self.end();
                    break;
                }
            }
            self.standing.all_steps = true;
            let before = (states(callbacks), trainer.learning_rate());
            let validated = validation.as_ref().filter(|_| is_validated).map(|validation| Validated {
                data: validation,
                steps: fit.validation_steps,
                pass: u64::from(epoch / fit.validation_every - 1),
            });
            let values = match self.end_epoch(progress, callbacks, validated) {
                Ok(values) => values,
                Err(error) => {
                    // The epoch may end once more, with other processes.
                    self.take_back(callbacks, before);
                    return Err(error);
                }
            };
            if !std::mem::replace(is_memory_told, true) {
                tell_memory(trainer);
            }
            self.close_epoch(epoch, &values);
            progress.activity(Activity::Checkpointing);
            self.save(callbacks, &values, Occasion::Epoch)?;
            self.standing.unsaved = false;
            if let Some(why) = self.stop.as_ref().filter(|_| strategy.is_chief()) {
                tracing::info!("training ends after epoch {epoch}: {why}");
            }
        }
        let last = self.last_values();
        self.heed_at_end(preemption.as_ref(), callbacks, &last)?;
        self.tell(callbacks, &last, |callback, training| callback.train_end(training))?;
        if preemption.as_ref().is_some_and(PreemptionHandler::has_event) {
            let later = match strategy.elastic() {
                // Requests are void when its members meet anew.
                Some(_) => "the program continues until it ends or is told again",
                None => {
                    // Also within a grace period, whose request to save may have been taken.
                    strategy.request(Request::Leave);
                    "a later fit with stop_on ends after its first step"
                }
            };
            distribute_notice::warn!(
                "this process was told to stop at the end of its training, which is complete: fit returns as usual; \
                 {later}"
            );
        }
        Ok(())
    }

    /// Computes the values of an epoch whose steps have been made, and tells callbacks.
    fn end_epoch(
        &mut self,
        progress: &mut Progress,
        callbacks: &mut [Box<dyn Callback>],
        validated: Option<Validated<'_, T>>,
    ) -> Result<Vec<(String, f64)>, T::Error> {
        let trainer = self.trainer;
        self.settle()?;
        if self.standing.steps == 0 {
            return Err(Error::NoExamples { what: "train on" }.into());
        }
        let whole = sums_of_all(trainer.strategy(), &self.sums)?;
        // An elastic job: the processes that made the steps are lost, and this one joined later.
        self.without_training = whole[1] == 0.0;
        let mut values = match self.without_training {
            true => Vec::new(),
            false => results(trainer.metrics(), &whole),
        };
        if self.without_training && trainer.strategy().is_chief() {
            distribute_notice::warn!(
                "epoch {} has no loss and no metrics of training: the processes that made its steps were lost before \
                 these were added up; callbacks that watch them skip this epoch",
                self.epoch
            );
        }
        trainer.synchronize()?;
        if let Some(Validated { data, steps, pass }) = validated {
            progress.activity(Activity::Validating);
            let of_validation = evaluate_distributed(trainer, data, steps, pass)?;
            values.extend(of_validation.into_iter().map(|(name, value)| (format!("val_{name}"), value)));
        }
        let shown: Vec<(&str, f64)> = values.iter().map(|(name, value)| (name.as_str(), *value)).collect();
        progress.end_epoch(&shown);
        self.tell(callbacks, &values, |callback, training| callback.epoch_end(training))?;
        self.agree()?;
        Ok(values)
    }

    /// Takes an epoch into the history. Nothing that can fail lies between the changes.
    fn close_epoch(&mut self, epoch: u32, values: &[(String, f64)]) {
        let standing = &mut self.standing;
        standing.history.push(epoch, values);
        (standing.epochs_done, standing.steps) = (epoch, 0);
        (standing.all_steps, standing.unsaved) = (false, true);
        standing.ended.clone_from(&self.stop);
        self.sums = zeros(self.trainer);
    }

    fn last_values(&self) -> Vec<(String, f64)> {
        self.standing.history.epochs.last().map(|(_, values)| values.clone()).unwrap_or_default()
    }
}

/// The data on which a model is evaluated at the end of an epoch.
struct Validated<'a, T: Trainee> {
    data: &'a DistributedDataset<T::Examples>,
    steps: Option<usize>,
    /// The number of the pass over them, from 0.
    pass: u64,
}

/// Logs the memory of the chief, after the first epoch, when everything has been allocated.
fn tell_memory<T: Trainee>(trainer: &T) {
    let Some(memory) = trainer.memory().filter(|_| trainer.strategy().is_chief()) else { return };
    let peak =
        progress::peak_memory_bytes().map(|bytes| format!("; peak of the process {} MiB", bytes.div_ceil(1 << 20)));
    tracing::info!("memory of a replica: {memory}{}", peak.unwrap_or_default());
}

/// Starts the progress; without a title it is shown on status pages only.
fn show<T: Trainee>(trainer: &T, title: Option<&str>, epochs: u32, steps_per_epoch: Option<u64>) -> Result<Progress> {
    let strategy = trainer.strategy();
    let described = format!("{} · {} params", trainer.describe(), trainer.num_parameters());
    let options = progress::Options {
        title: title.map_or(described.clone(), |title| format!("{title} · {described}")),
        epochs,
        steps_per_epoch,
        ..progress::Options::of(strategy)
    };
    if title.is_some() { Progress::from_env(options) } else { Progress::new(options, Form::Off) }
}

#[cfg(test)]
mod tests;
