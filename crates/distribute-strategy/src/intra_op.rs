//! The threads of one operation of a tensor library.
//!
//! Tensor libraries divide an operation among the threads of a rayon pool. All replicas of a process in one pool would
//! wait for each other's operations, and a thread outside the pool waits for a thread of it in each operation. So each
//! replica's thread is a member of a pool of its own, with its share of the cores. candle divides products of matrices
//! by the variable RAYON_NUM_THREADS, whatever the pool is, so that is set too.
#![expect(unsafe_code, reason = "setting an environment variable is unsafe once there are other threads")]

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rayon::{ThreadPool, ThreadPoolBuilder, Yield};

const VARIABLE: &str = "RAYON_NUM_THREADS";
/// The threads that candle has in addition to rayon's; [`VARIABLE`] if it is not set.
const OF_CANDLE: &str = "CANDLE_NUM_THREADS";

/// Gives each replica of this process its share of the cores, or warns and names the setting.
pub(crate) fn share_cores(replicas: usize) {
    let (cores, share) = (cores(), share(replicas));
    let may_set = threads_of_this_process() == Some(1);
    // candle's threads wait in loops, and so take cores from those of the pools.
    if may_set && std::env::var_os(OF_CANDLE).is_none() {
        // SAFETY: this is the only thread of the process, so no other one reads the environment meanwhile.
        unsafe { std::env::set_var(OF_CANDLE, "1") };
    }
    match given() {
        Some(threads) if threads > 1 && threads * replicas > cores => tracing::warn!(
            "{VARIABLE}={threads} lets {replicas} replicas use {} threads on {cores} cores, which slows them down; set \
             {VARIABLE}={share}",
            threads * replicas
        ),
        Some(_) => {}
        None if replicas == 1 => {}
        None if may_set => {
            // SAFETY: this is the only thread of the process, so no other one reads the environment meanwhile.
            unsafe { std::env::set_var(VARIABLE, share.to_string()) };
        }
        None => tracing::warn!(
            "{replicas} replicas share {cores} cores, but operations of candle models are divided among as many \
             threads, which slows them down; set {VARIABLE}={share} and {OF_CANDLE}=1 before the program starts, or \
             make the strategy before any other thread"
        ),
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Returns the cores of each replica, at least 1.
fn share(replicas: usize) -> usize {
    (cores() / replicas.max(1)).max(1)
}

/// Returns `None` if the system does not tell.
fn threads_of_this_process() -> Option<usize> {
    Some(std::fs::read_dir("/proc/self/task").ok()?.count())
}

fn given() -> Option<usize> {
    std::env::var(VARIABLE).ok().and_then(|value| value.parse::<usize>().ok()).filter(|threads| *threads > 0)
}

/// Returns the size of the pool of each of `replicas` replicas: RAYON_NUM_THREADS, or its share of the cores.
pub(crate) fn pool_size(replicas: usize) -> usize {
    given().unwrap_or_else(|| share(replicas))
}

thread_local! {
    /// The pool of this thread; it ends with the thread.
    static POOL: RefCell<Option<ThreadPool>> = const { RefCell::new(None) };
}

/// Makes this thread a member of a pool of that many threads. A thread that is a member of some pool stays in it: rayon
/// has no way to leave one.
pub(crate) fn join_pool(threads: usize) {
    if rayon::current_thread_index().is_some() {
        return;
    }
    let name = std::thread::current().name().unwrap_or("replica").to_owned();
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(move |index| format!("{name}-{index}"))
        .use_current_thread()
        .build();
    match pool {
        Ok(pool) => POOL.set(Some(pool)),
        Err(error) => tracing::warn!(
            "no threads can be started for the operations of this replica ({error}); they run in the process's common \
             pool, where replicas wait for each other"
        ),
    }
}

/// Keeps the other threads of this thread's pool from going to sleep between operations.
///
/// A thread of rayon sleeps soon after an operation; to wake it takes as long as a small operation. With this, it looks
/// for work until the guard is dropped, or until it has found none for a while, and lets other threads of the machine
/// run between looks.
#[must_use]
pub(crate) fn keep_awake() -> Awake {
    let own = rayon::current_thread_index().filter(|_| rayon::current_num_threads() > 1);
    let Some(own) = own.filter(|_| POOL.with_borrow(Option::is_some)) else { return Awake(None) };
    let ended = Arc::new(AtomicBool::new(false));
    let seen = ended.clone();
    rayon::spawn_broadcast(move |context| {
        let mut idle = 0;
        while context.index() != own && idle < LOOKS && !seen.load(Ordering::Relaxed) {
            match rayon::yield_now() {
                Some(Yield::Executed) => idle = 0,
                Some(Yield::Idle) | None => {
                    idle += 1;
                    std::thread::yield_now();
                }
            }
        }
    });
    Awake(Some(ended))
}

/// Lets the threads sleep when dropped.
pub(crate) struct Awake(Option<Arc<AtomicBool>>);

impl Drop for Awake {
    fn drop(&mut self) {
        if let Some(ended) = &self.0 {
            ended.store(true, Ordering::Relaxed);
        }
    }
}

/// How often a thread looks for work in vain before it sleeps: about half a millisecond.
const LOOKS: u32 = 1_000;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rayon::prelude::*;

    use super::*;

    #[test]
    fn a_thread_takes_part_in_its_own_operations() {
        for threads in [1, 2] {
            let thread = std::thread::spawn(move || {
                join_pool(threads);
                join_pool(5);
                let here = std::thread::current().id();
                let (mine, other) = rayon::join(|| std::thread::current().id(), rayon::current_num_threads);
                (here == mine, other)
            });
            assert_eq!(thread.join().unwrap(), (true, threads));
        }
    }

    #[test]
    fn threads_that_are_kept_awake_work_and_then_sleep() {
        let (sender, ended) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            join_pool(3);
            for round in 0..200u64 {
                let awake = keep_awake();
                let sums = [1, 2].map(|_| (0..1000).into_par_iter().map(|x| x * round).sum::<u64>());
                assert_eq!(sums, [499_500 * round; 2]);
                match round {
                    // Looks end by themselves, too.
                    0 => std::mem::forget(awake),
                    _ => drop(awake),
                }
            }
            // Runs on each thread once it has left its loop.
            sender.send(rayon::broadcast(|context| context.index())).unwrap();
        });
        assert_eq!(ended.recv_timeout(Duration::from_secs(60)), Ok(vec![0, 1, 2]));
    }

    #[test]
    fn threads_of_a_pool_that_is_not_ours_are_left_alone() {
        let pool = ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        assert!(pool.install(keep_awake).0.is_none());
        assert!(keep_awake().0.is_none());
    }
}
