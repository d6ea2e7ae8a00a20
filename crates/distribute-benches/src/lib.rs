//! Groups of threads for the benchmarks under `benches/`, which `cargo xtask bench micro` runs by criterion.
//!
//! The benchmarks call public items alone. They are in a crate of the lab, so that the published crates do not depend
//! on criterion; as this crate has no tests, `cargo test --workspace` does not build it either.

use std::thread;
use std::time::{Duration, Instant};

use distribute_collectives::{ProcessGroup, Result};

/// Defines the `main` of a benchmark, which runs these functions of criterion briefly.
#[macro_export]
macro_rules! benchmarks {
    ($($function:ident),+) => {
        criterion::criterion_group! {
            name = all;
            config = criterion::Criterion::default()
                .warm_up_time(std::time::Duration::from_millis(500))
                .measurement_time(std::time::Duration::from_secs(2))
                .sample_size(50);
            targets = $($function),+
        }
        criterion::criterion_main!(all);
    };
}

/// The ranks of one group, each of which is a thread while it is measured.
#[derive(Debug)]
pub struct Ranks(Vec<ProcessGroup>);

impl Ranks {
    /// Creates a group of this process.
    ///
    /// # Errors
    /// The errors of [`ProcessGroup::local`].
    pub fn new(ranks: usize) -> Result<Ranks> {
        Ok(Ranks(ProcessGroup::local(ranks)?))
    }

    /// Calls `step` the same number of times on every rank, each with a value of its own, and returns the time of the
    /// slowest rank. Threads are started, and values made, before that time.
    ///
    /// On Linux each rank keeps to one core, in turn: a busy machine would start all threads on the same one, and ranks
    /// that wait for each other do not leave it.
    ///
    /// # Errors
    /// The first error of `step`.
    pub fn time<V>(
        &self,
        iterations: u64,
        value: impl Fn() -> V + Sync,
        step: impl Fn(&ProcessGroup, &mut V) -> Result<()> + Sync,
    ) -> Result<Duration> {
        let (value, step) = (&value, &step);
        let of_rank = move |group: &ProcessGroup| -> Result<Duration> {
            keep_to_a_core(group.rank().index());
            let mut value = value();
            group.barrier()?;
            let started = Instant::now();
            for _ in 0..iterations {
                step(group, &mut value)?;
            }
            Ok(started.elapsed())
        };
        thread::scope(|scope| {
            let threads: Vec<_> = self.0.iter().map(|group| scope.spawn(move || of_rank(group))).collect();
            let mut slowest = Duration::ZERO;
            for thread in threads {
                match thread.join() {
                    Ok(time) => slowest = slowest.max(time?),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            Ok(slowest)
        })
    }
}

/// Binds this thread to one of the cores that it may use. Where that fails, the kernel chooses as before.
#[cfg(target_os = "linux")]
fn keep_to_a_core(rank: usize) {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core)).collect();
    if let Some(core) = cores.get(rank % cores.len().max(1)) {
        let mut own = CpuSet::new();
        own.set(*core);
        let _ = sched_setaffinity(None, &own);
    }
}

#[cfg(not(target_os = "linux"))]
fn keep_to_a_core(_: usize) {}
