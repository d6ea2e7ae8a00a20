//! Communicators by the pointers that callers hold. A pointer is only a number: a stale one is detected, not
//! dereferenced.

use std::collections::HashMap;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use nccl_sys::NcclComm;

use crate::comm::Comm;
use crate::failure::Failure;
use crate::link::Link;

static COMMS: LazyLock<Mutex<HashMap<usize, Arc<Comm>>>> = LazyLock::new(Mutex::default);
static NEXT: AtomicUsize = AtomicUsize::new(0x1000);

/// Adds a communicator and returns its pointer.
pub(crate) fn add(comm: Arc<Comm>) -> *mut NcclComm {
    let number = NEXT.fetch_add(0x10, Ordering::Relaxed);
    COMMS.lock().unwrap_or_else(PoisonError::into_inner).insert(number, comm);
    ptr::without_provenance_mut(number)
}

/// Returns the communicator of a pointer.
pub(crate) fn get(comm: *mut NcclComm) -> Result<Arc<Comm>, Failure> {
    let known = COMMS.lock().unwrap_or_else(PoisonError::into_inner).get(&comm.addr()).cloned();
    known.ok_or_else(|| unknown(comm))
}

/// Removes a communicator; its pointer is stale afterwards.
pub(crate) fn remove(comm: *mut NcclComm) -> Result<Arc<Comm>, Failure> {
    let known = COMMS.lock().unwrap_or_else(PoisonError::into_inner).remove(&comm.addr());
    known.ok_or_else(|| unknown(comm))
}

/// Returns whether a communicator in use satisfies a condition on its connection.
pub(crate) fn any(condition: impl Fn(&Arc<Link>) -> bool) -> bool {
    let comms = COMMS.lock().unwrap_or_else(PoisonError::into_inner);
    comms.values().filter_map(|comm| comm.member()).any(|member| condition(&member.link))
}

fn unknown(comm: *mut NcclComm) -> Failure {
    Failure::argument(match comm.is_null() {
        true => "comm argument is NULL",
        false => "comm argument is not a communicator, or one that was destroyed",
    })
}
