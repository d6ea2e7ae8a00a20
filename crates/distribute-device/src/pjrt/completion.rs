//! Ends of operations, which the plugin reports by callbacks.
#![expect(unsafe_code, reason = "a callback of C is registered and takes back what it was given")]

use std::ffi::c_void;
use std::fmt;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar};
use std::time::{Duration, Instant};

use pjrt_sys::{Arguments, Event, EventDestroyArgs, EventOnReadyArgs, Function, PjrtError};

use super::handle::Handle;
use super::plugin::{Plugin, failure};
use crate::mutex::Mutex;
use crate::{Error, HostBuffer, Result};

/// Operations of a plugin that end together, such as an execution on all its devices.
///
/// Dropping it does not wait: the operations continue.
pub struct Completion {
    group: Arc<Group>,
}

/// The number of operations of a client whose ends were not reported yet.
#[derive(Debug, Default)]
pub(super) struct Pending {
    count: Mutex<usize>,
    changed: Condvar,
}

struct Group {
    /// For each operation what an error names.
    subjects: Vec<String>,
    call: Function,
    started: Instant,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// For each operation its end, or `None` while it runs. The first of errors is kept by its code and its text.
    ends: Vec<Option<Result<(), Failed>>>,
    /// Memory that the operations write.
    memory: Option<HostBuffer>,
}

#[derive(Debug, Clone)]
struct Failed {
    call: &'static str,
    code: pjrt_sys::Code,
    text: String,
}

/// What the callback of one event owns.
struct Registration {
    group: Arc<Group>,
    place: usize,
    plugin: Plugin,
    pending: Arc<Pending>,
    /// Memory that the operation reads.
    source: Option<Arc<HostBuffer>>,
    event: Handle<Event>,
    second: Arc<AtomicBool>,
}

impl Completion {
    /// Creates the state of operations that are about to be started. `memory` is what they write.
    pub(super) fn new(call: Function, subjects: Vec<String>, memory: Option<HostBuffer>) -> Completion {
        let ends = vec![None; subjects.len()];
        let state = Mutex::new(State { ends, memory });
        let group = Group { subjects, call, started: Instant::now(), state, changed: Condvar::new() };
        Completion { group: Arc::new(group) }
    }

    /// Returns the address and the size of the memory that operations write, which stays while the callback has not
    /// run, or the value exists.
    pub(super) fn memory(&self) -> (*mut c_void, usize) {
        let mut state = self.group.state.lock();
        match state.memory.as_mut() {
            Some(memory) => (memory.as_bytes_mut().as_mut_ptr().cast(), memory.len_bytes()),
            None => (std::ptr::null_mut(), 0),
        }
    }

    /// Notes that an operation has no event, since the plugin has already finished it.
    pub(super) fn end(&self, place: usize) {
        self.group.end(place, Ok(()));
    }

    /// Has the plugin report the end of an operation, and keeps `source` until then.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if the callback cannot be registered. The memory of the operation is then leaked, since nothing
    /// would tell when it is no longer used.
    ///
    /// # Safety
    /// The event was created by this plugin, and is the caller's, who no longer uses it.
    pub(super) unsafe fn register(
        &self,
        place: usize,
        plugin: &Plugin,
        pending: &Arc<Pending>,
        event: Handle<Event>,
        source: Option<Arc<HostBuffer>>,
    ) -> Result<()> {
        let second = Arc::new(AtomicBool::new(false));
        let registration = Registration {
            group: Arc::clone(&self.group),
            place,
            plugin: plugin.clone(),
            pending: Arc::clone(pending),
            source,
            event,
            second: Arc::clone(&second),
        };
        pending.add();
        let user_arg = Box::into_raw(Box::new(registration));
        let mut arguments = EventOnReadyArgs {
            event: event.as_ptr(),
            callback: Some(fired),
            user_arg: user_arg.cast(),
            ..EventOnReadyArgs::new()
        };
        let subject = &self.group.subjects[place];
        // SAFETY: the event is valid; the callback takes the registration, once.
        let answer = unsafe { plugin.call(subject, &mut arguments) };
        if answer.is_err() {
            // SAFETY: the callback was not registered, so that the registration is still this function's.
            let registration = unsafe { Box::from_raw(user_arg) };
            mem::forget((Arc::clone(&registration.group), registration.source.clone()));
            pending.end();
            second.store(true, Ordering::Relaxed);
        }
        release(plugin, event, &second);
        answer
    }

    /// Returns whether all operations have ended, with or without an error.
    pub fn is_done(&self) -> bool {
        self.group.state.lock().ends.iter().all(Option::is_some)
    }

    /// Waits until all operations have ended, or one has failed.
    ///
    /// # Errors
    /// [`Error::Pjrt`] if one has failed, without waiting for the others; [`Error::Deadline`] names those that have not
    /// ended.
    pub fn wait(&self, deadline: Instant) -> Result<()> {
        let group = &*self.group;
        let timeout = deadline.saturating_duration_since(Instant::now());
        let state = group.state.wait_while(&group.changed, timeout, |state| {
            let failed = state.ends.iter().flatten().any(Result::is_err);
            !failed && state.ends.iter().any(Option::is_none)
        });
        let failed = state.ends.iter().enumerate().find_map(|(place, end)| match end {
            Some(Err(failed)) => Some((place, failed.clone())),
            _ => None,
        });
        if let Some((place, Failed { call, code, text })) = failed {
            return Err(failure(&group.subjects[place], pjrt_sys::Error::Call { function: call, code, text }));
        }
        let late: Vec<_> = group.subjects.iter().zip(&state.ends).filter(|(_, end)| end.is_none()).collect();
        if late.is_empty() {
            return Ok(());
        }
        let late: Vec<_> = late.into_iter().map(|(subject, _)| subject.as_str()).collect();
        Err(Error::Deadline {
            operation: format!("{} of {}", group.call.name(), late.join(", ")),
            waited: group.started.elapsed(),
            state: format!("{} of {} have not ended", late.len(), group.subjects.len()),
        })
    }

    /// Takes the memory that the operations have written, after [`wait`](Self::wait) has returned without an error.
    pub(super) fn take_memory(&self) -> Option<HostBuffer> {
        self.group.state.lock().memory.take()
    }
}

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = if self.is_done() { "done" } else { "running" };
        write!(f, "Completion({} of {}: {state})", self.group.call.name(), self.group.subjects.join(", "))
    }
}

impl Group {
    fn end(&self, place: usize, end: Result<(), Failed>) {
        self.state.lock().ends[place] = Some(end);
        self.changed.notify_all();
    }
}

impl Pending {
    fn add(&self) {
        *self.count.lock() += 1;
    }

    fn end(&self) {
        *self.count.lock() -= 1;
        self.changed.notify_all();
    }

    /// Waits until the ends of all operations were reported. Returns whether they were.
    pub(super) fn wait(&self, timeout: Duration) -> bool {
        *self.count.wait_while(&self.changed, timeout, |count| *count > 0) == 0
    }
}

/// The callback of an event: runs once, on a thread of the plugin or within the registration.
unsafe extern "C" fn fired(error: *mut PjrtError, user_arg: *mut c_void) {
    // SAFETY: the argument is that of `register`, which gave up the registration; the callback runs once.
    let registration = unsafe { Box::from_raw(user_arg.cast::<Registration>()) };
    let Registration { group, place, plugin, pending, source, event, second } = *registration;
    // SAFETY: a callback owns its error.
    let end = unsafe { plugin.check(group.call, error) }.map_err(|error| match error {
        pjrt_sys::Error::Call { function, code, text } => Failed { call: function, code, text },
        other => Failed { call: group.call.name(), code: pjrt_sys::Code::UNKNOWN, text: other.to_string() },
    });
    drop(source);
    release(&plugin, event, &second);
    group.end(place, end);
    pending.end();
}

/// Destroys an event when both the registration and the callback have ended: the first of them leaves it to the second,
/// since a callback may run within the registration, which still uses the event.
fn release(plugin: &Plugin, event: Handle<Event>, second: &AtomicBool) {
    // AcqRel: what the first has done with the event precedes its end.
    if second.swap(true, Ordering::AcqRel) {
        // SAFETY: neither uses the event any longer.
        unsafe { plugin.free(&mut EventDestroyArgs { event: event.as_ptr(), ..EventDestroyArgs::new() }) };
    }
}
