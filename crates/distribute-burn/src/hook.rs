//! The operation through which a model uses a parameter.
//!
//! burn lets a module replace what [`Param::val`](burn::module::Param::val) returns: a
//! [`Reparameterization`]. Here it is an operation of the graph that returns the replica's copy of the variable and, in
//! backward, takes its gradient. The parameter that the model itself holds is a placeholder of the same shape, filled
//! with NaN and of one element in memory.
//!
//! burn runs the operations of backward by their depth in the graph, and an operation on a parameter alone has depth 1:
//! it would run last, when nothing is left to overlap with. So each use has a second operand, outside the graph, whose
//! depth grows with every use in the forward pass: a *token*. Gradients then come last layer first.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use burn::module::{Module, Param, ParamId, Reparameterization, Reparameterizer};
use burn::tensor::{Device, Tensor};
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::{BalancedCheckpointing, CheckpointStrategy, NoCheckpointing};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, ComputePropertyDone, Ops, OpsKind, OpsPrep};
use burn_backend::backend::AutodiffBackend;
use burn_backend::ops::FloatTensorOps;
use burn_backend::{DType, FloatDType, Scalar};
use burn_flex::{Flex, FlexTensor};
use distribute_optim::backend::{ShardLayout, Tape};
use distribute_strategy::{Recoverable, RecoveryError};
use distribute_values::TensorStorage;
use parking_lot::Mutex;

use crate::BurnTensor;
use crate::backend::{Diff, DiffTensor};
use crate::gather::{Gathers, Regather};
use crate::tensor::{node_of, on_device_of, tensor_on};

/// The depth by which the tokens of two uses differ. More operations than this between two parameters delay their
/// gradients, and each level of depth costs an empty list in backward.
const DEPTH_PER_USE: usize = 32;

/// The parameters of one replica's model: who takes their gradients, and the uses of the current step.
pub(crate) struct Uses {
    tape: Arc<Tape<BurnTensor>>,
    tokens: Vec<DiffTensor>,
    step: Mutex<Step>,
    pub(crate) gathers: Gathers,
}

/// The uses since the last backward.
#[derive(Default)]
struct Step {
    /// The number of uses of all parameters.
    count: usize,
    of_parameters: HashMap<usize, Parameter>,
}

/// The uses of one parameter; several if its weight is tied, or if the model ran several times.
#[derive(Default)]
pub(crate) struct Parameter {
    pub(crate) uses: usize,
    pub(crate) returned: usize,
    /// The sum of the gradients that were returned.
    pub(crate) sum: Option<FlexTensor>,
}

impl Parameter {
    /// Adds the gradient of one use. Returns whether all uses have returned theirs.
    pub(crate) fn add(&mut self, gradient: FlexTensor) -> bool {
        self.returned += 1;
        self.sum = Some(match self.sum.take() {
            Some(sum) => Flex::float_add(sum, gradient),
            None => gradient,
        });
        self.returned >= self.uses
    }
}

thread_local! {
    /// The replicas whose parameters were used on this thread since its last backward.
    static USED: RefCell<Vec<Arc<Uses>>> = const { RefCell::new(Vec::new()) };
}

/// Runs a backward pass, and reports the gradients of parameters some uses of which the loss did not depend on.
pub(crate) fn around_backward<R>(backward: impl FnOnce() -> R) -> R {
    let used = USED.take();
    used.iter().for_each(|uses| uses.gathers.begin_backward());
    let result = backward();
    used.iter().for_each(|uses| uses.end_backward());
    result
}

/// The tokens of this process, in the order of their depth. Models share them: each takes some kilobytes.
static TOKENS: Mutex<Vec<DiffTensor>> = Mutex::new(Vec::new());

pub(crate) fn tokens(count: usize) -> Vec<DiffTensor> {
    let mut tokens = TOKENS.lock();
    while tokens.len() < count {
        let mut token = match tokens.last() {
            Some(token) => token.clone(),
            None => Diff::from_inner(Flex::float_zeros([1].into(), &Default::default(), FloatDType::F32)),
        };
        for _ in 0..DEPTH_PER_USE {
            token = Diff::float_neg(token);
        }
        tokens.push(token);
    }
    tokens[..count].to_vec()
}

impl Uses {
    pub(crate) fn new(tape: Arc<Tape<BurnTensor>>, parameters: usize) -> Arc<Uses> {
        let tokens = tokens(parameters);
        Arc::new(Uses { tape, tokens, step: Mutex::default(), gathers: Gathers::default() })
    }

    /// Counts a use of a parameter, and returns the use's token.
    fn begin(self: &Arc<Uses>, index: usize) -> Option<&DiffTensor> {
        USED.with_borrow_mut(|used| {
            if !used.iter().any(|uses| Arc::ptr_eq(uses, self)) {
                used.push(self.clone());
            }
        });
        let mut step = self.step.lock();
        step.count += 1;
        step.of_parameters.entry(index).or_default().uses += 1;
        self.tokens.get(step.count - 1).or(self.tokens.last())
    }

    /// Takes the gradient of one use. Returns it if no optimizer waits for gradients.
    fn take(&self, index: usize, gradient: FlexTensor) -> Option<FlexTensor> {
        if !self.tape.is_recording() {
            return Some(gradient);
        }
        let complete = {
            let mut step = self.step.lock();
            let parameter = step.of_parameters.entry(index).or_default();
            if parameter.add(gradient) { parameter.sum.take() } else { None }
        };
        if let Some(complete) = complete {
            self.report(index, complete);
        }
        None
    }

    fn end_backward(&self) {
        let step = std::mem::take(&mut *self.step.lock());
        let mut rest: Vec<(usize, FlexTensor)> =
            step.of_parameters.into_iter().filter_map(|(index, parameter)| Some((index, parameter.sum?))).collect();
        rest.sort_by_key(|(index, _)| std::cmp::Reverse(*index));
        rest.into_iter().for_each(|(index, sum)| self.report(index, sum));
        self.gathers.end_step();
    }

    fn report(&self, index: usize, gradient: FlexTensor) {
        self.tape.gradient(index, BurnTensor::new(gradient));
    }
}

/// The uses of all replicas of this process. A failed run leaves none behind, in whatever operation it has ended: the
/// next step would add what backward had taken by then to its own gradients.
pub(crate) struct UsesOfReplicas(pub(crate) Vec<Arc<Uses>>);

impl Recoverable for UsesOfReplicas {
    /// Between runs there may be a graph that a later one runs backward.
    fn note(&self, _: usize) -> Result<(), RecoveryError> {
        Ok(())
    }

    fn take_back(&self, local: usize) -> Result<(), RecoveryError> {
        *self.0[local].step.lock() = Step::default();
        self.0[local].gathers.forget();
        Ok(())
    }
}

impl std::fmt::Debug for Uses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uses").finish_non_exhaustive()
    }
}

/// One replica's copy of a variable, or its part, as its model uses it.
pub(crate) struct Copy {
    pub(crate) index: usize,
    pub(crate) name: String,
    pub(crate) id: ParamId,
    pub(crate) value: BurnTensor,
    /// How the variable, or this rank's slice of it, is divided among replicas, if it is.
    pub(crate) layout: Option<ShardLayout>,
    /// Whether the variable is split among the ranks of each tensor group; the value is then this rank's slice, or a
    /// part of that.
    pub(crate) is_split: bool,
    /// The parts in the order of the layout, of this rank's slice if it is split, if this process has all of them.
    pub(crate) parts: Vec<BurnTensor>,
    /// Whether gradients are computed for it.
    pub(crate) trained: Arc<AtomicBool>,
    pub(crate) uses: Arc<Uses>,
    /// Whether the model runs in compiled programs only.
    pub(crate) is_compiled: bool,
    /// The number of the model, which no other of this process has.
    #[cfg(feature = "pjrt")]
    pub(crate) model: u64,
    /// Whether the model has running statistics.
    #[cfg(feature = "pjrt")]
    pub(crate) has_statistics: bool,
}

impl Copy {
    fn is_trained(&self) -> bool {
        self.trained.load(Ordering::Acquire)
    }

    /// Returns the whole value, or this rank's slice, for an operation that backward runs through or not.
    fn whole(self: &Arc<Copy>, is_recorded: bool) -> FlexTensor {
        match &self.layout {
            Some(layout) => given(self.index).unwrap_or_else(|| self.uses.gathers.whole(self, layout, is_recorded)),
            None if self.is_split => given(self.index).unwrap_or_else(|| self.value.flex()),
            None => self.value.flex(),
        }
    }
}

impl std::fmt::Debug for Copy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Copy").field("name", &self.name).finish_non_exhaustive()
    }
}

thread_local! {
    /// The whole values of sharded and of split variables, while a module that has them is made on this thread.
    static GIVEN: RefCell<HashMap<usize, FlexTensor>> = RefCell::default();
}

fn given(index: usize) -> Option<FlexTensor> {
    GIVEN.with_borrow(|given| given.get(&index).cloned())
}

/// Runs `make`, in which sharded and split variables have these whole values.
pub(crate) fn with_whole<R>(values: HashMap<usize, FlexTensor>, make: impl FnOnce() -> R) -> R {
    let before = GIVEN.replace(values);
    let made = make();
    GIVEN.set(before);
    made
}

/// The name of the parameters' replacement, in the paths of burn's visitors.
pub(crate) const NAME: &str = "distribute";

/// The replacement of a parameter's value by the replica's copy of the variable.
#[derive(Module, Debug)]
pub(crate) struct Hook {
    #[module(skip)]
    copy: Arc<Copy>,
}

impl Reparameterization for Hook {
    const NAME: &'static str = NAME;

    fn apply<const D: usize>(&self, base: Tensor<D>) -> Tensor<D> {
        let copy = &self.copy;
        let device = base.device();
        #[cfg(feature = "pjrt")]
        if crate::pjrt::is_tracing() {
            if copy.has_statistics {
                crate::pjrt::refuse_without_statistics();
            }
            let (place, is_trained) = ((copy.model, copy.index), copy.is_trained());
            let traced = crate::pjrt::traced_parameter(place, &copy.value, is_trained, device.is_autodiff());
            return traced.unwrap_or_else(crate::pjrt::refuse_second_model);
        }
        if copy.is_compiled {
            return tensor_on(given(copy.index).unwrap_or_else(outside_programs), &device);
        }
        let is_sharded = copy.layout.is_some();
        // Backward needs a sharded weight again even if it is frozen, so its use must be in the graph.
        if !copy.is_trained() && !is_sharded {
            return tensor_on(copy.whole(false), &device);
        }
        let Ok(base) = node_of(base) else { return tensor_on(copy.whole(false), &device) };
        let token = copy.uses.begin(copy.index).unwrap_or(&base).node();
        let value = copy.whole(true);
        let nodes = [base.node(), token];
        let used = if is_sharded {
            let prepared = Take.prepare::<BalancedCheckpointing>(nodes).memory_bound();
            finished(prepared.retro_forward(Regather(copy.clone())).parents([&base]), copy, value)
        } else {
            finished(Take.prepare::<NoCheckpointing>(nodes).compute_bound(), copy, value)
        };
        on_device_of(used, &device)
    }
}

/// Raises the error of a model that is used outside of the programs in which it is compiled.
fn outside_programs() -> FlexTensor {
    distribute_strategy::raise(distribute_strategy::Error::Context {
        what: "a model of TpuStrategy",
        place: "on the host",
        remedy: "train it by Trainer, whose steps are compiled, or take a module by Model::to_module",
    })
}

/// Records a use in the graph.
fn finished<C: CheckpointStrategy>(
    prepared: OpsPrep<Take, Flex, Arc<Copy>, C, 2, ComputePropertyDone>,
    copy: &Arc<Copy>,
    value: FlexTensor,
) -> DiffTensor {
    match prepared.stateful() {
        OpsKind::Tracked(prepared) => prepared.finish(copy.clone(), value),
        OpsKind::UnTracked(prepared) => prepared.finish(value),
    }
}

/// Takes the gradient of one use of a parameter.
#[derive(Debug)]
struct Take;

impl Backward<Flex, 2> for Take {
    type State = Arc<Copy>;

    fn backward(self, ops: Ops<Arc<Copy>, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<Flex>(&ops.node);
        let copy = &ops.state;
        if !copy.is_trained() {
            return;
        }
        if let (Some(gradient), Some(parent)) = (copy.uses.take(copy.index, gradient), &ops.parents[0]) {
            // For a program that calls backward itself.
            gradients.register::<Flex>(parent.id, gradient);
        }
    }
}

/// Replaces the parameters of a model by placeholders, and their values by the replica's copies.
pub(crate) struct Attach<'a> {
    /// The copies of the replica, by path.
    pub(crate) copies: &'a HashMap<String, Arc<Copy>>,
}

impl Reparameterizer for Attach<'_> {
    type Reparam = Hook;

    fn reparameterize<const D: usize>(
        &mut self,
        path: &str,
        param: Param<Tensor<D>>,
    ) -> (Param<Tensor<D>>, Option<Hook>) {
        let Some(copy) = self.copies.get(path) else { return (param, None) };
        let device = param.lazy_device();
        let is_tracked = copy.layout.is_some() || param.is_require_grad();
        let shape = copy.layout.as_ref().map_or_else(|| copy.value.shape(), |layout| layout.shape().to_vec());
        let base = placeholder::<D>(&shape, copy.value.flex().dtype(), &device);
        let mut param = replaced(param, base.set_require_grad(is_tracked));
        param.id = copy.id;
        (param, Some(Hook { copy: copy.clone() }))
    }
}

/// Returns the parameter with another value.
pub(crate) fn replaced<const D: usize>(param: Param<Tensor<D>>, value: Tensor<D>) -> Param<Tensor<D>> {
    param.map(|_| value)
}

/// Returns a tensor of NaN, of one element in memory.
pub(crate) fn placeholder<const D: usize>(shape: &[usize], dtype: DType, device: &Device) -> Tensor<D> {
    let nan = Scalar::from(f32::NAN);
    let element = Flex::float_full(vec![1; D].into(), nan, &Default::default(), dtype.into());
    tensor_on(Flex::float_expand(element, shape.to_vec().into()), device)
}
