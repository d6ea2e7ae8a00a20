//! Updates of a replica's parameters in the memory of an NVIDIA GPU.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use distribute_device::cuda::{CudaDevice, CudaStream, GradientChange, GradientLimit, StepTensor};
use distribute_device::{DType, Device, DeviceBuffer, Error, HostBuffer, Result, Stream};
use parking_lot::Mutex;

use crate::Clip;
use crate::library::{DeviceOutcome, DeviceStep, is_short};

/// The size of the two f64 that kernels write for each gradient, and for all of them together.
const SUMS_BYTES: usize = 16;

/// Carries out a replica's [`DeviceStep`]s in the memory of its GPU.
///
/// Loss scaling and [`Clip::GlobalNorm`] copy 16 bytes to the host in each step; nothing else is copied. The results
/// are those of the CPU bit for bit, except where norms are needed: sums of squares are added in f64 as on the CPU, but
/// in another order, which depends on the variables' sizes only.
///
/// # Examples
/// On a machine with a GPU:
/// ```no_run
/// use std::sync::Arc;
/// use std::time::{Duration, Instant};
/// use distribute_device::cuda::CudaDevice;
/// use distribute_device::{DType, Device, Devices};
/// use distribute_optim::backend::{DeviceStep, GpuUpdater, GpuVariable};
/// use distribute_optim::{Clip, UpdateRule};
///
/// let device = Arc::new(CudaDevice::new(Devices::local().find(&"GPU:0".parse()?)?.clone())?);
/// let updater = GpuUpdater::new(device.clone(), Arc::new(device.stream()?));
/// let (parameters, gradients) = (device.allocate(4096)?, device.allocate(4096)?);
/// let variable = GpuVariable { step: 1, dtype: DType::F32, parameters, gradients, slots: Vec::new(), master: None };
/// let (rule, clip) = (UpdateRule::Sgd { momentum: 0.0, nesterov: false }, Some(Clip::GlobalNorm(1.0)));
/// let step = DeviceStep { rule, learning_rate: 0.1, loss_scale: Some(1024.0), clip, other_squares: 0.0 };
/// let outcome = updater.apply(&step, &[variable], Instant::now() + Duration::from_secs(60))?;
/// println!("finite: {}, norm: {:?}", outcome.finite, outcome.gradient_norm);
/// # Ok::<(), distribute_device::Error>(())
/// ```
pub struct GpuUpdater {
    device: Arc<CudaDevice>,
    stream: Arc<CudaStream>,
    memory: Mutex<Memory>,
}

/// The memory of earlier steps, which later ones use again: an allocation waits until its memory is zeroed.
#[derive(Default)]
struct Memory {
    /// Pinned memory for the sums that the host needs.
    read: Option<HostBuffer>,
    sums: Option<DeviceBuffer>,
    /// Gradients of 16 bits that were converted to f32.
    wide: Option<DeviceBuffer>,
}

/// A variable of a step on a GPU.
#[derive(Clone, Debug)]
pub struct GpuVariable {
    /// The number of the variable's step, from 1.
    pub step: u64,
    /// The type of the parameters and of the gradients.
    pub dtype: DType,
    /// The parameters.
    pub parameters: DeviceBuffer,
    /// The gradients, summed over all replicas, which stay as they are.
    pub gradients: DeviceBuffer,
    /// The optimizer's slots, of f64 if the parameters are, else of f32.
    pub slots: Vec<DeviceBuffer>,
    /// The f32 copy of parameters of 16 bits.
    pub master: Option<DeviceBuffer>,
}

/// A variable in the types in which steps are computed.
struct Wide<'a> {
    of: &'a GpuVariable,
    dtype: DType,
    /// Equal numbers are stepped together; 1 if the rule does not count steps.
    step: u64,
    parameters: &'a DeviceBuffer,
    gradients: DeviceBuffer,
    slots: Vec<&'a DeviceBuffer>,
}

impl Wide<'_> {
    fn tensor(&self) -> StepTensor<'_> {
        StepTensor { parameters: self.parameters, gradients: &self.gradients, slots: &self.slots }
    }
}

impl GpuUpdater {
    /// Creates an updater that enqueues its work on `stream`, a stream of `device`.
    pub fn new(device: Arc<CudaDevice>, stream: Arc<CudaStream>) -> GpuUpdater {
        GpuUpdater { device, stream, memory: Mutex::default() }
    }

    /// Divides, limits and applies the gradients of `variables`, after the work that the stream has. Returns when the
    /// work is enqueued; with loss scaling or [`Clip::GlobalNorm`], when the norm of the gradients is known.
    ///
    /// # Errors
    /// [`Error::Operands`] for sizes that differ, slots that the rule does not have, or parameters of 16 bits without
    /// an f32 copy; [`Error::DeviceMemory`] if intermediate values do not fit into memory; [`Error::Deadline`] if the
    /// norm is not known at `deadline`; the errors of [`CudaStream::step`].
    pub fn apply(&self, step: &DeviceStep, variables: &[GpuVariable], deadline: Instant) -> Result<DeviceOutcome> {
        // Taken, so that nothing is locked while the norm is awaited.
        let mut memory = std::mem::take(&mut *self.memory.lock());
        let outcome = self.apply_in(&mut memory, step, variables, deadline);
        *self.memory.lock() = memory;
        outcome
    }

    fn apply_in(
        &self,
        memory: &mut Memory,
        step: &DeviceStep,
        variables: &[GpuVariable],
        deadline: Instant,
    ) -> Result<DeviceOutcome> {
        let mut wide = self.widened(step, variables, &mut memory.wide)?;
        // Neighbours are stepped together. The sort is stable, so sums are added in the same order on all replicas.
        wide.sort_by_key(|variable| (variable.dtype == DType::F64, variable.step));
        let divisor = step.loss_scale.unwrap_or(1.0);
        let is_global = matches!(step.clip, Some(Clip::GlobalNorm(_)));
        let needs_sums = step.loss_scale.is_some() || step.clip.is_some_and(Clip::needs_norms);
        // Kernels refuse memory of another size where they need sums.
        let sums = if needs_sums { self.sums(&wide, divisor, &mut memory.sums)? } else { self.device.allocate(0)? };
        let of = |variables: Range<usize>| match needs_sums {
            true => sums.slice(SUMS_BYTES * variables.start..SUMS_BYTES * variables.end),
            false => Ok(sums.clone()),
        };
        let total = of(wide.len()..wide.len() + 1)?;
        let mut outcome = DeviceOutcome { finite: true, gradient_norm: None };
        if step.loss_scale.is_some() || is_global {
            let [unfinite, squares] = self.read(&total, &mut memory.read, deadline)?;
            if step.loss_scale.is_some() && !(unfinite == 0.0 && step.other_squares.is_finite()) {
                return Ok(DeviceOutcome { finite: false, ..outcome });
            }
            outcome.gradient_norm = is_global.then(|| (squares + step.other_squares).sqrt());
        }
        let mut start = 0;
        for group in wide.chunk_by(|a, b| (a.dtype, a.step) == (b.dtype, b.step)) {
            let own = of(start..start + group.len())?;
            let limit = match step.clip {
                None => GradientLimit::None,
                Some(Clip::Value(limit)) => GradientLimit::Value(limit),
                Some(Clip::Norm(limit)) => GradientLimit::Norm { limit, sums: &own },
                Some(Clip::GlobalNorm(limit)) => {
                    GradientLimit::GlobalNorm { limit, total: &total, others: step.other_squares }
                }
            };
            let tensors: Vec<StepTensor<'_>> = group.iter().map(Wide::tensor).collect();
            let fused = step.rule.fused(group[0].step, step.learning_rate);
            self.stream.step(fused, &GradientChange { divisor, limit }, group[0].dtype, &tensors)?;
            start += group.len();
        }
        for Wide { of: GpuVariable { dtype, parameters, master, .. }, .. } in &wide {
            if let Some(master) = master {
                self.stream.cast(DType::F32, master, *dtype, parameters)?;
            }
        }
        Ok(outcome)
    }

    /// Returns the variables with gradients in f32 or f64: those of 16 bits are converted.
    fn widened<'a>(
        &self,
        step: &DeviceStep,
        variables: &'a [GpuVariable],
        held: &mut Option<DeviceBuffer>,
    ) -> Result<Vec<Wide<'a>>> {
        let bytes = |variable: &GpuVariable| match is_short(variable.dtype) {
            // Tensors begin at multiples of 16 bytes, so that kernels load whole vectors.
            true => (2 * variable.gradients.len_bytes()).next_multiple_of(16),
            false => 0,
        };
        let whole = self.memory(held, variables.iter().map(bytes).sum())?;
        let mut at = 0;
        let mut wide = Vec::with_capacity(variables.len());
        for of in variables {
            let GpuVariable { dtype, parameters, gradients, slots, master, .. } = of;
            let (dtype, parameters, gradients) = match (is_short(*dtype), master) {
                (true, Some(master)) => {
                    let part = whole.slice(at..at + 2 * gradients.len_bytes())?;
                    at += bytes(of);
                    self.stream.cast(*dtype, gradients, DType::F32, &part)?;
                    (DType::F32, master, part)
                }
                (false, None) => (*dtype, parameters, gradients.clone()),
                (is_short, _) => {
                    let given = if is_short { "without" } else { "with" };
                    let problem =
                        format!("a variable of {dtype} came {given} an f32 copy; give one for f16 and bf16 alone");
                    return Err(Error::Operands { operation: "stepping an optimizer", problem });
                }
            };
            let step = if step.rule.counts_steps() { of.step } else { 1 };
            wide.push(Wide { of, dtype, step, parameters, gradients, slots: slots.iter().collect() });
        }
        Ok(wide)
    }

    /// Returns the sums of squares of each gradient, followed by their total.
    fn sums(&self, wide: &[Wide<'_>], divisor: f64, held: &mut Option<DeviceBuffer>) -> Result<DeviceBuffer> {
        let sums = self.memory(held, SUMS_BYTES * (wide.len() + 1))?;
        let mut start = 0;
        for group in wide.chunk_by(|a, b| a.dtype == b.dtype) {
            let end = start + group.len();
            let gradients: Vec<&DeviceBuffer> = group.iter().map(|variable| &variable.gradients).collect();
            let own = sums.slice(SUMS_BYTES * start..SUMS_BYTES * end)?;
            self.stream.square_sums(group[0].dtype, &gradients, divisor, &own)?;
            start = end;
        }
        let (each, total) = (sums.slice(0..SUMS_BYTES * start)?, sums.slice(SUMS_BYTES * start..sums.len_bytes())?);
        self.stream.total_square_sum(&each, &total)?;
        Ok(sums)
    }

    /// Returns memory of this size: that of an earlier step, if it has as much. All uses of it are in the order of the
    /// stream.
    fn memory(&self, held: &mut Option<DeviceBuffer>, len_bytes: usize) -> Result<DeviceBuffer> {
        match held {
            Some(held) if held.len_bytes() == len_bytes => Ok(held.clone()),
            _ => Ok(held.insert(self.device.allocate(len_bytes)?).clone()),
        }
    }

    /// Copies two f64 to the host and waits for them.
    fn read(&self, total: &DeviceBuffer, held: &mut Option<HostBuffer>, deadline: Instant) -> Result<[f64; 2]> {
        let memory = match held.take() {
            Some(memory) => memory,
            None => self.device.allocate_host(SUMS_BYTES)?,
        };
        let memory = self.stream.copy_to_host(total, memory, 0)?.wait(deadline)?;
        let sums = memory.as_slice::<f64>()?;
        let sums = [sums[0], sums[1]];
        *held = Some(memory);
        Ok(sums)
    }
}

impl fmt::Debug for GpuUpdater {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuUpdater").field("device", &self.device.spec().short()).finish_non_exhaustive()
    }
}
