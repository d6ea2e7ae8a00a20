//! Collectives on device memory.

#[cfg_attr(not(feature = "cuda"), path = "device_group/without_cuda.rs")]
#[cfg_attr(feature = "cuda", path = "device_group/cuda.rs")]
mod backends;
mod choice;
mod compressed;
mod fused;
mod host;
mod implementation;
#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use distribute_cluster::FailureKind;
use distribute_device::{DType, Device, DeviceBuffer, DeviceSpec, Stream};

use self::choice::{BackendKind, Choice, Facts};
use crate::call::{Call, Kind, Reducing, ScheduleId};
use crate::{Error, ProcessGroup, Rank, ReduceOp, Result};

pub use self::fused::{FusedDeviceAllReduce, FusedDeviceStep};
pub use self::implementation::DeviceImplementation;

/// One rank's handle on a group whose ranks hold their values in device memory, with one device per rank.
///
/// Calls are ordered by a stream: they are enqueued after the work that the caller's stream has, and work that is given
/// to the stream later runs after them. They return when every rank has made its call and the work is enqueued, which
/// may be long before it has finished. Through the host they return when the work is nearly finished.
///
/// After a failed call, work that is given to the caller's stream later runs after all that the call has enqueued, so
/// its memory may be freed in the order of that stream.
///
/// # Ordering
/// Every rank must issue the same calls in the same order. Each call carries a fingerprint, and a difference is an
/// error on all ranks before any data move.
///
/// # Errors
/// The errors of [`ProcessGroup`]; [`Error::Device`] if a buffer or a stream is of another device than the group's, or
/// a device operation fails, and [`Error::Nccl`] if an NCCL call
/// fails.
///
/// # Examples
/// Two ranks, each with a logical CPU; for GPUs only the names change.
/// ```
/// use std::time::{Duration, Instant};
/// use distribute_collectives::{DeviceGroup, DeviceImplementation, ProcessGroup, ReduceOp};
/// use distribute_device::{DType, Devices, HostBuffer};
///
/// let devices = Devices::with_cpus(2)?;
/// let ranks = ProcessGroup::local(2)?;
/// std::thread::scope(|scope| {
///     for (group, name) in ranks.iter().zip(["CPU:0", "CPU:1"]) {
///         let device = devices.open(&name.parse().expect("a name")).expect("it is there");
///         scope.spawn(move || -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
///             let group = DeviceGroup::new(group, device.clone(), DeviceImplementation::Auto)?;
///             let (stream, gradients) = (device.create_stream()?, device.allocate(8)?);
///             stream.copy_from_host(HostBuffer::from_slice(&[1.0f32, 2.0])?, 0, &gradients)?;
///             group.all_reduce(&gradients, DType::F32, ReduceOp::Sum, &*stream)?;
///             let mut sum = stream.copy_to_host(&gradients, device.allocate_host(8)?, 0)?;
///             let sum = sum.wait(Instant::now() + Duration::from_secs(10))?;
///             assert_eq!(sum.as_slice::<f32>()?, [2.0, 4.0]);
///             Ok(())
///         });
///     }
/// });
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Source
/// NCCL's operations and their order; `tf.distribute.CrossDeviceOps` for the backends.
pub struct DeviceGroup {
    /// The ranks, for comparing calls; not used for anything else.
    group: Arc<ProcessGroup>,
    device: Arc<dyn Device>,
    choice: Choice,
    backend: Box<dyn Backend>,
    calls: AtomicU64,
}

/// Executes collectives on devices.
trait Backend: Send + Sync {
    /// Aborts the operations that other ranks have in progress with this one.
    fn abort(&self, reason: &str);

    /// Offers this rank's buffers to the other ranks of the process; all ranks do so before any of them runs.
    fn offer(&self, work: &Work<'_>) -> Result<()>;

    /// Enqueues the work on the caller's stream, or so that the stream waits for it.
    fn run(&self, work: &Work<'_>) -> Result<()>;

    /// Waits, after a call has failed and the group was aborted, until no stream but the caller's uses the memory of
    /// this rank's calls, at most twice the group's timeout: the caller may free it then in the order of its stream.
    fn withdraw(&self);
}

/// A call before it has its sequence number and its memory.
struct Request {
    kind: Kind,
    dtype: DType,
    layout: u32,
    op: Option<Reducing>,
    root: Option<Rank>,
}

impl Request {
    fn new(kind: Kind, dtype: DType) -> Request {
        Request { kind, dtype, layout: 0, op: None, root: None }
    }
}

/// One call of one rank.
struct Work<'a> {
    call: Call,
    /// This rank's values.
    input: &'a DeviceBuffer,
    /// The buffer for the result: the same as `input` for calls in place.
    output: &'a DeviceBuffer,
    stream: &'a dyn Stream,
}

impl DeviceGroup {
    /// Joins the ranks of `group`, each with its own device. `asked` must be equal on all ranks.
    ///
    /// Rank 0 logs the backend that was chosen, and why no better one was, once, at level `info`.
    ///
    /// # Ordering
    /// Every rank of `group` must call this.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::split`]; [`Error::Device`] if a stream or a buffer cannot be created;
    /// [`Error::Nccl`] if NCCL's communicator cannot be created.
    pub fn new(group: &ProcessGroup, device: Arc<dyn Device>, asked: DeviceImplementation) -> Result<DeviceGroup> {
        let group = Arc::new(duplicate(group)?);
        let facts = Facts::of(&*device, &group, backends::gpu(&*device), backends::nccl);
        let all = facts.exchange(&group)?;
        let choice = choice::choose(asked, &all);
        if group.rank() == Rank(0) {
            tracing::info!("{choice}");
        }
        let backend = backends::open(choice.kind, &group, &device)?;
        Ok(DeviceGroup { group, device, choice, backend, calls: AtomicU64::new(0) })
    }

    /// Returns this rank's place in the group.
    pub fn rank(&self) -> Rank {
        self.group.rank()
    }

    /// Returns the number of ranks.
    pub fn world_size(&self) -> usize {
        self.group.world_size()
    }

    /// Returns this rank's device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Returns the backend and the reason for it, as a sentence.
    pub fn chosen(&self) -> String {
        self.choice.to_string()
    }

    /// Reduces every rank's values element by element, in place; all ranks get the result.
    ///
    /// # Shapes
    /// Equal sizes on all ranks, in whole elements of `dtype`.
    ///
    /// # Errors
    /// The errors of every operation: see [`DeviceGroup`].
    pub fn all_reduce(&self, values: &DeviceBuffer, dtype: DType, op: ReduceOp, stream: &dyn Stream) -> Result<()> {
        self.all_reduce_tagged(values, dtype, op, 0, stream)
    }

    /// Reduces like [`all_reduce`](DeviceGroup::all_reduce), with a tag that must be equal on all ranks.
    ///
    /// Tags tell calls apart that are otherwise alike, such as those of layers of equal size: if ranks make them in
    /// another order, it is an error and not a wrong sum. [`all_reduce`](DeviceGroup::all_reduce) has the tag 0.
    ///
    /// # Shapes
    /// Equal sizes on all ranks, in whole elements of `dtype`.
    ///
    /// # Errors
    /// [`Error::Mismatch`] on all ranks if the tags differ, and the errors of every operation: see [`DeviceGroup`].
    pub fn all_reduce_tagged(
        &self,
        values: &DeviceBuffer,
        dtype: DType,
        op: ReduceOp,
        tag: u32,
        stream: &dyn Stream,
    ) -> Result<()> {
        op.check(dtype)?;
        let request = Request { layout: tag, op: Some(op.into()), ..Request::new(Kind::AllReduce, dtype) };
        self.run(request, [values, values], stream)
    }

    /// Replaces every rank's values with the root's, in place.
    ///
    /// # Shapes
    /// Equal sizes on all ranks, in whole elements of `dtype`.
    ///
    /// # Errors
    /// [`Error::RankOutside`] if `root` is not a member, and the errors of every operation: see [`DeviceGroup`].
    pub fn broadcast(&self, values: &DeviceBuffer, dtype: DType, root: Rank, stream: &dyn Stream) -> Result<()> {
        self.group.check_rank("root", root)?;
        let request = Request { root: Some(root), ..Request::new(Kind::Broadcast, dtype) };
        self.run(request, [values, values], stream)
    }

    /// Reduces every rank's values; rank r gets the r-th part of the result.
    ///
    /// # Shapes
    /// `input` is as large as the outputs of all ranks together; `output` may be this rank's part of it.
    ///
    /// # Errors
    /// [`Error::Length`] if the sizes do not fit, and the errors of every operation: see [`DeviceGroup`].
    pub fn reduce_scatter(
        &self,
        input: &DeviceBuffer,
        output: &DeviceBuffer,
        dtype: DType,
        op: ReduceOp,
        stream: &dyn Stream,
    ) -> Result<()> {
        op.check(dtype)?;
        self.check_parts("reduce_scatter input", input, output, dtype)?;
        let request = Request { op: Some(op.into()), ..Request::new(Kind::ReduceScatter, dtype) };
        self.run(request, [input, output], stream)
    }

    /// Collects every rank's values on all ranks, in rank order.
    ///
    /// # Shapes
    /// `output` is as large as the inputs of all ranks together; `input` may be this rank's part of it.
    ///
    /// # Errors
    /// [`Error::Length`] if the sizes do not fit, and the errors of every operation: see [`DeviceGroup`].
    pub fn all_gather(
        &self,
        input: &DeviceBuffer,
        output: &DeviceBuffer,
        dtype: DType,
        stream: &dyn Stream,
    ) -> Result<()> {
        self.all_gather_tagged(input, output, dtype, 0, stream)
    }

    /// Collects like [`all_gather`](DeviceGroup::all_gather), with a tag that must be equal on all ranks, as for
    /// [`all_reduce_tagged`](DeviceGroup::all_reduce_tagged).
    ///
    /// # Shapes
    /// `output` is as large as the inputs of all ranks together; `input` may be this rank's part of it.
    ///
    /// # Errors
    /// [`Error::Length`] if the sizes do not fit, [`Error::Mismatch`] on all ranks if the tags differ, and the errors
    /// of every operation: see [`DeviceGroup`].
    pub fn all_gather_tagged(
        &self,
        input: &DeviceBuffer,
        output: &DeviceBuffer,
        dtype: DType,
        tag: u32,
        stream: &dyn Stream,
    ) -> Result<()> {
        self.check_parts("all_gather output", output, input, dtype)?;
        let request = Request { layout: tag, ..Request::new(Kind::AllGather, dtype) };
        self.run(request, [input, output], stream)
    }

    /// Ends the group on every rank, like [`ProcessGroup::abort`].
    pub fn abort(&self, reason: &str) {
        self.group.abort(reason, FailureKind::Permanent);
        self.backend.abort(reason);
    }

    fn check_parts(&self, what: &'static str, whole: &DeviceBuffer, part: &DeviceBuffer, dtype: DType) -> Result<()> {
        let size = dtype.size_bytes();
        let (got, expected) = (whole.len_bytes() / size, part.len_bytes() / size * self.world_size());
        if got == expected {
            return Ok(());
        }
        Err(Error::Length { what, got, expected, remedy: "give one part for each rank" })
    }

    /// Checks that what a call uses is of this rank's device: kernels of another device may not reach it.
    fn check_devices<'a>(&self, used: impl IntoIterator<Item = (&'static str, &'a DeviceSpec)>) -> Result<()> {
        let own = self.device.spec();
        let Some((what, other)) = used.into_iter().find(|(_, device)| *device != own) else { return Ok(()) };
        let (owner, user) = (other.to_string(), format!("the group's rank {} on {own}", self.rank().0));
        let remedy = "give buffers and a stream of the group's device";
        Err(device_error(&self.group, distribute_device::Error::Foreign { what, owner, user, remedy }))
    }

    fn run(&self, request: Request, [input, output]: [&DeviceBuffer; 2], stream: &dyn Stream) -> Result<()> {
        let Request { kind, dtype, layout, op, root } = request;
        let buffers = [input, output].map(|buffer| ("buffer", buffer.device()));
        self.check_devices(buffers.into_iter().chain([("stream", stream.device())]))?;
        if let Some(len_bytes) =
            [input, output].map(DeviceBuffer::len_bytes).into_iter().find(|len| !len.is_multiple_of(dtype.size_bytes()))
        {
            return Err(device_error(&self.group, distribute_device::Error::PartialElement { len_bytes, dtype }));
        }
        let count = (input.len_bytes() / dtype.size_bytes()) as u64;
        // Relaxed: calls of one rank are ordered by their caller; the number only names them.
        let sequence = self.calls.fetch_add(1, Ordering::Relaxed);
        let call = Call { kind, sequence, dtype, count, layout, op, root };
        let work = Work { call, input, output, stream };
        self.attempt(&work).inspect_err(|error| {
            // The other ranks must not wait for this one.
            self.group.abort_by(error);
            self.backend.abort(&error.to_string());
            self.backend.withdraw();
        })
    }

    /// Returns whether a rank of another process, when it is lost, ends calls that this rank has enqueued.
    fn may_lose_enqueued(&self) -> bool {
        self.choice.kind == BackendKind::Nccl && self.group.local_world_size() < self.group.world_size()
    }

    fn attempt(&self, work: &Work<'_>) -> Result<()> {
        self.backend.offer(work)?;
        self.agree(work.call)?;
        if work.call.count == 0 {
            return Ok(());
        }
        self.backend.run(work)
    }

    /// Compares the ranks' calls.
    fn agree(&self, call: Call) -> Result<()> {
        let mine = call.encode(ScheduleId::ONLY);
        let mut all = vec![0; Call::ENCODED_LEN * self.world_size()];
        self.group.all_gather(&mine, &mut all)?;
        let (encoded, _) = all.as_chunks::<{ Call::ENCODED_LEN }>();
        // Every rank reports the same pair: the first rank, and the first rank that differs from it.
        let Some(other) = encoded.iter().position(|other| *other != encoded[0]) else { return Ok(()) };
        let name = |rank: usize| self.group.rank_name(Rank::of(rank)).to_owned();
        let decoded = |rank: usize| Box::new(Call::decode(&encoded[rank]).map_or(call, |(call, _)| call));
        Err(Error::Mismatch { here: decoded(0), here_name: name(0), there: decoded(other), there_name: name(other) })
    }
}

impl fmt::Debug for DeviceGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, device) = (self.rank(), self.device.spec().short());
        f.debug_struct("DeviceGroup")
            .field("rank", &rank)
            .field("device", &device)
            .field("choice", &self.choice)
            .finish()
    }
}

/// Copies tensors to their places in a bucket, one by one.
fn copy_each(
    stream: &dyn Stream,
    tensors: &[(&DeviceBuffer, usize)],
    bucket: &DeviceBuffer,
) -> distribute_device::Result<()> {
    tensors
        .iter()
        .try_for_each(|(tensor, place)| stream.copy(tensor, &bucket.slice(*place..place + tensor.len_bytes())?))
}

/// Creates a group of the same ranks that is independent of the given one.
fn duplicate(group: &ProcessGroup) -> Result<ProcessGroup> {
    group.split(Some(0), 0)?.ok_or_else(|| missing(group))
}

/// Returns the error for a rank that passed a colour and got no group, which does not happen.
fn missing(group: &ProcessGroup) -> Error {
    let cause = "a rank was left out of a group that it asked for";
    Error::aborted(group.name(), group.rank_name(group.rank()), cause, FailureKind::Permanent)
}

fn device_error(group: &ProcessGroup, error: distribute_device::Error) -> Error {
    Error::Device { name: group.rank_name(group.rank()).to_owned(), source: Arc::new(error) }
}
