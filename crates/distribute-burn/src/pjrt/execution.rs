//! Compiled programs of one model, and their runs.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::Tensor;
use burn_backend::{DType as BurnType, TensorData};
use burn_flex::FlexTensor;
use burn_ir::TensorId;
use distribute_device::pjrt::{Buffer, Executable, ExecuteOptions, Execution, PjrtDevice};
use distribute_optim::backend::ProgramOptimizer;
use distribute_strategy::{PjrtReplicas, Strategy};
use distribute_values::{DistributedVariable, TensorStorage};
use parking_lot::Mutex;

use super::program::{Known, Planned, plan, typed};
use super::trace::{Trace, record};
use super::{Leaf, Output, Resident};
use crate::backend::{SEED_STEP, drawn_seed};
use crate::tensor::burn_type;
use crate::{Burn, BurnTensor, Error, Result};

/// The compiled programs of a model, and the state of its random streams on each device.
#[derive(Default)]
pub(crate) struct Programs {
    compiled: Mutex<HashMap<Key, Arc<Compiled>>>,
    /// The executables of steps that are recorded each time, by the fingerprint of their text.
    of_steps: Mutex<HashMap<u128, Arc<Executable>>>,
    random: Arc<RandomStates>,
}

/// The state of each replica's random stream; empty before the first step, and after a failure, which loses them.
type RandomStates = Mutex<Vec<Arc<Buffer>>>;

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
    /// Whether the copies of the parameters are to be compared after the step.
    is_audit_due: bool,
    random: Arc<RandomStates>,
    timeout: Duration,
}

impl StepOutputs {
    /// Waits for the end of the run on all devices, and returns each replica's outputs. After a failure the model's
    /// variables are lost, until others are loaded.
    pub(crate) fn wait(self, strategy: &Strategy) -> Result<Vec<Vec<FlexTensor>>> {
        let StepOutputs { execution, optimizer, has_norm, is_audit_due, random, timeout } = self;
        let deadline = Instant::now() + timeout;
        if let Err(error) = execution.wait(deadline) {
            lose(optimizer.as_ref(), &random);
            return Err(Error::Accelerator(error));
        }
        let outputs = execution.into_outputs();
        if let Some(optimizer) = &optimizer {
            if let (true, Some([norm, ..])) = (has_norm, outputs.first().map(Vec::as_slice)) {
                let norm = norm.to_vec::<f32>(deadline).map_err(Error::Accelerator)?;
                optimizer.set_norm(norm.first().map(|norm| f64::from(*norm)));
            }
            if is_audit_due {
                distribute_optim::audit(strategy, optimizer.parameters())?;
            }
        }
        let first = usize::from(has_norm);
        let of_replica = |buffers: &Vec<Buffer>| buffers[first..].iter().map(|one| read(one, deadline)).collect();
        outputs.iter().map(of_replica).collect()
    }
}

/// Notes that a program has failed, with what was donated to it.
fn lose(optimizer: Option<&ProgramOptimizer<Burn>>, random: &RandomStates) {
    if let Some(optimizer) = optimizer {
        optimizer.parameters().set_torn(true);
    }
    random.lock().clear();
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
    /// on all devices.
    pub(crate) fn run(&self, inputs: StepInputs<'_>, body: &dyn Fn() -> Result<Recorded>) -> Result<StepOutputs> {
        let pjrt = pjrt_of(inputs.strategy)?;
        let compiled = self.compiled(&inputs, pjrt, body)?;
        self.launch(inputs, pjrt, &compiled.planned, &compiled.executable)
    }

    /// Runs the program of records that the replicas have made of one step, each with its own inputs. It is compiled
    /// if no step before it was the same.
    pub(crate) fn run_recorded(&self, strategy: &Strategy, mut traces: Vec<Trace>) -> Result<StepOutputs> {
        let pjrt = pjrt_of(strategy)?;
        let differs = |replica: usize| Error::Trace {
            problem: format!(
                "replica {replica} computes something else than replica 0: all replicas run one program, so give what \
                 differs between them as arrays, by context.tensor, of equal shapes"
            ),
        };
        check_optimizers(&traces)?;
        let optimizer = traces[0].optimizer.take();
        let length = traces[0].components.last_key_value().map_or(0, |(last, _)| last + 1);
        let mut components = vec![Vec::new(); length];
        let mut leaves = Vec::with_capacity(traces.len());
        for (replica, trace) in traces.iter().enumerate() {
            if !trace.components.keys().eq(traces[0].components.keys()) || trace.model != traces[0].model {
                return Err(differs(replica));
            }
            for (index, component) in &trace.components {
                components[*index].push(component.clone());
            }
            leaves.push(trace.inputs.iter().map(|(_, leaf)| leaf.clone()).collect());
        }
        let inputs = StepInputs { name: "step", strategy, components, optimizer, settings: String::new(), leaves };
        let mut planned: Option<Planned> = None;
        for (replica, trace) in traces.iter().enumerate() {
            let own = planned_of(&inputs, trace, &BTreeMap::new(), traces.len())?;
            match &planned {
                None => planned = Some(own),
                Some(first) if first.is_same(&own) => {}
                Some(_) => return Err(differs(replica)),
            }
        }
        let Some(planned) = planned else {
            return Err(Error::Trace { problem: "there are no replicas".to_owned() });
        };
        let executable = self.of_step(pjrt, &planned)?;
        self.launch(inputs, pjrt, &planned, &executable)
    }

    /// Returns the executable of a step's program, which is compiled if no step before it was the same.
    fn of_step(&self, pjrt: &PjrtReplicas, planned: &Planned) -> Result<Arc<Executable>> {
        let fingerprint = planned.program.fingerprint();
        let (known, others) = {
            let of_steps = self.of_steps.lock();
            (of_steps.get(&fingerprint).cloned(), of_steps.len())
        };
        if let Some(known) = known {
            return Ok(known);
        }
        if others > 0 {
            distribute_notice::warn!(
                "a step is compiled again, as it differs from the {others} before it, in shapes or in numbers of the \
                 host; give numbers that change as arrays, by context.tensor"
            );
        }
        let executable = Arc::new(pjrt.compile(planned.program.name(), planned.program.text())?);
        self.of_steps.lock().insert(fingerprint, executable.clone());
        Ok(executable)
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
        if !again.is_same(&first) {
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
        let executable = Arc::new(pjrt.compile(first.program.name(), first.program.text())?);
        let compiled = Arc::new(Compiled { planned: first, executable });
        self.compiled.lock().insert(key, compiled.clone());
        Ok(compiled)
    }

    fn launch(
        &self,
        inputs: StepInputs<'_>,
        pjrt: &PjrtReplicas,
        planned: &Planned,
        executable: &Executable,
    ) -> Result<StepOutputs> {
        check_indices(planned, &inputs.leaves)?;
        let timeout = pjrt.deadline().saturating_duration_since(Instant::now());
        let optimizer = inputs.optimizer.as_ref();
        optimizer.map_or(Ok(()), ProgramOptimizer::renew_masters)?;
        let numbers = optimizer.map(|optimizer| optimizer.numbers(&planned.trained)).unwrap_or_default();
        let numbers: Vec<f32> = numbers.into_iter().map(|number| number as f32).collect();
        let numbers = Leaf::floats(&numbers)?;
        let slots = slots_of(optimizer, &planned.trained);
        let mut random = self.random.lock();
        if random.is_empty() {
            *random = first_states(pjrt)?;
        }
        let mut arguments: Vec<Vec<Arc<Buffer>>> = Vec::with_capacity(pjrt.devices().len());
        for (local, device) in pjrt.devices().iter().enumerate() {
            let variables = planned.variables.iter().map(|index| &inputs.components[*index][local]);
            let mut own = Vec::new();
            for tensor in variables.chain(slots.iter().map(|slot| &slot[local])) {
                own.push(resident(tensor, device, timeout)?);
            }
            own.push(random[local].clone());
            for leaf in std::iter::once(&numbers).chain(&inputs.leaves[local]) {
                own.push(upload(leaf, device)?);
            }
            arguments.push(own);
        }
        let given: Vec<Vec<&Buffer>> = arguments.iter().map(|own| own.iter().map(|one| &**one).collect()).collect();
        let mut execution = match executable.launch(&given, &ExecuteOptions::new()) {
            Ok(execution) => execution,
            Err(error) => {
                let state = |own: &Vec<Arc<Buffer>>| own.get(planned.variables.len() + slots.len()).cloned();
                let is_lost = |state: Arc<Buffer>| state.is_deleted().unwrap_or(true);
                drop(random);
                // Of what is donated, each program has a random state.
                if arguments.iter().filter_map(state).any(is_lost) {
                    lose(optimizer, &self.random);
                }
                return Err(Error::Accelerator(error));
            }
        };
        let is_audit_due = optimizer.is_some_and(|optimizer| optimizer.commit(&planned.trained));
        if optimizer.is_some() {
            inputs.strategy.agree_alone();
        }
        // The new values of variables, and of the random states.
        let changed = planned.trained.len() + slots.len() + planned.replaced.len();
        for (local, buffers) in execution.take_outputs(changed + 1).into_iter().enumerate() {
            let mut buffers = buffers.into_iter();
            let component = |index: &usize| &inputs.components[*index][local];
            let targets = planned.trained.iter().map(component).chain(slots.iter().map(|slot| &slot[local]));
            let targets = targets.chain(planned.replaced.iter().map(component));
            for (tensor, buffer) in targets.zip(buffers.by_ref()) {
                tensor.replace_on_device(Resident::new(buffer, tensor.dtype()?, tensor.shape(), timeout));
            }
            if let Some(state) = buffers.next() {
                random[local] = Arc::new(state);
            }
        }
        drop(random);
        let (has_norm, random) = (planned.has_norm, self.random.clone());
        Ok(StepOutputs { execution, optimizer: inputs.optimizer, has_norm, is_audit_due, random, timeout })
    }
}

/// Returns the elements of a variable's copy in the memory of its device, to which they are copied if they are not
/// there.
fn resident(tensor: &BurnTensor, device: &PjrtDevice, timeout: Duration) -> Result<Arc<Buffer>> {
    if let Some(resident) = tensor.on_device() {
        return Ok(resident.buffer());
    }
    let leaf = Leaf::of(&tensor.fetched()?)?;
    let resident = Resident::new(upload(&leaf, device)?, tensor.dtype()?, leaf.shape, timeout);
    let buffer = resident.buffer();
    tensor.add_device_copy(resident);
    Ok(buffer)
}

fn upload(leaf: &Leaf, device: &PjrtDevice) -> Result<Arc<Buffer>> {
    let element = typed(&leaf.shape, leaf.dtype)?.element;
    let buffer = device.upload(element, &leaf.shape, leaf.memory.clone()).map_err(Error::Accelerator)?;
    Ok(Arc::new(buffer))
}

/// Returns an error unless all replicas make a step of one optimizer, or none does, and it is of the variables that
/// they have used.
fn check_optimizers(traces: &[Trace]) -> Result<()> {
    for (replica, trace) in traces.iter().enumerate() {
        let problem = match (&traces[0].optimizer, &trace.optimizer) {
            (None, None) => continue,
            (Some(first), Some(own)) if first.is_same(own) => {
                let variables = own.parameters().variables();
                let copy =
                    |index: &usize| variables.get(*index).and_then(|variable| variable.components().get(replica));
                let mut used = trace.components.iter();
                if used.all(|(index, component)| copy(index).is_some_and(|copy| copy.is_same(component))) {
                    continue;
                }
                "the optimizer is of another model than the step; give it the model from which it was built".to_owned()
            }
            _ => format!(
                "replica {replica} minimizes by another optimizer than replica 0, or with another learning rate: call \
                 minimize of one optimizer on every replica"
            ),
        };
        return Err(Error::Trace { problem });
    }
    Ok(())
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
fn check_indices(planned: &Planned, leaves: &[Vec<Leaf>]) -> Result<()> {
    for check in &planned.checks {
        leaves.iter().try_for_each(|leaves| check.check(&leaves[check.input]))?;
    }
    Ok(())
}

/// Draws the first state of each replica's random stream from burn's generator, which `Device::seed` sets.
fn first_states(pjrt: &PjrtReplicas) -> Result<Vec<Arc<Buffer>>> {
    let seed = drawn_seed()?;
    let state = |(replica, device): (usize, &PjrtDevice)| {
        // The first number is the key; the second is a counter.
        let key = seed.wrapping_add((replica as u64).wrapping_mul(SEED_STEP));
        Ok(Arc::new(device.upload_slice(&[key, 0u64], &[2]).map_err(Error::Accelerator)?))
    };
    pjrt.devices().iter().enumerate().map(state).collect()
}

fn shapes(key: &Key) -> String {
    let all: Vec<String> = key.leaves.iter().map(|(shape, _)| format!("{shape:?}")).collect();
    all.join(", ")
}
