//! A tensor library whose tensors are in the memory of GPUs, and whose gradients the program computes itself.

#![expect(unsafe_code, reason = "the stream of another owner")]

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use distribute_collectives::{BucketPlan, Compression, DeviceGroup, FusedDeviceAllReduce, FusedDeviceStep, ReduceOp};
use distribute_device::cuda::{CudaDevice, CudaStream};
use distribute_device::{BufferMut, BufferRef, DType, Device, DeviceBuffer, HostBuffer, Stream};
use distribute_optim::backend::{
    DeviceExchange, DeviceOutcome, DeviceUpdate, GpuUpdater, GpuVariable, Parameters, Plan, Reduced, TensorLibrary,
    Variable,
};
use distribute_optim::{HostError, Trainable};
use distribute_strategy::{ReplicaContext, Strategy};
use distribute_values::TensorStorage;

/// How many of the next replacements of streams fail.
pub(super) static FAILING_REPLACEMENTS: AtomicU32 = AtomicU32::new(0);

/// The marker type of the library.
#[derive(Debug)]
pub(super) enum OnGpu {}

/// A replica's GPU, and the stream on which all of its work is ordered.
#[derive(Clone, Debug)]
struct Gpu {
    device: Arc<CudaDevice>,
    stream: Arc<CudaStream>,
}

/// A tensor of f32.
#[derive(Clone, Debug)]
pub(super) struct GpuTensor {
    gpu: Gpu,
    shape: Vec<usize>,
    memory: DeviceBuffer,
}

/// The gradients of one replica, by variable.
pub(super) struct GpuLoss(pub(super) Vec<Option<GpuTensor>>);

/// A model with variables on the GPUs of a strategy's replicas.
pub(super) struct GpuModel(Arc<Parameters<OnGpu>>);

impl Gpu {
    fn of(strategy: &Strategy, local: usize) -> Gpu {
        let any: Arc<dyn Any + Send + Sync> = strategy.open_device(local).unwrap();
        let device: Arc<CudaDevice> = any.downcast().unwrap();
        let stream = Arc::new(device.stream().unwrap());
        Gpu { device, stream }
    }

    /// Returns the same GPU and stream, as one that knows of no failure: like the stream of a tensor library that does
    /// not use this workspace.
    fn adopted(&self) -> Gpu {
        // SAFETY: it is a stream of this GPU, which is kept with it.
        let stream = unsafe { self.device.adopt_stream(self.stream.handle(), self.stream.clone()) };
        Gpu { device: self.device.clone(), stream: Arc::new(stream.unwrap()) }
    }

    fn put(&self, shape: &[usize], elements: &[f32]) -> distribute_device::Result<GpuTensor> {
        let memory = self.device.allocate(size_of_val(elements))?;
        self.stream.copy_from_host(HostBuffer::from_slice(elements)?, 0, &memory)?;
        Ok(GpuTensor { gpu: self.clone(), shape: shape.to_vec(), memory })
    }
}

impl GpuModel {
    pub(super) fn new(strategy: &Strategy, variables: &[(&str, Vec<f32>)]) -> GpuModel {
        let gpus: Vec<Gpu> = (0..strategy.num_local_replicas()).map(|local| Gpu::of(strategy, local)).collect();
        let variable = |(name, elements): &(&str, Vec<f32>)| {
            let mut variable = Variable::new(*name, false);
            gpus.iter().for_each(|gpu| variable.push(gpu.put(&[elements.len()], elements).unwrap()));
            variable
        };
        let variables = variables.iter().map(variable).collect();
        GpuModel(Arc::new(Parameters::new(strategy, variables, Vec::new(), None)))
    }

    /// Returns a tensor on the GPU of a local replica.
    pub(super) fn put(&self, local: usize, elements: &[f32]) -> GpuTensor {
        self.0.variables()[0].components()[local].gpu.put(&[elements.len()], elements).unwrap()
    }

    /// Lets a local replica's GPU do nothing for a while, after the work that it has so far.
    pub(super) fn pause(&self, local: usize, time: Duration) {
        let pause = move || {
            std::thread::sleep(time);
            Ok(())
        };
        self.0.variables()[0].components()[local].gpu.stream.launch_host(Box::new(pause)).unwrap();
    }

    /// Returns the elements of each variable on a local replica.
    pub(super) fn values(&self, local: usize) -> Vec<Vec<f32>> {
        self.0.variables().iter().map(|variable| variable.components()[local].to_elements().unwrap()).collect()
    }
}

impl Trainable for GpuModel {
    type Library = OnGpu;

    fn parameters(&self) -> &Arc<Parameters<OnGpu>> {
        &self.0
    }
}

impl GpuTensor {
    fn elements(&self) -> distribute_device::Result<Vec<f32>> {
        let memory = self.gpu.device.allocate_host(self.memory.len_bytes())?;
        let memory = self.gpu.stream.copy_to_host(&self.memory, memory, 0)?.wait(deadline())?;
        Ok(memory.as_slice::<f32>()?.to_vec())
    }

    fn map(&self, f: impl Fn(f32) -> f32) -> Result<GpuTensor, HostError> {
        let elements: Vec<f32> = self.to_elements::<f32>()?.into_iter().map(f).collect();
        Ok(self.gpu.put(&self.shape, &elements).map_err(failed)?)
    }
}

impl TensorStorage<OnGpu> for GpuTensor {
    fn dtype(&self) -> distribute_values::Result<DType> {
        Ok(DType::F32)
    }

    fn shape(&self) -> Vec<usize> {
        self.shape.clone()
    }

    fn read(&self, visit: &mut dyn FnMut(BufferRef<'_>)) -> distribute_values::Result<()> {
        visit(BufferRef::from(&self.elements()?[..]));
        Ok(())
    }

    fn write(&self, visit: &mut dyn FnMut(BufferMut<'_>)) -> distribute_values::Result<()> {
        let mut elements = self.elements()?;
        visit(BufferMut::from(&mut elements[..]));
        self.gpu.stream.copy_from_host(HostBuffer::from_slice(&elements)?, 0, &self.memory)?;
        Ok(())
    }

    fn beside(&self, shape: &[usize], elements: BufferRef<'_>) -> distribute_values::Result<GpuTensor> {
        Ok(self.gpu.put(shape, elements.as_slice()?)?)
    }
}

impl TensorLibrary for OnGpu {
    type Tensor = GpuTensor;
    type Loss = GpuLoss;
    type Gradients = Vec<Option<GpuTensor>>;
    type Error = HostError;
    type Devices = Buckets;

    const CUT_GRAPH: &'static str = "Give GpuLoss a gradient for each variable.";

    fn backward(loss: &GpuLoss) -> Result<Self::Gradients, HostError> {
        Ok(loss.0.clone())
    }

    fn gradient(gradients: &Self::Gradients, index: usize, _: &GpuTensor) -> Option<GpuTensor> {
        gradients[index].clone()
    }

    fn scale(loss: &GpuLoss, factor: f64) -> Result<GpuLoss, HostError> {
        let scale = |tensor: &GpuTensor| tensor.map(|x| (f64::from(x) * factor) as f32);
        let scaled = loss.0.iter().map(|tensor| tensor.as_ref().map(scale).transpose());
        Ok(GpuLoss(scaled.collect::<Result<_, _>>()?))
    }

    fn detach(tensor: &GpuTensor) -> GpuTensor {
        tensor.clone()
    }

    fn zeros_like(tensor: &GpuTensor) -> Result<GpuTensor, HostError> {
        tensor.map(|_| 0.0)
    }

    fn cast(tensor: &GpuTensor, _: DType) -> Result<GpuTensor, HostError> {
        Ok(tensor.clone())
    }

    fn add(a: &GpuTensor, b: &GpuTensor) -> Result<GpuTensor, HostError> {
        let sum: Vec<f32> = a.to_elements::<f32>()?.iter().zip(b.to_elements::<f32>()?).map(|(a, b)| a + b).collect();
        Ok(a.gpu.put(&a.shape, &sum).map_err(failed)?)
    }

    fn own(gradient: GpuTensor) -> Result<GpuTensor, HostError> {
        Ok(gradient.copied()?)
    }

    fn is_on_host(_: &GpuTensor) -> bool {
        false
    }

    fn on_host(tensor: &GpuTensor) -> Result<GpuTensor, HostError> {
        Ok(tensor.clone())
    }
}

/// A replica's buckets on its GPU.
#[derive(Debug)]
pub(super) struct Buckets {
    gpu: Gpu,
    fused: Arc<FusedDeviceAllReduce>,
    updater: Arc<GpuUpdater>,
}

pub(super) struct Step {
    gpu: Gpu,
    updater: Arc<GpuUpdater>,
    context: ReplicaContext,
    group: Arc<DeviceGroup>,
    step: FusedDeviceStep,
}

pub(super) struct Sum {
    updater: Arc<GpuUpdater>,
    gradients: Vec<(usize, DeviceBuffer)>,
}

impl DeviceExchange<OnGpu> for Buckets {
    type Step = Step;
    type Sum = Sum;

    fn new(
        context: &ReplicaContext,
        parameters: &Parameters<OnGpu>,
        plan: &Plan,
        compression: &Compression,
    ) -> Result<Option<Buckets>, HostError> {
        let gpu = parameters.variables()[0].components()[context.local_replica_id()].gpu.adopted();
        let (group, buckets) = (context.device_group()?, plan.buckets());
        let tensors = &buckets.tensors()[..parameters.variables().len()];
        let members = buckets.buckets().iter().flat_map(|bucket| bucket.members.iter().copied());
        let order: Vec<usize> = members.filter(|index| *index < tensors.len()).collect();
        let plan = BucketPlan::new(tensors, &order, 1 << 12);
        let fused = Arc::new(FusedDeviceAllReduce::new(&group, plan, ReduceOp::Sum)?.compress(compression)?);
        let updater = Arc::new(GpuUpdater::new(gpu.device.clone(), gpu.stream.clone()));
        Ok(Some(Buckets { gpu, fused, updater }))
    }

    fn take_back(&self) {
        self.fused.take_back();
    }

    fn replace_streams(&mut self) -> Result<(), HostError> {
        let fails = |left: u32| left.checked_sub(1);
        if FAILING_REPLACEMENTS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fails).is_ok() {
            let problem = "streams are not replaced, as this test wants it".to_owned();
            return Err(distribute_strategy::Error::Merge { replica: 0, problem }.into());
        }
        self.fused.replace_stream()?;
        self.gpu = self.gpu.adopted();
        self.updater = Arc::new(GpuUpdater::new(self.gpu.device.clone(), self.gpu.stream.clone()));
        Ok(())
    }

    fn begin(&self, context: &ReplicaContext) -> Result<Step, HostError> {
        let (gpu, updater, context) = (self.gpu.clone(), self.updater.clone(), context.clone());
        Ok(Step { gpu, updater, group: context.device_group()?, context, step: self.fused.begin() })
    }

    fn has(step: &Step, index: usize) -> bool {
        step.step.has(index)
    }

    fn push(Step { gpu, group, step, .. }: &mut Step, index: usize, gradient: GpuTensor) -> Result<(), HostError> {
        Ok(step.push(group, index, gradient.memory, &*gpu.stream)?)
    }

    fn finish(step: Step, mut flags: Vec<u32>) -> Result<(Sum, Vec<u32>), HostError> {
        let Step { gpu, updater, context, group, step } = step;
        step.wait(&group)?;
        context.group().all_reduce(&mut flags, ReduceOp::Sum)?;
        flags.iter().enumerate().filter(|(_, came)| **came == 0).try_for_each(|(index, _)| step.discard(index))?;
        let gradients = step.finish(&*gpu.stream)?.into_iter().filter(|(index, _)| flags[*index] > 0).collect();
        Ok((Sum { updater, gradients }, flags))
    }

    fn variables(sum: &Sum) -> Vec<usize> {
        sum.gradients.iter().map(|(index, _)| *index).collect()
    }

    fn into_tensors(_: Sum, _: &Parameters<OnGpu>, _: usize) -> Result<Vec<Reduced<OnGpu>>, HostError> {
        panic!("gradients left the GPU");
    }

    fn apply(sum: &Sum, update: &DeviceUpdate<'_, OnGpu>) -> Result<DeviceOutcome, HostError> {
        let variable = |(index, gradients): &(usize, DeviceBuffer)| GpuVariable {
            step: update.counts.of(*index),
            dtype: DType::F32,
            parameters: update.parameters.variables()[*index].components()[update.local].memory.clone(),
            gradients: gradients.clone(),
            slots: (update.slots)(*index).into_iter().map(|slot| slot.memory).collect(),
            master: None,
        };
        let variables: Vec<GpuVariable> = sum.gradients.iter().map(variable).collect();
        Ok(sum.updater.apply(&update.step, &variables, deadline()).map_err(failed)?)
    }
}

fn failed(error: distribute_device::Error) -> distribute_strategy::Error {
    error.into()
}

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(20)
}
