//! Waiting until a socket is ready.

use std::time::Duration;

use rustix::event::{self, PollFd, Timespec};

/// Longest wait of one call; callers look again.
const LONGEST: Duration = Duration::from_secs(3600);

/// Waits until one of these sockets is ready, or until `time` has passed.
///
/// An interrupted or failed poll only means another look: the sockets themselves report what is wrong.
pub(super) fn poll(sockets: &mut [PollFd<'_>], time: Duration) {
    let time = time.min(LONGEST);
    // The types of a time's fields differ between systems.
    let time = Timespec { tv_sec: time.as_secs() as _, tv_nsec: time.subsec_nanos() as _ };
    let _ = event::poll(sockets, Some(&time));
}
