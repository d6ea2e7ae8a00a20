//! Training under `TpuStrategy` on XLA's plugin for CPUs, where `DISTRIBUTE_PJRT_PLUGIN` names it. Otherwise each test
//! reports that it was skipped.
#![expect(clippy::unwrap_used, reason = "tests")]

mod models;
mod simulated;
mod steps;
mod training;

use distribute_strategy::{MirroredStrategy, Strategy, TpuStrategy};
use distribute_testkit::skipped;
use parking_lot::{ReentrantMutex, ReentrantMutexGuard, const_reentrant_mutex};

/// burn's generator of random numbers, which is one for the whole process.
static GENERATOR: ReentrantMutex<()> = const_reentrant_mutex(());

/// Returns a strategy of replicas on XLA's CPU devices. No other test draws random numbers as long as the guard lives.
fn tpu(replicas: usize) -> Option<(ReentrantMutexGuard<'static, ()>, Strategy)> {
    if std::env::var_os("DISTRIBUTE_PJRT_PLUGIN").is_none() {
        skipped("DISTRIBUTE_PJRT_PLUGIN names no plugin for CPUs");
        return None;
    }
    let generator = GENERATOR.lock();
    Some((generator, TpuStrategy::builder().replicas(replicas).build().unwrap()))
}

fn mirrored(replicas: usize) -> Strategy {
    let devices = (0..replicas).map(|index| format!("CPU:{index}"));
    MirroredStrategy::builder().devices(devices).build().unwrap()
}
