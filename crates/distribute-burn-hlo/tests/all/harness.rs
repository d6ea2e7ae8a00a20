//! Runs a function of burn's tensors on Flex and as a lowered program, and compares results and gradients.

use std::collections::HashMap;

use burn::tensor::{Bool, CapturedGraph, Device, DispatchTensor, Int, Tensor, TensorData, TensorId};
use burn_autodiff::Autodiff;
use burn_backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn_backend::{AutodiffBackend, DType, TensorMetadata};
use burn_capture::{CaptureBackend, CaptureChannel, CaptureDevice};
use burn_flex::Flex;
use burn_ir::{TensorIr, TensorStatus};
use burn_router::{RouterChannel, RouterTensor, TensorInterpreter};
use distribute_burn_hlo::{Error, Lowering, element_type};
use distribute_hlo::{Builder, ElementType, Literal, Program, TensorType};
use hlo_evaluator::{Data, Tensor as HostTensor, evaluate};

/// Calls code with a constant number of dimensions.
macro_rules! with_rank {
    ($rank:expr, $d:ident => $body:expr) => {
        match $rank {
            1 => {
                const $d: usize = 1;
                $body
            }
            2 => {
                const $d: usize = 2;
                $body
            }
            3 => {
                const $d: usize = 3;
                $body
            }
            4 => {
                const $d: usize = 4;
                $body
            }
            5 => {
                const $d: usize = 5;
                $body
            }
            rank => panic!("inputs of {rank} dimensions"),
        }
    };
}

type Diff = Autodiff<CaptureBackend>;

/// A tensor of the capture backend, of any kind.
pub(crate) type Recorded = RouterTensor<<CaptureChannel as RouterChannel>::Client>;

/// The tensors that a function gets.
pub(crate) struct Inputs {
    device: Device,
    tensors: Vec<DispatchTensor>,
}

impl Inputs {
    /// Creates tensors on a device; floating-point numbers require gradients there if it differentiates.
    fn new(device: &Device, given: &[TensorData]) -> Inputs {
        let tensor = |data: &TensorData| match given_kind(data) {
            Kind::Float => {
                let tensor = with_rank!(data.rank(), D => {
                    Tensor::<D>::from_data(data.clone(), (device, data.dtype())).into_dispatch()
                });
                if device.is_autodiff() {
                    Tensor::<1>::from_dispatch(tensor).require_grad().into_dispatch()
                } else {
                    tensor
                }
            }
            Kind::Int => with_rank!(data.rank(), D => {
                Tensor::<D, Int>::from_data(data.clone(), (device, data.dtype())).into_dispatch()
            }),
            Kind::Bool => with_rank!(data.rank(), D => {
                Tensor::<D, Bool>::from_data(data.clone(), device).into_dispatch()
            }),
        };
        Inputs { device: device.clone(), tensors: given.iter().map(tensor).collect() }
    }

    /// Returns the device, for tensors that the function makes.
    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// Returns an input of floating-point numbers.
    pub(crate) fn float<const D: usize>(&self, place: usize) -> Tensor<D> {
        Tensor::from_dispatch(self.tensors[place].clone())
    }

    /// Returns an input of integers.
    pub(crate) fn int<const D: usize>(&self, place: usize) -> Tensor<D, Int> {
        Tensor::from_dispatch(self.tensors[place].clone())
    }

    /// Returns an input of truth values.
    pub(crate) fn bool<const D: usize>(&self, place: usize) -> Tensor<D, Bool> {
        Tensor::from_dispatch(self.tensors[place].clone())
    }
}

/// The results of a function, and a loss that depends on every element of those that are floating-point numbers.
pub(crate) struct Outputs {
    tensors: Vec<(Kind, DispatchTensor)>,
    loss: Option<Tensor<1>>,
}

impl Outputs {
    /// Creates an empty list.
    pub(crate) fn new() -> Outputs {
        Outputs { tensors: Vec::new(), loss: None }
    }

    /// Adds floating-point numbers that count for the loss, each with a weight of its own.
    pub(crate) fn float<const D: usize>(mut self, tensor: Tensor<D>) -> Outputs {
        if tensor.is_tracked() {
            let count = tensor.shape().num_elements();
            let weights: Vec<f32> = (0..count).map(|place| 0.5 + (place * 7 % 11) as f32 / 8.0).collect();
            let weights = TensorData::new(weights, tensor.shape()).convert_dtype(tensor.dtype());
            let weights = Tensor::<D>::from_data(weights, (&tensor.device(), tensor.dtype()));
            let part = (tensor.clone() * weights).sum();
            self.loss = Some(match self.loss {
                Some(loss) => loss + part,
                None => part,
            });
        }
        self.constant(tensor)
    }

    /// Adds floating-point numbers that do not count for the loss.
    pub(crate) fn constant<const D: usize>(mut self, tensor: Tensor<D>) -> Outputs {
        self.tensors.push((Kind::Float, tensor.into_dispatch()));
        self
    }

    /// Adds integers.
    pub(crate) fn int<const D: usize>(mut self, tensor: Tensor<D, Int>) -> Outputs {
        self.tensors.push((Kind::Int, tensor.into_dispatch()));
        self
    }

    /// Adds truth values.
    pub(crate) fn bool<const D: usize>(mut self, tensor: Tensor<D, Bool>) -> Outputs {
        self.tensors.push((Kind::Bool, tensor.into_dispatch()));
        self
    }
}

/// Compares a function and its gradients on Flex and lowered. Differences of floating-point numbers up to `tolerance`
/// times the larger of both and of 1 are allowed.
pub(crate) fn check(name: &str, tolerance: f64, given: &[TensorData], function: impl Fn(&Inputs) -> Outputs) {
    checked(name, tolerance, given, true, function);
}

/// Compares a function without gradients on Flex and lowered.
pub(crate) fn check_forward(name: &str, tolerance: f64, given: &[TensorData], function: impl Fn(&Inputs) -> Outputs) {
    checked(name, tolerance, given, false, function);
}

fn checked(name: &str, tolerance: f64, given: &[TensorData], diff: bool, function: impl Fn(&Inputs) -> Outputs) {
    let expected = on_flex(given, diff, &function);
    let lowered = captured(given, diff, &function).lower().unwrap_or_else(|error| panic!("{name}: {error}"));
    lowered.compare(name, tolerance, &expected);
}

/// Compares what `function` records by the capture backend's own methods, as executed by Flex and lowered.
pub(crate) fn check_recorded(
    name: &str,
    tolerance: f64,
    given: &[TensorData],
    function: impl FnOnce(&CaptureDevice, Vec<Recorded>) -> Vec<Recorded>,
) {
    let capture = recorded(given, function);
    let expected = capture.interpret();
    capture.lower().unwrap_or_else(|error| panic!("{name}: {error}")).compare(name, tolerance, &expected);
}

/// Returns the error of lowering a function.
pub(crate) fn refused(given: &[TensorData], function: impl Fn(&Inputs) -> Outputs) -> Error {
    captured(given, false, function).lower().err().unwrap()
}

/// Returns the error of lowering what `function` records by the capture backend's own methods.
pub(crate) fn refused_recorded(
    given: &[TensorData],
    function: impl FnOnce(&CaptureDevice, Vec<Recorded>) -> Vec<Recorded>,
) -> Error {
    recorded(given, function).lower().err().unwrap()
}

/// Returns the results of a lowered function without an oracle, as for random numbers.
pub(crate) fn results(given: &[TensorData], function: impl Fn(&Inputs) -> Outputs) -> Vec<HostTensor> {
    let lowered = captured(given, false, function).lower().unwrap();
    evaluate(&lowered.program, std::slice::from_ref(&lowered.inputs)).unwrap().swap_remove(0)
}

/// Returns the lowered program of a function.
pub(crate) fn program(given: &[TensorData], function: impl Fn(&Inputs) -> Outputs) -> Program {
    captured(given, false, function).lower().unwrap().program
}

/// Runs a function on Flex. Returns the results, then the gradients of inputs that have one.
fn on_flex(given: &[TensorData], diff: bool, function: impl Fn(&Inputs) -> Outputs) -> Vec<TensorData> {
    let device = if diff { Device::flex().autodiff() } else { Device::flex() };
    let inputs = Inputs::new(&device, given);
    let outputs = function(&inputs);
    let read = |(kind, tensor): (Kind, DispatchTensor)| match kind {
        Kind::Float => Tensor::<1>::from_dispatch(tensor).into_data(),
        Kind::Int => Tensor::<1, Int>::from_dispatch(tensor).into_data(),
        Kind::Bool => Tensor::<1, Bool>::from_dispatch(tensor).into_data(),
    };
    let mut results: Vec<TensorData> = outputs.tensors.into_iter().map(read).collect();
    if let Some(loss) = outputs.loss {
        let gradients = loss.backward();
        let floats = given.iter().zip(inputs.tensors).filter(|(data, _)| given_kind(data) == Kind::Float);
        results.extend(floats.filter_map(|(_, tensor)| {
            Tensor::<1>::from_dispatch(tensor).grad(&gradients).map(|gradient| gradient.into_data())
        }));
    }
    results
}

/// Operations as they were recorded.
struct Capture {
    graph: CapturedGraph,
    /// The tensors and data of the inputs.
    inputs: Vec<(TensorId, TensorData)>,
    outputs: Vec<TensorIr>,
}

/// Records a function and its gradients.
fn captured(given: &[TensorData], diff: bool, function: impl Fn(&Inputs) -> Outputs) -> Capture {
    let plain = Device::capture();
    let device = if diff { plain.clone().autodiff() } else { plain.clone() };
    let (mut input_ids, mut outputs) = (Vec::new(), Vec::new());
    let graph = plain.capture_scope(|scope| {
        let inputs = Inputs::new(&device, given);
        let results = function(&inputs);
        let of = |kind: Kind, tensor: &DispatchTensor| primitive(kind, diff, tensor.clone());
        let held: Vec<Recorded> =
            given.iter().zip(&inputs.tensors).map(|(data, tensor)| of(given_kind(data), tensor)).collect();
        input_ids = held.iter().map(Recorded::id).collect();
        let mut tensors: Vec<Recorded> = results.tensors.iter().map(|(kind, tensor)| of(*kind, tensor)).collect();
        if let Some(loss) = results.loss {
            let gradients = Diff::backward(loss.try_into_primitive::<Diff>().unwrap());
            let floats = given.iter().zip(&inputs.tensors).filter(|(data, _)| given_kind(data) == Kind::Float);
            tensors.extend(floats.filter_map(|(_, tensor)| {
                let tensor = Tensor::<1>::from_dispatch(tensor.clone()).try_into_primitive::<Diff>().unwrap();
                Diff::grad(&tensor, &gradients)
            }));
        }
        outputs = tensors.iter().map(ir_of).collect();
        scope.complete(input_ids.clone(), unique(&outputs))
    });
    let inputs = input_ids.into_iter().zip(given.iter().cloned()).collect();
    Capture { graph: graph.unwrap(), inputs, outputs }
}

/// Records calls of the capture backend's own methods.
fn recorded(given: &[TensorData], function: impl FnOnce(&CaptureDevice, Vec<Recorded>) -> Vec<Recorded>) -> Capture {
    let device = CaptureDevice::default();
    let (mut input_ids, mut outputs) = (Vec::new(), Vec::new());
    let graph = device.capture_scope(|scope| {
        let tensor = |data: &TensorData| match given_kind(data) {
            Kind::Float => CaptureBackend::float_from_data(data.clone(), &device),
            Kind::Int => CaptureBackend::int_from_data(data.clone(), &device),
            Kind::Bool => CaptureBackend::bool_from_data(data.clone(), &device),
        };
        let inputs: Vec<Recorded> = given.iter().map(tensor).collect();
        input_ids = inputs.iter().map(Recorded::id).collect();
        let results = function(&device, inputs);
        outputs = results.iter().map(ir_of).collect();
        scope.complete(input_ids.clone(), unique(&outputs))
    });
    let inputs = input_ids.into_iter().zip(given.iter().cloned()).collect();
    Capture { graph: graph.unwrap(), inputs, outputs }
}

impl Capture {
    /// Executes the recorded operations on Flex.
    fn interpret(&self) -> Vec<TensorData> {
        let mut interpreter = TensorInterpreter::<Flex>::new(burn_flex::FlexDevice);
        for (id, data) in &self.graph.values {
            interpreter.register_tensor_data_id(*id, data.clone());
        }
        for operation in &self.graph.graph.operations {
            interpreter.register_op(operation.clone());
        }
        let read = |tensor: &TensorIr| {
            let data = interpreter.read_tensor_async(tensor.clone());
            burn_std::reader::try_read_sync(data).unwrap().unwrap()
        };
        self.outputs.iter().map(read).collect()
    }

    /// Lowers the recorded operations.
    fn lower(&self) -> Result<Lowered, Error> {
        let mut builder = Builder::new("test");
        let (mut parameters, mut inputs) = (HashMap::new(), Vec::new());
        for (id, data) in &self.inputs {
            parameters.insert(*id, builder.parameter(type_of(data)));
            inputs.push(HostTensor::from_bytes(type_of(data), data.as_bytes()));
        }
        let state = builder.parameter(TensorType::new(ElementType::U64, [2]));
        inputs.push(HostTensor::new([2], vec![7u64, 0]));
        let mut lowering = Lowering::new(&mut builder);
        lowering.set_random_state(state);
        for (id, data) in &self.graph.values {
            match parameters.get(id) {
                Some(&parameter) => lowering.bind(*id, parameter),
                None => {
                    let literal = Literal::from_bytes(type_of(data), data.as_bytes().to_vec()).unwrap();
                    lowering.bind_constant(*id, literal)?;
                }
            }
        }
        let ids: Vec<TensorId> = self.outputs.iter().map(|output| output.id).collect();
        lowering.lower(&self.graph.graph.operations, &ids)?;
        let values: Vec<_> = ids.iter().map(|&id| lowering.value(id)).collect::<Result<_, _>>()?;
        Ok(Lowered { program: builder.finish(&values).unwrap(), inputs })
    }
}

/// A lowered program with its inputs.
struct Lowered {
    program: Program,
    inputs: Vec<HostTensor>,
}

impl Lowered {
    /// Runs the program and compares its results.
    fn compare(&self, name: &str, tolerance: f64, expected: &[TensorData]) {
        let inputs = std::slice::from_ref(&self.inputs);
        let found = evaluate(&self.program, inputs).unwrap_or_else(|error| panic!("{name}: {error}"));
        compare(&format!("{name}, evaluated"), tolerance, &found[0], expected);
        if let Some(found) = crate::plugin::execute(&self.program, &self.inputs) {
            compare(&format!("{name}, on the plugin"), tolerance, &found, expected);
        }
    }
}

/// Compares all results.
pub(crate) fn compare(name: &str, tolerance: f64, found: &[HostTensor], expected: &[TensorData]) {
    assert_eq!(found.len(), expected.len(), "{name}: number of results");
    for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
        if let Some(problem) = difference(tolerance, found, expected) {
            panic!("{name}: result {place}, {}: {problem}\nfound {found:?}\nexpected {expected}", found.ty().short());
        }
    }
}

/// Returns a difference that is not allowed.
pub(crate) fn difference(tolerance: f64, found: &HostTensor, expected: &TensorData) -> Option<String> {
    let expected = &as_recorded(expected, found.ty().element);
    let ty = type_of(expected);
    if *found.ty() != ty {
        return Some(format!("the type is {}, expected {}", found.ty().short(), ty.short()));
    }
    let Some(found) = floats(found) else {
        return (found.to_bytes() != expected.as_bytes()).then(|| "elements differ".to_owned());
    };
    let differ = |x: f64, y: f64| match (x.is_nan(), y.is_nan()) {
        (false, false) => {
            let (distance, size) = ((x - y).abs(), x.abs().max(y.abs()).max(1.0));
            // The distance to an infinite number is infinite, and so is the size.
            x != y && (!distance.is_finite() || distance > tolerance * size)
        }
        (x, y) => x != y,
    };
    let mut pairs = found.into_iter().zip(expected.iter::<f64>()).enumerate();
    let (place, (x, y)) = pairs.find(|(_, (x, y))| differ(*x, *y))?;
    Some(format!("element {place} is {x:?}, expected {y:?}"))
}

/// Converts types of which Flex has others than burn's recording says: default integers and places have 32 or 64 bits,
/// and some truth values are bytes.
fn as_recorded(expected: &TensorData, found: ElementType) -> TensorData {
    match (expected.dtype(), found) {
        (DType::I32, ElementType::I64) => expected.clone().convert_dtype(DType::I64),
        (DType::I64, ElementType::I32) => expected.clone().convert_dtype(DType::I32),
        (DType::U8, ElementType::Bool) => {
            let truth: Vec<bool> = expected.iter::<u8>().map(|byte| byte != 0).collect();
            TensorData::new(truth, expected.shape().clone())
        }
        _ => expected.clone(),
    }
}

/// Returns the elements of a tensor as f64, if they are floating-point numbers.
pub(crate) fn floats(tensor: &HostTensor) -> Option<Vec<f64>> {
    Some(match tensor.data() {
        Data::F64(values) => values.clone(),
        Data::F32(values) => values.iter().map(|&value| value.into()).collect(),
        Data::F16(values) => values.iter().map(|&value| value.into()).collect(),
        Data::BF16(values) => values.iter().map(|&value| value.into()).collect(),
        _ => return None,
    })
}

/// Returns the type of data in a program.
fn type_of(data: &TensorData) -> TensorType {
    TensorType::new(element_type(data.dtype()).unwrap(), data.shape().as_slice())
}

/// The kind of a tensor in burn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Float,
    Int,
    Bool,
}

fn given_kind(data: &TensorData) -> Kind {
    match data.dtype() {
        dtype if dtype.is_float() => Kind::Float,
        DType::Bool(_) => Kind::Bool,
        _ => Kind::Int,
    }
}

/// Returns the capture backend's tensor.
fn primitive(kind: Kind, diff: bool, tensor: DispatchTensor) -> Recorded {
    match (kind, diff) {
        (Kind::Float, true) => {
            let tensor = Tensor::<1>::from_dispatch(tensor);
            match tensor.is_autodiff() {
                true => Diff::inner(tensor.try_into_primitive::<Diff>().unwrap()),
                false => tensor.try_into_primitive::<CaptureBackend>().unwrap(),
            }
        }
        (Kind::Float, false) => Tensor::<1>::from_dispatch(tensor).try_into_primitive::<CaptureBackend>().unwrap(),
        (Kind::Int, _) => {
            Tensor::<1, Int>::from_dispatch(tensor).inner().try_into_primitive::<CaptureBackend>().unwrap()
        }
        (Kind::Bool, _) => {
            Tensor::<1, Bool>::from_dispatch(tensor).inner().try_into_primitive::<CaptureBackend>().unwrap()
        }
    }
}

fn ir_of(tensor: &Recorded) -> TensorIr {
    TensorIr { id: tensor.id(), shape: tensor.shape(), status: TensorStatus::ReadOnly, dtype: tensor.dtype() }
}

/// Returns each id once.
fn unique(tensors: &[TensorIr]) -> Vec<TensorId> {
    let mut ids = Vec::new();
    for tensor in tensors {
        if !ids.contains(&tensor.id) {
            ids.push(tensor.id);
        }
    }
    ids
}
