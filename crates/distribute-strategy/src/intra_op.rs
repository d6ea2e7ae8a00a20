//! Limits the threads of one operation so that replicas do not compete for cores.
//!
//! Tensor libraries read RAYON_NUM_THREADS to decide how many threads one operation uses. Two replicas on two cores
//! that both use two threads run at half the speed of two that use one each.
#![expect(unsafe_code, reason = "setting an environment variable is unsafe once there are other threads")]

const VARIABLE: &str = "RAYON_NUM_THREADS";

/// Gives each replica of this process its share of the cores, or warns and names the setting.
pub(crate) fn share_cores(replicas: usize) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let share = (cores / replicas.max(1)).max(1);
    match std::env::var(VARIABLE).ok().and_then(|value| value.parse::<usize>().ok()) {
        Some(threads) if threads > 1 && threads * replicas > cores => tracing::warn!(
            "{VARIABLE}={threads} lets {replicas} replicas use {} threads on {cores} cores, which slows them down; set \
             {VARIABLE}={share}",
            threads * replicas
        ),
        Some(_) => {}
        None if replicas == 1 => {}
        None if threads_of_this_process() == Some(1) => {
            // SAFETY: this is the only thread of the process, so no other one reads the environment meanwhile.
            unsafe { std::env::set_var(VARIABLE, share.to_string()) };
        }
        None => tracing::warn!(
            "{replicas} replicas share {cores} cores, but each operation may use all of them, which slows them down; \
            set \
             {VARIABLE}={share} before the program starts, or make the strategy before any other thread"
        ),
    }
}

/// Returns `None` if the system does not tell.
fn threads_of_this_process() -> Option<usize> {
    Some(std::fs::read_dir("/proc/self/task").ok()?.count())
}
