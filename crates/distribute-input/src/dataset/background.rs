//! Threads that read ahead and let others compute.
#![cfg_attr(target_os = "linux", expect(unsafe_code, reason = "the scheduler is asked by a system call"))]

/// Tells the scheduler that waking this thread is no reason to interrupt another one: the reader that has just taken an element
/// goes on, and the next one is made on a core that is free, or when this one is.
#[cfg(target_os = "linux")]
pub(crate) fn begin() {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the call reads the parameters, which live as long, and changes nothing but how this thread is scheduled.
    let outcome = unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const parameters) };
    if outcome != 0 {
        tracing::debug!("the scheduler would not take SCHED_BATCH: {}", std::io::Error::last_os_error());
    }
}

/// Elsewhere threads are scheduled as they are.
#[cfg(not(target_os = "linux"))]
pub(crate) fn begin() {}
