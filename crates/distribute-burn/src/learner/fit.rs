//! The loop over epochs and steps.

use std::collections::HashSet;
use std::sync::Arc;

use burn::data::dataloader::Progress;
use burn::module::{Module, ModuleVisitor, Param, ParamId};
use burn::tensor::Tensor;
use burn::train::metric::store::EventStoreClient;
use burn::train::train::WorkerFailure;
use burn::train::{
    EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearnerModel,
    SupervisedTrainingEventProcessor, TrainLoader, TrainStep, TrainingComponents, TrainingError, TrainingItem,
    ValidLoader,
};
use distribute_collectives::ReduceOp;
use distribute_strategy::{ReplicaContext, Strategy};
use distribute_types::ErrorClass;
use distribute_values::{Axis, PerReplica};
use parking_lot::Mutex;

use super::agreement::{Agreement, Round};
use super::data::{Batch, Feed, shares};
use super::owners::Owners;
use super::replica::{Reduction, Replica};
use super::watch::Meanwhile;
use super::{DataParallel, start};
use crate::model::draw_apart;
use crate::statistics::{Place, by_id, set_values, values_of};
use crate::visit::describe;
use crate::{BurnTensor, Error, Result};

type Input<M> = <M as TrainStep>::Input;
type Output<M> = <M as TrainStep>::Output;

pub(super) fn fit<M: LearnerModel>(
    training: &DataParallel,
    components: TrainingComponents<M>,
    learner: Learner<M>,
    train: TrainLoader<M>,
    valid: ValidLoader<M>,
    starting_epoch: usize,
) -> (M, SupervisedTrainingEventProcessor<M>) {
    let strategy = &training.strategy;
    let interrupter = components.interrupter.clone();
    let _report = ReportPanic(strategy);
    let mut model = learner.model();
    let mut components = Components {
        events: Events {
            processor: components.event_processor,
            is_chief: strategy.is_chief(),
            interrupter: interrupter.clone(),
        },
        store: components.event_store,
        // Files are the chief's.
        checkpointer: components.checkpointer.filter(|_| strategy.is_chief()),
        early_stopping: components.early_stopping.filter(|_| strategy.is_chief()),
        epochs: (starting_epoch, components.num_epochs),
        accumulation: components.grad_accumulation.unwrap_or(1),
    };
    let outcome = Fit::prepare(training, &mut components, &interrupter, learner, &train, &valid).and_then(|fit| {
        let outcome = fit.run(&mut components);
        if outcome.is_err() {
            fit.keep_first_statistics()?;
        }
        model = fit.replicas[0].lock().learner.model();
        outcome
    });
    if let Err(error) = strategy.report_failure_as(outcome, ErrorClass::failure_kind) {
        interrupter.fail(failure(strategy, &error));
    }
    (model, components.events.processor)
}

/// Returns burn's error of a worker for one of this crate's, which names the replica.
fn failure(strategy: &Strategy, error: &Error) -> TrainingError {
    let own = strategy.topology().first_replica();
    let device_id = match error {
        Error::Strategy(distribute_strategy::Error::ReplicaPanicked { replica, .. }) => *replica,
        _ => own,
    };
    TrainingError::Workers(vec![WorkerFailure { device_id, message: error.to_string() }])
}

/// Tells the other workers of a panic outside steps, such as one in validation or in a renderer.
struct ReportPanic<'a>(&'a Strategy);

impl Drop for ReportPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = self.0.report_failure(Err::<(), _>("it panicked outside a step, in validation or in an event"));
        }
    }
}

/// burn's components, as this worker uses them.
struct Components<M: LearnerModel> {
    events: Events<M>,
    store: Arc<EventStoreClient>,
    checkpointer: Option<burn::train::LearningCheckpointer<M>>,
    early_stopping: Option<Box<dyn burn::train::CloneEarlyStoppingStrategy>>,
    /// The first and the last epoch.
    epochs: (usize, usize),
    /// The number of steps whose gradients are summed.
    accumulation: usize,
}

/// The events of the chief; other workers have none.
struct Events<M: LearnerModel> {
    processor: SupervisedTrainingEventProcessor<M>,
    is_chief: bool,
    interrupter: Interrupter,
}

impl<M: LearnerModel> Events<M> {
    fn train(&mut self, event: LearnerEvent<Output<M>>) {
        if self.is_chief {
            self.interrupter.fail_on_error(self.processor.process_train(event));
        }
    }

    fn valid(&mut self, event: LearnerEvent<<M as InferenceStep>::Output>) {
        if self.is_chief {
            self.interrupter.fail_on_error(self.processor.process_valid(event));
        }
    }

    fn flush(&mut self) {
        if self.is_chief {
            self.interrupter.fail_on_error(self.processor.flush());
        }
    }
}

struct Fit<'a, M: LearnerModel> {
    strategy: &'a Strategy,
    interrupter: &'a Interrupter,
    replicas: Vec<Mutex<Replica<M>>>,
    /// The reduction of gradients while backward runs, if steps allow it.
    meanwhile: Option<Meanwhile>,
    /// The owners of parameters, if the optimizer's state is in parts.
    owners: Option<Arc<Owners>>,
    /// The training data of each replica.
    loaders: Vec<TrainLoader<M>>,
    /// The validation data of the chief.
    valid: ValidLoader<M>,
    /// The number of items of one epoch, over all workers.
    items: u64,
    /// The running statistics of the model.
    statistics: Vec<ParamId>,
    /// Whether the statistics are told from other tensors without gradients, so that their means can be taken.
    is_averaged: bool,
}

impl<'a, M: LearnerModel> Fit<'a, M> {
    fn prepare(
        training: &'a DataParallel,
        components: &mut Components<M>,
        interrupter: &'a Interrupter,
        mut learner: Learner<M>,
        train: &TrainLoader<M>,
        valid: &ValidLoader<M>,
    ) -> Result<Fit<'a, M>> {
        let strategy = &training.strategy;
        start::check_replicas(strategy)?;
        let model = learner.model();
        let device = start::device(strategy, &model, 0)?;
        for local in 1..strategy.num_local_replicas() {
            start::device(strategy, &model, local)?;
        }
        let (first, last) = components.epochs;
        let mut settings = vec![
            format!("first epoch: {first}"),
            format!("epochs: {last}"),
            format!("steps whose gradients are accumulated: {}", components.accumulation),
            format!("loaders of their own for workers: {}", training.has_own_loaders),
            format!("gradients reduced after backward: {}", training.reduces_after_backward),
        ];
        if !training.has_own_loaders {
            settings.push(format!("items of the training loader: {}", train.num_items()));
        }
        start::compare(strategy, &model, settings)?;
        let is_restored = first > 1 && components.checkpointer.is_some();
        start::equalise(strategy, &mut learner, &components.store, is_restored)?;
        draw_apart(strategy, &model)?;
        learner.fork(&device);
        if strategy.is_chief() {
            start::warn_of_clones(&learner.model());
        }
        let described = describe(&learner.model());
        let is_averaged = described.is_ok();
        let locals = strategy.num_local_replicas();
        let statistics = match described {
            Ok(described) => start::statistics(described, locals)?,
            Err(_) => untrained(&learner.model()),
        };
        let own_statistics = (locals > 1).then(|| Arc::new(statistics.iter().copied().collect()));
        let meanwhile = match training.reduces_after_backward {
            true => None,
            false => Meanwhile::new(strategy, &learner.model())?,
        };
        let owners = Owners::new(strategy, &learner.model())?.map(Arc::new);
        // Of the state of an optimizer that has one, as a resumed one does, a replica needs its part.
        let state = owners.is_some().then(|| start::optimizer_state(&learner, &components.store)).transpose()?;
        let replica = |local| {
            let mut own = learner.clone();
            if let (Some(owners), Some(state), Some(sharding)) = (&owners, &state, strategy.sharding()) {
                let part = sharding.part_of(strategy.topology().first_replica() + local);
                own.load_optim(start::record(&owners.part_of_state(state, part)?)?);
            }
            let meanwhile = meanwhile.as_ref().map(|meanwhile| (meanwhile, local));
            Ok(Mutex::new(Replica::new(&own, &device, own_statistics.clone(), meanwhile, owners.clone())?))
        };
        let replicas = (0..locals).map(replica).collect::<Result<_>>()?;
        let loaders = shares(training, train, &device);
        let valid = valid.to_device(&device.inner());
        let mut fit = Fit {
            strategy,
            interrupter,
            replicas,
            meanwhile,
            owners,
            loaders,
            valid,
            items: 0,
            statistics,
            is_averaged,
        };
        fit.items = train.num_items() as u64;
        if training.has_own_loaders {
            let sum = fit.agreement().sum(Round { rows: fit.items, ..Round::default() })?;
            fit.items = sum.map_or(fit.items, |sum| sum.rows);
        }
        Ok(fit)
    }

    fn agreement(&self) -> Agreement<'_> {
        Agreement { strategy: self.strategy, interrupter: self.interrupter }
    }

    fn run(&self, components: &mut Components<M>) -> Result<()> {
        let (first, last) = components.epochs;
        for epoch in first..=last {
            components.events.train(LearnerEvent::StartSplit { epoch_number: epoch, total_items: self.items as usize });
            let is_complete = self.train(components)?;
            components.events.train(LearnerEvent::EndSplit(epoch));
            self.average_statistics()?;
            if !is_complete {
                return Ok(());
            }
            let total_items = self.valid.num_items();
            components.events.valid(LearnerEvent::StartSplit { epoch_number: epoch, total_items });
            let is_complete =
                if self.strategy.is_chief() { self.validate(components)? } else { self.follow_validation()? };
            components.events.valid(LearnerEvent::EndSplit(epoch));
            components.events.train(LearnerEvent::EndEpoch(epoch));
            if !is_complete || self.end_epoch(components, epoch)? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Makes the steps of one epoch. Returns whether it came to its end.
    fn train(&self, components: &mut Components<M>) -> Result<bool> {
        let first = self.strategy.topology().first_replica();
        let feeds = self.loaders.iter().enumerate().map(|(local, loader)| Feed::start(loader.clone(), first + local));
        let feeds: Vec<Feed<Input<M>>> = feeds.collect::<Result<_>>()?;
        let (mut processed, mut pending) = (0, 0);
        for iteration in 1.. {
            let batches = feeds.iter().map(|feed| feed.next(self.strategy, self.interrupter));
            let batches: Vec<Option<Batch<Input<M>>>> = batches.collect::<Result<_>>()?;
            let own = batches.iter().flatten().map(|batch| batch.rows).sum();
            let Some(Round { rows, .. }) = self.agreement().sum(Round { rows: own, ..Round::default() })? else {
                return Ok(false);
            };
            if rows == 0 {
                break;
            }
            processed += rows;
            pending += 1;
            let is_applied = pending >= components.accumulation;
            let outputs = self.step(batches, rows, is_applied)?;
            if is_applied {
                pending = 0;
            }
            let lr = self.replicas[0].lock().learner.lr_current();
            let (processed, items) = (processed as usize, self.items as usize);
            for output in outputs.into_iter().flatten() {
                let progress = Progress::new(processed, items, Some("items".to_owned()));
                let item = TrainingItem::new(output, progress, Some(iteration), Some(lr.clone()));
                components.events.train(LearnerEvent::ProcessedItem(item));
            }
        }
        if pending > 0 {
            // The last steps of an epoch are applied even if they are fewer, as by burn.
            self.step(self.loaders.iter().map(|_| None).collect(), 1, true)?;
        }
        Ok(true)
    }

    /// Runs the model on the replicas' batches, of `rows` rows on all replicas; if `is_applied`, also updates it.
    fn step(
        &self,
        batches: Vec<Option<Batch<Input<M>>>>,
        rows: u64,
        is_applied: bool,
    ) -> Result<Vec<Option<Output<M>>>> {
        let batches = PerReplica::new(batches);
        let step = |context: &ReplicaContext, reduction: Reduction<'_>, batch| {
            self.replicas[context.local_replica_id()].lock().step(context, reduction, batch, (rows, is_applied))
        };
        let outputs = match &self.meanwhile {
            Some(meanwhile) => {
                self.strategy.run_with((&meanwhile.optimizer, batches), |context, (optimizer, batch)| {
                    step(context, Some((meanwhile, optimizer)), batch)
                })
            }
            None => self.strategy.run_with(batches, |context, batch| step(context, None, batch)),
        };
        Ok(outputs?.into_values())
    }

    /// Validates on the chief. Returns whether that came to its end.
    fn validate(&self, components: &mut Components<M>) -> Result<bool> {
        let model = self.replicas[0].lock().learner.model().valid();
        let mut batches = self.valid.iter();
        for iteration in 1.. {
            let batch = batches.next().transpose();
            let batch = batch.unwrap_or_else(|error| {
                self.interrupter.fail(error);
                None
            });
            let round = Round { batches: u64::from(batch.is_some()), ..Round::default() };
            if self.agreement().sum(round)?.is_none() {
                return Ok(false);
            }
            let Some(batch) = batch else { break };
            let progress = batches.progress();
            let output = InferenceStep::step(&model, batch);
            let item = TrainingItem::new(output, progress, Some(iteration), None);
            components.events.valid(LearnerEvent::ProcessedItem(item));
        }
        Ok(true)
    }

    /// Waits for the chief's validation. Returns whether that came to its end.
    fn follow_validation(&self) -> Result<bool> {
        loop {
            match self.agreement().sum(Round::default())? {
                Some(Round { batches: 0, .. }) => return Ok(true),
                Some(_) => {}
                None => return Ok(false),
            }
        }
    }

    /// Saves a checkpoint, and returns whether training ends: because it was interrupted, or early.
    fn end_epoch(&self, components: &mut Components<M>, epoch: usize) -> Result<bool> {
        if components.checkpointer.is_some() || components.early_stopping.is_some() {
            components.events.flush();
        }
        let saves = Round { batches: u64::from(components.checkpointer.is_some()), ..Round::default() };
        let Some(Round { batches: saves, .. }) = self.agreement().sum(saves)? else { return Ok(true) };
        let Components { store, checkpointer, early_stopping, .. } = components;
        let mut learner = self.replicas[0].lock().learner.clone();
        if saves > 0
            && let Some(owners) = &self.owners
        {
            let learners = self.replicas.iter().map(|replica| replica.lock().learner.clone());
            if let Some(state) = owners.whole_state(self.strategy, learners, store)? {
                learner.load_optim(start::record(&state)?);
            }
        }
        if let Some(checkpointer) = checkpointer {
            checkpointer.checkpoint(&learner, epoch, store);
        }
        let ends = early_stopping.as_mut().is_some_and(|early| early.should_stop(epoch, store));
        let round = self.agreement().sum(Round { ends: u64::from(ends), ..Round::default() })?;
        Ok(round.is_none_or(|round| round.ends > 0))
    }

    /// Replaces running statistics by their mean over replicas, for the learners' models too.
    fn average_statistics(&self) -> Result<()> {
        if self.strategy.num_replicas_in_sync() == 1 || self.statistics.is_empty() {
            return Ok(());
        }
        if !self.is_averaged {
            return self.keep_first_statistics();
        }
        let models: Vec<M> = self.replicas.iter().map(|replica| replica.lock().model()).collect();
        let values =
            models.iter().map(|model| values_of(model, self.of_statistics())).collect::<Result<Vec<_>, _>>()?;
        let mut means = Vec::with_capacity(self.statistics.len());
        for index in 0..self.statistics.len() {
            let of_replicas = values.iter().map(|values| BurnTensor::new(values[index].clone())).collect();
            means.push(self.strategy.reduce(ReduceOp::Mean, &PerReplica::new(of_replicas), Axis::None)?.flex());
        }
        let learners = self.replicas.iter().map(|replica| replica.lock().learner.model());
        models.into_iter().chain(learners).for_each(|model| set_values(&model, self.of_statistics(), &means));
        Ok(())
    }

    /// Gives the learners' models the running statistics of the first local replica.
    fn keep_first_statistics(&self) -> Result<()> {
        let first = self.replicas[0].lock();
        let values = values_of(&first.model(), self.of_statistics())?;
        set_values(&first.learner.model(), self.of_statistics(), &values);
        Ok(())
    }

    fn of_statistics(&self) -> impl Place {
        by_id(&self.statistics)
    }
}

/// Returns the ids of tensors that have no gradient, and no clone that has one.
fn untrained<M: Module>(model: &M) -> Vec<ParamId> {
    #[derive(Default)]
    struct Untrained(Vec<ParamId>, HashSet<ParamId>);
    impl ModuleVisitor for Untrained {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if param.base().is_require_grad() {
                self.1.insert(param.id);
            } else if !self.0.contains(&param.id) {
                self.0.push(param.id);
            }
        }
    }
    let mut untrained = Untrained::default();
    model.visit(&mut untrained);
    let Untrained(mut ids, trained) = untrained;
    ids.retain(|id| !trained.contains(id));
    ids
}
