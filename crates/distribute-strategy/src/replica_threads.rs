//! The threads that replicas run on.
//!
//! A rayon pool of all replicas would not do: a replica that waits in a collective inside one of rayon's joins may
//! steal the task of the very replica it waits for.
#![expect(unsafe_code, reason = "replica closures borrow from their caller, who waits for them")]

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::{JoinHandle, Thread};

use crossbeam_channel::{Sender, bounded};

use crate::{Error, Result, intra_op};

/// The payload of a panicked closure.
pub(crate) type Panic = Box<dyn Any + Send>;

type Task<'a> = Box<dyn FnOnce() + Send + 'a>;

/// One thread for each replica of this process except the first, which runs on the caller's thread.
pub(crate) struct ReplicaThreads {
    /// The size of the pool of each replica's operations.
    pool_size: usize,
    threads: Vec<(Sender<Task<'static>>, JoinHandle<()>)>,
}

impl ReplicaThreads {
    /// Starts the threads; `first_replica` is the id of this process's first replica, for their names.
    pub(crate) fn start(replicas: usize, first_replica: usize) -> Result<ReplicaThreads> {
        let pool_size = intra_op::pool_size(replicas);
        let threads = (1..replicas)
            .map(|local| {
                let replica = first_replica + local;
                let (sender, tasks) = bounded::<Task<'static>>(1);
                let thread = std::thread::Builder::new()
                    .name(format!("replica-{replica}"))
                    .spawn(move || {
                        intra_op::join_pool(pool_size);
                        tasks.into_iter().for_each(|task| task());
                    })
                    .map_err(|source| Error::Thread { replica, source })?;
                Ok((sender, thread))
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(ReplicaThreads { pool_size, threads })
    }

    /// Runs one closure per replica, all at the same time, and returns when all have ended.
    ///
    /// It waits without a deadline of its own; the operations that the closures wait for have deadlines.
    pub(crate) fn run<'a, R: Send + 'a>(
        &self,
        mut closures: Vec<Box<dyn FnOnce() -> R + Send + 'a>>,
    ) -> Vec<std::result::Result<R, Panic>> {
        let mut results: Vec<Option<std::result::Result<R, Panic>>> = closures.iter().map(|_| None).collect();
        let first = closures.remove(0);
        intra_op::join_pool(self.pool_size);
        {
            let (mine, others) = results.split_at_mut(1);
            let latch = Arc::new(Latch { pending: AtomicUsize::new(closures.len()), waiter: std::thread::current() });
            // Waits when dropped, so that no borrow ends before the threads are done, whatever happens below.
            let wait = WaitOnDrop(&latch);
            for ((closure, result), (sender, _)) in closures.into_iter().zip(others).zip(&self.threads) {
                let latch = latch.clone();
                let task: Task<'_> = Box::new(move || {
                    *result = Some(caught(closure));
                    latch.count_down();
                });
                // SAFETY: the task borrows for 'a at most, and this function does not return before the latch says that
                // the task has ended: `wait` is dropped first, on every path.
                let task: Task<'static> = unsafe { std::mem::transmute::<Task<'_>, Task<'static>>(task) };
                if let Err(refused) = sender.send(task) {
                    // The thread has ended; run the task here rather than lose the replica.
                    (refused.0)();
                }
            }
            mine[0] = Some(caught(first));
            drop(wait);
        }
        results.into_iter().flatten().collect()
    }
}

/// Runs a replica's closure while the threads of its pool stay awake.
fn caught<R>(closure: impl FnOnce() -> R) -> std::result::Result<R, Panic> {
    let _awake = intra_op::keep_awake();
    catch_unwind(AssertUnwindSafe(closure))
}

impl Drop for ReplicaThreads {
    fn drop(&mut self) {
        for (sender, thread) in self.threads.drain(..) {
            drop(sender);
            // Ends as soon as its channel is closed: no task is running while the threads are not borrowed.
            if thread.thread().id() != std::thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// Counts tasks that have not ended.
struct Latch {
    pending: AtomicUsize,
    waiter: Thread,
}

impl Latch {
    fn count_down(&self) {
        if self.pending.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.waiter.unpark();
        }
    }
}

struct WaitOnDrop<'a>(&'a Latch);

impl Drop for WaitOnDrop<'_> {
    fn drop(&mut self) {
        // Replicas end within microseconds of each other, since they have just left the same collective.
        for _ in 0..SPINS {
            if self.0.pending.load(Ordering::Acquire) == 0 {
                return;
            }
            std::hint::spin_loop();
        }
        while self.0.pending.load(Ordering::Acquire) > 0 {
            std::thread::park_timeout(std::time::Duration::from_millis(50));
        }
    }
}

const SPINS: u32 = 2_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closures_run_together_and_borrow() {
        let threads = ReplicaThreads::start(3, 0).unwrap();
        let barrier = std::sync::Barrier::new(3);
        for round in 0..50 {
            let values = [1, 2, 3].map(|value| value * round);
            let closures: Vec<Box<dyn FnOnce() -> i32 + Send + '_>> = values
                .iter()
                .map(|value| {
                    let barrier = &barrier;
                    Box::new(move || {
                        barrier.wait();
                        *value
                    }) as _
                })
                .collect();
            let results: Vec<i32> = threads.run(closures).into_iter().map(|result| result.unwrap()).collect();
            assert_eq!(results, values);
        }
    }

    #[test]
    fn a_panic_is_caught_and_the_thread_lives_on() {
        let threads = ReplicaThreads::start(2, 0).unwrap();
        for _ in 0..2 {
            let results = threads.run::<i32>(vec![Box::new(|| 1), Box::new(|| panic!("no gradient"))]);
            assert!(results[0].is_ok() && results[1].is_err());
        }
    }
}
