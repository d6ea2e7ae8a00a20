//! A replica: burn's learner, and the model that it trains.

use std::collections::HashMap;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{Device, Tensor};
use burn::train::{Learner, LearnerModel, TrainStep};
use burn_flex::FlexTensor;
use distribute_strategy::ReplicaContext;

use super::data::Batch;
use super::gradients::Accumulated;
use crate::Result;
use crate::hook::replaced;
use crate::tensor::{flex_of, tensor_on};

/// A replica of this process.
pub(super) struct Replica<M: LearnerModel> {
    pub(super) learner: Learner<M>,
    /// The model of the steps, if the learner's is not.
    ///
    /// Learners cannot be given a model, and their clones' models share running statistics. Backward of one replica
    /// would then consume the graph of another, which the statistics connect.
    own: Option<M>,
    gradients: Accumulated,
}

impl<M: LearnerModel> Replica<M> {
    /// Creates a replica; if `is_one_of_several` in its process, with running statistics of its own.
    pub(super) fn new(learner: &Learner<M>, device: &Device, is_one_of_several: bool) -> Result<Replica<M>> {
        let mut learner = learner.clone();
        // Leaves of a graph of its own.
        learner.fork(device);
        let own = match is_one_of_several {
            // Validation has statistics of its own.
            true => Some(updated(learner.model().valid().train().fork(device), &learner.model(), |_| true)?),
            false => None,
        };
        Ok(Replica { learner, own, gradients: Accumulated::default() })
    }

    /// Returns the model of the steps, with its running statistics.
    pub(super) fn model(&self) -> M {
        self.own.clone().unwrap_or_else(|| self.learner.model())
    }

    /// Runs the model on a batch, of `rows` rows on all replicas.
    pub(super) fn train<I>(&mut self, batch: Batch<I>, rows: u64) -> Result<<M as TrainStep>::Output>
    where
        M: TrainStep<Input = I>,
    {
        let model = self.model();
        let trained = TrainStep::step(&model, batch.input);
        self.gradients.add(&model, trained.grads, batch.rows as f64 / rows as f64)?;
        Ok(trained.item)
    }

    /// Makes a step of the optimizer with the gradients of all replicas.
    pub(super) fn apply(&mut self, context: &ReplicaContext) -> Result<()> {
        let reduced = self.gradients.reduce(context, &self.model())?;
        self.learner.lr_step();
        self.learner.optimizer_step(reduced);
        if let Some(own) = self.own.take() {
            self.own = Some(updated(own, &self.learner.model(), |is_trained| is_trained)?);
        }
        Ok(())
    }
}

/// Returns a model with those parameters of another that are `chosen`, given whether they are trained.
fn updated<M: Module>(model: M, from: &M, chosen: fn(bool) -> bool) -> Result<M> {
    let mut values = Values { chosen, found: HashMap::new(), outcome: Ok(()) };
    from.visit(&mut values);
    values.outcome?;
    Ok(model.map(&mut Load { values: values.found }))
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

struct Load {
    values: HashMap<ParamId, (FlexTensor, bool)>,
}

impl ModuleMapper for Load {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        match self.values.get(&param.id) {
            Some((value, is_trained)) => {
                let device = param.lazy_device();
                replaced(param, tensor_on(value.clone(), &device).set_require_grad(*is_trained))
            }
            None => param,
        }
    }
}
