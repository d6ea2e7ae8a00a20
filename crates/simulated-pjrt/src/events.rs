//! Events.
#![expect(unsafe_code, reason = "functions of C, under the names of C")]

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use pjrt_sys::{
    Code, Event, EventDestroyArgs, EventErrorArgs, EventIsReadyArgs, EventOnReadyArgs, OnReadyCallback, PjrtError,
};

use crate::failure::{Failure, Kind, enter, error_of, give, take};
use crate::script::{self, script};

/// Work that is done when an event fires.
type Work = Box<dyn FnOnce() + Send>;

struct State {
    end: Option<Result<(), Failure>>,
    work: Option<Work>,
    callbacks: Vec<(OnReadyCallback, usize)>,
}

type Shared = Arc<Mutex<State>>;

static STUCK: Mutex<Vec<(Shared, Result<(), Failure>)>> = Mutex::new(Vec::new());
static RELEASED: AtomicBool = AtomicBool::new(false);

/// Makes an event of a kind, which fires as the script says, after `work` was done. One with an error fires at once.
pub(crate) fn event(kind: &str, work: impl FnOnce() + Send + 'static) -> *mut Event {
    let state = State { end: None, work: Some(Box::new(work)), callbacks: Vec::new() };
    let shared = Arc::new(Mutex::new(state));
    let end = script::event(kind);
    if end.is_err() {
        fire(&shared, end);
    } else if script().stuck.iter().any(|stuck| stuck == kind) && !RELEASED.load(Ordering::SeqCst) {
        locked(&STUCK).push((Arc::clone(&shared), end));
    } else if let Some(ms) = script().late_ms.get(kind).copied() {
        let shared = Arc::clone(&shared);
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(ms));
            fire(&shared, end);
        });
    } else {
        fire(&shared, end);
    }
    give(Kind::Event, shared)
}

fn fire(shared: &Shared, end: Result<(), Failure>) {
    let work = locked(shared).work.take();
    if let (Some(work), Ok(())) = (work, &end) {
        work();
    }
    let callbacks = {
        let mut state = locked(shared);
        state.end = Some(end.clone());
        std::mem::take(&mut state.callbacks)
    };
    for (callback, argument) in callbacks {
        // SAFETY: the program has registered the callback with this argument.
        unsafe { callback(error_of(end.clone()), ptr::with_exposed_provenance_mut(argument)) };
    }
}

#[unsafe(no_mangle)]
extern "C" fn simulated_pjrt_release() {
    RELEASED.store(true, Ordering::SeqCst);
    let stuck = std::mem::take(&mut *locked(&STUCK));
    for (shared, end) in stuck {
        fire(&shared, end);
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// # Safety
/// The pointer is an event that is not destroyed.
unsafe fn shared(event: *mut Event) -> Shared {
    // SAFETY: guaranteed by the caller.
    Arc::clone(unsafe { &*event.cast::<Shared>() })
}

pub(crate) unsafe extern "C" fn destroy(arguments: *mut EventDestroyArgs) -> *mut PjrtError {
    // SAFETY: the caller passes its event.
    unsafe {
        enter(arguments, |arguments| {
            take::<Shared, _>(Kind::Event, arguments.event);
            Ok(())
        })
    }
}

pub(crate) unsafe extern "C" fn is_ready(arguments: *mut EventIsReadyArgs) -> *mut PjrtError {
    // SAFETY: the caller passes its event.
    unsafe {
        enter(arguments, |arguments| {
            arguments.is_ready = locked(&shared(arguments.event)).end.is_some();
            Ok(())
        })
    }
}

pub(crate) unsafe extern "C" fn error(arguments: *mut EventErrorArgs) -> *mut PjrtError {
    let unready = || Err(Failure::new(Code::FAILED_PRECONDITION, "the event has not fired"));
    // SAFETY: the caller passes its event.
    unsafe { enter(arguments, |arguments| locked(&shared(arguments.event)).end.clone().unwrap_or_else(unready)) }
}

pub(crate) unsafe extern "C" fn on_ready(arguments: *mut EventOnReadyArgs) -> *mut PjrtError {
    // SAFETY: the caller passes its event and a callback.
    unsafe {
        enter(arguments, |arguments| {
            let Some(callback) = arguments.callback else {
                return Err(Failure::new(Code::INVALID_ARGUMENT, "the callback is null"));
            };
            let argument: *mut c_void = arguments.user_arg;
            let end = {
                let shared = shared(arguments.event);
                let mut state = locked(&shared);
                if state.end.is_none() {
                    state.callbacks.push((callback, argument.expose_provenance()));
                }
                state.end.clone()
            };
            if let Some(end) = end {
                callback(error_of(end), argument);
            }
            Ok(())
        })
    }
}
