//! A replica: burn's learner, and the model that it trains.

use std::collections::HashSet;
use std::sync::Arc;

use burn::module::{Module, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::Device;
use burn::train::{Learner, LearnerModel, TrainStep};
use distribute_collectives::ReduceOp;
use distribute_strategy::ReplicaContext;

use super::data::Batch;
use super::gradients::Accumulated;
use super::owners::Owners;
use super::start::learning_rates;
use super::values::{values, with_values};
use super::watch::Meanwhile;
use crate::statistics::merge_updates;
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
    /// Where the models of the steps are.
    device: Device,
    /// The running statistics that the models of the steps have of their own, if the learner's are not theirs.
    statistics: Option<Arc<HashSet<ParamId>>>,
    way: Way,
    gradients: Accumulated,
    /// The owners of parameters, if the optimizer's state is in parts.
    owners: Option<Arc<Owners>>,
    /// Whether workers have compared the learning rates of their first step.
    are_rates_equal: bool,
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
    /// Creates a replica, with these running statistics of its own if it is one of several in its process.
    pub(super) fn new(
        learner: &Learner<M>,
        device: &Device,
        statistics: Option<Arc<HashSet<ParamId>>>,
        meanwhile: Option<(&Meanwhile, usize)>,
        owners: Option<Arc<Owners>>,
    ) -> Result<Replica<M>> {
        let mut learner = learner.clone();
        // Leaves of a graph of its own.
        learner.fork(device);
        let own = statistics.is_some().then(|| apart(&learner.model(), device)).transpose()?;
        let watched = meanwhile
            .map(|(meanwhile, local)| meanwhile.watched(own.clone().unwrap_or_else(|| learner.model()), local));
        let way = if watched.is_some() { Way::First { are_unchanged: true } } else { Way::After };
        let (device, gradients) = (device.clone(), Accumulated::default());
        Ok(Replica { learner, own, watched, device, statistics, way, gradients, owners, are_rates_equal: false })
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
            self.update(context, reduction, meanwhile.gradients(&self.learner.model(), local))?;
            meanwhile.store(&self.learner.model(), local)?;
            return Ok(output);
        }
        let output = batch.map(|batch| self.train(context, reduction, batch, weight)).transpose()?;
        if is_applied {
            let reduced = self.gradients.reduce(context, &self.model())?;
            self.update(context, reduction, reduced)?;
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
    ///
    /// # Errors
    /// [`Error::Strategy`] with [`SettingsDiffer`](distribute_strategy::Error::SettingsDiffer) in the first step if
    /// workers have other learning rates, as the schedulers of a group by id may give them.
    fn update(&mut self, context: &ReplicaContext, reduction: Reduction<'_>, reduced: GradientsParams) -> Result<()> {
        self.learner.lr_step();
        if !self.are_rates_equal && context.strategy().topology().workers() > 1 {
            context.compare_settings(learning_rates(&self.learner))?;
        }
        self.are_rates_equal = true;
        match &self.owners {
            Some(owners) => {
                let before = self.learner.model();
                let own = owners.own(context, &before, reduced);
                self.learner.optimizer_step(own.gradients);
                owners.check_others(&before, &self.learner.model(), &own.updated)?;
                drop(before);
                let values = owners.exchange(context, &self.learner.model())?;
                let exchanged = with_values(self.learner.model(), values, None);
                self.learner.load_model(exchanged.into_record());
            }
            None => self.learner.optimizer_step(reduced),
        }
        self.renew(context, reduction)
    }

    /// Replaces the models of the steps by the learner's, all of which `TrainStep::optimize` may have changed, on their
    /// running statistics.
    fn renew(&mut self, context: &ReplicaContext, reduction: Reduction<'_>) -> Result<()> {
        if self.own.is_none() && self.watched.is_none() {
            return Ok(());
        }
        let mut model = self.learner.model();
        if let Some(statistics) = &self.statistics {
            let old = self.model();
            merge_updates(&old);
            let kept = values(&old, |(id, _)| statistics.contains(&id))?;
            model = with_values(apart(&model, &self.device)?, kept, Some(&self.device));
        }
        if let (Some(_), Some((meanwhile, _))) = (&self.watched, reduction) {
            self.watched = Some(meanwhile.watched(model.clone(), context.local_replica_id()));
        }
        if self.own.is_some() {
            self.own = Some(model);
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

/// Returns a copy of a model with running statistics of its own.
fn apart<M: Module>(model: &M, device: &Device) -> Result<M> {
    // Validation has statistics of its own. It forgets whether activations are recomputed.
    Ok(with_values(model.valid().train().fork(device), values(model, |_| true)?, Some(device)))
}
