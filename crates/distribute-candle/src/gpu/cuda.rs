//! Access of collectives and kernels to candle's tensors on NVIDIA GPUs, without copies.
//!
//! A replica's gradients are packed into buckets as backward completes them, and reduced in the GPU's memory while
//! backward continues. The optimizer then reads them from the buckets, and changes parameters and slots in candle's own
//! memory; nothing is copied to the host. All operations are ordered by the stream on which the replica's candle device
//! computes.

#![expect(unsafe_code, reason = "memory of candle's tensors is lent by its address")]

use std::any::Any;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::CudaStorageSlice;
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, DevicePtr};
use candle_core::{CudaDevice as CandleCuda, CudaStorage, Device, Layout, Storage, Tensor};
use distribute_collectives::{BucketPlan, Compression, DeviceGroup, FusedDeviceAllReduce, FusedDeviceStep, ReduceOp};
use distribute_device::cuda::{CudaDevice, CudaStream};
use distribute_device::{DType, Device as _, DeviceBuffer, Stream};
use distribute_optim::backend::{
    DeviceExchange, DeviceOutcome, DeviceUpdate, GpuUpdater, GpuVariable, Parameters, Plan, Reduced, is_short,
};
use distribute_strategy::{ReplicaContext, Strategy};

use super::zeros;
use crate::device::candle_device;
use crate::exchange::Exchange;
use crate::tensor::dtype_of;
use crate::{Candle, Result};

/// The size of buckets on a GPU if no other size is chosen: smaller operations leave its links idle.
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
    updater: Arc<GpuUpdater>,
}

/// One step's gradients, which are being reduced.
pub struct GpuStep {
    gpu: Gpu,
    updater: Arc<GpuUpdater>,
    group: Arc<DeviceGroup>,
    context: ReplicaContext,
    step: FusedDeviceStep,
}

/// One step's gradients, summed over all replicas: parts of the buckets.
pub struct GpuSum {
    gpu: Gpu,
    updater: Arc<GpuUpdater>,
    /// How long the norm of the gradients may take.
    timeout: Duration,
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
        let stream = adopted(&device, cuda)?;
        Ok(Some(Gpu { device, candle, stream }))
    }

    /// Returns a tensor's memory; the tensor must be contiguous.
    fn lend(&self, tensor: &Tensor) -> Result<DeviceBuffer> {
        let (storage, layout) = tensor.storage_and_layout();
        let refuse = |problem: &str| Err(candle_core::Error::Msg(problem.to_owned()).into());
        let Storage::Cuda(storage) = &*storage else { return refuse("a tensor of a GPU's replica is not on the GPU") };
        let Some(range) = layout.contiguous_offsets() else { return refuse("a tensor is not contiguous") };
        self.lend_range(storage, range, Arc::new(tensor.clone()))
    }

    /// Returns the memory of elements of a storage, which lives as long as `owner` or is released in the order of
    /// candle's stream.
    fn lend_range(
        &self,
        storage: &CudaStorage,
        (start, end): (usize, usize),
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<DeviceBuffer> {
        let refuse = |problem: &str| Err(candle_core::Error::Msg(problem.to_owned()).into());
        let other = storage.device();
        if !matches!(&self.candle, Device::Cuda(own) if own.same_device(other)) {
            let (own, other) = (self.device.spec().short(), other.location());
            let problem = format!(
                "a tensor of the replica on {own} is on candle's device {other:?}; move it by context.to_device"
            );
            return refuse(&problem);
        }
        let stream = other.cuda_stream();
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
        let size = storage.dtype().size_in_bytes();
        // SAFETY: the range is inside the storage. Operations on it run on candle's stream, or on streams for which
        // candle's stream waits before the storage is dropped, or which have ended by then if a call fails
        // (`FusedDeviceStep`, `DeviceGroup`); candle frees its memory in the order of that stream.
        Ok(unsafe { self.device.lend(address + (start * size) as u64, (end - start) * size, owner) })
    }
}

impl DeviceExchange<Candle> for Gpus {
    type Step = GpuStep;
    type Sum = GpuSum;

    fn new(
        context: &ReplicaContext,
        parameters: &Parameters<Candle>,
        plan: &Plan,
        compression: &Compression,
    ) -> Result<Option<Gpus>> {
        let gpu = Gpu::of(context.strategy(), context.local_replica_id())?;
        // All replicas reduce in the same way: one that is not on a GPU has the others go through the host.
        let mut all_have_one = [u32::from(gpu.is_some())];
        context.group().all_reduce(&mut all_have_one, ReduceOp::Min)?;
        let Some(gpu) = gpu.filter(|_| all_have_one == [1]) else { return Ok(None) };
        let group = context.device_group()?;
        let tensors = &plan.buckets().tensors()[..parameters.variables().len()];
        let members = plan.buckets().buckets().iter().flat_map(|bucket| bucket.members.iter().copied());
        let order: Vec<usize> = members.filter(|index| *index < tensors.len()).collect();
        let total = tensors.iter().map(|tensor| tensor.len() * tensor.dtype.size_bytes()).sum();
        let buckets = BucketPlan::new(tensors, &order, context.group().bytes_per_pack_or(total, BUCKET_BYTES));
        let fused = Arc::new(FusedDeviceAllReduce::new(&group, buckets, ReduceOp::Sum)?.compress(compression)?);
        let updater = Arc::new(GpuUpdater::new(gpu.device.clone(), gpu.stream.clone()));
        Ok(Some(Gpus { gpu, fused, updater }))
    }

    fn take_back(&self) {
        self.fused.take_back();
    }

    fn replace_streams(&mut self) -> Result<()> {
        self.fused.replace_stream()?;
        let Device::Cuda(cuda) = &self.gpu.candle else { return Ok(()) };
        self.gpu.stream = adopted(&self.gpu.device, cuda)?;
        self.updater = Arc::new(GpuUpdater::new(self.gpu.device.clone(), self.gpu.stream.clone()));
        Ok(())
    }

    fn begin(&self, context: &ReplicaContext) -> Result<GpuStep> {
        let (gpu, updater, step) = (self.gpu.clone(), self.updater.clone(), self.fused.begin());
        Ok(GpuStep { gpu, updater, group: context.device_group()?, context: context.clone(), step })
    }

    fn has(step: &GpuStep, index: usize) -> bool {
        step.step.has(index)
    }

    fn push(GpuStep { gpu, group, step, .. }: &mut GpuStep, index: usize, gradient: Tensor) -> Result<()> {
        let gradient = gpu.lend(&gradient.detach().contiguous()?)?;
        Ok(step.push(group, index, gradient, &*gpu.stream)?)
    }

    /// Orders later operations after the reductions; the host exchanges the flags. Reductions by NCCL with replicas of
    /// other processes are waited for before: the flags say on all replicas that they have finished, so that a process
    /// that is lost from now on cannot leave its share out of an update.
    fn finish(step: GpuStep, mut flags: Vec<u32>) -> Result<(GpuSum, Vec<u32>)> {
        let GpuStep { gpu, updater, group, context, step } = step;
        step.wait(&group)?;
        context.group().all_reduce(&mut flags, ReduceOp::Sum)?;
        flags.iter().enumerate().filter(|(_, came)| **came == 0).try_for_each(|(index, _)| step.discard(index))?;
        let gradients = step.finish(&*gpu.stream)?;
        let gradients = gradients.into_iter().filter(|(index, _)| flags[*index] > 0).collect();
        let timeout = context.group().options().timeout;
        Ok((GpuSum { gpu, updater, timeout, gradients }, flags))
    }

    fn variables(sum: &GpuSum) -> Vec<usize> {
        sum.gradients.iter().map(|(index, _)| *index).collect()
    }

    fn into_tensors(sum: GpuSum, parameters: &Parameters<Candle>, local: usize) -> Result<Vec<Reduced<Candle>>> {
        let GpuSum { gpu, gradients, .. } = sum;
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

    fn apply(sum: &GpuSum, update: &DeviceUpdate<'_, Candle>) -> Result<DeviceOutcome> {
        let DeviceUpdate { parameters, local, counts, slots, step } = update;
        let variables = sum.gradients.iter().map(|(index, gradients)| {
            let parameter = &parameters.variables()[*index].components()[*local];
            let dtype = dtype_of(parameter.dtype())?;
            let lend = |tensor: &Tensor| sum.gpu.lend(tensor);
            let mut slots = slots(*index).iter().map(lend).collect::<Result<Vec<DeviceBuffer>>>()?;
            let master = slots.pop_if(|_| is_short(dtype));
            let (parameters, gradients) = (lend(parameter)?, gradients.clone());
            Ok(GpuVariable { step: counts.of(*index), dtype, parameters, gradients, slots, master })
        });
        let variables = variables.collect::<Result<Vec<GpuVariable>>>()?;
        let outcome = sum.updater.apply(step, &variables, Instant::now() + sum.timeout);
        Ok(outcome.map_err(distribute_strategy::Error::from)?)
    }
}

/// Returns the stream on which candle computes, as one of this workspace that knows of no earlier failure.
fn adopted(device: &CudaDevice, candle: &CandleCuda) -> Result<Arc<CudaStream>> {
    let stream = candle.cuda_stream();
    // SAFETY: it is a stream of this GPU's primary context, like all of candle's, and is kept alive with it.
    let stream = unsafe { device.adopt_stream(stream.cu_stream().cast(), Arc::new(stream.clone())) };
    Ok(Arc::new(stream.map_err(distribute_strategy::Error::from)?))
}

/// Returns a contiguous tensor's elements, reduced over the replicas in the memory of their GPUs; `None` if a replica
/// is not on a GPU. Every replica calls this.
pub(crate) fn reduced(
    context: &ReplicaContext,
    (op, exchange): (ReduceOp, Exchange),
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<Option<CudaStorage>> {
    in_graph(context, exchange, storage, layout, 1, |group, [_, all], dtype, stream| {
        group.all_reduce_tagged(all, dtype, op, exchange.tag, stream)
    })
}

/// Returns the elements of every replica's contiguous tensor, all of one size, in the order of replicas; `None` as for
/// [`reduced`]. Every replica calls this.
pub(crate) fn gathered(
    context: &ReplicaContext,
    exchange: Exchange,
    storage: &CudaStorage,
    layout: &Layout,
) -> Result<Option<CudaStorage>> {
    let replicas = context.num_replicas_in_sync();
    in_graph(context, exchange, storage, layout, replicas, |group, [own, all], dtype, stream| {
        group.all_gather_tagged(own, all, dtype, exchange.tag, stream)
    })
}

/// Copies a tensor's elements into memory for `parts` times as many, at the replica's place if there are several, and
/// runs `collective` on that place and on the whole. Replicas without elements run it too: others may have some, which
/// is an error on all of them.
fn in_graph(
    context: &ReplicaContext,
    exchange: Exchange,
    storage: &CudaStorage,
    layout: &Layout,
    parts: usize,
    collective: impl FnOnce(&DeviceGroup, [&DeviceBuffer; 2], DType, &dyn Stream) -> distribute_collectives::Result<()>,
) -> Result<Option<CudaStorage>> {
    let Some(group) = context.graph_device_group()? else { return Ok(None) };
    let Some(gpu) = Gpu::of(context.strategy(), context.local_replica_id())? else { return Ok(None) };
    let count = layout.shape().elem_count();
    let Some(range) = layout.contiguous_offsets() else {
        return Err(candle_core::Error::Msg("a tensor is not contiguous".to_owned()).into());
    };
    let result = zeros(storage.device(), parts * count, storage.dtype())?;
    let (given, all) =
        (gpu.lend_range(storage, range, Arc::new(()))?, gpu.lend_range(&result, (0, parts * count), Arc::new(()))?);
    let start = if parts > 1 { context.replica_id() * given.len_bytes() } else { 0 };
    let own = all.slice(start..start + given.len_bytes()).map_err(distribute_strategy::Error::from)?;
    if count > 0 {
        gpu.stream.copy(&given, &own).map_err(distribute_strategy::Error::from)?;
    }
    let called = collective(&group, [&own, &all], dtype_of(storage.dtype())?, &*gpu.stream);
    called.map_err(|error| exchange.failed(error))?;
    Ok(Some(result))
}

impl std::fmt::Debug for Gpus {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gpus").field("device", &self.gpu.device.spec().short()).finish_non_exhaustive()
    }
}
