//! The coordinator's side: steps that are scheduled ahead, and their sums.

use std::collections::{BTreeSet, VecDeque};
use std::sync::atomic::AtomicU64;

use candle_core::{Device, ModuleT, Tensor};
use distribute_parameter_server::{
    ClusterCoordinator, ParameterServerStrategy, RemoteValue, RemoteValueStatus, Updates,
};
use distribute_strategy::Strategy;
use distribute_train::BoxError;
use distribute_train::checkpoint::{Checkpointed, Snapshot};
use distribute_train::trainer::{self, BATCH_SIZE, Settings};
use distribute_types::{Classified, ErrorClass, FailureKind};
use parking_lot::Mutex;

use super::ServedTraining;
use super::data::Steps;
use super::functions::{DESCRIBE, EVALUATE, Made, STEP, Step};
use crate::{CandleParameterServer, Error, PredictionData, Result};

/// A training whose steps are made by workers.
pub(super) struct Coordination<M> {
    pub(super) training: ServedTraining<M>,
    pub(super) strategy: ParameterServerStrategy,
    /// The strategy of this process, which trains nothing.
    pub(super) here: Strategy,
    coordinator: ClusterCoordinator,
    optimizer: u32,
    state: Mutex<State>,
    pub(super) passes: AtomicU64,
}

/// Accessed by the thread that trains; no wait happens while it is locked.
struct State {
    step: Step,
    under_way: VecDeque<RemoteValue>,
    /// The sums of steps that have ended, until the loop takes them.
    sums: Vec<f64>,
    /// Whether the loop has got sums since it last waited for all steps.
    is_begun: bool,
    /// An error that the loop could not be told.
    failed: Option<Error>,
    /// Whether a server may have another learning rate than the others.
    has_unequal_rates: bool,
    /// The number of the next step, once it is known, if the coordinator can be restarted in place.
    next: Option<u64>,
    /// Whether a step has got its number.
    is_numbered: bool,
}

/// Steps that are scheduled ahead, for each worker.
const AHEAD: usize = 2;

/// Parts of an evaluation for each worker, as in TensorFlow: a lost one takes only its part with it.
const PARTS: usize = 5;

impl<M: ModuleT + Send + Sync + 'static> Coordination<M> {
    pub(super) fn new(training: ServedTraining<M>, strategy: &ParameterServerStrategy) -> Result<Coordination<M>> {
        let here = Strategy::default_strategy()?;
        let optimizer = strategy.create_model(training.optimizer, |vb| (training.build)(vb))?;
        let coordinator = ClusterCoordinator::new(strategy, training.program())?;
        let step = Step {
            optimizer,
            dataset: String::new(),
            run: 0,
            first_pass: 0,
            next_pass: 0,
            begun: BTreeSet::new(),
            class_weights: Vec::new(),
        };
        let sums = trainer::sums(training.measures.metrics());
        let state = State {
            step,
            under_way: VecDeque::new(),
            sums,
            is_begun: false,
            failed: None,
            has_unequal_rates: false,
            next: None,
            is_numbered: false,
        };
        let strategy = strategy.clone();
        Ok(Coordination {
            training,
            strategy,
            here,
            coordinator,
            optimizer,
            state: Mutex::new(state),
            passes: AtomicU64::new(0),
        })
    }

    /// Prepares a training run on a dataset; returns its steps.
    pub(super) fn begin(&self, dataset: &str, settings: Settings) -> Result<Steps> {
        self.training.find(dataset)?;
        let Some(count) = settings.steps_per_epoch else {
            return Err(refused("an epoch on parameter servers has no end of its own; set steps_per_epoch"));
        };
        if settings.validation_steps.is_some() {
            let problem = "validation_steps has no effect on parameter servers, where workers evaluate parts of the \
                           data at once; limit the dataset in its function";
            return Err(refused(problem));
        }
        let contributions = self.contributions() as u64;
        if !count.is_multiple_of(contributions) {
            let problem = format!(
                "an epoch has {count} steps, and {contributions} of them make one update; set steps_per_epoch to a \
                 multiple of {contributions}"
            );
            return Err(refused(problem));
        }
        // As many as make a round, so that no part of one is left.
        let described: Vec<Option<usize>> =
            self.coordinator.evaluate(DESCRIBE, self.contributions(), &dataset.to_owned())?;
        let mut state = self.state.lock();
        state.step.dataset = dataset.to_owned();
        state.step.run += 1;
        // Workers that read their data once more do so in another order.
        state.step.read_from(0);
        state.step.begun.clear();
        state.is_begun = false;
        Ok(Steps { count, batch_size: described.into_iter().flatten().next().unwrap_or(1) })
    }

    /// Ends a training run: no step is left under way. Returns the outcome, or the first error that the loop could not
    /// be told.
    pub(super) fn end<T>(&self, outcome: Result<T>) -> Result<T> {
        let under_way = std::mem::take(&mut self.state.lock().under_way);
        if !under_way.is_empty() {
            // The run has failed already, and its error tells more.
            drop(self.coordinator.join());
        }
        let failed = {
            let mut state = self.state.lock();
            state.sums = trainer::sums(self.training.measures.metrics());
            state.failed.take()
        };
        self.report(failed.map_or(outcome, Err))
    }

    /// Returns an outcome unchanged, and records a failure, with which workers and servers end.
    pub(super) fn report<T>(&self, outcome: Result<T>) -> Result<T> {
        if let Err(error) = &outcome {
            let kind = match error {
                // The next run of this program continues with the same workers and servers.
                Error::Train(distribute_train::Error::Preempted { .. } | distribute_train::Error::Unsaved { .. }) => {
                    FailureKind::Retryable
                }
                // What the servers have kept outlives a program that cannot continue with it.
                Error::Train(distribute_train::Error::StepsUnknown { .. }) => FailureKind::Retryable,
                error => error.failure_kind(),
            };
            self.strategy.report_failure(error, kind);
        }
        outcome
    }

    /// Returns how many steps the servers have made, and numbers the steps of the run from there on, if the coordinator
    /// can be restarted in place. Further runs count on.
    pub(super) fn steps_made(&self, known: u64) -> distribute_train::Result<u64> {
        if !self.strategy.restarts_in_place() || self.state.lock().is_numbered {
            return Ok(known);
        }
        let confirmed = self.strategy.confirm_steps(known);
        let made = confirmed.map_err(|error| distribute_train::Error::Part(Classified::new(error).into()))?;
        self.strategy.first_step();
        let mut state = self.state.lock();
        state.next = Some(made);
        // Those whose position is lost do not read again what the coordinator before has trained on.
        state.step.read_from(made);
        Ok(made)
    }

    /// Schedules steps, and returns the sums of those that have ended.
    pub(super) fn train(&self, steps: usize, class_weights: &[f32]) -> Result<Vec<f64>> {
        let (mut step, failed, is_begun) = {
            let mut state = self.state.lock();
            class_weights.clone_into(&mut state.step.class_weights);
            (state.step.clone(), state.failed.take(), std::mem::replace(&mut state.is_begun, true))
        };
        if let Some(error) = failed {
            return Err(error);
        }
        for _ in 0..steps {
            let number = self.state.lock().next;
            let scheduled = match number {
                None => self.coordinator.schedule(STEP, &step),
                Some(number) => self.coordinator.schedule_step(number, STEP, &step),
            };
            let scheduled = scheduled.map_err(|error| self.failed(error.into()))?;
            let mut state = self.state.lock();
            state.step.next_pass += 1;
            step.next_pass = state.step.next_pass;
            state.next = number.map(|number| number + 1);
            state.is_numbered |= number.is_some();
            state.under_way.push_back(scheduled);
        }
        let ahead = AHEAD * self.strategy.num_workers();
        // The loop shows a loss after each call, so there is one from the start.
        let first = self.state.lock().under_way.len().saturating_sub(1);
        self.wait(if is_begun { ahead } else { ahead.min(first) })?;
        self.here.agree_alone();
        Ok(self.take_sums())
    }

    /// Waits for all steps, and returns their sums.
    pub(super) fn settle(&self) -> Result<Vec<f64>, BoxError> {
        self.drain()?;
        Ok(self.take_sums())
    }

    /// Waits for all steps. An error is kept for the end of the run, and its message returned.
    fn drain(&self) -> Result<(), BoxError> {
        let failed = self.state.lock().failed.take();
        let outcome = failed.map_or_else(|| self.wait(0), Err);
        self.state.lock().is_begun = false;
        outcome.map_err(|error| {
            let message = error.to_string();
            self.state.lock().failed = Some(error);
            message.into()
        })
    }

    /// Waits until at most `left` steps are under way, and adds the sums of those that have ended.
    fn wait(&self, left: usize) -> Result<()> {
        let mut under_way = std::mem::take(&mut self.state.lock().under_way);
        while let Some(step) = next_ended(&mut under_way, left) {
            let Made { worker, sums } = match step.fetch::<Option<Made>>() {
                Ok(Some(made)) => made,
                Ok(None) => return Err(self.failed(distribute_train::Error::NoExamples { what: "train on" }.into())),
                Err(error) => return Err(self.failed(error.into())),
            };
            let mut state = self.state.lock();
            state.step.begun.insert(worker);
            state.sums.iter_mut().zip(sums).for_each(|(sum, more)| *sum += more);
        }
        self.state.lock().under_way = under_way;
        Ok(())
    }

    /// Waits until the steps under way have ended or are cancelled; returns the first error of a function, which the
    /// coordinator returns once, else the given one.
    fn failed(&self, error: Error) -> Error {
        self.state.lock().under_way.clear();
        self.coordinator.join().map_or_else(Error::from, |()| error)
    }

    fn take_sums(&self) -> Vec<f64> {
        let zeros = trainer::sums(self.training.measures.metrics());
        std::mem::replace(&mut self.state.lock().sums, zeros)
    }

    /// Lets workers compute the sums over all batches of a dataset.
    pub(super) fn evaluate(&self, dataset: &str) -> Result<Vec<f64>> {
        let parts = (PARTS * self.strategy.num_workers()).next_multiple_of(self.contributions());
        let of_parts: Vec<Vec<f64>> = self.coordinator.evaluate(EVALUATE, parts, &dataset.to_owned())?;
        let mut all = trainer::sums(self.training.measures.metrics());
        for sums in of_parts {
            all.iter_mut().zip(sums).for_each(|(sum, more)| *sum += more);
        }
        Ok(all)
    }

    /// Computes outputs in this process, with the values that variables have on the servers now.
    pub(super) fn predict(&self, data: &impl PredictionData) -> Result<Tensor> {
        let model = self.strategy.read_model(|vb| (self.training.build)(vb))?;
        let mut outputs = Vec::new();
        for batch in &data.distribute(&self.here, BATCH_SIZE)? {
            for inputs in batch?.into_values() {
                outputs.push(model.forward_t(&inputs.to_device(&Device::Cpu)?, false)?.detach());
            }
        }
        if outputs.is_empty() { Err(Error::NoExamples { what: "predict" }) } else { Ok(Tensor::cat(&outputs, 0)?) }
    }

    pub(super) fn learning_rate(&self) -> f64 {
        self.strategy.learning_rate(self.optimizer).unwrap_or(self.training.optimizer.learning_rate)
    }

    /// Sets the learning rate of steps that are scheduled from now on. An error is kept for the next step.
    pub(super) fn set_learning_rate(&self, learning_rate: f64) {
        let is_set = learning_rate.to_bits() == self.learning_rate().to_bits() && !self.state.lock().has_unequal_rates;
        if is_set || self.drain().is_err() {
            return;
        }
        let told = self.strategy.set_learning_rate(self.optimizer, learning_rate);
        let mut state = self.state.lock();
        state.has_unequal_rates = told.is_err();
        if let Err(error) = told {
            state.failed = Some(error.into());
        }
    }

    pub(super) fn num_parameters(&self) -> usize {
        let variables = self.strategy.variables();
        let trained = variables.iter().filter(|variable| variable.info().trainable);
        trained.map(|variable| variable.shape().iter().product::<usize>()).sum()
    }

    /// Returns the number of steps that make one update.
    fn contributions(&self) -> usize {
        match self.strategy.updates() {
            Updates::Synchronous { contributions, .. } => contributions,
            _ => 1,
        }
    }
}

/// Variables, slots and step counts, which the servers hold together.
impl<M: ModuleT + Send + Sync + 'static> Checkpointed for Coordination<M> {
    fn streams(&self) -> bool {
        self.strategy.streams()
    }

    fn save(&self, strategy: &Strategy, snapshot: &mut Snapshot) -> Result<(), BoxError> {
        self.drain()?;
        self.strategy.save(strategy, snapshot)
    }

    fn load(&self, strategy: &Strategy, snapshot: &Snapshot) -> Result<(), BoxError> {
        self.drain()?;
        self.strategy.load(strategy, snapshot)?;
        // Workers that read their data anew do so in another order than from the start.
        self.state.lock().step.read_from(snapshot.step());
        Ok(())
    }
}

/// The optimizer's part of a checkpoint, which is saved with the model.
pub(super) struct WithModel;

impl Checkpointed for WithModel {
    fn save(&self, _: &Strategy, _: &mut Snapshot) -> Result<(), BoxError> {
        Ok(())
    }

    fn load(&self, _: &Strategy, _: &Snapshot) -> Result<(), BoxError> {
        Ok(())
    }
}

/// Takes a step that has ended, or the oldest one if more than `left` are under way.
fn next_ended(under_way: &mut VecDeque<RemoteValue>, left: usize) -> Option<RemoteValue> {
    match under_way.iter().position(|step| step.status() != RemoteValueStatus::NotReady) {
        Some(ended) => under_way.remove(ended),
        None if under_way.len() > left => under_way.pop_front(),
        None => None,
    }
}

fn refused(problem: impl Into<String>) -> Error {
    Error::Served { problem: problem.into() }
}
