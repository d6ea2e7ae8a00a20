//! Compiled programs of one model, and their runs.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use burn_backend::{DType as BurnType, TensorData};
use burn_flex::FlexTensor;
use burn_ir::TensorId;
use distribute_device::DType;
use distribute_device::pjrt::{Buffer, CompileOptions, ElementType, Executable, ExecuteOptions, Execution};
use distribute_optim::backend::ProgramOptimizer;
use distribute_strategy::{PjrtReplicas, Strategy};
use distribute_values::{DistributedVariable, TensorStorage};
use parking_lot::Mutex;

use super::program::{Known, Planned, one_byte_each, plan};
use super::trace::{Trace, record};
use super::{Leaf, Output, Resident};
use crate::tensor::{burn_type, dtype_of};
use crate::{Burn, BurnTensor, Error, Result};

/// The compiled programs of a model, and the state of its random streams on each device.
#[derive(Default)]
pub(crate) struct Programs {
    compiled: Mutex<HashMap<Key, Arc<Compiled>>>,
    /// One state per replica, after the first step.
    random: Mutex<Vec<Arc<Buffer>>>,
}

/// The properties on which a program depends.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    name: &'static str,
    leaves: Vec<(Vec<usize>, BurnType)>,
    /// The optimizer's part and other settings.
    settings: String,
}

struct Compiled {
    planned: Planned,
    executable: Arc<Executable>,
}

impl Compiled {
    fn new(pjrt: &PjrtReplicas, planned: Planned) -> Result<Compiled> {
        let mut options = CompileOptions::for_devices(pjrt.devices());
        if pjrt.client().platform_name() == "cpu" {
            // Else maxima lose NaN.
            options = options.with("xla_cpu_enable_fast_min_max", false);
        }
        pjrt.dump(planned.program.name(), planned.program.text())?;
        let executable = pjrt.client().compile(planned.program.text(), &options, pjrt.deadline());
        Ok(Compiled { planned, executable: Arc::new(executable.map_err(Error::Accelerator)?) })
    }
}

/// The arguments of a run of a program.
pub(crate) struct StepInputs<'a> {
    pub(crate) name: &'static str,
    pub(crate) strategy: &'a Strategy,
    /// The components of all variables of the model, by index and replica.
    pub(crate) components: Vec<Vec<BurnTensor>>,
    /// The optimizer, of a program that trains.
    pub(crate) optimizer: Option<ProgramOptimizer<Burn>>,
    /// Settings of the record, which is made again if they change.
    pub(crate) settings: String,
    /// Each replica's tensors, of equal shapes.
    pub(crate) leaves: Vec<Vec<Leaf>>,
}

/// The result of a record's closure: a loss to train by, the outputs, and new values of running statistics.
pub(crate) type Recorded = (Option<Tensor<1>>, Vec<Output>, BTreeMap<usize, TensorId>);

/// A run of a program, with the outputs of the record.
pub(crate) struct StepOutputs {
    execution: Execution,
    /// The optimizer whose step the program makes.
    optimizer: Option<ProgramOptimizer<Burn>>,
    /// Whether the first output is the norm of the gradients.
    has_norm: bool,
    timeout: Duration,
}

impl StepOutputs {
    /// Waits for the end of the run on all devices, and returns each replica's outputs. After a failure the model's
    /// variables are lost, until others are loaded.
    pub(crate) fn wait(self) -> Result<Vec<Vec<FlexTensor>>> {
        let StepOutputs { execution, optimizer, has_norm, timeout } = self;
        let deadline = Instant::now() + timeout;
        let ended = execution.wait(deadline).map_err(Error::Accelerator);
        if let (Err(_), Some(optimizer)) = (&ended, &optimizer) {
            optimizer.parameters().set_torn(true);
        }
        ended?;
        let outputs = execution.into_outputs();
        if let (Some(optimizer), true, Some([norm, ..])) = (&optimizer, has_norm, outputs.first().map(Vec::as_slice)) {
            let norm = norm.to_vec::<f32>(deadline).map_err(Error::Accelerator)?;
            optimizer.set_norm(norm.first().map(|norm| f64::from(*norm)));
        }
        let first = usize::from(has_norm);
        let of_replica = |buffers: &Vec<Buffer>| buffers[first..].iter().map(|one| read(one, deadline)).collect();
        outputs.iter().map(of_replica).collect()
    }
}

fn read(buffer: &Buffer, deadline: Instant) -> Result<FlexTensor> {
    let (dims, element) =
        (buffer.dims().map_err(Error::Accelerator)?, buffer.element_type().map_err(Error::Accelerator)?);
    let dtype = element.dtype().ok_or_else(|| Error::Program {
        problem: format!("a program returned elements of {element}, which are not read; convert them"),
    })?;
    let host = buffer.read(deadline).map_err(Error::Accelerator)?;
    let data = TensorData::from_bytes_vec(host.as_bytes().to_vec(), dims, burn_type(dtype));
    Ok(FlexTensor::from_data(data))
}

impl Programs {
    /// Runs the program that `body` records: compiles it, if there is none for tensors of these shapes, and starts it
    /// on all devices. `statistics` makes running statistics inputs of a record, and returns their new values.
    pub(crate) fn run(&self, mut inputs: StepInputs<'_>, body: &dyn Fn() -> Result<Recorded>) -> Result<StepOutputs> {
        let pjrt = pjrt_of(inputs.strategy)?;
        let compiled = self.compiled(&inputs, pjrt, body)?;
        self.launch(&mut inputs, pjrt, &compiled)
    }

    /// Runs the program of records that the replicas have made of one step, each with its own inputs. It is compiled
    /// if no step before it was the same.
    pub(crate) fn run_recorded(&self, strategy: &Strategy, traces: Vec<Trace>) -> Result<StepOutputs> {
        let pjrt = pjrt_of(strategy)?;
        let mut traces = traces;
        let indices: Vec<usize> = traces[0].components.keys().copied().collect();
        let length = indices.last().map_or(0, |last| last + 1);
        let mut components = vec![Vec::new(); length];
        for trace in &mut traces {
            for (index, component) in std::mem::take(&mut trace.components) {
                if let Some(of_variable) = components.get_mut(index) {
                    of_variable.push(component);
                }
            }
        }
        let leaves = traces.iter().map(|trace| trace.inputs.iter().map(|(_, leaf)| leaf.clone()).collect()).collect();
        let optimizer = traces[0].optimizer.take();
        let (name, settings) = ("step", String::new());
        let mut inputs = StepInputs { name, strategy, components, optimizer, settings, leaves };
        let mut first: Option<Planned> = None;
        for (replica, trace) in traces.iter().enumerate() {
            let planned = planned_of(&inputs, trace, &BTreeMap::new(), traces.len())?;
            match &first {
                None => first = Some(planned),
                Some(first) if first.program.text() == planned.program.text() => {}
                Some(_) => {
                    let problem = format!(
                        "replica {replica} computes something else than replica 0: all replicas run one program, so \
                         give what differs between them as arrays, by context.tensor, of equal shapes"
                    );
                    return Err(Error::Trace { problem });
                }
            }
        }
        let Some(planned) = first else {
            return Err(Error::Trace { problem: "there are no replicas".to_owned() });
        };
        let settings = format!("{:032x}", planned.program.fingerprint());
        let key = Key { name, leaves: Vec::new(), settings };
        let known = self.compiled.lock().get(&key).cloned();
        let compiled = match known {
            // Equal programs may be of other variables.
            Some(known) => Arc::new(Compiled { planned, executable: known.executable.clone() }),
            None => {
                let others = self.compiled.lock().len();
                if others > 0 {
                    distribute_notice::warn!(
                        "a step is compiled again, as it differs from the {others} before it, in shapes or in numbers \
                         of the host; give numbers that change as arrays, by context.tensor"
                    );
                }
                let compiled = Arc::new(Compiled::new(pjrt, planned)?);
                self.compiled.lock().insert(key, compiled.clone());
                compiled
            }
        };
        self.launch(&mut inputs, pjrt, &compiled)
    }

    fn compiled(
        &self,
        inputs: &StepInputs<'_>,
        pjrt: &PjrtReplicas,
        body: &dyn Fn() -> Result<Recorded>,
    ) -> Result<Arc<Compiled>> {
        let leaves = inputs.leaves[0].iter().map(|leaf| (leaf.shape.clone(), leaf.dtype)).collect();
        let step = inputs.optimizer.as_ref().map(ProgramOptimizer::step);
        let key = Key { name: inputs.name, leaves, settings: format!("{step:?} {}", inputs.settings) };
        if let Some(compiled) = self.compiled.lock().get(&key) {
            return Ok(compiled.clone());
        }
        let planned = || -> Result<Planned> {
            let mut statistics = BTreeMap::new();
            let trace = record(|| {
                let (loss, outputs, new) = body()?;
                statistics = new;
                Ok((loss, outputs))
            })?;
            planned_of(inputs, &trace, &statistics, pjrt.devices().len())
        };
        let (first, again) = (planned()?, planned()?);
        // A second record that differs has read something that programs do not: random numbers of the host, a clock.
        if again.program.text() != first.program.text() {
            let problem = "the model computed something else from the same inputs when it was recorded again, such as \
                with random numbers or a clock of the host; use burn's random tensors, and give other numbers as \
                inputs";
            return Err(Error::Trace { problem: problem.to_owned() });
        }
        let same_name = |other: &&Key| other.name == key.name && other.settings == key.settings;
        if let Some(other) = self.compiled.lock().keys().find(same_name) {
            distribute_notice::warn!(
                "the program {:?} is compiled again, for tensors of shapes {}; those before were {}. Batches of one \
                 size need one program",
                key.name,
                shapes(&key),
                shapes(other)
            );
        }
        let compiled = Arc::new(Compiled::new(pjrt, first)?);
        self.compiled.lock().insert(key, compiled.clone());
        Ok(compiled)
    }

    fn launch(&self, inputs: &mut StepInputs<'_>, pjrt: &PjrtReplicas, compiled: &Compiled) -> Result<StepOutputs> {
        let Compiled { planned, executable } = compiled;
        check_targets(planned, &inputs.leaves)?;
        let timeout = pjrt.deadline().saturating_duration_since(Instant::now());
        let numbers = inputs.optimizer.as_ref().map(|optimizer| optimizer.numbers(&planned.trained));
        let numbers: Vec<f32> = numbers.unwrap_or_default().into_iter().map(|number| number as f32).collect();
        let numbers = Leaf::floats(&numbers);
        let mut random = self.random.lock();
        if random.is_empty() {
            *random = first_states(pjrt)?;
        }
        let mut arguments: Vec<Vec<Kept>> = Vec::with_capacity(pjrt.devices().len());
        for (local, device) in pjrt.devices().iter().enumerate() {
            let upload = |leaf: &Leaf| -> Result<Kept> {
                let element = pjrt_element(leaf.dtype)?;
                let bytes = one_byte_each(leaf.dtype, &leaf.bytes);
                let leaf = Leaf { bytes, ..leaf.clone() };
                let buffer = device.upload(element, &leaf.shape, leaf.memory()?).map_err(Error::Accelerator)?;
                Ok(Kept::Own(buffer))
            };
            let resident = |tensor: &BurnTensor| -> Result<Kept> {
                if let Some(resident) = tensor.on_device() {
                    return Ok(Kept::Resident(resident));
                }
                let (flex, dtype) = (tensor.fetched()?, tensor.dtype()?);
                let leaf = Leaf::of(&flex);
                let buffer = device.upload(dtype.into(), &leaf.shape, leaf.memory()?).map_err(Error::Accelerator)?;
                let resident = Arc::new(Resident::new(buffer, dtype, leaf.shape, timeout));
                tensor.add_device_copy(resident.clone());
                Ok(Kept::Resident(resident))
            };
            let mut own = Vec::new();
            for index in &planned.variables {
                own.push(resident(&inputs.components[*index][local])?);
            }
            for slot in slots_of(inputs.optimizer.as_ref(), &planned.trained) {
                own.push(resident(&slot[local])?);
            }
            own.push(Kept::Random(random[local].clone()));
            own.push(upload(&numbers)?);
            for leaf in &inputs.leaves[local] {
                own.push(upload(leaf)?);
            }
            arguments.push(own);
        }
        let given: Vec<Vec<&Buffer>> = arguments.iter().map(|own| own.iter().map(Kept::buffer).collect()).collect();
        let execution = executable.launch(&given, &ExecuteOptions::new()).map_err(Error::Accelerator)?;
        if let Some(optimizer) = &inputs.optimizer {
            optimizer.commit(&planned.trained);
        }
        self.take(inputs, planned, (execution, &mut random, timeout))
    }

    /// Takes the new values of variables from a program that has been started.
    fn take(
        &self,
        inputs: &mut StepInputs<'_>,
        planned: &Planned,
        (mut execution, random, timeout): (Execution, &mut [Arc<Buffer>], Duration),
    ) -> Result<StepOutputs> {
        let slots = slots_of(inputs.optimizer.as_ref(), &planned.trained);
        let changed = planned.trained.len() + slots.len() + planned.replaced.len();
        let taken = execution.take_outputs(changed + 1);
        for (local, buffers) in taken.into_iter().enumerate() {
            let mut buffers = buffers.into_iter();
            let component = |index: &usize| &inputs.components[*index][local];
            let targets = planned.trained.iter().map(component).chain(slots.iter().map(|slot| &slot[local]));
            let targets = targets.chain(planned.replaced.iter().map(component));
            for (tensor, buffer) in targets.zip(buffers.by_ref()) {
                let resident = Resident::new(buffer, tensor.dtype()?, tensor.shape(), timeout);
                tensor.replace_on_device(Arc::new(resident));
            }
            if let Some(state) = buffers.next() {
                random[local] = Arc::new(state);
            }
        }
        Ok(StepOutputs { execution, optimizer: inputs.optimizer.take(), has_norm: planned.has_norm, timeout })
    }
}

/// An argument of a program, kept until it was started.
enum Kept {
    Own(Buffer),
    Resident(Arc<Resident>),
    Random(Arc<Buffer>),
}

impl Kept {
    fn buffer(&self) -> &Buffer {
        match self {
            Kept::Own(buffer) => buffer,
            Kept::Resident(resident) => &resident.buffer,
            Kept::Random(buffer) => buffer,
        }
    }
}

/// Returns the slots of trained variables, in the order of a program's parameters.
fn slots_of<'a>(optimizer: Option<&'a ProgramOptimizer<Burn>>, trained: &[usize]) -> Vec<&'a [BurnTensor]> {
    let slots = |index: &usize| optimizer.map_or(&[][..], |optimizer| optimizer.slots(*index));
    trained.iter().flat_map(slots).map(|slot| slot.components()).collect()
}

pub(super) fn pjrt_of(strategy: &Strategy) -> Result<&PjrtReplicas> {
    strategy.pjrt().ok_or_else(|| Error::Program { problem: "a program needs PJRT devices; there are none".to_owned() })
}

/// Returns the program of a record.
fn planned_of(
    inputs: &StepInputs<'_>,
    trace: &Trace,
    statistics: &BTreeMap<usize, TensorId>,
    replicas: usize,
) -> Result<Planned> {
    let known = |index: usize| -> Result<Known> {
        let component = &inputs.components[index][0];
        let slots = inputs.optimizer.as_ref().map_or(&[][..], |optimizer| optimizer.slots(index));
        let of_slot = |slot: &DistributedVariable<BurnTensor>| Ok(burn_type(slot.components()[0].dtype()?));
        let slots = slots.iter().map(of_slot).collect::<Result<_>>()?;
        Ok(Known { shape: component.shape(), dtype: burn_type(component.dtype()?), slots })
    };
    let step = inputs.optimizer.as_ref().map(ProgramOptimizer::step);
    plan(inputs.name, trace, &known, statistics, step.as_ref(), replicas)
}

/// Returns an error for the first target that is not a class.
fn check_targets(planned: &Planned, leaves: &[Vec<Leaf>]) -> Result<()> {
    for (place, classes) in &planned.checks {
        for leaf in leaves.iter().map(|leaves| &leaves[*place]) {
            let data = TensorData::from_bytes_vec(leaf.bytes.clone(), leaf.shape.clone(), leaf.dtype);
            let targets: Vec<i64> = crate::data::numbers(data)?;
            let outside = |class: &i64| usize::try_from(*class).map_or(true, |class| class >= *classes);
            if let Some(at) = targets.iter().position(outside) {
                return Err(Error::Class { at, class: targets[at], classes: *classes });
            }
        }
    }
    Ok(())
}

/// Draws the first state of each replica's random stream from burn's generator, which `Device::seed` sets.
fn first_states(pjrt: &PjrtReplicas) -> Result<Vec<Arc<Buffer>>> {
    use burn::tensor::{Device, Distribution, Tensor};
    let drawn = Tensor::<1>::random([4], Distribution::Uniform(0.0, 65536.0), &Device::flex());
    let parts: Vec<f32> = crate::data::numbers(drawn.into_data())?;
    let seed = parts.iter().fold(0u64, |seed, part| (seed << 16) | u64::from(*part as u32 & 0xffff));
    let state = |(replica, device): (usize, &distribute_device::pjrt::PjrtDevice)| {
        // The first number is the key; the second is a counter.
        let key = seed.wrapping_add((replica as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        Ok(Arc::new(device.upload_slice(&[key, 0u64], &[2]).map_err(Error::Accelerator)?))
    };
    pjrt.devices().iter().enumerate().map(state).collect()
}

fn pjrt_element(dtype: BurnType) -> Result<ElementType> {
    match dtype {
        BurnType::Bool(_) => Ok(ElementType::Bool),
        dtype => Ok(DType::into(dtype_of(dtype)?)),
    }
}

fn shapes(key: &Key) -> String {
    let all: Vec<String> = key.leaves.iter().map(|(shape, _)| format!("{shape:?}")).collect();
    all.join(", ")
}
