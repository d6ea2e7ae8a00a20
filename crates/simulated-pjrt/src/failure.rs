//! Errors, the frame around every function, and the count of objects.
#![expect(unsafe_code, reason = "functions of C, under the names of C")]

use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use pjrt_sys::{
    Arguments, CallbackError, Code, ErrorDestroyArgs, ErrorGetCodeArgs, ErrorMessageArgs, Function, PjrtError,
};

use crate::script;

/// Why a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) code: i32,
    pub(crate) text: Option<Vec<u8>>,
}

impl Failure {
    pub(crate) fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code: code.0, text: Some(text.into().into_bytes()) }
    }
}

/// Kinds of objects.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kind {
    Error,
    Event,
    Client,
    Executable,
    Loaded,
    Buffer,
    Topology,
    Value,
}

static COUNTS: [AtomicUsize; Live::COUNT] = [const { AtomicUsize::new(0) }; Live::COUNT];

/// Numbers of objects that were not destroyed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Live {
    /// Errors.
    pub errors: usize,
    /// Events.
    pub events: usize,
    /// Clients.
    pub clients: usize,
    /// Programs.
    pub executables: usize,
    /// Programs on devices.
    pub loaded: usize,
    /// Buffers.
    pub buffers: usize,
    /// Topologies, except those of clients.
    pub topologies: usize,
    /// Serialized programs.
    pub values: usize,
}

impl Live {
    pub(crate) const COUNT: usize = 8;

    pub(crate) fn of(counts: [usize; Self::COUNT]) -> Self {
        let [errors, events, clients, executables, loaded, buffers, topologies, values] = counts;
        Self { errors, events, clients, executables, loaded, buffers, topologies, values }
    }
}

/// Gives an object to the program.
pub(crate) fn give<T, P>(kind: Kind, object: T) -> *mut P {
    COUNTS[kind as usize].fetch_add(1, Ordering::SeqCst);
    Box::into_raw(Box::new(object)).cast()
}

/// Takes an object back; null is none.
///
/// # Safety
/// The pointer is null, or one of [`give`] with these types, and is not used later.
pub(crate) unsafe fn take<T, P>(kind: Kind, object: *mut P) {
    if !object.is_null() {
        COUNTS[kind as usize].fetch_sub(1, Ordering::SeqCst);
        // SAFETY: guaranteed by the caller.
        drop(unsafe { Box::from_raw(object.cast::<T>()) });
    }
}

/// Runs a function's body: the size of its arguments is compared, and failures are injected.
///
/// # Safety
/// The pointer is to the arguments, which nothing else uses.
pub(crate) unsafe fn enter<A: Arguments>(
    arguments: *mut A,
    body: impl FnOnce(&mut A) -> Result<(), Failure>,
) -> *mut PjrtError {
    let name = A::FUNCTION.name();
    // SAFETY: every struct begins with its size.
    let size = unsafe { arguments.cast::<usize>().read() };
    let needed = script::script().needs_bytes.get(name).copied().unwrap_or(A::STRUCT_SIZE);
    let result = if size < needed {
        Err(Failure::new(Code::INVALID_ARGUMENT, format!("Unexpected {name}_Args size: expected {needed}, got {size}")))
    } else {
        // SAFETY: guaranteed by the caller.
        script::before(name).and_then(|()| body(unsafe { &mut *arguments }))
    };
    error_of(result)
}

/// Returns the error of a result, or null.
pub(crate) fn error_of(result: Result<(), Failure>) -> *mut PjrtError {
    result.err().map_or(ptr::null_mut(), |failure| give(Kind::Error, failure))
}

/// `PJRT_CallbackError`.
pub(crate) unsafe extern "C" fn make_error(code: Code, text: *const std::ffi::c_char, size: usize) -> *mut PjrtError {
    // SAFETY: the caller passes a text of this size.
    let text = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), size) };
    give(Kind::Error, Failure { code: code.0, text: Some(text.to_vec()) })
}

pub(crate) static MAKE_ERROR: Option<CallbackError> = Some(make_error);

/// Takes an error that a callback has returned.
///
/// # Safety
/// The pointer is null, or an error that nothing else uses.
pub(crate) unsafe fn take_error(error: *mut PjrtError) -> Option<Failure> {
    if error.is_null() {
        return None;
    }
    // SAFETY: guaranteed by the caller.
    let failure = unsafe { &*error.cast::<Failure>() }.clone();
    // SAFETY: guaranteed by the caller.
    unsafe { take::<Failure, _>(Kind::Error, error) };
    Some(failure)
}

pub(crate) unsafe extern "C" fn destroy(arguments: *mut ErrorDestroyArgs) {
    // SAFETY: the caller passes its error.
    unsafe { take::<Failure, _>(Kind::Error, (*arguments).error) };
}

pub(crate) unsafe extern "C" fn message(arguments: *mut ErrorMessageArgs) {
    // SAFETY: the caller passes the arguments.
    let arguments = unsafe { &mut *arguments };
    // SAFETY: the error is valid.
    let failure = unsafe { &*arguments.error.cast::<Failure>() };
    let text = failure.text.as_deref();
    arguments.message = text.map_or(ptr::null(), |text| text.as_ptr().cast());
    // A size without a text, as a careless plugin may give.
    arguments.message_size = text.map_or(17, <[u8]>::len);
}

pub(crate) unsafe extern "C" fn get_code(arguments: *mut ErrorGetCodeArgs) -> *mut PjrtError {
    // SAFETY: the caller passes the arguments.
    let arguments = unsafe { &mut *arguments };
    if let Err(failure) = script::before(Function::PJRT_Error_GetCode.name()) {
        return error_of(Err(failure));
    }
    // SAFETY: the error is valid.
    arguments.code = Code(unsafe { &*arguments.error.cast::<Failure>() }.code);
    ptr::null_mut()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn simulated_pjrt_live(counts: *mut [usize; Live::COUNT]) {
    // SAFETY: the caller passes a place for the numbers.
    unsafe { *counts = COUNTS.each_ref().map(|count| count.load(Ordering::SeqCst)) };
}
