//! Operations on streams of a simulated CUDA, if cargo has built one next to this test.

use std::ffi::{c_int, c_void};
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;
use std::{env, ptr};

use distribute_testkit::{Job, skipped, within};
use nccl_sys::{Code, Comm, DataType, Library, RedOp, Search, Stream};

use crate::cuda::{Cuda, NOT_READY};
use crate::support::{LIMIT, abort, destroy, join, state, state_after};

/// The folder in which a child finds both libraries.
const FOLDER: &str = "SIMULATED_NCCL_TEST_FOLDER";

/// CUDA is located when NCCL first needs it, so these tests run in a separate process.
#[test]
fn operations_run_on_streams() {
    let built = env::current_exe().unwrap().with_file_name("libsimulated_cuda.so");
    if !built.is_file() {
        return skipped("cargo has not built simulated-cuda next to this test");
    }
    let folder = tempfile::tempdir().unwrap();
    symlink(built, folder.path().join("libcuda.so.1")).unwrap();
    simulated_nccl::install(folder.path()).unwrap();
    let mut job = Job::builder(env::current_exe().unwrap())
        .args(["streams::inside", "--ignored", "--nocapture", "--test-threads=1"])
        .env(FOLDER, folder.path().to_string_lossy())
        .env("SIMULATED_CUDA_DEVICES", "2")
        .start()
        .unwrap();
    let outcome = job.wait_all(LIMIT).unwrap().remove(0);
    assert!(outcome.success() && outcome.stdout.contains("ok. 6 passed"), "{outcome:?}");
}

/// Returns the libraries of a child; `None` in a process that is not a child.
fn both() -> Option<(Cuda, Library)> {
    let folder = PathBuf::from(env::var_os(FOLDER)?);
    let cuda = Cuda::open(&folder.join("libcuda.so.1"));
    let nccl = Library::open(&Search::file(folder.join("libnccl.so.2"))).unwrap();
    Some((cuda, nccl))
}

fn add_up(nccl: &Library, comm: Comm, value: *mut i32, stream: Stream) {
    // SAFETY: the value lives until the stream has completed the operation.
    let done = unsafe { nccl.all_reduce(value.cast(), value.cast(), 1, DataType::INT32, RedOp::SUM, comm, stream) };
    let _ = done.unwrap();
}

fn read(value: *mut i32) -> i32 {
    // SAFETY: it was created by `Cuda::value` and is never freed.
    unsafe { value.read_volatile() }
}

/// Runs two ranks as threads on different devices, with a stream each.
fn two_ranks(body: impl Fn(&Cuda, &Library, Comm, Stream, usize) + Send + Sync + Copy + 'static) {
    let Some((_, nccl)) = both() else { return };
    let id = nccl.unique_id().unwrap();
    within(LIMIT, move || {
        let threads = [0, 1].map(|rank| {
            thread::spawn(move || {
                let (cuda, nccl) = both().unwrap();
                let stream = cuda.stream(rank as c_int);
                let comm = join(&nccl, 2, id, rank);
                body(&cuda, &nccl, comm, stream, rank);
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

mod inside {
    use super::*;

    #[test]
    #[ignore = "a process that other tests start"]
    fn operations_wait_for_what_is_before_them() {
        two_ranks(|cuda, nccl, comm, stream, rank| {
            let held = cuda.hold(stream);
            let sum = cuda.value(rank as i32 + 1);
            add_up(nccl, comm, sum, stream);
            add_up(nccl, comm, sum, stream);
            thread::sleep(Duration::from_millis(20));
            assert_eq!((read(sum), cuda.query(stream)), (rank as i32 + 1, NOT_READY));
            held.send(()).unwrap();
            cuda.wait(stream);
            assert_eq!(read(sum), 6);
            // SAFETY: the communicator is valid.
            assert_eq!(unsafe { nccl.comm_device(comm) }.unwrap(), rank as c_int);
            destroy(nccl, comm);
        });
    }

    #[test]
    #[ignore = "a process that other tests start"]
    fn operations_without_their_peer_end_with_an_abort() {
        two_ranks(|cuda, nccl, comm, stream, rank| {
            if rank == 1 {
                return abort(nccl, comm);
            }
            let sum = cuda.value(1);
            // A rank that is gone refuses at once.
            if state(nccl, comm) == Code::SUCCESS {
                let memory = sum.cast::<c_void>();
                // SAFETY: the value is never freed.
                let _ = unsafe { nccl.all_reduce(memory, memory, 1, DataType::INT32, RedOp::SUM, comm, stream) };
            }
            assert_eq!(state_after(nccl, comm, Code::SUCCESS), Code::REMOTE_ERROR);
            thread::sleep(Duration::from_millis(50));
            abort(nccl, comm);
            cuda.wait(stream);
            assert_eq!(read(sum), 1);
        });
    }

    #[test]
    #[ignore = "a process that other tests start"]
    fn operations_hang_until_their_communicator_is_aborted() {
        two_ranks(|cuda, nccl, comm, stream, rank| {
            if rank == 0 {
                let sum = cuda.value(1);
                add_up(nccl, comm, sum, stream);
                thread::sleep(Duration::from_millis(100));
                assert_eq!(cuda.query(stream), NOT_READY);
                abort(nccl, comm);
                cuda.wait(stream);
                assert_eq!(read(sum), 1);
            } else {
                assert_eq!(state_after(nccl, comm, Code::SUCCESS), Code::REMOTE_ERROR);
                abort(nccl, comm);
            }
        });
    }

    #[test]
    #[ignore = "a process that other tests start"]
    fn graphs_replay_operations() {
        two_ranks(|cuda, nccl, comm, stream, _| {
            let sum = cuda.value(1);
            let graph = cuda.capture(stream, || add_up(nccl, comm, sum, stream));
            assert_eq!(read(sum), 1);
            for _ in 0..3 {
                cuda.launch(graph, stream);
                add_up(nccl, comm, sum, stream);
            }
            cuda.wait(stream);
            assert_eq!(read(sum), 64);
            destroy(nccl, comm);
        });
    }

    #[test]
    #[ignore = "a process that other tests start"]
    fn memory_that_is_not_the_communicators_devices_is_refused() {
        let Some((cuda, _)) = both() else { return };
        let addresses = [0, 1].map(|device| {
            cuda.stream(device);
            cuda.memory().expose_provenance()
        });
        // NCCL keeps the last words of a process, and not those of each thread.
        static TURN: Mutex<()> = Mutex::new(());
        two_ranks(move |_, nccl, comm, stream, rank| {
            let alone = TURN.lock().unwrap_or_else(PoisonError::into_inner);
            let mut plain = 1_i32;
            let own: *mut c_void = ptr::with_exposed_provenance_mut(addresses[rank]);
            let other = ptr::with_exposed_provenance_mut(addresses[1 - rank]);
            let reduce = |from: *mut c_void, to: *mut c_void| {
                // SAFETY: memory of one element each, or refused.
                unsafe { nccl.all_reduce(from, to, 1, DataType::INT32, RedOp::SUM, comm, stream) }
            };
            let mismatch =
                |name: &str| format!("{name} allocated on device {} mismatches with NCCL device {rank}", 1 - rank);
            let invalid = |name: &str| format!("{name} is not a valid pointer");
            let plain: *mut c_void = (&raw mut plain).cast();
            let refused = [
                (reduce(other, own), mismatch("sendbuff")),
                (reduce(own, other), mismatch("recvbuff")),
                (reduce(plain, own), invalid("sendbuff")),
                (reduce(own, plain), invalid("recvbuff")),
            ];
            for (call, problem) in refused {
                let error = call.unwrap_err().to_string();
                assert!(error.contains(&problem), "{error}");
            }
            drop(alone);
            let _ = reduce(own, own).unwrap();
            destroy(nccl, comm);
        });
    }

    #[test]
    #[ignore = "a process that other tests start"]
    fn two_ranks_on_one_device_are_refused() {
        let Some((_, nccl)) = both() else { return };
        within(LIMIT, move || {
            let mut comms = [ptr::null_mut(); 2];
            // SAFETY: there is room for two, and there are two devices.
            let made = unsafe { nccl.comm_init_all(comms.as_mut_ptr(), 2, [1, 1].as_ptr()) };
            let error = made.unwrap_err().to_string();
            assert!(error.contains("ncclInvalidUsage"), "{error}");
            assert!(error.contains("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device"), "{error}");
            assert!(comms.iter().all(|comm| comm.is_null()));
        });
    }
}
