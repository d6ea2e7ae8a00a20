//! Contexts: the current one of a thread, and the error that ends them.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use crate::device::{Device, devices};
use crate::error::{Code, Result};
use crate::registry::{Registry, locked};

/// A context of one device.
pub(crate) struct Context {
    pub(crate) handle: usize,
    /// Ordinal of its device.
    pub(crate) device: usize,
    is_primary: bool,
    active: AtomicBool,
    /// The first error of its streams, which is permanent; 0 for none.
    error: AtomicU32,
    pub(crate) flags: AtomicU32,
    /// Handles of the contexts whose memory its kernels may access.
    peers: Mutex<BTreeSet<usize>>,
    limits: Mutex<BTreeMap<u32, usize>>,
}

/// All contexts, by handle.
pub(crate) static CONTEXTS: Registry<Context> = Registry::new();

impl Context {
    pub(crate) fn primary(handle: usize, device: usize) -> Self {
        Self { is_primary: true, active: AtomicBool::new(false), ..Self::new(handle, device) }
    }

    pub(crate) fn new(handle: usize, device: usize) -> Self {
        Self {
            handle,
            device,
            is_primary: false,
            active: AtomicBool::new(true),
            error: AtomicU32::new(0),
            flags: AtomicU32::new(0),
            peers: Mutex::new(BTreeSet::new()),
            limits: Mutex::new(BTreeMap::new()),
        }
    }

    pub(crate) fn device(&self) -> &'static Device {
        &devices()[self.device]
    }

    pub(crate) fn is_primary(&self) -> bool {
        self.is_primary
    }

    pub(crate) fn activate(&self) {
        self.active.store(true, Ordering::Release);
    }

    /// Makes the context unusable, and forgets whose memory its kernels may access.
    pub(crate) fn deactivate(&self) {
        self.active.store(false, Ordering::Release);
        locked(&self.peers).clear();
    }

    /// Checks that the context is usable.
    ///
    /// # Errors
    /// `CONTEXT_IS_DESTROYED`, or the first error of its streams.
    pub(crate) fn check(&self) -> Result {
        if !self.active.load(Ordering::Acquire) {
            return Err(Code::CONTEXT_IS_DESTROYED);
        }
        match self.error.load(Ordering::Acquire) {
            0 => Ok(()),
            code => Err(Code(code)),
        }
    }

    /// Fails the context permanently, as a fault on a GPU does. The first error is kept.
    pub(crate) fn fail(&self, code: Code) {
        let _ = self.error.compare_exchange(0, code.0, Ordering::AcqRel, Ordering::Acquire);
    }

    pub(crate) fn enable_peer(&self, peer: &Self) -> Result {
        if self.device == peer.device {
            return Err(Code::INVALID_DEVICE);
        }
        if !self.device().reaches(peer.device()) {
            return Err(Code::PEER_ACCESS_UNSUPPORTED);
        }
        if locked(&self.peers).insert(peer.handle) { Ok(()) } else { Err(Code::PEER_ACCESS_ALREADY_ENABLED) }
    }

    pub(crate) fn disable_peer(&self, peer: &Self) -> Result {
        if locked(&self.peers).remove(&peer.handle) { Ok(()) } else { Err(Code::PEER_ACCESS_NOT_ENABLED) }
    }

    pub(crate) fn has_peer(&self, context: usize) -> bool {
        locked(&self.peers).contains(&context)
    }

    pub(crate) fn limit(&self, limit: u32) -> Result<usize> {
        let default = match limit {
            0 => 1 << 10,     // stack
            1 => 1 << 20,     // printf
            2 => 8 << 20,     // heap
            3 | 4 => 2 << 10, // device runtime
            5 => 64,          // fetch granularity
            6 => 0,           // persisting cache
            _ => return Err(Code::UNSUPPORTED_LIMIT),
        };
        Ok(locked(&self.limits).get(&limit).copied().unwrap_or(default))
    }

    pub(crate) fn set_limit(&self, limit: u32, value: usize) -> Result {
        self.limit(limit)?;
        locked(&self.limits).insert(limit, value);
        Ok(())
    }
}

/// Returns the context that is current on this thread.
///
/// # Errors
/// `INVALID_CONTEXT` if there is none, and the errors of [`Context::check`].
pub(crate) fn current() -> Result<Arc<Context>> {
    let handle = current_handle().ok_or(Code::INVALID_CONTEXT)?;
    let context = CONTEXTS.get(handle).ok_or(Code::CONTEXT_IS_DESTROYED)?;
    context.check()?;
    Ok(context)
}

/// Returns the context with a handle from a caller.
pub(crate) fn context(handle: usize) -> Result<Arc<Context>> {
    let context = CONTEXTS.get(handle).ok_or(Code::INVALID_CONTEXT)?;
    context.check()?;
    Ok(context)
}

pub(crate) fn current_handle() -> Option<usize> {
    CURRENT.with_borrow(|stack| stack.last().copied())
}

/// Makes a context current in place of the previous one; 0 for none.
pub(crate) fn set_current(handle: usize) -> Result {
    if handle != 0 && CONTEXTS.get(handle).is_none() {
        return Err(Code::INVALID_CONTEXT);
    }
    CURRENT.with_borrow_mut(|stack| {
        stack.pop();
        if handle != 0 {
            stack.push(handle);
        }
    });
    Ok(())
}

pub(crate) fn push_current(handle: usize) -> Result {
    context(handle)?;
    CURRENT.with_borrow_mut(|stack| stack.push(handle));
    Ok(())
}

pub(crate) fn pop_current() -> Result<usize> {
    CURRENT.with_borrow_mut(Vec::pop).ok_or(Code::INVALID_CONTEXT)
}

thread_local! {
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}
