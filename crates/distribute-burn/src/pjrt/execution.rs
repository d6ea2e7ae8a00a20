//! Compiled programs of one model, and their runs.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn_backend::{DType as BurnType, TensorData};
use burn_flex::FlexTensor;
use burn_ir::TensorId;
use distribute_device::DType;
use distribute_device::pjrt::{Buffer, CompileOptions, ElementType, Executable, ExecuteOptions, Execution};
use distribute_optim::backend::{ProgramStep, Variable};
use distribute_strategy::{PjrtReplicas, Strategy};
use distribute_values::TensorStorage;
use parking_lot::Mutex;

use super::program::{Known, Planned, one_byte_each, plan};
use super::trace::{Trace, record};
use super::{Leaf, Output, Resident};
use crate::tensor::{burn_type, dtype_of};
use crate::{Burn, BurnTensor, Error, Optimizer, Result};

/// The compiled programs of a model, and the state of its random streams on each device.
#[derive(Default)]
pub(crate) struct Programs {
    compiled: Mutex<HashMap<Key, Arc<Compiled>>>,
    /// One state per replica, after the first step.
    random: Mutex<Vec<Arc<Buffer>>>,
}

/// What a program depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Key {
    name: &'static str,
    leaves: Vec<(Vec<usize>, BurnType)>,
    /// The optimizer's part and other settings.
    settings: String,
}

struct Compiled {
    planned: Planned,
    executable: Executable,
}

/// What a run of a program needs.
pub(crate) struct StepInputs<'a> {
    pub(crate) name: &'static str,
    pub(crate) strategy: &'a Strategy,
    pub(crate) variables: &'a [Variable<Burn>],
    /// The optimizer, of a program that trains.
    pub(crate) optimizer: Option<&'a Optimizer>,
    /// Settings of the record, which is made again if they change.
    pub(crate) settings: String,
    /// Each replica's tensors, of equal shapes.
    pub(crate) leaves: Vec<Vec<Leaf>>,
}

/// What a run of a program returns: the outputs of the record, by replica.
pub(crate) struct StepOutputs {
    execution: Execution,
    first: usize,
    norm: Option<usize>,
    timeout: Duration,
}

impl StepOutputs {
    /// Waits for the end of the run on all devices, and returns each replica's outputs and the norm of gradients.
    pub(crate) fn wait(self) -> Result<(Vec<Vec<FlexTensor>>, Option<f64>)> {
        let deadline = Instant::now() + self.timeout;
        self.execution.wait(deadline).map_err(Error::Accelerator)?;
        let outputs = self.execution.into_outputs();
        let norm = match (self.norm, outputs.first()) {
            (Some(place), Some(outputs)) => {
                let values = outputs[place].to_vec::<f32>(deadline).map_err(Error::Accelerator)?;
                values.first().map(|norm| f64::from(*norm))
            }
            _ => None,
        };
        let of_replica = |buffers: &Vec<Buffer>| buffers[self.first..].iter().map(|one| read(one, deadline)).collect();
        Ok((outputs.iter().map(of_replica).collect::<Result<_>>()?, norm))
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
    pub(crate) fn run<const D: usize>(
        &self,
        inputs: StepInputs<'_>,
        body: &dyn Fn() -> Result<(Option<burn::tensor::Tensor<D>>, Vec<Output>, BTreeMap<usize, TensorId>)>,
    ) -> Result<StepOutputs> {
        let pjrt = pjrt_of(inputs.strategy)?;
        let step = inputs.optimizer.map(|optimizer| optimizer.program_step()).transpose()?;
        let compiled = self.compiled(&inputs, pjrt, step, body)?;
        check_targets(&compiled.planned, &inputs.leaves)?;
        self.launch(&inputs, pjrt, &compiled)
    }

    fn compiled<const D: usize>(
        &self,
        inputs: &StepInputs<'_>,
        pjrt: &PjrtReplicas,
        step: Option<ProgramStep>,
        body: &dyn Fn() -> Result<(Option<burn::tensor::Tensor<D>>, Vec<Output>, BTreeMap<usize, TensorId>)>,
    ) -> Result<Arc<Compiled>> {
        let leaves = inputs.leaves[0].iter().map(|leaf| (leaf.shape.clone(), leaf.dtype)).collect();
        let key = Key { name: inputs.name, leaves, settings: format!("{step:?} {}", inputs.settings) };
        if let Some(compiled) = self.compiled.lock().get(&key) {
            return Ok(compiled.clone());
        }
        let planned = planned(inputs, step, pjrt.devices().len(), body)?;
        // A second record that differs has read something that programs do not: random numbers of the host, a clock.
        let again = planned_text(inputs, step, pjrt.devices().len(), body)?;
        if again != planned.program.text() {
            let problem = "the model computed something else from the same inputs when it was recorded again, such as \
                with random numbers or a clock of the host; use burn's random tensors, and give other numbers as inputs";
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
        let mut options = CompileOptions::for_devices(pjrt.devices());
        if pjrt.client().platform_name() == "cpu" {
            // Else maxima lose NaN.
            options = options.with("xla_cpu_enable_fast_min_max", false);
        }
        let executable = pjrt.client().compile(planned.program.text(), &options, pjrt.deadline());
        let compiled = Arc::new(Compiled { planned, executable: executable.map_err(Error::Accelerator)? });
        self.compiled.lock().insert(key, compiled.clone());
        Ok(compiled)
    }

    fn launch(&self, inputs: &StepInputs<'_>, pjrt: &PjrtReplicas, compiled: &Compiled) -> Result<StepOutputs> {
        let Compiled { planned, executable } = compiled;
        let timeout = pjrt.deadline().saturating_duration_since(Instant::now());
        let numbers: Vec<f32> = match inputs.optimizer {
            Some(optimizer) => {
                optimizer.program_numbers(&planned.trained).iter().map(|number| *number as f32).collect()
            }
            None => Vec::new(),
        };
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
                own.push(resident(&inputs.variables[*index].components()[local])?);
            }
            for slot in slots_of(inputs.optimizer, &planned.trained) {
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
        if let Some(optimizer) = inputs.optimizer {
            optimizer.commit_program_step(&planned.trained);
        }
        self.take(inputs, planned, (execution, &mut random, timeout))
    }

    /// Takes the new values of variables from a program that has been started.
    fn take(
        &self,
        inputs: &StepInputs<'_>,
        planned: &Planned,
        (mut execution, random, timeout): (Execution, &mut [Arc<Buffer>], Duration),
    ) -> Result<StepOutputs> {
        let slots = slots_of(inputs.optimizer, &planned.trained);
        let changed = planned.trained.len() + slots.len() + planned.replaced.len();
        let taken = execution.take_outputs(changed + 1);
        for (local, buffers) in taken.into_iter().enumerate() {
            let mut buffers = buffers.into_iter();
            let targets = planned.trained.iter().map(|index| &inputs.variables[*index].components()[local]);
            let targets = targets.chain(slots.iter().map(|slot| &slot[local]));
            let targets =
                targets.chain(planned.replaced.iter().map(|index| &inputs.variables[*index].components()[local]));
            for (tensor, buffer) in targets.zip(buffers.by_ref()) {
                let resident = Resident::new(buffer, tensor.dtype()?, tensor.shape(), timeout);
                tensor.replace_on_device(Arc::new(resident));
            }
            if let Some(state) = buffers.next() {
                random[local] = Arc::new(state);
            }
        }
        let norm = planned.has_norm.then_some(0);
        Ok(StepOutputs { execution, first: usize::from(planned.has_norm), norm, timeout })
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
fn slots_of<'a>(optimizer: Option<&'a Optimizer>, trained: &[usize]) -> Vec<&'a [BurnTensor]> {
    let slots = |index: &usize| optimizer.map_or(&[][..], |optimizer| optimizer.program_slots(*index));
    trained.iter().flat_map(slots).map(|slot| slot.components()).collect()
}

pub(super) fn pjrt_of(strategy: &Strategy) -> Result<&PjrtReplicas> {
    strategy.pjrt().ok_or_else(|| Error::Program { problem: "a program needs PJRT devices; there are none".to_owned() })
}

fn planned<const D: usize>(
    inputs: &StepInputs<'_>,
    step: Option<ProgramStep>,
    replicas: usize,
    body: &dyn Fn() -> Result<(Option<burn::tensor::Tensor<D>>, Vec<Output>, BTreeMap<usize, TensorId>)>,
) -> Result<Planned> {
    let mut statistics = BTreeMap::new();
    let trace: Trace = record(|| {
        let (loss, outputs, new) = body()?;
        statistics = new;
        Ok((loss, outputs))
    })?;
    let known = |index: usize| -> Result<Known> {
        let component = &inputs.variables[index].components()[0];
        let slots = inputs.optimizer.map_or(&[][..], |optimizer| optimizer.program_slots(index));
        let of_slot = |slot: &BurnTensor| Ok(burn_type(slot.dtype()?));
        let slots = slots.iter().map(|slot| of_slot(&slot.components()[0])).collect::<Result<_>>()?;
        Ok(Known { shape: component.shape(), dtype: burn_type(component.dtype()?), slots })
    };
    plan(inputs.name, &trace, &known, &statistics, step.as_ref(), replicas)
}

fn planned_text<const D: usize>(
    inputs: &StepInputs<'_>,
    step: Option<ProgramStep>,
    replicas: usize,
    body: &dyn Fn() -> Result<(Option<burn::tensor::Tensor<D>>, Vec<Output>, BTreeMap<usize, TensorId>)>,
) -> Result<String> {
    Ok(planned(inputs, step, replicas, body)?.program.text().to_owned())
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
