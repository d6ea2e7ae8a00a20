//! Works as futures, polled by a minimal executor: one thread, which parks until it is woken.

use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use crate::harness::{each, groups, quick};
use distribute_cluster::FailureKind;
use distribute_collectives::{Error, Options, OwnedBuffers, ProcessGroup, Rank, ReduceOp, TransportKind, Work};

/// Unparks the polling thread, and counts the wake-ups.
struct Unpark {
    thread: Thread,
    wake_ups: AtomicUsize,
}

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.wake_ups.fetch_add(1, Ordering::SeqCst);
        self.thread.unpark();
    }
}

fn unpark() -> (Arc<Unpark>, Waker) {
    let unpark = Arc::new(Unpark { thread: thread::current(), wake_ups: AtomicUsize::new(0) });
    (unpark.clone(), Waker::from(unpark))
}

/// Polls a future only when its waker was called, and never in between.
fn block_on<F: Future>(future: F) -> F::Output {
    let (unpark, waker) = unpark();
    let mut future = pin!(future);
    let mut seen = 0;
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return output;
        }
        let until = Instant::now() + Duration::from_secs(40);
        while unpark.wake_ups.load(Ordering::SeqCst) == seen {
            assert!(Instant::now() < until, "the waker was not called");
            thread::park_timeout(Duration::from_secs(1));
        }
        seen = unpark.wake_ups.load(Ordering::SeqCst);
    }
}

fn poll_once(work: &mut Work<Vec<f32>>, waker: &Waker) -> Poll<Result<Vec<f32>, Error>> {
    Pin::new(work).poll(&mut Context::from_waker(waker))
}

/// Threads of one process; processes of one rank and of two, over sockets and over shared memory.
fn settings() -> Vec<(usize, usize, Options)> {
    let with = |transport| quick().transport(transport);
    vec![
        (1, 3, quick()),
        (2, 1, with(TransportKind::Tcp)),
        (2, 2, with(TransportKind::Tcp)),
        (3, 1, with(TransportKind::Auto)),
    ]
}

#[test]
fn works_complete_without_anybody_who_waits() {
    for (processes, local_ranks, options) in settings() {
        let groups = groups(processes, local_ranks, &options);
        let world = groups.len() as f32;
        for len in [1, 1000, 1 << 20] {
            let sums = each(&groups, |group| {
                let mine = vec![group.rank().0 as f32; len];
                block_on(async {
                    // Two operations at the same time, awaited in reverse order.
                    let first = group.start().all_reduce(mine.clone(), ReduceOp::Sum)?;
                    let second = group.start().all_reduce(mine, ReduceOp::Mean)?;
                    let mean = second.await?;
                    group.start().barrier()?.await?;
                    Ok::<_, Error>((first.await?, mean))
                })
            });
            let sum = world * (world - 1.0) / 2.0;
            for (rank, outcome) in sums.into_iter().enumerate() {
                let (all, mean) = outcome.unwrap();
                assert_eq!(all, vec![sum; len], "rank {rank} of {processes} × {local_ranks}");
                assert_eq!(mean, vec![sum / world; len], "rank {rank} of {processes} × {local_ranks}");
            }
        }
    }
}

#[test]
fn ranks_that_poll_and_ranks_that_wait_meet() {
    for (processes, local_ranks, options) in settings() {
        let groups = groups(processes, local_ranks, &options);
        let gathered = each(&groups, |group| {
            for round in 0..50u32 {
                let mut values = vec![round + group.rank().0; 3];
                if (group.rank().0 + round) % 2 == 0 {
                    values = block_on(group.start().all_reduce(values, ReduceOp::Max)?)?;
                } else {
                    group.all_reduce(&mut values, ReduceOp::Max)?;
                }
                assert_eq!(values, vec![round + group.world_size() as u32 - 1; 3]);
            }
            Ok::<_, Error>(())
        });
        assert!(gathered.iter().all(Result::is_ok), "{gathered:?}");
    }
}

#[test]
fn a_deadline_wakes_a_rank_that_polls() {
    for (processes, local_ranks) in [(1, 2), (2, 1)] {
        let options = Options::default().timeout(Duration::from_millis(300)).transport(TransportKind::Tcp);
        let groups = groups(processes, local_ranks, &options);
        let started = Instant::now();
        // Rank 1 never makes the call.
        let outcome = block_on(groups[0].start().all_reduce(vec![1.0f32; 4], ReduceOp::Sum).unwrap());
        assert!(matches!(&outcome, Err(Error::Deadline { .. })), "{outcome:?}");
        assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
        let later = groups[0].start().all_reduce(vec![1.0f32], ReduceOp::Sum).map(drop);
        assert!(later.is_err(), "the group has ended");
    }
}

/// A way of ending a group by its last handle.
type End = fn(ProcessGroup);

#[test]
fn an_abort_a_leave_and_a_mismatch_wake_ranks_that_poll() {
    let ends: [(&str, End); 3] = [
        ("abort", |group| group.abort("the other rank gives up", FailureKind::Permanent)),
        ("leave", drop),
        ("mismatch", |group| {
            let _ = group.start().all_reduce(vec![1.0f64; 9], ReduceOp::Sum).map(Work::wait);
        }),
    ];
    for (processes, local_ranks, options) in settings() {
        if processes * local_ranks != 2 && processes * local_ranks != 3 {
            continue;
        }
        for (what, end) in ends {
            let mut groups = groups(processes, local_ranks, &options);
            let others = groups.split_off(1);
            let polled = Barrier::new(processes * local_ranks);
            thread::scope(|scope| {
                let polling = scope.spawn(|| {
                    let mut work = groups[0].start().all_reduce(vec![1.0f32; 4], ReduceOp::Sum)?;
                    assert!(poll_once(&mut work, &unpark().1).is_pending());
                    polled.wait();
                    block_on(work)
                });
                for other in others {
                    let polled = &polled;
                    scope.spawn(move || {
                        polled.wait();
                        end(other);
                    });
                }
                let started = Instant::now();
                let outcome = polling.join().unwrap();
                assert!(outcome.is_err(), "{what}: {outcome:?}");
                assert!(started.elapsed() < Duration::from_secs(10), "{what}: {:?}", started.elapsed());
            });
        }
    }
}

#[test]
fn a_pending_work_that_is_dropped_is_waited_for() {
    for (processes, local_ranks, options) in settings() {
        let groups = groups(processes, local_ranks, &options);
        let polled = Barrier::new(groups.len());
        let sums = each(&groups, |group| {
            if group.rank().0 == 0 {
                let mut work = group.start().all_reduce(vec![1.0f32; 100_000], ReduceOp::Sum).unwrap();
                assert!(poll_once(&mut work, &unpark().1).is_pending());
                polled.wait();
                drop(work);
            } else {
                polled.wait();
                let sum = group.start().all_reduce(vec![1.0f32; 100_000], ReduceOp::Sum).and_then(block_on);
                assert_eq!(sum.unwrap(), vec![group.world_size() as f32; 100_000]);
            }
            // The group still works.
            let mut sum = [1.0f32];
            group.all_reduce(&mut sum, ReduceOp::Sum).map(|()| sum[0])
        });
        assert!(sums.iter().all(|sum| *sum.as_ref().unwrap() == groups.len() as f32), "{sums:?}");
    }
}

/// Asks until the work is done, and returns its memory.
fn spin<B: OwnedBuffers>(work: Work<B>) -> Result<B, Error> {
    let until = Instant::now() + Duration::from_secs(10);
    while !work.is_done() {
        assert!(Instant::now() < until, "the work is never done");
        thread::yield_now();
    }
    work.wait()
}

#[test]
fn a_rank_that_only_asks_gets_its_work_done() {
    for (processes, local_ranks, options) in settings() {
        let groups = groups(processes, local_ranks, &options);
        let (world, counts) = (groups.len() as u32, vec![1; groups.len()]);
        let outcomes = each(&groups, |group| {
            let me = group.rank().0;
            let sum = spin(group.start().all_reduce(vec![1u32; 100_000], ReduceOp::Sum)?)?;
            assert_eq!(sum, vec![world; 100_000]);
            assert_eq!(spin(group.start().broadcast(vec![me; 1000], Rank(1))?)?, [1; 1000]);
            let [_, all] = spin(group.start().all_gather(vec![me], vec![0; counts.len()])?)?;
            assert!(all.into_iter().eq(0..world));
            let [_, mine] = spin(group.start().reduce_scatter(vec![me; counts.len()], vec![0], ReduceOp::Max)?)?;
            assert_eq!(mine, [world - 1]);
            // A mean of integers has an accumulator of its own.
            assert_eq!(spin(group.start().all_reduce(vec![2u32, 4], ReduceOp::Mean)?)?, [2, 4]);
            spin(group.start().barrier()?).map(drop)
        });
        assert!(outcomes.iter().all(Result::is_ok), "{processes} × {local_ranks}: {outcomes:?}");
    }
}

#[test]
fn a_rank_that_only_asks_notices_a_deadline() {
    for (processes, local_ranks) in [(1, 2), (2, 1)] {
        let options = Options::default().timeout(Duration::from_millis(300)).transport(TransportKind::Tcp);
        let groups = groups(processes, local_ranks, &options);
        // Rank 1 never makes the call.
        let outcome = groups[0].start().all_reduce(vec![1.0f32; 4], ReduceOp::Sum).and_then(spin);
        assert!(matches!(&outcome, Err(Error::Deadline { .. })), "{outcome:?}");
    }
}

#[test]
fn a_work_is_handed_back_once() {
    let group = ProcessGroup::local(1).unwrap().remove(0);
    let (_, waker) = unpark();
    let mut work = group.start().all_reduce(vec![2.0f32], ReduceOp::Sum).unwrap();
    assert!(matches!(poll_once(&mut work, &waker), Poll::Ready(Ok(values)) if values == [2.0]));
    assert!(matches!(poll_once(&mut work, &waker), Poll::Ready(Err(Error::Aborted { .. }))));
    assert!(work.is_done() && work.wait().is_err());
    assert!(group.failure().is_none());
}
