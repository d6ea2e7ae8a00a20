//! A replica: burn's learner, and the model that it trains.

use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::{Device, Tensor};
use burn::train::{Learner, LearnerModel, TrainStep};
use burn_flex::FlexTensor;
use distribute_collectives::ReduceOp;
use distribute_strategy::ReplicaContext;

use super::data::Batch;
use super::gradients::Accumulated;
use super::owners::Owners;
use super::watch::Meanwhile;
use crate::hook::replaced;
use crate::tensor::{flex_of, tensor_on};
use crate::{Error, ReplicaOptimizer, Result};

/// A replica of this process.
pub(super) struct Replica<M: LearnerModel> {
    pub(super) learner: Learner<M>,
    /// The model of the steps, if the learner's is not.
    ///
    /// Learners cannot be given a model, and their clones' models share running statistics. Backward of one replica
    /// would then consume the graph of another, which the statistics connect.
    own: Option<M>,
    /// The model of the steps with watched parameters, on the same running statistics.
    watched: Option<M>,
    way: Way,
    gradients: Accumulated,
    /// The owners of parameters, if the optimizer's state is in parts.
    owners: Option<Arc<Owners>>,
}

/// When gradients are reduced.
#[derive(Clone, Copy)]
enum Way {
    /// After backward.
    After,
    /// After backward, until the first step of the optimizer has shown whether steps give back the gradients of their
    /// backward as they are.
    First { are_unchanged: bool },
    /// While backward runs.
    Meanwhile,
}

/// The reduction while backward runs, as a step uses it.
pub(super) type Reduction<'a> = Option<(&'a Meanwhile, ReplicaOptimizer<'a>)>;

impl<M: LearnerModel> Replica<M> {
    /// Creates a replica; if `is_one_of_several` in its process, with running statistics of its own.
    pub(super) fn new(
        learner: &Learner<M>,
        device: &Device,
        is_one_of_several: bool,
        meanwhile: Option<(&Meanwhile, usize)>,
        owners: Option<Arc<Owners>>,
    ) -> Result<Replica<M>> {
        let mut learner = learner.clone();
        // Leaves of a graph of its own.
        learner.fork(device);
        let own = match is_one_of_several {
            // Validation has statistics of its own. It forgets whether activations are recomputed.
            true => {
                Some(updated(learner.model().valid().train().fork(device), &learner.model(), |_| true, Some(device))?)
            }
            false => None,
        };
        let watched = meanwhile
            .map(|(meanwhile, local)| meanwhile.watched(own.clone().unwrap_or_else(|| learner.model()), local));
        let way = if watched.is_some() { Way::First { are_unchanged: true } } else { Way::After };
        Ok(Replica { learner, own, watched, way, gradients: Accumulated::default(), owners })
    }

    /// Returns the model of the steps, with its running statistics.
    pub(super) fn model(&self) -> M {
        self.watched.as_ref().or(self.own.as_ref()).cloned().unwrap_or_else(|| self.learner.model())
    }

    /// Runs the model on this replica's batch, if there is one, of `rows` rows on all replicas; if `is_applied`, also
    /// makes a step of the optimizer with the gradients of all replicas.
    pub(super) fn step<I>(
        &mut self,
        context: &ReplicaContext,
        reduction: Reduction<'_>,
        batch: Option<Batch<I>>,
        (rows, is_applied): (u64, bool),
    ) -> Result<Option<<M as TrainStep>::Output>>
    where
        M: TrainStep<Input = I>,
    {
        let weight = batch.as_ref().map_or(0.0, |batch| batch.rows as f64 / rows as f64);
        if let (Some((meanwhile, optimizer)), Way::Meanwhile) = (reduction, self.way) {
            let mut output = None;
            let backward = || {
                if let Some(batch) = batch {
                    let model = self.model();
                    output = Some(watched_step(meanwhile, context, &model, batch, weight)?);
                }
                Ok(())
            };
            if !is_applied {
                optimizer.accumulate_by(context, backward)?;
                return Ok(output);
            }
            optimizer.minimize_by(context, backward)?;
            let local = context.local_replica_id();
            self.update(context, meanwhile.gradients(&self.learner.model(), local))?;
            meanwhile.store(&self.learner.model(), local)?;
            return Ok(output);
        }
        let output = batch.map(|batch| self.train(context, reduction, batch, weight)).transpose()?;
        if is_applied {
            let reduced = self.gradients.reduce(context, &self.model())?;
            self.update(context, reduced)?;
            self.decide(context, reduction)?;
        }
        Ok(output)
    }

    /// Runs the model on a batch, whose gradients are reduced later.
    fn train<I>(
        &mut self,
        context: &ReplicaContext,
        reduction: Reduction<'_>,
        batch: Batch<I>,
        weight: f64,
    ) -> Result<<M as TrainStep>::Output>
    where
        M: TrainStep<Input = I>,
    {
        let model = self.model();
        let trained = match (reduction, &mut self.way) {
            (Some((meanwhile, _)), Way::First { are_unchanged }) => {
                let watch = &meanwhile.watches[context.local_replica_id()];
                watch.start(weight);
                let trained = TrainStep::step(&model, batch.input);
                *are_unchanged &= meanwhile.are_unchanged(&model, &trained.grads, &watch.end());
                trained
            }
            _ => TrainStep::step(&model, batch.input),
        };
        self.gradients.add(&model, trained.grads, weight)?;
        Ok(trained.item)
    }

    /// Makes a step of the optimizer, and brings the models of the steps up to date.
    fn update(&mut self, context: &ReplicaContext, reduced: GradientsParams) -> Result<()> {
        self.learner.lr_step();
        match &self.owners {
            Some(owners) => {
                self.learner.optimizer_step(owners.own(context, &self.learner.model(), reduced));
                let values = owners.exchange(context, &self.learner.model())?;
                let exchanged = self.learner.model().map(&mut Load { values, device: None });
                self.learner.load_model(exchanged.into_record());
            }
            None => self.learner.optimizer_step(reduced),
        }
        for model in [&mut self.own, &mut self.watched] {
            if let Some(old) = model.take() {
                *model = Some(updated(old, &self.learner.model(), |is_trained| is_trained, None)?);
            }
        }
        Ok(())
    }

    /// Agrees with all replicas after the first step whether later ones reduce gradients while backward runs.
    fn decide(&mut self, context: &ReplicaContext, reduction: Reduction<'_>) -> Result<()> {
        if let (Way::First { are_unchanged }, Some((meanwhile, _))) = (self.way, reduction) {
            let mut all = [u8::from(are_unchanged)];
            context.group().all_reduce(&mut all, ReduceOp::Min)?;
            if all == [1] {
                (self.way, self.own) = (Way::Meanwhile, None);
                meanwhile.store(&self.learner.model(), context.local_replica_id())?;
            } else {
                (self.way, self.watched) = (Way::After, None);
            }
        }
        Ok(())
    }
}

/// Runs a model on a batch while its gradients are reduced.
fn watched_step<M: LearnerModel>(
    meanwhile: &Meanwhile,
    context: &ReplicaContext,
    model: &M,
    batch: Batch<<M as TrainStep>::Input>,
    weight: f64,
) -> Result<<M as TrainStep>::Output> {
    let watch = &meanwhile.watches[context.local_replica_id()];
    watch.start(weight);
    let trained = TrainStep::step(model, batch.input);
    if meanwhile.are_unchanged(model, &trained.grads, &watch.end()) {
        return Ok(trained.item);
    }
    Err(Error::Learner {
        what: format!("the step of the model on replica {}", context.replica_id()),
        problem: "it has changed gradients, or left some out, which it did not in the first step, and they are \
                  reduced while backward runs; train with DataParallel::reduce_after_backward"
            .to_owned(),
    })
}

/// Returns a model with those parameters of another that are `chosen`, given whether they are trained; on `device`, or
/// where they are.
fn updated<M: Module>(model: M, from: &M, chosen: fn(bool) -> bool, device: Option<&Device>) -> Result<M> {
    let mut values = Values { chosen, found: HashMap::new(), outcome: Ok(()) };
    from.visit(&mut values);
    values.outcome?;
    Ok(model.map(&mut Load { values: values.found, device }))
}

struct Values {
    chosen: fn(bool) -> bool,
    found: HashMap<ParamId, (FlexTensor, bool)>,
    outcome: Result<()>,
}

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.base();
        let is_trained = value.is_require_grad();
        if (self.chosen)(is_trained) {
            match flex_of(value) {
                Ok(value) => drop(self.found.insert(param.id, (value, is_trained))),
                Err(error) => self.outcome = Err(error.into()),
            }
        }
    }
}

struct Load<'a> {
    values: HashMap<ParamId, (FlexTensor, bool)>,
    device: Option<&'a Device>,
}

impl ModuleMapper for Load<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.values.get(&param.id) {
            Some((value, is_trained)) => {
                let device = self.device.cloned().unwrap_or_else(|| param.lazy_device());
                replaced(param, tensor_on(value.clone(), &device).set_require_grad(*is_trained))
            }
            None => param,
        }
    }
}
