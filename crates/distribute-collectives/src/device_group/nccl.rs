//! Collectives through NCCL: one communicator of all ranks, created through the group's own connections.

#![expect(unsafe_code, reason = "calls of NCCL, which takes pointers and handles on trust")]

use std::collections::VecDeque;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use distribute_device::cuda::{CudaDevice, CudaStream};
use distribute_device::{DType, Device, DeviceBuffer, Event, Stream};
use nccl_sys::{Code, Comm, Config, DataType, Library, Progress, RedOp, UniqueId};

use super::super::{Backend, Work, device_error};
use super::{cuda, no_gpu};
use crate::call::Kind;
use crate::sync::lock;
use crate::{Error, ProcessGroup, Rank, ReduceOp, Result};

/// Interval at which the watching thread checks for failures of peers and of NCCL.
const WATCH: Duration = Duration::from_millis(50);

/// Interval at which a pending call of NCCL is checked.
const POLL: Duration = Duration::from_micros(100);

/// Time limit for a communicator's orderly end, after which it is aborted.
const FAREWELL: Duration = Duration::from_secs(10);

/// One rank's part of collectives through NCCL.
pub(super) struct NcclBackend {
    shared: Arc<Shared>,
    device: Arc<dyn Device>,
    /// Set until drop; the watching thread then ends the communicator.
    stop: Option<Sender<()>>,
    /// Disconnects when the thread has done so.
    ended: Receiver<()>,
}

/// State that the calling thread and the watching thread share.
struct Shared {
    group: Arc<ProcessGroup>,
    library: Library,
    /// `None` after an abort. Calls do not block, so waiting for this lock does not either.
    communicator: Mutex<Option<Communicator>>,
    /// All collectives of this device run on this stream, also those of other groups, so their order is equal on every
    /// rank.
    stream: Arc<CudaStream>,
    device: Arc<dyn Device>,
    /// Collectives that have not finished.
    pending: Mutex<VecDeque<Pending>>,
    local: Arc<LocalRanks>,
}

/// A collective that was enqueued.
struct Pending {
    /// Its number among this rank's collectives.
    number: u64,
    /// The event after it.
    done: Arc<dyn Event>,
}

/// The state that the ranks of one process share.
#[derive(Default)]
struct LocalRanks {
    devices: Mutex<Vec<Arc<dyn Device>>>,
    enqueued: Mutex<Enqueued>,
}

/// The collectives that the ranks of a group within one process have enqueued.
#[derive(Default)]
struct Enqueued {
    /// The number of those of each rank; empty in a group of several processes.
    counts: Vec<u64>,
    /// The number of those that finish, once a rank has begun to end the group: it is the same for all ranks, so none
    /// waits for a collective that another one aborts.
    last: Option<u64>,
}

struct Communicator(Comm);

// SAFETY: NCCL allows a communicator to be used by any thread, one at a time, which a mutex ensures.
unsafe impl Send for Communicator {}

impl NcclBackend {
    pub(super) fn new(group: &Arc<ProcessGroup>, device: &Arc<dyn Device>) -> Result<NcclBackend> {
        let stream = match cuda(&**device) {
            Some(device) => device.collective_stream(),
            None => Err(no_gpu(&**device)),
        };
        let stream = stream.map_err(|error| device_error(group, error))?;
        let library = Library::load().map_err(|error| failed(group, "opening the library", &error))?;
        let local = group.shared_state(LocalRanks::default);
        local.open_peers(group, device)?;
        let shared = Shared {
            group: Arc::clone(group),
            library,
            communicator: Mutex::new(None),
            stream,
            device: Arc::clone(device),
            pending: Mutex::default(),
            local,
        };
        shared.join()?;
        let shared = Arc::new(shared);
        let (stop, stopped) = bounded::<()>(0);
        let (watching, ended) = bounded::<()>(0);
        let watcher = Arc::clone(&shared);
        thread::Builder::new()
            .name(format!("nccl-watch/{}", group.rank().0))
            .spawn(move || {
                let _watching = watching;
                while stopped.recv_timeout(WATCH) == Err(RecvTimeoutError::Timeout) {
                    if !watcher.look() {
                        return;
                    }
                }
                watcher.leave();
            })
            .map_err(|error| failed(group, "starting the thread that watches it", &error))?;
        Ok(NcclBackend { shared, device: Arc::clone(device), stop: Some(stop), ended })
    }
}

impl LocalRanks {
    /// Gives this rank's GPU access to the memory of the process's others: NCCL's kernels write directly into the
    /// results of ranks of one process, and memory pools are not open to other GPUs by themselves.
    fn open_peers(&self, group: &ProcessGroup, device: &Arc<dyn Device>) -> Result<()> {
        lock(&self.devices).push(Arc::clone(device));
        group.barrier()?;
        let devices = lock(&self.devices).clone();
        // Between GPUs that cannot access each other's memory NCCL copies.
        devices.iter().for_each(|other| drop(device.enable_peer_access(&**other)));
        if group.local_world_size() == group.world_size() {
            lock(&self.enqueued).counts.resize(group.world_size(), 0);
        }
        Ok(())
    }

    /// Counts a collective of a rank, and returns its number.
    fn count(&self, rank: Rank) -> u64 {
        let mut enqueued = lock(&self.enqueued);
        let Some(count) = enqueued.counts.get_mut(rank.index()) else { return 0 };
        *count += 1;
        *count - 1
    }

    /// Begins to end the group, unless a rank has done so. Returns the number of collectives that all ranks had
    /// enqueued when the first one did, in a group within one process.
    fn enqueued_by_all(&self) -> u64 {
        let mut enqueued = lock(&self.enqueued);
        let by_all = enqueued.counts.iter().copied().min().unwrap_or(0);
        *enqueued.last.get_or_insert(by_all)
    }
}

impl Shared {
    /// Creates the communicator without blocking, so that a missing rank is an error at the deadline.
    fn join(&self) -> Result<()> {
        let leads = self.group.rank() == Rank(0);
        let id = if leads { self.library.unique_id() } else { Ok(UniqueId::from_bytes([0; UniqueId::BYTES])) };
        // The other ranks wait for the id, so a failure to create one is sent in its place.
        let mut bytes = [0; UniqueId::BYTES + 1];
        if let Ok(id) = &id {
            bytes[1..].copy_from_slice(id.as_bytes());
            bytes[0] = u8::from(leads);
        }
        self.group.broadcast(&mut bytes, Rank(0))?;
        id.map_err(|error| self.failed("making an identity for a communicator", &error))?;
        let [made, rest @ ..] = bytes;
        if made == 0 {
            return Err(self.failed("making an identity for a communicator", &"rank 0 could not make one"));
        }
        let deadline = Instant::now() + self.group.options().timeout;
        let config = Config::new().blocking(false);
        let [ranks, rank] =
            [self.group.world_size(), self.group.rank().index()].map(|n| c_int::try_from(n).unwrap_or(c_int::MAX));
        self.make_current()?;
        let mut communicator = lock(&self.communicator);
        let mut comm: Box<Comm> = Box::new(ptr::null_mut());
        // SAFETY: the memory for the communicator stays valid until it is no longer in progress, which is waited for
        // below; the configuration outlives the call; this rank's context is current.
        let begun =
            unsafe { self.library.comm_init_rank_config(&mut *comm, ranks, UniqueId::from_bytes(rest), rank, &config) };
        let begun = begun.map_err(|error| self.failed("joining a communicator", &error));
        let joined = begun.and_then(|progress| self.settle(*comm, progress, deadline, "joining a communicator"));
        if let Err(error) = joined {
            if !comm.is_null() {
                // SAFETY: it was created above, and no other code has it.
                let _ = unsafe { self.library.comm_abort(*comm) };
            }
            // NCCL may write to this memory as long as it has not stopped.
            Box::leak(comm);
            return Err(error);
        }
        *communicator = Some(Communicator(*comm));
        Ok(())
    }

    /// Waits until NCCL has completed a call that is in progress.
    fn settle(&self, comm: Comm, mut progress: Progress, deadline: Instant, action: &str) -> Result<()> {
        while progress == Progress::InProgress {
            if let Some(error) = self.group.failure() {
                return Err(error);
            }
            if Instant::now() >= deadline {
                let waited = self.group.options().timeout;
                return Err(self.failed(action, &format!("it has not ended within {waited:.1?}; is every rank here?")));
            }
            // SAFETY: the communicator exists, and this query is allowed at any time.
            let code = unsafe { self.library.comm_async_error(comm) };
            match code.map_err(|error| self.failed(action, &error))? {
                Code::SUCCESS => progress = Progress::Done,
                Code::IN_PROGRESS => thread::sleep(POLL),
                code => return Err(self.failed(action, &self.library.error("ncclCommGetAsyncError", code))),
            }
        }
        Ok(())
    }

    /// Enqueues one call of NCCL, and returns the event after it.
    fn enqueue(
        &self,
        action: Kind,
        call: impl FnOnce(Comm, *mut c_void) -> std::result::Result<Progress, nccl_sys::Error>,
    ) -> Result<Arc<dyn Event>> {
        self.make_current()?;
        let failed = |error| device_error(&self.group, error);
        let done = self.device.create_event().map_err(failed)?;
        let communicator = lock(&self.communicator);
        let Some(Communicator(comm)) = &*communicator else {
            return Err(self.group.failure().unwrap_or_else(|| self.failed(action.name(), &"it was aborted before")));
        };
        let progress = call(*comm, self.stream.handle()).map_err(|error| self.failed(action.name(), &error))?;
        self.settle(*comm, progress, Instant::now() + self.group.options().timeout, action.name())?;
        self.stream.record(&*done).map_err(failed)?;
        // Still under the lock: the thread that takes the communicator to abort it finds everything that it has
        // enqueued.
        let number = self.local.count(self.group.rank());
        lock(&self.pending).push_back(Pending { number, done: Arc::clone(&done) });
        Ok(done)
    }

    /// Returns whether there is no failure; otherwise aborts the communicator and the group.
    fn look(&self) -> bool {
        let wrong = match self.group.failure() {
            Some(error) => {
                self.end(&error.to_string());
                Some(error)
            }
            None => self.own_failure().inspect(|error| self.abort(&error.to_string())),
        };
        if let Some(error) = &wrong {
            self.group.abort_by(error);
        }
        wrong.is_none()
    }

    /// Ends the enqueued work after a failure of the group. In a group within one process, collectives that all ranks
    /// have enqueued finish first: a step that was committed on all replicas may still be using their results, and no
    /// lost peer can keep them from it.
    fn end(&self, reason: &str) {
        let last = self.local.enqueued_by_all();
        let deadline = Instant::now() + FAREWELL;
        let is_going = || lock(&self.pending).front().is_some_and(|pending| pending.number < last);
        while self.own_failure().is_none() && is_going() && Instant::now() < deadline {
            thread::sleep(POLL);
        }
        self.abort(reason);
    }

    fn own_failure(&self) -> Option<Error> {
        self.prune();
        let communicator = lock(&self.communicator);
        let Communicator(comm) = communicator.as_ref()?;
        // SAFETY: the communicator exists: aborting takes it out first.
        match unsafe { self.library.comm_async_error(*comm) } {
            Ok(Code::SUCCESS | Code::IN_PROGRESS) => None,
            Ok(code) => Some(self.failed("a collective", &self.library.error("ncclCommGetAsyncError", code))),
            Err(error) => Some(self.failed("asking for errors", &error)),
        }
    }

    /// Ends the enqueued work; waiting for its results returns errors.
    fn abort(&self, reason: &str) {
        let communicator = lock(&self.communicator).take();
        self.prune();
        if let Some(pending) = lock(&self.pending).front() {
            self.stream.fail(&*pending.done, "a collective by NCCL", reason);
        }
        if let Some(device) = cuda(&*self.device) {
            device.replace_collective_stream(&self.stream);
        }
        if let (Some(Communicator(comm)), Ok(())) = (communicator, self.make_current()) {
            // SAFETY: it was taken out, so it has no other user.
            let _ = unsafe { self.library.comm_abort(comm) };
        }
    }

    /// Ends the communicator after its collectives have finished, in an orderly way, so that slower ranks are not
    /// disturbed.
    fn leave(&self) {
        let deadline = Instant::now() + FAREWELL;
        let last = lock(&self.pending).back().map(|last| Arc::clone(&last.done));
        let over = last.is_none_or(|last| last.wait(deadline).is_ok());
        let Some(Communicator(comm)) = lock(&self.communicator).take() else { return };
        if self.make_current().is_err() {
            return;
        }
        // SAFETY: it was taken out, so no further calls are issued.
        let finalized = over.then(|| unsafe { self.library.comm_finalize(comm) });
        let in_order = match finalized {
            Some(Ok(progress)) => self.settle(comm, progress, deadline, "ending a communicator").is_ok(),
            _ => false,
        };
        if in_order {
            // SAFETY: as above, and it has been finalized.
            let _ = unsafe { self.library.comm_destroy(comm) };
        } else {
            // SAFETY: as above.
            let _ = unsafe { self.library.comm_abort(comm) };
        }
    }

    /// Removes collectives that have finished.
    fn prune(&self) {
        let mut pending = lock(&self.pending);
        while pending.front().is_some_and(|pending| pending.done.is_ready().unwrap_or(true)) {
            pending.pop_front();
        }
    }

    fn make_current(&self) -> Result<()> {
        let current = cuda(&*self.device).map_or(Ok(()), CudaDevice::make_current);
        current.map_err(|error| device_error(&self.group, error))
    }

    fn failed(&self, action: &str, problem: &dyn std::fmt::Display) -> Error {
        failed(&self.group, action, problem)
    }

    fn address(&self, buffer: &DeviceBuffer) -> Result<*mut c_void> {
        let address = self.stream.address_for_use(buffer).map_err(|error| device_error(&self.group, error))?;
        Ok(ptr::with_exposed_provenance_mut(address as usize))
    }
}

impl Backend for NcclBackend {
    fn abort(&self, reason: &str) {
        self.shared.end(reason);
    }

    fn offer(&self, _: &Work<'_>) -> Result<()> {
        Ok(())
    }

    fn run(&self, work: &Work<'_>) -> Result<()> {
        let shared = &*self.shared;
        let (library, call) = (&shared.library, work.call);
        let failed = |error| device_error(&shared.group, error);
        let ready = self.device.create_event().map_err(failed)?;
        work.stream.record(&*ready).map_err(failed)?;
        shared.stream.wait(&*ready).map_err(failed)?;
        let (from, to) = (shared.address(work.input)?, shared.address(work.output)?);
        let (dtype, op) = (data_type(call.dtype), reduction(&shared.group, call.built_in(), call.dtype)?);
        let (count, part) = (call.count as usize, work.output.len_bytes() / call.dtype.size_bytes());
        // SAFETY, for each: the device's context is current; both buffers have the given number of elements and stay
        // valid until the stream has executed the call, which `address_for_use` ensures; the communicator stays alive
        // while it is locked.
        let done = shared.enqueue(call.kind, |comm, stream| match call.kind {
            Kind::Broadcast => {
                let root = c_int::try_from(call.root.map_or(0, |root| root.0)).unwrap_or(0);
                // SAFETY: see above.
                unsafe { library.broadcast(from, to, count, dtype, root, comm, stream) }
            }
            Kind::AllGather => {
                // SAFETY: see above.
                unsafe { library.all_gather(from, to, count, dtype, comm, stream) }
            }
            Kind::ReduceScatter => {
                // SAFETY: see above.
                unsafe { library.reduce_scatter(from, to, part, dtype, op, comm, stream) }
            }
            _ => {
                // SAFETY: see above.
                unsafe { library.all_reduce(from, to, count, dtype, op, comm, stream) }
            }
        })?;
        work.stream.wait(&*done).map_err(failed)
    }

    fn withdraw(&self) {
        // A failure of the stream ends the wait, too.
        let _ = self.shared.stream.synchronize(Instant::now() + self.shared.group.options().timeout);
    }
}

impl Drop for NcclBackend {
    fn drop(&mut self) {
        drop(self.stop.take());
        // To its peers, a process that ended in the middle of this would be a lost peer.
        let _ = self.ended.recv_timeout(2 * FAREWELL);
    }
}

fn failed(group: &ProcessGroup, action: &str, problem: &dyn std::fmt::Display) -> Error {
    let name = group.rank_name(group.rank()).to_owned();
    Error::Nccl { name, action: action.to_owned(), problem: problem.to_string() }
}

fn data_type(dtype: DType) -> DataType {
    match dtype {
        DType::F32 => DataType::FLOAT32,
        DType::F64 => DataType::FLOAT64,
        DType::F16 => DataType::FLOAT16,
        DType::BF16 => DataType::BFLOAT16,
        DType::I8 => DataType::INT8,
        DType::U8 => DataType::UINT8,
        DType::I32 => DataType::INT32,
        DType::U32 => DataType::UINT32,
        DType::I64 => DataType::INT64,
        DType::U64 => DataType::UINT64,
    }
}

/// NCCL divides before it adds where possible, so a mean may differ in the last bit.
fn reduction(group: &ProcessGroup, op: Option<ReduceOp>, dtype: DType) -> Result<RedOp> {
    Ok(match op {
        Some(ReduceOp::Mean) if !dtype.is_float() => {
            let problem = "it adds integers up in their own type, where the sum wraps; use DeviceImplementation::Host";
            return Err(failed(group, &format!("the mean of {dtype}"), &problem));
        }
        None | Some(ReduceOp::Sum) => RedOp::SUM,
        Some(ReduceOp::Mean) => RedOp::AVG,
        Some(ReduceOp::Min) => RedOp::MIN,
        Some(ReduceOp::Max) => RedOp::MAX,
        Some(ReduceOp::Product) => RedOp::PROD,
        Some(other) => {
            let problem = "it has no such reduction; use DeviceImplementation::Host";
            return Err(failed(group, &format!("reducing by {other}"), &problem));
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_ranks_let_the_same_collectives_finish() {
        let local = LocalRanks::default();
        lock(&local.enqueued).counts.resize(2, 0);
        assert_eq!([0, 1].map(|rank| local.count(Rank(rank))), [0, 0]);
        // Rank 0 has enqueued its second collective and aborts the group; rank 1 is about to enqueue its own.
        assert_eq!(local.count(Rank(0)), 1);
        assert_eq!(local.enqueued_by_all(), 1);
        assert_eq!(local.count(Rank(1)), 1);
        assert_eq!(local.enqueued_by_all(), 1, "rank 1 would wait for a collective that rank 0 has aborted");
    }
}
