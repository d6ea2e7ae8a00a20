//! User functions that panic inside an operation: every rank gets the error, no rank hangs, and no memory is used after
//! its owner has gone.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::harness::{each, groups, quick};
use distribute_collectives::schedule::{AllReduceAlgorithm, Schedule};
use distribute_collectives::{
    Algorithm, BufferMut, CrossDeviceOps, Error, Options, ProcessGroup, ReduceOp, Reduction, TransportKind,
};
use distribute_types::ErrorClass;

/// Enough elements for many chunks.
const LEN: usize = 1 << 20;

/// Returns every rank's error. Memory is freed and reused at once, as by a caller that unwinds.
fn errors(groups: &[ProcessGroup], call: impl Fn(&ProcessGroup, &mut [f32]) -> Result<(), Error> + Sync) -> Vec<Error> {
    each(groups, |group| {
        let mut values = vec![1.0f32; LEN];
        let error = call(group, &mut values).unwrap_err();
        drop(values);
        let other = vec![7.0f32; LEN];
        std::thread::sleep(Duration::from_millis(20));
        assert!(other.iter().all(|value| *value == 7.0), "somebody wrote to memory that was given back");
        error
    })
}

fn all_say(errors: &[Error], text: &str) {
    assert!(errors.iter().any(|error| matches!(error, Error::Panicked { .. })), "{errors:?}");
    for error in errors {
        let said = error.to_string();
        assert!(said.contains("panicked during all_reduce #0") && said.contains(text), "{said}");
        assert!(!error.is_retryable(), "{said}");
    }
}

fn transports() -> [TransportKind; 3] {
    [TransportKind::Shm, TransportKind::Tcp, TransportKind::Grpc]
}

#[test]
fn a_reduction_that_panics_in_one_chunk_fails_on_every_thread() {
    for chunk in [0, 1, 7] {
        let groups = groups(1, 3, &quick());
        let calls = AtomicUsize::new(0);
        let calls: &'static AtomicUsize = Box::leak(Box::new(calls));
        let reduction = Reduction::new(move |a: f32, b: f32| {
            assert!(calls.fetch_add(1, Ordering::Relaxed) != chunk * 50_000, "the sum is too hard");
            a + b
        });
        let began = Instant::now();
        all_say(&errors(&groups, |group, values| group.all_reduce(values, &reduction)), "the sum is too hard");
        assert!(began.elapsed() < Duration::from_secs(20), "not by a deadline");
        // The group has ended, and reports the reason.
        let again = each(&groups, |group| group.barrier().unwrap_err());
        assert!(again.iter().all(|error| error.to_string().contains("the sum is too hard")), "{again:?}");
    }
}

#[test]
fn a_reduction_that_panics_fails_on_every_process() {
    for transport in transports() {
        for (processes, local) in [(3, 1), (2, 2)] {
            let groups = groups(processes, local, &quick().transport(transport));
            // On one process only, as if values differ.
            let calls: &'static AtomicUsize = Box::leak(Box::new(AtomicUsize::new(0)));
            let reduction = Reduction::new(move |a: f32, b: f32| {
                assert!(calls.fetch_add(1, Ordering::Relaxed) != 100_000, "the sum is too hard");
                a + b
            });
            let errors = errors(&groups, |group, values| group.all_reduce(values, &reduction));
            all_say(&errors, "the sum is too hard");
        }
    }
}

struct Broken;

impl CrossDeviceOps for Broken {
    fn name(&self) -> &str {
        "broken"
    }

    fn all_reduce(&self, _: ReduceOp, _: &mut [BufferMut<'_>]) {
        panic!("no such device");
    }
}

#[test]
fn cross_device_operations_that_panic_fail_on_every_rank() {
    for op in [ReduceOp::Sum, ReduceOp::Mean] {
        let options = quick().cross_device_ops(Some(Broken.into()));
        for groups in [groups(1, 3, &options), groups(2, 2, &options)] {
            all_say(&errors(&groups, |group, values| group.all_reduce(values, op)), "no such device");
        }
    }
}

struct Lost;

impl AllReduceAlgorithm for Lost {
    fn name(&self) -> &str {
        "lost"
    }

    fn schedule(&self, rank: usize, ranks: usize, count: usize) -> Schedule {
        assert!(rank != 1, "rank 1 has no plan");
        Algorithm::Ring.schedule(rank, ranks, count)
    }
}

#[test]
fn an_algorithm_that_panics_fails_on_every_process() {
    for transport in transports() {
        let options = quick().transport(transport).algorithm(Algorithm::custom(Lost));
        for groups in [groups(3, 1, &options), groups(2, 2, &options)] {
            all_say(&errors(&groups, |group, values| group.all_reduce(values, ReduceOp::Sum)), "rank 1 has no plan");
        }
    }
}

#[test]
fn work_that_is_dropped_while_its_rank_unwinds_is_waited_for() {
    for processes in [1, 2] {
        let groups = groups(processes, 2, &quick());
        let outcomes = each(&groups, |group| {
            let me = group.rank().0;
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let work = group.start().all_reduce(vec![1.0f32; LEN], ReduceOp::Sum).unwrap();
                assert!(me != 0, "after the call");
                work.wait().map(|values| values[0])
            }))
        });
        for (rank, outcome) in outcomes.into_iter().enumerate() {
            match outcome {
                Ok(sum) => assert_eq!(sum.unwrap(), 2.0 * processes as f32, "rank {rank}"),
                Err(_) => assert_eq!(rank, 0),
            }
        }
    }
}

#[test]
fn operations_in_line_end_when_an_earlier_one_has_failed() {
    // Two ranks of a process disagree on the first of two calls, and the second is complete: it must not wait without
    // end for its turn between processes.
    let groups = groups(2, 2, &quick());
    let began = Instant::now();
    each(&groups, |group| {
        let len = if group.rank().0 == 1 { 5 } else { 6 };
        let first = group.start().all_reduce(vec![1.0f32; len], ReduceOp::Sum);
        let second = group.start().all_reduce(vec![1.0f32; 8], ReduceOp::Sum);
        if let Ok(second) = second {
            assert!(second.wait().is_err());
        }
        if let Ok(first) = first {
            assert!(first.wait().is_err());
        }
    });
    assert!(began.elapsed() < Duration::from_secs(20), "not by a deadline: {:?}", began.elapsed());
}

#[test]
fn a_function_that_does_not_return_in_time_is_a_deadline_for_all() {
    let options = Options::default().timeout(Duration::from_millis(300));
    let groups = groups(1, 2, &options);
    let reduction = Reduction::new(|a: f32, b: f32| {
        std::thread::sleep(Duration::from_micros(50));
        a + b
    });
    // Two seconds of work in chunks, of which those in hand are finished.
    let errors = each(&groups, |group| group.all_reduce(&mut vec![1.0f32; 40_000], &reduction));
    let says = |outcome: &Result<(), Error>| matches!(outcome, Err(Error::Deadline { .. } | Error::Aborted { .. }));
    assert!(errors.iter().all(says), "{errors:?}");
}
