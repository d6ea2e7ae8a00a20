//! Training under `TpuStrategy` on XLA's plugin for CPUs, where `DISTRIBUTE_PJRT_PLUGIN` names it. Otherwise each test
//! reports that it was skipped.
#![expect(clippy::unwrap_used, reason = "tests")]

mod models;
mod simulated;
mod steps;
mod training;

use distribute_strategy::{MirroredStrategy, Strategy, TpuStrategy};
use distribute_testkit::skipped;

/// Returns a strategy of replicas on XLA's CPU devices.
fn tpu(replicas: usize) -> Option<Strategy> {
    if std::env::var_os("DISTRIBUTE_PJRT_PLUGIN").is_none() {
        skipped("DISTRIBUTE_PJRT_PLUGIN names no plugin for CPUs");
        return None;
    }
    Some(TpuStrategy::builder().replicas(replicas).build().unwrap())
}

fn mirrored(replicas: usize) -> Strategy {
    let devices = (0..replicas).map(|index| format!("CPU:{index}"));
    MirroredStrategy::builder().devices(devices).build().unwrap()
}
