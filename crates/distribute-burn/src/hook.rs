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
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

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
    /// Whether the next backward of this run may be of a graph that was made before the last one.
    may_repeat: AtomicBool,
}

/// The uses in graphs of which backward may yet run, and those whose gradients it has returned.
#[derive(Default)]
struct Step {
    /// The number of uses of all parameters since the last backward.
    count: usize,
    of_parameters: HashMap<usize, Parameter>,
}

impl Step {
    /// Ends a backward. Returns the sums that are not complete, since graphs of other losses have further uses.
    fn end(&mut self) -> Vec<(usize, FlexTensor)> {
        self.count = 0;
        let end = |(index, parameter): (&usize, &mut Parameter)| {
            parameter.uses = parameter.uses.saturating_sub(parameter.returned);
            parameter.returned = 0;
            Some((*index, parameter.sum.take()?))
        };
        self.of_parameters.iter_mut().filter_map(end).collect()
    }
}

/// The uses of one parameter; several if its weight is tied, or if the model ran several times.
#[derive(Default)]
pub(crate) struct Parameter {
    /// The number of uses that backward may return, or has returned since it began.
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
    /// The replicas for which this thread's last backward has begun.
    static BEGUN: RefCell<Vec<Weak<Uses>>> = const { RefCell::new(Vec::new()) };
}

/// Runs a backward pass, and reports the gradients of parameters some uses of which the loss did not depend on.
///
/// Several graphs may be in memory, of which each backward takes one. Which one is not known before, so everything is
/// prepared for all that were made in this run.
pub(crate) fn around_backward<R>(backward: impl FnOnce() -> R) -> R {
    let mut begun = USED.take();
    for earlier in BEGUN.take().iter().filter_map(Weak::upgrade) {
        if earlier.may_repeat.load(Ordering::Acquire) && !contains(&begun, &earlier) {
            begun.push(earlier);
        }
    }
    begun.iter().for_each(|uses| uses.gathers.begin_backward());
    let result = backward();
    // Those that backward has met.
    let met = USED.take();
    begun.iter().chain(met.iter().filter(|uses| !contains(&begun, uses))).for_each(|uses| uses.end_backward());
    begun.iter().for_each(|uses| uses.may_repeat.store(uses.gathers.has_live(), Ordering::Release));
    BEGUN.set(begun.iter().map(Arc::downgrade).collect());
    result
}

fn contains(all: &[Arc<Uses>], uses: &Arc<Uses>) -> bool {
    all.iter().any(|other| Arc::ptr_eq(other, uses))
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
        let (step, gathers) = (Mutex::default(), Gathers::default());
        Arc::new(Uses { tape, tokens, step, gathers, may_repeat: AtomicBool::new(false) })
    }

    /// Notes that this thread uses the replica's parameters.
    fn note_thread(self: &Arc<Uses>) {
        USED.with_borrow_mut(|used| {
            if !contains(used, self) {
                used.push(self.clone());
            }
        });
    }

    /// Counts a use of a parameter, and returns the use's token.
    fn begin(self: &Arc<Uses>, index: usize) -> Option<&DiffTensor> {
        self.note_thread();
        let mut step = self.step.lock();
        step.count += 1;
        step.of_parameters.entry(index).or_default().uses += 1;
        self.tokens.get(step.count - 1).or(self.tokens.last())
    }

    /// Takes the gradient of one use. Returns it if no optimizer waits for gradients.
    fn take(self: &Arc<Uses>, used: &Use, gradient: FlexTensor) -> Option<FlexTensor> {
        if !self.tape.is_recording() {
            used.end();
            return Some(gradient);
        }
        self.note_thread();
        let index = used.copy.index;
        let complete = {
            let mut step = self.step.lock();
            // It is counted as returned from now on.
            used.is_awaited.store(false, Ordering::Release);
            let parameter = step.of_parameters.entry(index).or_default();
            if parameter.add(gradient) { parameter.sum.take() } else { None }
        };
        if let Some(complete) = complete {
            self.report(index, complete);
        }
        None
    }

    fn end_backward(&self) {
        let mut rest = self.step.lock().end();
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
    fn note(&self, local: usize) -> Result<(), RecoveryError> {
        // Replicas may be on other threads than in the run before.
        self.0[local].may_repeat.store(false, Ordering::Release);
        Ok(())
    }

    fn commit(&self, _: usize, _: bool) -> Result<(), RecoveryError> {
        Ok(())
    }

    fn take_back(&self, local: usize) -> Result<(), RecoveryError> {
        drop(self.0[local].step.lock().end());
        self.0[local].gathers.forget();
        Ok(())
    }

    fn end(&self, local: usize) {
        self.0[local].may_repeat.store(false, Ordering::Release);
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

    /// Returns the whole value, or this rank's slice, for a use in a graph, or for one outside of it.
    fn whole(self: &Arc<Copy>, used: Option<&Arc<Use>>) -> FlexTensor {
        match &self.layout {
            Some(layout) => given(self.index).unwrap_or_else(|| self.uses.gathers.whole(self, layout, used)),
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

/// One use of a parameter in a graph.
pub(crate) struct Use {
    copy: Arc<Copy>,
    /// Whether backward may yet return its gradient.
    is_awaited: AtomicBool,
}

impl Use {
    /// Returns whether backward may yet run through the use.
    pub(crate) fn is_awaited(&self) -> bool {
        self.is_awaited.load(Ordering::Acquire)
    }

    /// Counts the use no more, as backward reports no gradient of it.
    fn end(&self) {
        if self.is_awaited.swap(false, Ordering::AcqRel)
            && let Some(parameter) = self.copy.uses.step.lock().of_parameters.get_mut(&self.copy.index)
        {
            parameter.uses = parameter.uses.saturating_sub(1);
        }
    }
}

/// The graph is gone.
impl Drop for Use {
    fn drop(&mut self) {
        self.end();
    }
}

impl std::fmt::Debug for Use {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Use").field(&self.copy).finish()
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
            return tensor_on(copy.whole(None), &device);
        }
        let Ok(base) = node_of(base) else { return tensor_on(copy.whole(None), &device) };
        let token = copy.uses.begin(copy.index).unwrap_or(&base).node();
        let used = Arc::new(Use { copy: copy.clone(), is_awaited: AtomicBool::new(true) });
        let value = copy.whole(Some(&used));
        let nodes = [base.node(), token];
        let value = if is_sharded {
            let prepared = Take.prepare::<BalancedCheckpointing>(nodes).memory_bound();
            finished(prepared.retro_forward(Regather(copy.clone())).parents([&base]), used, value)
        } else {
            finished(Take.prepare::<NoCheckpointing>(nodes).compute_bound(), used, value)
        };
        on_device_of(value, &device)
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
    prepared: OpsPrep<Take, Flex, Arc<Use>, C, 2, ComputePropertyDone>,
    used: Arc<Use>,
    value: FlexTensor,
) -> DiffTensor {
    match prepared.stateful() {
        OpsKind::Tracked(prepared) => prepared.finish(used, value),
        OpsKind::UnTracked(prepared) => prepared.finish(value),
    }
}

/// Takes the gradient of one use of a parameter.
#[derive(Debug)]
struct Take;

impl Backward<Flex, 2> for Take {
    type State = Arc<Use>;

    fn backward(self, ops: Ops<Arc<Use>, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<Flex>(&ops.node);
        let (used, copy) = (&ops.state, &ops.state.copy);
        if !copy.is_trained() {
            used.end();
            return;
        }
        if let (Some(gradient), Some(parent)) = (copy.uses.take(used, gradient), &ops.parents[0]) {
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
