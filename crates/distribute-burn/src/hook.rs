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
use burn_autodiff::checkpoint::strategy::NoCheckpointing;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind};
use burn_backend::backend::AutodiffBackend;
use burn_backend::ops::FloatTensorOps;
use burn_backend::{FloatDType, TensorMetadata};
use burn_flex::{Flex, FlexTensor};
use distribute_optim::backend::Tape;
use parking_lot::Mutex;

use crate::BurnTensor;
use crate::backend::{Diff, DiffTensor};
use crate::tensor::tensor_on;

/// The depth by which the tokens of two uses differ. More operations than this between two parameters delay their
/// gradients, and each level of depth costs an empty list in backward.
const DEPTH_PER_USE: usize = 32;

/// The parameters of one replica's model: who takes their gradients, and the uses of the current step.
pub(crate) struct Uses {
    tape: Arc<Tape<BurnTensor>>,
    tokens: Vec<DiffTensor>,
    step: Mutex<Step>,
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
struct Parameter {
    uses: usize,
    returned: usize,
    sum: Option<FlexTensor>,
}

thread_local! {
    /// The replicas whose gradients backward has taken on this thread.
    static TAKEN: RefCell<Vec<Arc<Uses>>> = const { RefCell::new(Vec::new()) };
}

/// Reports the gradients of parameters some uses of which the loss did not depend on.
pub(crate) fn end_backward() {
    for uses in TAKEN.take() {
        uses.end_backward();
    }
}

impl Uses {
    pub(crate) fn new(tape: Arc<Tape<BurnTensor>>, parameters: usize) -> Arc<Uses> {
        let zero = Flex::float_zeros([1].into(), &Default::default(), FloatDType::F32);
        let mut token: DiffTensor = Diff::from_inner(zero);
        let tokens = (0..parameters)
            .map(|_| {
                for _ in 0..DEPTH_PER_USE {
                    token = Diff::float_neg(token.clone());
                }
                token.clone()
            })
            .collect();
        Arc::new(Uses { tape, tokens, step: Mutex::default() })
    }

    /// Counts a use of a parameter, and returns the use's token.
    fn begin(&self, index: usize) -> Option<&DiffTensor> {
        let mut step = self.step.lock();
        step.count += 1;
        step.of_parameters.entry(index).or_default().uses += 1;
        self.tokens.get(step.count - 1).or(self.tokens.last())
    }

    /// Takes the gradient of one use. Returns it if no optimizer waits for gradients.
    fn take(self: &Arc<Uses>, index: usize, gradient: FlexTensor) -> Option<FlexTensor> {
        if !self.tape.is_recording() {
            return Some(gradient);
        }
        TAKEN.with_borrow_mut(|taken| {
            if !taken.iter().any(|uses| Arc::ptr_eq(uses, self)) {
                taken.push(self.clone());
            }
        });
        let complete = {
            let mut step = self.step.lock();
            let parameter = step.of_parameters.entry(index).or_default();
            parameter.returned += 1;
            let sum = match parameter.sum.take() {
                Some(sum) => Flex::float_add(sum, gradient),
                None => gradient,
            };
            if parameter.returned < parameter.uses {
                parameter.sum = Some(sum);
                return None;
            }
            sum
        };
        self.report(index, complete);
        None
    }

    fn end_backward(&self) {
        let step = std::mem::take(&mut *self.step.lock());
        let mut rest: Vec<(usize, FlexTensor)> =
            step.of_parameters.into_iter().filter_map(|(index, parameter)| Some((index, parameter.sum?))).collect();
        rest.sort_by_key(|(index, _)| std::cmp::Reverse(*index));
        rest.into_iter().for_each(|(index, sum)| self.report(index, sum));
    }

    fn report(&self, index: usize, gradient: FlexTensor) {
        self.tape.gradient(index, BurnTensor::new(gradient));
    }
}

impl std::fmt::Debug for Uses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uses").finish_non_exhaustive()
    }
}

/// One replica's copy of a variable, as its model uses it.
#[derive(Debug)]
pub(crate) struct Copy {
    pub(crate) index: usize,
    pub(crate) id: ParamId,
    pub(crate) value: BurnTensor,
    /// Whether gradients are computed for it.
    pub(crate) trained: Arc<AtomicBool>,
    pub(crate) uses: Arc<Uses>,
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
        let Copy { index, value, trained, uses, .. } = &*self.copy;
        let (value, device) = (value.flex(), base.device());
        if !trained.load(Ordering::Acquire) {
            return tensor_on(value, &device);
        }
        let Ok(base) = base.try_into_primitive::<Diff>() else { return tensor_on(value, &device) };
        let token = uses.begin(*index).unwrap_or(&base).node();
        let prepared = Take.prepare::<NoCheckpointing>([base.node(), token]).compute_bound();
        Tensor::from_primitive::<Diff>(match prepared.stateful() {
            OpsKind::Tracked(prepared) => prepared.finish(self.copy.clone(), value),
            OpsKind::UnTracked(prepared) => prepared.finish(value),
        })
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
        let value = copy.value.flex();
        let device = param.lazy_device();
        let trained = param.is_require_grad();
        let base = placeholder::<D>(&value, &device).set_require_grad(trained);
        let mut param = replaced(param, base);
        param.id = copy.id;
        (param, Some(Hook { copy: copy.clone() }))
    }
}

/// Returns the parameter with another value.
pub(crate) fn replaced<const D: usize>(param: Param<Tensor<D>>, value: Tensor<D>) -> Param<Tensor<D>> {
    param.map(|_| value)
}

/// Returns a tensor of NaN with the shape of another, of one element in memory.
fn placeholder<const D: usize>(like: &FlexTensor, device: &Device) -> Tensor<D> {
    let element = Flex::float_full(
        vec![1; D].into(),
        burn_backend::Scalar::from(f32::NAN),
        &Default::default(),
        like.dtype().into(),
    );
    tensor_on(Flex::float_expand(element, like.shape()), device)
}
