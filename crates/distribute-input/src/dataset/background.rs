//! Scheduling of the threads that read ahead.
#![cfg_attr(target_os = "linux", expect(unsafe_code, reason = "the scheduler is asked by a system call"))]

/// Requests batch scheduling for the calling thread, so that waking it does not preempt another thread: the reader that
/// has just taken an element continues, and the next element is made on a free core, or later on this one.
#[cfg(target_os = "linux")]
pub(crate) fn begin() {
    let parameters = libc::sched_param { sched_priority: 0 };
    // SAFETY: the call only reads the parameters, which outlive it, and only changes how this thread is scheduled.
    let outcome = unsafe { libc::sched_setscheduler(0, libc::SCHED_BATCH, &raw const parameters) };
    if outcome != 0 {
        tracing::debug!("the scheduler would not take SCHED_BATCH: {}", std::io::Error::last_os_error());
    }
}

/// Does nothing on systems other than Linux.
#[cfg(not(target_os = "linux"))]
pub(crate) fn begin() {}
