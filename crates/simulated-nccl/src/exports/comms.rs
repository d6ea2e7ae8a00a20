//! Communicators.
#![expect(unsafe_code, reason = "functions of C, under the names of C")]

use std::ffi::{c_int, c_uint};
use std::ptr;
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use nccl_sys::{Code, Comm, Config, UniqueId};

use super::{DONE, enter, exports, trace};
use crate::comm::{Comm as Communicator, Line, Member};
use crate::cuda::cuda;
use crate::failure::Failure;
use crate::group::{self, Job};
use crate::join::{aborted, join};
use crate::link::Ended;
use crate::wire::Request;
use crate::{hub, registry, settings};

/// How long the hub's process waits for other processes when it ends.
const LINGER: Duration = Duration::from_secs(5);
/// `NCCL_SHRINK_ABORT`.
const SHRINK_ABORT: c_int = 1;
/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;

/// A caller's pointer to a communicator.
struct Slot(*mut Comm);

// SAFETY: NCCL's contract keeps the pointee valid until the group has ended, and the thread that ends the group writes
// it.
unsafe impl Send for Slot {}

/// The common beginning of all versions of a configuration.
#[repr(C)]
struct ConfigHead {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
}

exports! {
    fn ncclGetUniqueId(id: *mut UniqueId) {
        let made = hub::start().map_err(|error| Failure::new(Code::SYSTEM_ERROR, format!("Bootstrap : {error}")))?;
        write(id, made, "uniqueId")
    }

    fn ncclCommInitRank(comm: *mut Comm, ranks: c_int, id: UniqueId, rank: c_int) {
        init(comm, ranks, id, rank, true, current_device())
    }

    fn ncclCommInitRankConfig(comm: *mut Comm, ranks: c_int, id: UniqueId, rank: c_int, config: *const Config<'_>) {
        let blocking = blocking(config)?.unwrap_or(true);
        init(comm, ranks, id, rank, blocking, current_device())
    }

    fn ncclCommInitAll(comms: *mut Comm, count: c_int, devices: *const c_int) {
        let all = cuda().and_then(|cuda| cuda.device_count());
        let id = hub::start().map_err(|error| Failure::new(Code::SYSTEM_ERROR, format!("Bootstrap : {error}")))?;
        if comms.is_null() {
            return Err(Failure::argument("comms argument is NULL"));
        }
        let devices = if devices.is_null() { (0..count).collect() } else { list(devices, count)? };
        group::start();
        for (rank, device) in (0..).zip(devices) {
            if device < 0 || all.is_some_and(|all| device >= all) {
                group::spoil(&Failure::argument(format!("invalid device {device}")));
                continue;
            }
            // SAFETY: the caller has provided room for `count` communicators.
            let slot = unsafe { comms.add(rank as usize) };
            if let Err(failure) = init(slot, count, id, rank, true, device) {
                group::spoil(&failure);
            }
        }
        group::end()
    }

    fn ncclCommFinalize(comm: Comm) {
        if comm.is_null() {
            return DONE;
        }
        let comm = registry::get(comm)?;
        comm.ready()?;
        let blocking = comm.blocking;
        let flush = Arc::clone(&comm);
        let run = Box::new(move || {
            flush.drain();
            Ok(())
        });
        group::submit(Job { comms: vec![comm], blocking, run })
    }

    fn ncclCommDestroy(comm: Comm) {
        if comm.is_null() {
            return DONE;
        }
        let known = registry::get(comm)?;
        known.settle();
        known.drain();
        registry::remove(comm)?;
        known.leave(false);
        let token = known.member().map(|member| member.link.token);
        drop(known);
        // Like NCCL, this waits for other processes of the machine, which need the hub of this one.
        if let Some(token) = token.filter(|token| !registry::any(|link| link.token == *token)) {
            hub::linger(token, LINGER);
        }
        DONE
    }

    fn ncclCommAbort(comm: Comm) {
        if comm.is_null() {
            return DONE;
        }
        let comm = registry::remove(comm)?;
        comm.abort();
        match comm.member() {
            Some(member) if registry::any(|link| Arc::ptr_eq(link, &member.link)) => comm.leave(true),
            // No other communicator uses the connection; closing it does not wait for a frozen hub.
            Some(member) => member.link.close(),
            None => {}
        }
        comm.settle();
        DONE
    }

    fn ncclCommSplit(parent: Comm, color: c_int, order: c_int, new: *mut Comm, config: *const Config<'_>) {
        let parent = registry::get(parent)?;
        let Member { link, place } = parent.ready()?.clone();
        let blocking = blocking(config)?.unwrap_or(parent.blocking);
        let (key, tag) = (parent.key(Line::Collective, false), link.tag());
        let request = Request::Split { group: place.group, tag, key, color, order };
        split_off(&parent, new, (color >= 0).then_some(blocking), tag, request)
    }

    fn ncclCommShrink(
        parent: Comm,
        excluded: *const c_int,
        count: c_int,
        new: *mut Comm,
        config: *const Config<'_>,
        flags: c_int,
    ) {
        let parent = registry::get(parent)?;
        if flags & SHRINK_ABORT != 0 {
            parent.stop();
        } else {
            parent.ready()?;
        }
        let Member { link, place } = parent.member().ok_or_else(|| Failure::argument("comm is not ready"))?.clone();
        let blocking = blocking(config)?.unwrap_or(parent.blocking);
        let mut excluded: Vec<_> = list(excluded, count)?.into_iter().filter_map(|rank| rank.try_into().ok()).collect();
        excluded.sort_unstable();
        excluded.dedup();
        if excluded.contains(&place.rank) {
            return Err(Failure::argument("a rank that is excluded does not call"));
        }
        let (key, tag) = (parent.key(Line::Shrink, false), link.tag());
        let request = Request::Shrink { group: place.group, tag, key, excluded };
        split_off(&parent, new, Some(blocking), tag, request)
    }

    fn ncclCommCount(comm: Comm, count: *mut c_int) {
        let ranks = registry::get(comm)?.ready()?.place.ranks;
        write(count, ranks as c_int, "count")
    }

    fn ncclCommUserRank(comm: Comm, rank: *mut c_int) {
        let own = registry::get(comm)?.ready()?.place.rank;
        write(rank, own as c_int, "rank")
    }

    fn ncclCommCuDevice(comm: Comm, device: *mut c_int) {
        let comm = registry::get(comm)?;
        comm.ready()?;
        write(device, comm.device, "device")
    }
}

/// An injected failure is the state that this reports, not the code that it returns.
#[unsafe(no_mangle)]
unsafe extern "C" fn ncclCommGetAsyncError(comm: Comm, state: *mut Code) -> Code {
    let found = registry::get(comm).map(|comm| {
        if let Some(code) = settings::injected(ASYNC_ERROR) {
            comm.fail(Failure::new(code, "ncclCommGetAsyncError: a simulated failure"));
        }
        comm.state()
    });
    let code = match found.and_then(|found| write(state, found, "asyncError")) {
        Ok(code) => code,
        Err(failure) => {
            crate::failure::remember(&format!("CommGetAsyncError : {}", failure.text));
            failure.code()
        }
    };
    trace(ASYNC_ERROR, code);
    code
}

/// The function that is not defined like the others.
pub(super) const ASYNC_ERROR: &str = "ncclCommGetAsyncError";

fn init(
    slot: *mut Comm,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    blocking: bool,
    device: c_int,
) -> Result<Code, Failure> {
    let (ranks, rank) = match (u32::try_from(ranks), u32::try_from(rank)) {
        (Ok(ranks), Ok(rank)) if rank < ranks => (ranks, rank),
        _ => return Err(Failure::argument(format!("Invalid rank requested : {rank}/{ranks}"))),
    };
    let identity = cuda().and_then(|cuda| cuda.identity(device));
    let comm = Communicator::new(blocking, device);
    let pointer = registry::add(Arc::clone(&comm));
    write(slot, pointer, "comm")?;
    let (slot, made) = (Slot(slot), Arc::clone(&comm));
    let run = Box::new(move || match join(&id, ranks, rank, identity, &|| made.gives_up()) {
        Ok(member) => {
            made.is_made(member);
            Ok(())
        }
        Err(failure) => Err(slot.clear(failure, blocking)),
    });
    group::submit(Job { comms: vec![comm], blocking, run })
}

/// Requests a place in a communicator of some of the parent's ranks; `blocking` is `None` for a rank that joins none.
fn split_off(
    parent: &Arc<Communicator>,
    slot: *mut Comm,
    blocking: Option<bool>,
    tag: u64,
    request: Request,
) -> Result<Code, Failure> {
    let link = parent.member().map(|member| Arc::clone(&member.link)).ok_or_else(aborted)?;
    let child = blocking.map(|blocking| Communicator::new(blocking, parent.device));
    let pointer = child.as_ref().map_or(ptr::null_mut(), |child| registry::add(Arc::clone(child)));
    write(slot, pointer, "newcomm")?;
    let comms: Vec<_> = child.iter().chain([parent]).cloned().collect();
    let (slot, waits, above) = (Slot(slot), parent.blocking, Arc::clone(parent));
    let run = Box::new(move || {
        link.send(&request, &[]);
        let give_up = || above.gives_up() || child.as_ref().is_some_and(|child| child.gives_up());
        match (link.member(tag, &give_up), &child) {
            (Ok(Some(place)), Some(child)) => {
                child.is_made(Member { link: Arc::clone(&link), place });
                Ok(())
            }
            (Ok(_), _) => Ok(()),
            (Err(Ended::Broken(failure)), _) => Err(slot.clear(failure, waits)),
            (Err(Ended::GivenUp), _) => Err(slot.clear(aborted(), waits)),
        }
    });
    group::submit(Job { comms, blocking: waits, run })
}

impl Slot {
    /// Sets a blocking caller's communicator to null; a non-blocking caller keeps it, to abort it.
    fn clear(self, failure: Failure, blocking: bool) -> Failure {
        if blocking {
            // SAFETY: the caller of NCCL's function keeps the slot valid until the call, or the group, has ended.
            let made = unsafe { self.0.replace(ptr::null_mut()) };
            // Fails if it was aborted by another thread meanwhile, or never created.
            let _ = registry::remove(made);
        }
        failure
    }
}

fn current_device() -> c_int {
    cuda().and_then(|cuda| cuda.current_device()).unwrap_or(0)
}

/// Returns whether a configuration requests blocking calls.
fn blocking(config: *const Config<'_>) -> Result<Option<bool>, Failure> {
    if config.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller has passed a configuration; every version has this beginning.
    let head = unsafe { config.cast::<ConfigHead>().read_unaligned() };
    if head.magic != 0xcafe_beef || head.size < size_of::<ConfigHead>() || head.version < 21400 {
        return Err(Failure::argument("ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER"));
    }
    match head.blocking {
        UNDEFINED => Ok(None),
        0 | 1 => Ok(Some(head.blocking == 1)),
        other => Err(Failure::argument(format!("Invalid config blocking attribute value {other}"))),
    }
}

/// Copies a list from the caller.
fn list(numbers: *const c_int, count: c_int) -> Result<Vec<c_int>, Failure> {
    match usize::try_from(count) {
        Ok(count) if count == 0 || numbers.is_null() => Ok(Vec::new()),
        // SAFETY: the caller has passed `count` numbers.
        Ok(count) => Ok(unsafe { slice::from_raw_parts(numbers, count) }.to_vec()),
        Err(_) => Err(Failure::argument(format!("invalid count {count}"))),
    }
}

fn write<T>(to: *mut T, value: T, name: &str) -> Result<Code, Failure> {
    if to.is_null() {
        return Err(Failure::argument(format!("{name} argument is NULL")));
    }
    // SAFETY: the caller has passed a valid destination.
    unsafe { to.write(value) };
    DONE
}
