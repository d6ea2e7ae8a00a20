//! Access of collectives and kernels to candle's tensors on NVIDIA GPUs, without copies.
//!
//! A replica's gradients are packed into buckets as backward completes them, and reduced in the GPU's memory while
//! backward continues. The optimizer then reads them from the buckets, and changes parameters and slots in candle's own
//! memory; nothing is copied to the host. All operations are ordered by the stream on which the replica's candle device
//! computes.

#![expect(unsafe_code, reason = "memory of candle's tensors is lent by its address")]

use std::any::Any;
use std::collections::BTreeSet;
use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::{DType as CandleType, Device, Storage, Tensor};
use distribute_collectives::{BucketPlan, DeviceGroup, FusedDeviceAllReduce, FusedDeviceStep, Options, ReduceOp};
use distribute_device::cuda::{CudaDevice, CudaStream, FusedStep, StepTensor};
use distribute_device::{DType, Device as _, DeviceBuffer, Stream};
use distribute_optim::backend::{DeviceExchange, DeviceUpdate, Parameters, Plan, Reduced, is_short};
use distribute_optim::{AdamFactors, UpdateRule};
use distribute_strategy::{ReplicaContext, Strategy};

use crate::device::candle_device;
use crate::tensor::dtype_of;
use crate::{Candle, Error, Result};

/// The minimum size of buckets on a GPU if no other size is set: smaller operations leave its links idle.
const BUCKET_BYTES: usize = 16 << 20;

/// A GPU as candle and as this workspace address it, with the stream on which candle computes.
#[derive(Clone)]
struct Gpu {
    device: Arc<CudaDevice>,
    candle: Device,
    stream: Arc<CudaStream>,
}

/// A replica's buckets on its GPU.
pub struct Gpus {
    gpu: Gpu,
    fused: Arc<FusedDeviceAllReduce>,
}

/// One step's gradients, which are being reduced.
pub struct GpuStep {
    gpu: Gpu,
    group: Arc<DeviceGroup>,
    context: ReplicaContext,
    step: FusedDeviceStep,
}

/// One step's gradients, summed over all replicas: parts of the buckets.
pub struct GpuSum {
    gpu: Gpu,
    /// The variables that got a gradient on some replica, by index.
    gradients: Vec<(usize, DeviceBuffer)>,
}

impl Gpu {
    /// Returns the GPU of a local replica, or `None` if it is on another device.
    fn of(strategy: &Strategy, local: usize) -> Result<Option<Gpu>> {
        let candle = candle_device(strategy, local)?;
        let Device::Cuda(cuda) = &candle else { return Ok(None) };
        let any: Arc<dyn Any + Send + Sync> = strategy.open_device(local)?;
        let Ok(device) = any.downcast::<CudaDevice>() else { return Ok(None) };
        let stream = cuda.cuda_stream();
        // SAFETY: it is a stream of this GPU's primary context, like all of candle's, and is kept alive with it.
        let stream = unsafe { device.adopt_stream(stream.cu_stream().cast(), Arc::new(stream.clone())) };
        let stream = Arc::new(stream.map_err(distribute_strategy::Error::from)?);
        Ok(Some(Gpu { device, candle, stream }))
    }

    /// Returns a tensor's memory; the tensor must be contiguous.
    fn lend(&self, tensor: &Tensor) -> Result<DeviceBuffer> {
        let (storage, layout) = tensor.storage_and_layout();
        let refuse = |problem: &str| Err(candle_core::Error::Msg(problem.to_owned()).into());
        let Storage::Cuda(storage) = &*storage else { return refuse("a tensor of a GPU's replica is not on the GPU") };
        let Some((start, end)) = layout.contiguous_offsets() else { return refuse("a tensor is not contiguous") };
        let stream = storage.device().cuda_stream();
        fn address<T>(slice: &CudaSlice<T>, stream: &candle_core::cuda_backend::cudarc::driver::CudaStream) -> u64 {
            // candle computes on this stream only, so the access has nothing to wait for.
            slice.device_ptr(stream).0
        }
        let address = match &storage.slice {
            CudaStorageSlice::F32(slice) => address(slice, &stream),
            CudaStorageSlice::F64(slice) => address(slice, &stream),
            CudaStorageSlice::F16(slice) => address(slice, &stream),
            CudaStorageSlice::BF16(slice) => address(slice, &stream),
            _ => return refuse("only floating-point tensors are trained on GPUs"),
        };
        let size = tensor.dtype().size_in_bytes();
        let owner = Arc::new(tensor.clone());
        // SAFETY: the range is inside the tensor's storage, which lives as long as the tensor. Operations on it run on
        // candle's stream, or on streams for which candle's stream waits before the tensor is dropped
        // (`FusedDeviceStep`).
        Ok(unsafe { self.device.lend(address + (start * size) as u64, (end - start) * size, owner) })
    }
}

impl DeviceExchange<Candle> for Gpus {
    type Step = GpuStep;
    type Sum = GpuSum;

    fn new(context: &ReplicaContext, parameters: &Parameters<Candle>, plan: &Plan) -> Result<Option<Gpus>> {
        let Some(gpu) = Gpu::of(context.strategy(), context.local_replica_id())? else { return Ok(None) };
        let group = context.device_group()?;
        let tensors = &plan.buckets().tensors()[..parameters.variables().len()];
        let members = plan.buckets().buckets().iter().flat_map(|bucket| bucket.members.iter().copied());
        let order: Vec<usize> = members.filter(|index| *index < tensors.len()).collect();
        let total = tensors.iter().map(|tensor| tensor.len() * tensor.dtype.size_bytes()).sum();
        let chosen = context.group().bytes_per_pack(total);
        let bucket_bytes = if chosen == Options::default().bytes_per_pack { BUCKET_BYTES } else { chosen };
        let buckets = BucketPlan::new(tensors, &order, bucket_bytes);
        let fused = Arc::new(FusedDeviceAllReduce::new(&group, buckets, ReduceOp::Sum)?);
        Ok(Some(Gpus { gpu, fused }))
    }

    fn begin(&self, context: &ReplicaContext) -> Result<GpuStep> {
        let (gpu, group, step) = (self.gpu.clone(), context.device_group()?, self.fused.begin());
        Ok(GpuStep { gpu, group, context: context.clone(), step })
    }

    fn has(step: &GpuStep, index: usize) -> bool {
        step.step.has(index)
    }

    fn push(GpuStep { gpu, group, step, .. }: &mut GpuStep, index: usize, gradient: Tensor) -> Result<()> {
        let gradient = gpu.lend(&gradient.detach().contiguous()?)?;
        Ok(step.push(group, index, gradient, &*gpu.stream)?)
    }

    /// Orders later operations after the reductions, without waiting for them; the host exchanges the flags.
    fn finish(GpuStep { gpu, context, step, .. }: GpuStep, mut flags: Vec<u32>) -> Result<(GpuSum, Vec<u32>)> {
        context.group().all_reduce(&mut flags, ReduceOp::Sum)?;
        let gradients = step.finish(&*gpu.stream)?;
        let gradients = gradients.into_iter().filter(|(index, _)| flags[*index] > 0).collect();
        Ok((GpuSum { gpu, gradients }, flags))
    }

    fn variables(sum: &GpuSum) -> Vec<usize> {
        sum.gradients.iter().map(|(index, _)| *index).collect()
    }

    fn into_tensors(sum: GpuSum, parameters: &Parameters<Candle>, local: usize) -> Result<Vec<Reduced<Candle>>> {
        let GpuSum { gpu, gradients } = sum;
        gradients
            .into_iter()
            .map(|(index, part)| {
                let parameter = &parameters.variables()[index].components()[local];
                let gradient = Tensor::zeros(parameter.shape(), parameter.dtype(), &gpu.candle)?;
                gpu.stream.copy(&part, &gpu.lend(&gradient)?).map_err(distribute_strategy::Error::from)?;
                Reduced::new(index, gradient)
            })
            .collect()
    }

    fn apply(sum: &GpuSum, update: &DeviceUpdate<'_, Candle>) -> Result<bool> {
        sum.apply(update)
    }
}

impl GpuSum {
    /// Updates all parameters of a replica in few launches. Returns false if the rule has no kernel.
    fn apply(&self, update: &DeviceUpdate<'_, Candle>) -> Result<bool> {
        let DeviceUpdate { parameters, local, rule, counts, learning_rate: rate, slots } = *update;
        // Variables with equal step counts are updated together. Counts differ only if some variables get gradients in
        // some steps only.
        let step_of = |index: usize| if rule.counts_steps() { counts.of(index) } else { 1 };
        let steps: BTreeSet<u64> = self.gradients.iter().map(|(index, _)| step_of(*index)).collect();
        let Some(steps) =
            steps.into_iter().map(|step| Some((step, fused(rule, step, rate)?))).collect::<Option<Vec<_>>>()
        else {
            return Ok(false);
        };
        let stream = &self.gpu.stream;
        let device = |error| Error::from(distribute_strategy::Error::from(error));
        for ((number, fused), dtype) in
            steps.into_iter().flat_map(|step| [DType::F32, DType::F64].map(|dtype| (step, dtype)))
        {
            let mut tensors: Vec<(DeviceBuffer, DeviceBuffer, Vec<DeviceBuffer>)> = Vec::new();
            let mut rounded: Vec<(DeviceBuffer, DType, DeviceBuffer)> = Vec::new();
            for (index, gradient) in &self.gradients {
                let parameter = &parameters.variables()[*index].components()[local];
                let short = is_short(dtype_of(parameter.dtype())?);
                let computed = if parameter.dtype() == CandleType::F64 { DType::F64 } else { DType::F32 };
                if computed != dtype || step_of(*index) != number {
                    continue;
                }
                let mut kept = slots(*index);
                let lent = self.gpu.lend(parameter)?;
                let (target, gradient) = match kept.pop_if(|_| short) {
                    Some(master) => {
                        let from = dtype_of(parameter.dtype())?;
                        let wide = self.gpu.device.allocate(4 * parameter.elem_count()).map_err(device)?;
                        stream.cast(from, gradient, DType::F32, &wide).map_err(device)?;
                        let master = self.gpu.lend(&master)?;
                        rounded.push((master.clone(), from, lent));
                        (master, wide)
                    }
                    None => (lent, gradient.clone()),
                };
                let kept = kept.iter().map(|slot| self.gpu.lend(slot)).collect::<Result<Vec<DeviceBuffer>>>()?;
                tensors.push((target, gradient, kept));
            }
            let slots: Vec<Vec<&DeviceBuffer>> = tensors.iter().map(|(_, _, kept)| kept.iter().collect()).collect();
            let all: Vec<StepTensor<'_>> = tensors
                .iter()
                .zip(&slots)
                .map(|((parameters, gradients, _), slots)| StepTensor { parameters, gradients, slots })
                .collect();
            stream.step(fused, dtype, &all).map_err(device)?;
            for (master, to, parameter) in &rounded {
                stream.cast(DType::F32, master, *to, parameter).map_err(device)?;
            }
        }
        Ok(true)
    }
}

/// Returns the kernel of one step of a rule, if there is one.
fn fused(rule: UpdateRule, step: u64, rate: f64) -> Option<FusedStep> {
    match rule {
        UpdateRule::Sgd { momentum, nesterov } => Some(FusedStep::Sgd { rate, momentum, nesterov }),
        UpdateRule::Adam { beta1, beta2, epsilon, weight_decay } => {
            let factors = AdamFactors::new(step, rate, [beta1, beta2], epsilon, weight_decay);
            let AdamFactors { rate, scale, keep, beta1, rest1, beta2, rest2, epsilon } = factors;
            Some(FusedStep::Adam { rate, scale, keep, beta1, rest1, beta2, rest2, epsilon })
        }
        _ => None,
    }
}

impl std::fmt::Debug for Gpus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpus").field("device", &self.gpu.device.spec().short()).finish_non_exhaustive()
    }
}
