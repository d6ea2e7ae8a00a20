//! Gradients that are reduced while backward runs.
//!
//! burn's learner calls [`TrainStep::step`](burn::train::TrainStep::step), which runs backward itself and gives back
//! the gradients. The parameters of the model of the steps are *watched*: [`Param::val`](burn::module::Param::val)
//! returns the value through an operation of the graph whose backward also reports the gradient, which an
//! [`Optimizer`] reduces. What the step gives back is compared with what was reported, since a program may change
//! gradients: in the first step to find out whether it does, and in the later ones to refuse it.
//!
//! The end of backward is known only when the step returns. Once a gradient has arrived, `val` returns the parameter
//! itself, where burn finds its gradient.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param, ParamId, Reparameterization, Reparameterizer};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::NoCheckpointing;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::Scalar;
use burn_backend::ops::FloatTensorOps;
use burn_flex::{Flex, FlexTensor};
use distribute_optim::Trainable;
use distribute_optim::backend::{LibraryOptimizer, Parameters, Reduced, Tape, Variable, is_short};
use distribute_strategy::Strategy;
use distribute_values::TensorStorage;
use parking_lot::Mutex;

use crate::backend::{DiffTensor, has_same_bits};
use crate::hook::{Parameter, tokens};
use crate::tensor::{flex_of, node_of, on_device_of};
use crate::visit::describe;
use crate::{Burn, BurnTensor, Optimizer, Result};

/// The reduction of the gradients of all replicas of this process while their backward runs.
pub(super) struct Meanwhile {
    pub(super) optimizer: Optimizer,
    pub(super) watches: Vec<Arc<Watch>>,
    parameters: Arc<Parameters<Burn>>,
    index_of: Arc<HashMap<ParamId, usize>>,
    summed: Arc<Summed>,
}

impl Meanwhile {
    /// Prepares the reduction for models like this one. Returns `None` where gradients are reduced after backward: with
    /// one replica, replicas that share variables, parameters of 16 bits, whose gradients are summed in 32, and a model
    /// with a reparameterization, since a parameter can have only one.
    pub(super) fn new<M: Module>(strategy: &Strategy, model: &M) -> Result<Option<Meanwhile>> {
        let Ok(described) = describe(model) else { return Ok(None) };
        if strategy.num_replicas_in_sync() == 1 || strategy.shares_variables() {
            return Ok(None);
        }
        let names: HashMap<ParamId, String> = described.into_iter().rev().map(|one| (one.id, one.path)).collect();
        let trained = trained(model)?;
        let (mut variables, mut index_of) = (Vec::new(), HashMap::new());
        for (id, value) in trained {
            if is_short(BurnTensor::new(value.clone()).dtype()?) {
                return Ok(None);
            }
            let mut variable = Variable::new(names.get(&id).cloned().unwrap_or_default(), false);
            (0..strategy.num_local_replicas()).for_each(|_| variable.push(BurnTensor::new(value.clone())));
            index_of.insert(id, variables.len());
            variables.push(variable);
        }
        let tapes: Vec<_> = (0..strategy.num_local_replicas()).map(|_| Tape::new()).collect();
        let tokens = tokens(variables.len());
        let watch = |tape: &Arc<_>| Watch { tape: Arc::clone(tape), tokens: tokens.clone(), step: Mutex::default() };
        let watches = tapes.iter().map(|tape| Arc::new(watch(tape))).collect();
        let parameters = Arc::new(Parameters::new(strategy, variables, tapes, None));
        let summed = Arc::new(Summed((0..strategy.num_local_replicas()).map(|_| Mutex::default()).collect()));
        let optimizer = Optimizer::of_library(&Model(parameters.clone()), 1.0, summed.clone())?;
        Ok(Some(Meanwhile { optimizer, watches, parameters, index_of: Arc::new(index_of), summed }))
    }

    /// Returns a model whose parameters are watched for one local replica.
    pub(super) fn watched<M: Module>(&self, model: M, local: usize) -> M {
        model.apply_reparameterization(WatchAll { watch: &self.watches[local], index_of: &self.index_of })
    }

    /// Returns whether a step has given back the gradients of its backward unchanged.
    pub(super) fn are_unchanged<M: Module>(&self, model: &M, given: &GradientsParams, taken: &Taken) -> bool {
        let mut compare = Compare { given, taken, index_of: &self.index_of, are_equal: true };
        model.visit(&mut compare);
        compare.are_equal && !taken.is_repeated && given.len() == taken.gradients.len()
    }

    /// Returns the gradients that one local replica's last step has summed over all replicas.
    pub(super) fn gradients<M: Module>(&self, model: &M, local: usize) -> GradientsParams {
        let summed = std::mem::take(&mut *self.summed.0[local].lock());
        let of_index = summed.into_iter().map(|reduced| (reduced.index, reduced.gradient)).collect();
        let mut give = Give { of_index, index_of: &self.index_of, to: GradientsParams::new() };
        model.visit(&mut give);
        give.to
    }

    /// Brings the variables, which audits compare, up to date with one local replica's model.
    pub(super) fn store<M: Module>(&self, model: &M, local: usize) -> Result<()> {
        for (id, value) in trained(model)? {
            if let Some(index) = self.index_of.get(&id) {
                self.parameters.variables()[*index].components()[local].replace(value);
            }
        }
        Ok(())
    }
}

/// Returns the trained parameters of a model, each once.
pub(super) fn trained<M: Module>(model: &M) -> Result<Vec<(ParamId, FlexTensor)>> {
    struct Trained(Result<Vec<(ParamId, FlexTensor)>>);
    impl ModuleVisitor for Trained {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            let value = param.base();
            let Ok(all) = &mut self.0 else { return };
            if value.is_require_grad() && !all.iter().any(|(id, _)| *id == param.id) {
                match flex_of(value) {
                    Ok(value) => all.push((param.id, value)),
                    Err(error) => self.0 = Err(error.into()),
                }
            }
        }
    }
    let mut trained = Trained(Ok(Vec::new()));
    model.visit(&mut trained);
    trained.0
}

struct Model(Arc<Parameters<Burn>>);

impl Trainable for Model {
    type Library = Burn;

    fn parameters(&self) -> &Arc<Parameters<Burn>> {
        &self.0
    }
}

/// The summed gradients of each local replica's last step, which its learner's optimizer takes.
struct Summed(Vec<Mutex<Vec<Reduced<Burn>>>>);

impl LibraryOptimizer<Burn> for Summed {
    fn describe(&self) -> String {
        "burn's learner".to_owned()
    }

    fn apply(&self, local: usize, _: f64, gradients: Vec<Reduced<Burn>>) -> Result<()> {
        *self.0[local].lock() = gradients;
        Ok(())
    }

    fn copy(&self, _: usize, _: usize) {}

    /// The state is the learner's.
    fn save(&self, _: &Strategy) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn load(&self, _: &[u8]) -> Result<()> {
        Ok(())
    }
}

/// The uses and the gradients of one replica's parameters in a step.
pub(super) struct Watch {
    tape: Arc<Tape<BurnTensor>>,
    tokens: Vec<DiffTensor>,
    step: Mutex<Step>,
}

#[derive(Default)]
struct Step {
    /// The factor of the gradients in the sum over replicas.
    weight: f64,
    /// The number of uses of all parameters.
    count: usize,
    of_parameters: BTreeMap<usize, Reported>,
    is_repeated: bool,
}

/// A parameter, and whether its gradient was reported.
#[derive(Default)]
struct Reported {
    parameter: Parameter,
    is_reported: bool,
}

/// The gradients that backward has reported in a step, without the replica's weight.
pub(super) struct Taken {
    gradients: BTreeMap<usize, FlexTensor>,
    /// Whether one arrived after it was complete, from another backward.
    is_repeated: bool,
}

impl Watch {
    /// Begins a step, whose gradients are multiplied by `weight` before they are summed over replicas.
    pub(super) fn start(&self, weight: f64) {
        *self.step.lock() = Step { weight, ..Step::default() };
    }

    /// Ends a step, and reports the gradients of parameters some uses of which no loss depended on.
    pub(super) fn end(&self) -> Taken {
        let Step { weight, of_parameters, is_repeated, .. } = std::mem::take(&mut *self.step.lock());
        let mut gradients = BTreeMap::new();
        for (index, Reported { parameter, is_reported }) in of_parameters.into_iter().rev() {
            if let Some(sum) = parameter.sum {
                if !is_reported {
                    self.report(index, sum.clone(), weight);
                }
                gradients.insert(index, sum);
            }
        }
        Taken { gradients, is_repeated }
    }

    /// Counts a use, and returns its token; `None` if the parameter's gradient has arrived in this step.
    fn begin(&self, index: usize) -> Option<&DiffTensor> {
        let mut step = self.step.lock();
        let Reported { parameter, .. } = step.of_parameters.entry(index).or_default();
        if parameter.returned > 0 {
            return None;
        }
        parameter.uses += 1;
        step.count += 1;
        self.tokens.get(step.count - 1).or(self.tokens.last())
    }

    fn take(&self, index: usize, gradient: FlexTensor) {
        let (sum, weight) = {
            let mut step = self.step.lock();
            let weight = step.weight;
            let Reported { parameter, is_reported } = step.of_parameters.entry(index).or_default();
            let is_complete = parameter.add(gradient);
            if *is_reported {
                step.is_repeated = true;
                return;
            }
            if !is_complete {
                return;
            }
            *is_reported = true;
            let Some(sum) = parameter.sum.clone() else { return };
            (sum, weight)
        };
        self.report(index, sum, weight);
    }

    fn report(&self, index: usize, gradient: FlexTensor, weight: f64) {
        if self.tape.is_recording() {
            // A product with 1 would be a copy.
            let is_one = weight == 1.0;
            let weighed = if is_one { gradient } else { Flex::float_mul_scalar(gradient, Scalar::from(weight)) };
            self.tape.gradient(index, BurnTensor::new(weighed));
        }
    }
}

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}

/// Watches all trained parameters of a model.
struct WatchAll<'a> {
    watch: &'a Arc<Watch>,
    index_of: &'a HashMap<ParamId, usize>,
}

impl Reparameterizer for WatchAll<'_> {
    type Reparam = Watched;

    fn reparameterize<const D: usize>(
        &mut self,
        _: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Watched>) {
        let watched = self.index_of.get(&param.id).map(|index| Watched { watch: self.watch.clone(), index: *index });
        (param, watched)
    }
}

/// A watched parameter.
#[derive(Module, Debug)]
struct Watched {
    #[module(skip)]
    watch: Arc<Watch>,
    #[module(skip)]
    index: usize,
}

impl Reparameterization for Watched {
    const NAME: &'static str = "distribute-learner";

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        if !base.is_autodiff() || !base.is_require_grad() {
            return base;
        }
        let Ok(node) = node_of(base.clone()) else { return base };
        let Some(token) = self.watch.begin(self.index) else { return base };
        let value = node.primitive().clone();
        let used = match Report.prepare::<NoCheckpointing>([node.node(), token.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prepared) => prepared.finish((self.watch.clone(), self.index), value),
            OpsKind::UnTracked(prepared) => prepared.finish(value),
        };
        on_device_of(used, &base.device())
    }
}

/// The identity, which reports the gradient of one use of a parameter.
#[derive(Debug)]
struct Report;

impl Backward<Flex, 2> for Report {
    type State = (Arc<Watch>, usize);

    fn backward(self, ops: Ops<Self::State, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<Flex>(&ops.node);
        if let Some(parent) = &ops.parents[0] {
            gradients.register::<Flex>(parent.id, gradient.clone());
        }
        let (watch, index) = &ops.state;
        watch.take(*index, gradient);
    }
}

struct Compare<'a> {
    given: &'a GradientsParams,
    taken: &'a Taken,
    index_of: &'a HashMap<ParamId, usize>,
    are_equal: bool,
}

impl ModuleVisitor for Compare<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let taken = self.index_of.get(&param.id).and_then(|index| self.taken.gradients.get(index));
        let given = self.given.get::<D>(param.id).and_then(|gradient| flex_of(gradient).ok());
        self.are_equal &= match (given, taken) {
            (Some(given), Some(taken)) => has_same_bits(&given, taken),
            (given, taken) => given.is_none() && taken.is_none(),
        };
    }
}

/// Registers gradients for their parameters.
struct Give<'a> {
    of_index: HashMap<usize, BurnTensor>,
    index_of: &'a HashMap<ParamId, usize>,
    to: GradientsParams,
}

impl ModuleVisitor for Give<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let gradient = self.index_of.get(&param.id).and_then(|index| self.of_index.remove(index));
        if let Some(gradient) = gradient {
            self.to.register(param.id, Tensor::<D>::from_primitive::<Flex>(gradient.flex()));
        }
    }
}
