//! Recording what a model computes, on burn's capture backend.

use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use burn::tensor::{Int, Tensor};
use burn_autodiff::Autodiff;
use burn_backend::backend::{AutodiffBackend, BackendTypes};
use burn_backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn_backend::{DType as BurnType, TensorData};
use burn_capture::{CaptureBackend, CaptureChannel, CaptureClient, CaptureDevice, TensorId};
use burn_ir::OperationIr;
use burn_router::{RouterClient, RouterTensor, get_client};

use super::Leaf;
use distribute_optim::backend::ProgramOptimizer;
use distribute_values::TensorStorage;

use crate::tensor::burn_type;
use crate::trainer::{Inputs, TensorMap};
use crate::{Burn, BurnTensor, Error, Result};

/// The capture backend under automatic differentiation.
type Diff = Autodiff<CaptureBackend>;
type DiffTensor = <Diff as BackendTypes>::FloatTensorPrimitive;
type Recorded = RouterTensor<CaptureClient>;

/// A record of the operations by which a model computed outputs from inputs.
pub(crate) struct Trace {
    pub(crate) operations: Vec<OperationIr>,
    /// The values of tensors that were made from numbers of the host.
    pub(crate) constants: BTreeMap<TensorId, TensorData>,
    /// The parameters that the model used, by the index of their variables.
    pub(crate) parameters: BTreeMap<usize, TensorId>,
    /// The inputs, in the order in which they were made.
    pub(crate) inputs: Vec<(TensorId, Leaf)>,
    /// The number of the model whose parameters they are.
    pub(crate) model: Option<u64>,
    /// The replica's copies of these parameters.
    pub(crate) components: BTreeMap<usize, BurnTensor>,
    /// The optimizer that is to make a step.
    pub(crate) optimizer: Option<ProgramOptimizer<Burn>>,
    /// The gradients of the parameters that were used and are trained.
    pub(crate) gradients: BTreeMap<usize, TensorId>,
    /// The outputs, in the order in which they were named.
    pub(crate) outputs: Vec<TensorId>,
    /// Targets that must be below a number of classes.
    pub(crate) checks: Vec<(TensorId, usize)>,
}

/// The state of a record in progress.
struct Recording {
    client: CaptureClient,
    /// The parameters used so far, with whether their gradients are asked for.
    parameters: BTreeMap<usize, Parameter>,
    /// The model whose parameters they are.
    model: Option<u64>,
    /// The loss of which an optimizer is to make a step.
    step: Option<(Tensor<1>, ProgramOptimizer<Burn>)>,
    inputs: Vec<(TensorId, Leaf)>,
    /// Targets, with the number of classes.
    checks: Vec<(TensorId, usize)>,
    /// Whether the running statistics of the model are in the record.
    has_statistics: bool,
}

impl Recording {
    fn new(client: CaptureClient) -> Recording {
        let (parameters, inputs, checks) = (BTreeMap::new(), Vec::new(), Vec::new());
        Recording { client, parameters, model: None, step: None, inputs, checks, has_statistics: false }
    }
}

/// A parameter in a record.
struct Parameter {
    recorded: Recorded,
    tracked: DiffTensor,
    component: BurnTensor,
    /// Whether its gradient is asked for.
    is_trained: bool,
}

thread_local! {
    /// Device identifiers are never used again, so each thread keeps its own.
    static DEVICE: CaptureDevice = CaptureDevice::default();
    static RECORDING: RefCell<Option<Recording>> = const { RefCell::new(None) };
}

/// Returns whether a record is being made on this thread.
pub(crate) fn is_tracing() -> bool {
    RECORDING.with_borrow(Option::is_some)
}

/// A tensor that a record's closure returns.
pub(crate) struct Output(TensorId);

impl Output {
    pub(crate) fn of<const D: usize>(tensor: Tensor<D>) -> Result<Output> {
        Ok(Output(float_id(tensor)?))
    }
}

/// Records what `body` computes. It returns the loss, if gradients are asked for, and the outputs.
pub(crate) fn record(body: impl FnOnce() -> Result<(Option<Tensor<1>>, Vec<Output>)>) -> Result<Trace> {
    let device = DEVICE.with(|device| *device);
    let mut outcome = None;
    let captured = catch_unwind(AssertUnwindSafe(|| {
        device.capture_scope(|scope| {
            let client = get_client::<CaptureChannel>(&device);
            RECORDING.set(Some(Recording::new(client)));
            let recorded = body().and_then(|(loss, outputs)| finish(loss, outputs));
            let inputs: Vec<TensorId> = recorded.as_ref().map_or_else(
                |_| Vec::new(),
                |trace| trace.parameters.values().copied().chain(trace.inputs.iter().map(|(id, _)| *id)).collect(),
            );
            outcome = Some(recorded);
            scope.complete(inputs, [])
        })
    }));
    RECORDING.set(None);
    match (captured, outcome) {
        (Err(panic), _) => match message_of(panic) {
            Ok(message) => Err(Error::Trace { problem: message }),
            // An error that was raised.
            Err(other) => resume_unwind(other),
        },
        (Ok(_), Some(Err(error))) => Err(error),
        (Ok(Ok(graph)), Some(Ok(trace))) => {
            Ok(Trace { operations: graph.graph.operations, constants: graph.values, ..trace })
        }
        (Ok(Err(error)), _) => Err(Error::Trace { problem: error.to_string() }),
        (Ok(Ok(_)), None) => Err(Error::Trace { problem: "nothing was recorded".to_owned() }),
    }
}

/// Returns the problem of a record that has ended by a panic of burn's or a [`Refusal`], or else the panic.
fn message_of(panic: Box<dyn Any + Send>) -> std::result::Result<String, Box<dyn Any + Send>> {
    let panic = match panic.downcast::<Refusal>() {
        Ok(refusal) => return Ok(refusal.0),
        Err(other) => other,
    };
    let text = match panic.downcast::<String>() {
        Ok(text) => *text,
        Err(other) => (*other.downcast::<&str>()?).to_owned(),
    };
    let text = text.trim_end_matches('.');
    Ok(format!(
        "{text}. Operations are recorded without values, so that a model must not read tensors, nor call backward"
    ))
}

/// The panic by which a record ends with an error, out of a function of burn.
struct Refusal(String);

fn refuse(problem: impl Into<String>) -> ! {
    resume_unwind(Box::new(Refusal(problem.into())))
}

/// Runs backward, and collects the ids of everything.
fn finish(loss: Option<Tensor<1>>, outputs: Vec<Output>) -> Result<Trace> {
    let taken = recording(|recording| {
        let Recording { parameters, inputs, checks, step, model, .. } = recording;
        let parameters = (std::mem::take(parameters), *model);
        (parameters, std::mem::take(inputs), std::mem::take(checks), step.take())
    });
    let ((parameters, model), inputs, checks, step) = taken.unwrap_or_default();
    let (of_step, optimizer) = step.unzip();
    let mut gradients = BTreeMap::new();
    if let Some(loss) = loss.or(of_step) {
        let loss = loss.try_into_primitive::<Diff>().map_err(not_recorded)?;
        if !loss.is_tracked() {
            return Err(distribute_optim::Error::NoGradient.into());
        }
        let mut all = Diff::backward(loss);
        for (index, parameter) in parameters.iter().filter(|(_, parameter)| parameter.is_trained) {
            if let Some(gradient) = Diff::grad_remove(&parameter.tracked, &mut all) {
                gradients.insert(*index, gradient.id());
            }
        }
    }
    let ids = parameters.iter().map(|(index, parameter)| (*index, parameter.recorded.id())).collect();
    let components = parameters.into_iter().map(|(index, parameter)| (index, parameter.component)).collect();
    Ok(Trace {
        operations: Vec::new(),
        constants: BTreeMap::new(),
        parameters: ids,
        model,
        components,
        optimizer,
        inputs,
        gradients,
        outputs: outputs.into_iter().map(|output| output.0).collect(),
        checks,
    })
}

/// Takes the loss of which an optimizer is to make a step in the program that is being recorded; `None` if none is.
pub(crate) fn record_step(
    optimizer: &dyn Fn() -> distribute_optim::Result<Box<dyn Any>>,
    loss: &Tensor<1>,
) -> Option<Result<()>> {
    if !is_tracing() {
        return None;
    }
    let optimizer = match optimizer().map(Box::<dyn Any>::downcast::<ProgramOptimizer<Burn>>) {
        Ok(Ok(optimizer)) => *optimizer,
        Ok(Err(_)) => return Some(Err(Error::Trace { problem: "the optimizer is of another library".to_owned() })),
        Err(error) => return Some(Err(error.into())),
    };
    recording(|recording| match recording.step.replace((loss.clone(), optimizer)) {
        None => Ok(()),
        Some(_) => Err(Error::Trace { problem: "minimize is called twice in a step; call it once".to_owned() }),
    })
}

/// Makes a tensor of the record without a value.
fn handle(client: &CaptureClient, shape: &[usize], dtype: BurnType) -> Recorded {
    RouterTensor::new(client.create_empty_handle(), shape.to_vec().into(), dtype, client.clone())
}

/// Makes a float tensor of the record. An operation on it, whose result nothing uses, makes it known to the record.
fn float_handle(client: &CaptureClient, shape: &[usize], dtype: BurnType) -> Recorded {
    let tensor = handle(client, shape, dtype);
    let _ = CaptureBackend::float_neg(tensor.clone());
    tensor
}

fn recording<R>(act: impl FnOnce(&mut Recording) -> R) -> Option<R> {
    RECORDING.with_borrow_mut(|recording| recording.as_mut().map(act))
}

/// Returns the tensor that stands for a variable in the record of this thread; `None` if there is none. `model` is
/// equal for the variables of one model only.
pub(crate) fn traced_parameter<const D: usize>(
    (model, index): (u64, usize),
    component: &BurnTensor,
    is_trained: bool,
    autodiff: bool,
) -> Option<Tensor<D>> {
    let dtype = component.dtype().ok().map(burn_type)?;
    let (recorded, tracked) = recording(|recording| {
        if *recording.model.get_or_insert(model) != model {
            return None;
        }
        let client = recording.client.clone();
        let parameter = recording.parameters.entry(index).or_insert_with(|| {
            let recorded = float_handle(&client, &component.shape(), dtype);
            let tracked = Diff::from_inner(recorded.clone());
            let tracked = if is_trained { tracked.require_grad() } else { tracked };
            Parameter { recorded, tracked, component: component.clone(), is_trained }
        });
        Some((parameter.recorded.clone(), parameter.tracked.clone()))
    })??;
    Some(match autodiff {
        true => Tensor::from_primitive::<Diff>(tracked),
        false => Tensor::from_primitive::<CaptureBackend>(recorded),
    })
}

/// Makes an input of the record.
pub(crate) fn float_input<const D: usize>(leaf: Leaf, autodiff: bool) -> Option<Tensor<D>> {
    let recorded = recording(|recording| {
        let tensor = float_handle(&recording.client, &leaf.shape, leaf.dtype);
        recording.inputs.push((tensor.id(), leaf));
        tensor
    })?;
    Some(match autodiff {
        true => Tensor::from_primitive::<Diff>(Diff::from_inner(recorded)),
        false => Tensor::from_primitive::<CaptureBackend>(recorded),
    })
}

/// Multiplies a loss by a replica's weight, as an input: replicas with and without examples run one program.
pub(crate) fn weighed(loss: Tensor<1>, weight: f64) -> Tensor<1> {
    let weight = Leaf::floats(&[weight as f32]).unwrap_or_else(|error| refuse(error.to_string()));
    match float_input::<1>(weight, true) {
        Some(weight) => loss.clone() * weight.cast(loss.dtype()),
        None => loss,
    }
}

/// Makes an input of integers, or of truth values, of the record.
pub(crate) fn int_input<const D: usize>(leaf: Leaf, autodiff: bool) -> Option<Tensor<D, Int>> {
    let recorded = recording(|recording| {
        let tensor = handle(&recording.client, &leaf.shape, leaf.dtype);
        if leaf.dtype.is_bool() {
            let _ = CaptureBackend::bool_not(tensor.clone());
        } else {
            let _ = CaptureBackend::int_neg(tensor.clone());
        }
        recording.inputs.push((tensor.id(), leaf));
        tensor
    })?;
    Some(match autodiff {
        true => Tensor::from_primitive::<Diff>(recorded),
        false => Tensor::from_primitive::<CaptureBackend>(recorded),
    })
}

/// Notes that targets must be below `classes`, which is compared on the host before each step. Returns `None` outside
/// records.
pub(crate) fn targets_checked<const D: usize>(targets: &Tensor<D, Int>, classes: usize) -> Option<Result<()>> {
    if !is_tracing() {
        return None;
    }
    match targets.clone().without_autodiff().try_into_primitive::<CaptureBackend>() {
        Ok(tensor) => recording(|recording| recording.checks.push((tensor.id(), classes))).map(Ok),
        Err(error) => Some(Err(not_recorded(error))),
    }
}

/// Returns the id of a float tensor of the record.
pub(crate) fn float_id<const D: usize>(tensor: Tensor<D>) -> Result<TensorId> {
    let inner = match tensor.is_autodiff() {
        true => Diff::inner(tensor.try_into_primitive::<Diff>().map_err(not_recorded)?),
        false => tensor.try_into_primitive::<CaptureBackend>().map_err(not_recorded)?,
    };
    Ok(inner.id())
}

fn not_recorded(error: impl std::fmt::Debug) -> Error {
    let problem = format!(
        "a tensor is on another device ({error:?}); make tensors on the device of the inputs, as with x.device()"
    );
    Error::Trace { problem }
}

/// Notes that running statistics are made tensors of the record.
pub(crate) fn begin_statistics() {
    recording(|recording| recording.has_statistics = true);
}

/// Ends the record, with an error, if a model is used whose running statistics are not in it: on the host they are
/// not brought up to date.
pub(crate) fn refuse_without_statistics() {
    if recording(|recording| recording.has_statistics) == Some(false) {
        let problem = "a model with running statistics, such as those of batch normalisation, is used in run_step; \
            train it by Trainer, whose programs update them";
        refuse(problem);
    }
}

/// Ends the record of a step that uses two models, with an error.
pub(crate) fn refuse_second_model<const D: usize>() -> Tensor<D> {
    refuse("a step uses two models; make one module of both")
}

/// Records a step of one replica, and returns what it returned too.
pub(crate) fn record_with<R: Inputs>(body: impl FnOnce() -> Result<R>) -> Result<(Trace, R)> {
    let mut result = None;
    let trace = record(|| {
        let returned = body()?;
        let mut ids = Ids::default();
        result = Some(returned.map_tensors(&mut ids));
        match ids.problem {
            None => Ok((None, ids.outputs)),
            Some(problem) => Err(problem),
        }
    })?;
    let missing = || Error::Trace { problem: "nothing was recorded".to_owned() };
    Ok((trace, result.ok_or_else(missing)?))
}

/// The tensors that a step returns.
#[derive(Default)]
struct Ids {
    outputs: Vec<Output>,
    problem: Option<Error>,
}

impl TensorMap for Ids {
    fn float<const D: usize>(&mut self, tensor: Tensor<D>) -> Tensor<D> {
        match Output::of(tensor.clone()) {
            Ok(output) => self.outputs.push(output),
            Err(error) => self.problem = Some(error),
        }
        tensor
    }

    fn int<const D: usize>(&mut self, tensor: Tensor<D, Int>) -> Tensor<D, Int> {
        match tensor.clone().without_autodiff().try_into_primitive::<CaptureBackend>() {
            Ok(recorded) => self.outputs.push(Output(recorded.id())),
            Err(error) => self.problem = Some(not_recorded(error)),
        }
        tensor
    }
}
