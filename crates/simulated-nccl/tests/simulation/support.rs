//! Ranks as threads of a test, each with the simulated NCCL opened as a program opens it.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::{Duration, Instant};

use distribute_testkit::within;
use nccl_sys::{Code, Comm, Config, DataType, Error, Library, Progress, RedOp, Search, UniqueId};

pub(crate) const LIMIT: Duration = Duration::from_secs(60);
/// The null stream, on which operations run on the calling thread.
pub(crate) const NONE: *mut c_void = ptr::null_mut();

static LIBRARY: LazyLock<Library> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let file = simulated_nccl::install(folder.path()).unwrap();
    Library::open(&Search::file(file)).unwrap()
});

pub(crate) fn nccl() -> Library {
    LIBRARY.clone()
}

/// A rank and its thread's state.
pub(crate) struct Rank {
    pub(crate) nccl: Library,
    pub(crate) comm: Comm,
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
}

/// Runs a body for each rank of a communicator and then destroys the communicator.
pub(crate) fn on_ranks(ranks: usize, body: impl Fn(&Rank) + Send + Sync + 'static) {
    each(ranks, move |nccl, id, rank| {
        let comm = join(&nccl, ranks, id, rank);
        let own = Rank { nccl: nccl.clone(), comm, rank, ranks };
        body(&own);
        destroy(&nccl, comm);
    });
}

/// Runs a body in one thread per rank that is to join.
pub(crate) fn each(ranks: usize, body: impl Fn(Library, UniqueId, usize) + Send + Sync + 'static) {
    within(LIMIT, move || {
        let nccl = nccl();
        let id = nccl.unique_id().unwrap();
        let body = Arc::new(body);
        let threads: Vec<_> = (0..ranks)
            .map(|rank| {
                let (nccl, body) = (nccl.clone(), Arc::clone(&body));
                thread::spawn(move || body(nccl, id, rank))
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

pub(crate) fn join(nccl: &Library, ranks: usize, id: UniqueId, rank: usize) -> Comm {
    let mut comm = ptr::null_mut();
    // SAFETY: `comm` stays during the blocking call.
    let joined = unsafe { nccl.comm_init_rank(&mut comm, ranks as i32, id, rank as i32) };
    assert_eq!(joined.unwrap(), Progress::Done);
    comm
}

/// Begins to join without waiting.
pub(crate) fn join_without_waiting(nccl: &Library, ranks: usize, id: UniqueId, rank: usize) -> Comm {
    let config = Config::new().blocking(false);
    // NCCL may write to it until the communicator is no longer in progress.
    let comm = Box::leak(Box::new(ptr::null_mut()));
    // SAFETY: `comm` is never freed.
    let joined = unsafe { nccl.comm_init_rank_config(comm, ranks as i32, id, rank as i32, &config) };
    assert_eq!(joined.unwrap(), Progress::InProgress);
    *comm
}

pub(crate) fn state(nccl: &Library, comm: Comm) -> Code {
    // SAFETY: the communicator belongs to this test.
    unsafe { nccl.comm_async_error(comm) }.unwrap()
}

/// Polls the state until it is no longer `before`.
pub(crate) fn state_after(nccl: &Library, comm: Comm, before: Code) -> Code {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let state = state(nccl, comm);
        if state != before {
            return state;
        }
        assert!(Instant::now() < deadline, "still {before:?}");
        thread::sleep(Duration::from_millis(1));
    }
}

pub(crate) fn code<T: std::fmt::Debug>(result: Result<T, Error>) -> Code {
    match result {
        Err(Error::Call { code, .. }) => code,
        other => panic!("no failed call: {other:?}"),
    }
}

/// Sums one number of each rank, on the calling thread.
pub(crate) fn sum(nccl: &Library, comm: Comm, value: i32) -> Result<(Progress, i32), Error> {
    let mut sum = value;
    let memory: *mut c_void = (&raw mut sum).cast();
    // SAFETY: one element is sent and received.
    let progress = unsafe { nccl.all_reduce(memory, memory, 1, DataType::INT32, RedOp::SUM, comm, NONE) }?;
    Ok((progress, sum))
}

pub(crate) fn destroy(nccl: &Library, comm: Comm) {
    // SAFETY: the communicator is no longer used.
    let _ = unsafe { nccl.comm_destroy(comm) }.unwrap();
}

pub(crate) fn abort(nccl: &Library, comm: Comm) {
    // SAFETY: the communicator is no longer used.
    let _ = unsafe { nccl.comm_abort(comm) }.unwrap();
}
