//! Fused all-reduce of tensors in device memory.

use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use distribute_device::{DType, Device, DeviceBuffer, Stream};

use super::compressed::Short;
use super::{DeviceGroup, backends, device_error};
use crate::fusion::{BucketPlan, FusedTensor};
use crate::sync::lock;
use crate::{Compression, Error, ReduceOp, Result};

/// Alignment of tensors in a bucket, so that kernels load whole vectors.
const ALIGN_BYTES: usize = 16;

/// One rank's side of a repeated fused all-reduce of tensors in device memory.
///
/// In every step each rank [pushes](FusedDeviceStep::push) the same tensors, in any order and while its device still
/// computes others. A full bucket is packed and reduced on a separate stream, while the device continues to compute.
///
/// # Examples
/// ```
/// use std::sync::Arc;
/// use std::time::{Duration, Instant};
/// use distribute_collectives::{
///     BucketPlan, DType, DeviceGroup, DeviceImplementation, FusedDeviceAllReduce, FusedTensor, ProcessGroup, ReduceOp,
/// };
/// use distribute_device::{Devices, HostBuffer};
///
/// let device = Devices::local().open(&"CPU:0".parse()?)?;
/// let ranks = ProcessGroup::local(1)?;
/// let group = DeviceGroup::new(&ranks[0], device.clone(), DeviceImplementation::Auto)?;
/// let layers = [FusedTensor::new(DType::F32, [2]), FusedTensor::new(DType::F32, [1])];
/// let fused = Arc::new(FusedDeviceAllReduce::new(&group, BucketPlan::new(&layers, &[1, 0], 1 << 20), ReduceOp::Sum)?);
///
/// let stream = device.create_stream()?;
/// let mut step = fused.begin();
/// for (index, values) in [(1, &[3.0f32][..]), (0, &[1.0, 2.0])] {          // the last layer first
///     let gradient = device.allocate(4 * values.len())?;
///     stream.copy_from_host(HostBuffer::from_slice(values)?, 0, &gradient)?;
///     step.push(&group, index, gradient, &*stream)?;
/// }
/// let gradients = step.finish(&*stream)?;                                  // parts of buckets, by index
/// let (index, first) = &gradients[0];
/// let mut read = stream.copy_to_host(first, device.allocate_host(8)?, 0)?;
/// let read = read.wait(Instant::now() + Duration::from_secs(10))?;
/// assert_eq!((*index, read.as_slice::<f32>()?), (0, &[1.0, 2.0][..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Source
/// [`FusedAllReduce`](crate::FusedAllReduce), which does the same in host memory.
#[derive(Debug)]
pub struct FusedDeviceAllReduce {
    plan: BucketPlan,
    op: ReduceOp,
    buckets: Vec<Packed>,
    stream: Mutex<Arc<dyn Stream>>,
    device: Arc<dyn Device>,
    /// Limit for the wait when a step is dropped, or the stream is replaced.
    timeout: std::time::Duration,
}

/// A bucket's memory, and the ranges of its members in it.
#[derive(Debug)]
struct Packed {
    memory: DeviceBuffer,
    places: Vec<usize>,
    /// Set if the bucket is sent in 16 bits.
    short: Option<Short>,
}

impl Packed {
    /// Returns where the member at a position is in the bucket's memory.
    fn bytes(&self, place: usize, tensor: &FusedTensor) -> Range<usize> {
        let start = self.places[place];
        start..start + tensor.len() * tensor.dtype.size_bytes()
    }
}

impl FusedDeviceAllReduce {
    /// Creates the fused all-reduce of a plan's tensors. The plan must be equal on all ranks: a bucket that holds other
    /// tensors, or the same in another order, is [`Error::Mismatch`] in the step. Allocates memory for all buckets.
    ///
    /// # Errors
    /// [`Error::Device`] if the device does not have enough memory.
    pub fn new(group: &DeviceGroup, plan: BucketPlan, op: ReduceOp) -> Result<FusedDeviceAllReduce> {
        let failed = |error| device_error(&group.group, error);
        let mut buckets = Vec::with_capacity(plan.buckets.len());
        for bucket in &plan.buckets {
            let mut end = 0;
            let mut places = Vec::with_capacity(bucket.members.len());
            for index in &bucket.members {
                places.push(end);
                end += (plan.tensors[*index].len() * bucket.dtype.size_bytes()).next_multiple_of(ALIGN_BYTES);
            }
            buckets.push(Packed { memory: group.device.allocate(end).map_err(failed)?, places, short: None });
        }
        let stream = Mutex::new(group.device.create_stream().map_err(failed)?);
        let (device, timeout) = (Arc::clone(&group.device), group.group.options().timeout);
        Ok(FusedDeviceAllReduce { plan, op, buckets, stream, device, timeout })
    }

    /// Sends buckets of f32 in 16 bits. The rounding error of one step is added to the values of the next. Allocates
    /// memory for the rounded values and the errors: two and a half times that of these buckets.
    ///
    /// Each rank rounds its own values once, and the reduction rounds the sums to 16 bits as for other values of 16
    /// bits.
    ///
    /// # Errors
    /// [`Error::Compression`] for compressions other than f16 and bf16, reductions other than sums, and devices that
    /// are not GPUs; [`Error::Device`] if the device does not have enough memory.
    pub fn compress(mut self, compression: &Compression) -> Result<FusedDeviceAllReduce> {
        let refuse = |problem: &str| {
            Err(Error::Compression { name: compression.name().to_owned(), problem: problem.to_owned() })
        };
        let dtype = match compression {
            Compression::None => return Ok(self),
            Compression::F16 => DType::F16,
            Compression::Bf16 => DType::BF16,
            _ => return refuse("values in a GPU's memory are sent in f16 or bf16, or as they are; give one of these"),
        };
        if self.op != ReduceOp::Sum {
            return refuse("values in a GPU's memory are compressed for sums; give ReduceOp::Sum");
        }
        if backends::gpu(&*self.device).is_none() {
            return refuse("the device is not a GPU; use FusedAllReduce, which compresses in the host's memory");
        }
        for (packed, bucket) in self.buckets.iter_mut().zip(&self.plan.buckets) {
            if bucket.dtype == DType::F32 {
                let short = Short::new(&*self.device, dtype, packed.memory.len_bytes());
                packed.short = Some(short.map_err(plain)?);
            }
        }
        Ok(self)
    }

    /// Rolls back the last step after it has failed on some rank: restores the rounding errors from before it. Call it
    /// on every rank, once, when the step is dropped, and only if no rank has used its results.
    pub fn take_back(&self) {
        self.buckets.iter().filter_map(|packed| packed.short.as_ref()).for_each(Short::take_back);
    }

    /// Replaces the stream of the reductions by a new one, once its work has ended: the failure of a collective would
    /// be an error of everything that comes later in the stream. Call it when a step has failed and was dropped, before
    /// the next one.
    ///
    /// # Errors
    /// [`Error::Device`] if the work does not end within the group's timeout, or a stream cannot be created; the stream
    /// stays the same then.
    pub fn replace_stream(&self) -> Result<()> {
        let mut stream = lock(&self.stream);
        // Another error is of those that are left behind; after a deadline, the buckets may still be in use.
        if let Err(late @ distribute_device::Error::Deadline { .. }) = stream.synchronize(Instant::now() + self.timeout)
        {
            return Err(plain(late));
        }
        *stream = self.device.create_stream().map_err(plain)?;
        Ok(())
    }

    /// Returns the plan.
    pub fn plan(&self) -> &BucketPlan {
        &self.plan
    }

    /// Starts a step. Only one step at a time: the next one uses the same buckets.
    pub fn begin(self: &Arc<Self>) -> FusedDeviceStep {
        self.buckets.iter().filter_map(|packed| packed.short.as_ref()).for_each(Short::settle);
        FusedDeviceStep {
            waiting: self.plan.buckets.iter().map(|bucket| bucket.members.iter().map(|_| None).collect()).collect(),
            missing: self.plan.buckets.iter().map(|bucket| bucket.members.len()).collect(),
            packed: false,
            launched: 0,
            stream: Arc::clone(&lock(&self.stream)),
            fused: Arc::clone(self),
            finished: false,
        }
    }
}

/// One step of a [`FusedDeviceAllReduce`].
#[derive(Debug)]
pub struct FusedDeviceStep {
    fused: Arc<FusedDeviceAllReduce>,
    /// Tensors that have been pushed, by bucket and position; kept until they are packed.
    waiting: Vec<Vec<Option<DeviceBuffer>>>,
    missing: Vec<usize>,
    /// Whether tensors may be being packed.
    packed: bool,
    launched: usize,
    stream: Arc<dyn Stream>,
    finished: bool,
}

impl FusedDeviceStep {
    /// Adds a tensor, ordered after the work that `stream` has so far. When the tensor's bucket is full, starts to
    /// reduce it, and then the buckets that waited for it.
    ///
    /// # Errors
    /// [`Error::Tensor`] if the index is not in the plan or was pushed already, or the memory has another size; the
    /// errors of [`DeviceGroup::all_reduce`].
    pub fn push(&mut self, group: &DeviceGroup, index: usize, tensor: DeviceBuffer, stream: &dyn Stream) -> Result<()> {
        let refuse = |problem: String| Err(Error::Tensor { index, problem });
        let Some((bucket, place)) = self.fused.plan.position(index) else {
            return refuse("it is in no bucket of the plan".to_owned());
        };
        let planned = &self.fused.plan.tensors[index];
        let bytes = planned.len() * planned.dtype.size_bytes();
        if tensor.len_bytes() != bytes {
            return refuse(format!("it came with {} bytes, planned were {bytes}", tensor.len_bytes()));
        }
        if self.has(index) {
            return refuse("it was given before in this step".to_owned());
        }
        // Tensors may come from several streams. The bucket is packed after all of them, and after the work that still
        // reads the last step's results in it.
        self.order(stream, &*self.stream)?;
        self.waiting[bucket][place] = Some(tensor);
        self.missing[bucket] -= 1;
        while self.missing.get(self.launched) == Some(&0) {
            self.launch(group)?;
        }
        Ok(())
    }

    /// Returns whether this tensor has been pushed.
    pub fn has(&self, index: usize) -> bool {
        let position = self.fused.plan.position(index);
        position.is_some_and(|(bucket, place)| bucket < self.launched || self.waiting[bucket][place].is_some())
    }

    /// Waits until the reductions have finished, if ranks of other processes take part in them by NCCL; returns at once
    /// otherwise. When such a rank is lost, reductions that are enqueued end without a result, while later work on the
    /// device runs. So call this before the ranks agree to use the results: if all ranks have returned from it, a lost
    /// one cannot spoil them any more.
    ///
    /// # Cost
    /// The caller does not enqueue later work while the device is busy.
    ///
    /// # Errors
    /// The failure of the group; [`Error::Device`] if a reduction fails or does not finish within the group's timeout.
    pub fn wait(&self, group: &DeviceGroup) -> Result<()> {
        if self.launched == 0 || !group.may_lose_enqueued() {
            return Ok(());
        }
        let failed = |error| group.group.failure().unwrap_or_else(|| device_error(&group.group, error));
        let done = self.fused.device.create_event().map_err(failed)?;
        self.stream.record(&*done).map_err(failed)?;
        done.wait(Instant::now() + self.fused.timeout).map_err(failed)
    }

    /// Restores the rounding error of a tensor from before this step, because the rank does not use its sum: see
    /// [`FusedAllReduce::discard`](crate::FusedAllReduce::discard). Call it after [`wait`](FusedDeviceStep::wait), on
    /// every rank or on none.
    ///
    /// # Errors
    /// [`Error::Device`] if a device operation fails.
    pub fn discard(&self, index: usize) -> Result<()> {
        let Some((bucket, place)) = self.fused.plan.position(index) else { return Ok(()) };
        let packed = &self.fused.buckets[bucket];
        let Some(short) = &packed.short else { return Ok(()) };
        short.discard(&*self.stream, packed.bytes(place, &self.fused.plan.tensors[index])).map_err(plain)
    }

    /// Returns the reduced tensors with their indices, in ascending order. They are parts of the buckets and can be
    /// used by work that `stream` is given from now on, until a tensor of the next step is pushed after that work.
    ///
    /// # Errors
    /// [`Error::Tensor`] if a tensor was not pushed, [`Error::Device`] if a device operation fails.
    pub fn finish(mut self, stream: &dyn Stream) -> Result<Vec<(usize, DeviceBuffer)>> {
        let fused = Arc::clone(&self.fused);
        let planned = (0..fused.plan.tensors.len()).filter(|index| fused.plan.contains(*index));
        if let Some(index) = planned.clone().find(|index| !self.has(*index)) {
            return Err(Error::Tensor { index, problem: "it has not come when the step was finished".to_owned() });
        }
        self.order(&*self.stream, stream)?;
        self.finished = true;
        planned
            .filter_map(|index| fused.plan.position(index).map(|position| (index, position)))
            .map(|(index, (bucket, place))| {
                let packed = &fused.buckets[bucket];
                let part = packed.memory.slice(packed.bytes(place, &fused.plan.tensors[index]));
                Ok((index, part.map_err(plain)?))
            })
            .collect()
    }

    fn launch(&mut self, group: &DeviceGroup) -> Result<()> {
        let (fused, stream) = (Arc::clone(&self.fused), Arc::clone(&self.stream));
        let (index, own) = (self.launched, &*stream);
        self.packed = true;
        let Packed { memory, places, short } = &fused.buckets[index];
        let tensors: Vec<(&DeviceBuffer, usize)> =
            self.waiting[index].iter().flatten().zip(places.iter().copied()).collect();
        let failed = |error| device_error(&group.group, error);
        backends::pack(own, &tensors, memory).map_err(failed)?;
        let digest = fused.plan.digest(index);
        let reduce = |values: &DeviceBuffer, dtype| group.all_reduce_tagged(values, dtype, fused.op, digest, own);
        match short {
            Some(short) => short.exchange(own, memory, failed, reduce)?,
            None => reduce(memory, fused.plan.buckets[index].dtype)?,
        }
        self.launched += 1;
        Ok(())
    }

    /// Makes `later` wait for the work that `earlier` has so far.
    fn order(&self, earlier: &dyn Stream, later: &dyn Stream) -> Result<()> {
        let event = self.fused.device.create_event().map_err(plain)?;
        earlier.record(&*event).map_err(plain)?;
        later.wait(&*event).map_err(plain)
    }
}

impl Drop for FusedDeviceStep {
    fn drop(&mut self) {
        if !self.finished && self.packed {
            // The tensors may be freed as soon as they are released here.
            let _ = self.stream.synchronize(Instant::now() + self.fused.timeout);
        }
    }
}

fn plain(error: distribute_device::Error) -> Error {
    Error::Device { name: "a fused all-reduce".to_owned(), source: Arc::new(error) }
}
