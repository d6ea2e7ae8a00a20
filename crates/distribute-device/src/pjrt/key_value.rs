//! A store of keys and values, by which the processes of one client meet.
#![expect(unsafe_code, reason = "callbacks of C read and write their arguments")]

use std::any::Any;
use std::ffi::{c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use pjrt_sys::{CallbackError, Code, KeyValueGetArgs, KeyValuePutArgs, KeyValueTryGetArgs, PjrtError};

use super::value::list_of;

/// An error of a [`KeyValueStore`].
pub type KeyValueError = Box<dyn std::error::Error + Send + Sync>;

/// A store that all processes of one client share, such as a job's coordination service.
///
/// The plugin calls it from any thread. Keys of different clients must not collide: put a prefix before them.
///
/// # Source
/// `PJRT_KeyValueGetCallback`, `PJRT_KeyValueTryGetCallback` and `PJRT_KeyValuePutCallback`.
pub trait KeyValueStore: Any + Send + Sync {
    /// Waits until the key has a value, and returns it; `None` if it has none after `timeout`.
    ///
    /// # Errors
    /// Whatever prevents an answer; its text is passed to the plugin.
    fn get(&self, key: &[u8], timeout: Duration) -> Result<Option<Vec<u8>>, KeyValueError>;

    /// Returns the key's value, or `None` if it has none.
    ///
    /// # Errors
    /// Whatever prevents an answer; its text is passed to the plugin.
    fn try_get(&self, key: &[u8]) -> Result<Option<Vec<u8>>, KeyValueError>;

    /// Sets the key's value.
    ///
    /// # Errors
    /// Whatever prevents it; its text is passed to the plugin.
    fn put(&self, key: &[u8], value: &[u8]) -> Result<(), KeyValueError>;
}

/// The argument of the callbacks: it has one address while the client exists.
pub(super) type Shared = Box<Arc<dyn KeyValueStore>>;

/// The pointer that callbacks are given.
pub(super) fn user_arg(store: &Shared) -> *mut c_void {
    ptr::from_ref::<Arc<dyn KeyValueStore>>(store).cast_mut().cast()
}

pub(super) unsafe extern "C" fn get(arguments: *mut KeyValueGetArgs) -> *mut PjrtError {
    // SAFETY: the plugin passes its arguments, which nothing else uses during the call.
    let arguments = unsafe { &mut *arguments };
    let timeout = Duration::from_millis(u64::try_from(arguments.timeout_in_ms).unwrap_or(0));
    // SAFETY: the arguments have a key and the pointer of `user_arg`, whose store outlives the client.
    let (key, store) = unsafe { key_and_store(arguments.key, arguments.key_size, arguments.user_arg) };
    let missing = (Code::DEADLINE_EXCEEDED, format!("has no value after {timeout:?}"));
    // SAFETY: the plugin passes a function that makes errors.
    match unsafe { answer(&key, guarded(|| store.get(&key, timeout)), missing, arguments.callback_error) } {
        Ok((value, size)) => {
            (arguments.value, arguments.value_size) = (value, size);
            arguments.value_deleter_callback = Some(take_back);
            ptr::null_mut()
        }
        Err(error) => error,
    }
}

pub(super) unsafe extern "C" fn try_get(arguments: *mut KeyValueTryGetArgs) -> *mut PjrtError {
    // SAFETY: as in `get`.
    let arguments = unsafe { &mut *arguments };
    // SAFETY: as in `get`.
    let (key, store) = unsafe { key_and_store(arguments.key, arguments.key_size, arguments.user_arg) };
    let missing = (Code::NOT_FOUND, "has no value".to_owned());
    // SAFETY: as in `get`.
    match unsafe { answer(&key, guarded(|| store.try_get(&key)), missing, arguments.callback_error) } {
        Ok((value, size)) => {
            (arguments.value, arguments.value_size) = (value, size);
            arguments.value_deleter_callback = Some(take_back);
            ptr::null_mut()
        }
        Err(error) => error,
    }
}

pub(super) unsafe extern "C" fn put(arguments: *mut KeyValuePutArgs) -> *mut PjrtError {
    // SAFETY: as in `get`.
    let arguments = unsafe { &mut *arguments };
    // SAFETY: as in `get`.
    let (key, store) = unsafe { key_and_store(arguments.key, arguments.key_size, arguments.user_arg) };
    // SAFETY: the plugin passes a value of this size.
    let value = unsafe { list_of(arguments.value.cast::<u8>(), arguments.value_size) };
    match guarded(|| store.put(&key, &value)) {
        Ok(()) => ptr::null_mut(),
        // SAFETY: the plugin passes a function that makes errors.
        Err(text) => unsafe { error(arguments.callback_error, Code::INTERNAL, &text) },
    }
}

/// Lends a value of the store to the plugin, or makes the error of a key without one.
///
/// # Safety
/// `make` leads to a function that makes errors, or is null.
unsafe fn answer(
    key: &[u8],
    found: Result<Option<Vec<u8>>, String>,
    (code, problem): (Code, String),
    make: *const Option<CallbackError>,
) -> Result<(*mut c_char, usize), *mut PjrtError> {
    let (code, text) = match found {
        Ok(Some(value)) => {
            let size = value.len();
            return Ok((lend(value), size));
        }
        Ok(None) => (code, format!("the key {:?} {problem}", String::from_utf8_lossy(key))),
        Err(text) => (Code::INTERNAL, text),
    };
    // SAFETY: guaranteed by the caller.
    Err(unsafe { error(make, code, &text) })
}

/// # Safety
/// The key has as many bytes; the pointer is that of `user_arg`, and its store exists.
unsafe fn key_and_store<'a>(
    key: *const c_char,
    size: usize,
    user_arg: *mut c_void,
) -> (Vec<u8>, &'a Arc<dyn KeyValueStore>) {
    // SAFETY: guaranteed by the caller.
    let key = unsafe { list_of(key.cast::<u8>(), size) };
    // SAFETY: guaranteed by the caller.
    (key, unsafe { &*user_arg.cast::<Arc<dyn KeyValueStore>>() })
}

/// Calls the store. A panic becomes an error, since it must not pass through the plugin.
fn guarded<T>(work: impl FnOnce() -> Result<T, KeyValueError>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err("the key-value store panicked".to_owned()),
    }
}

/// # Safety
/// The pointer leads to a function that makes errors, or is null.
unsafe fn error(make: *const Option<CallbackError>, code: Code, text: &str) -> *mut PjrtError {
    if make.is_null() {
        return ptr::null_mut();
    }
    // SAFETY: guaranteed by the caller.
    match unsafe { *make } {
        // SAFETY: the function copies the text.
        Some(make) => unsafe { make(code, text.as_ptr().cast(), text.len()) },
        None => ptr::null_mut(),
    }
}

/// Lends a value to the plugin, which gives it back by its address alone: its size is written before it.
fn lend(value: Vec<u8>) -> *mut c_char {
    let mut bytes = Vec::with_capacity(SIZE + value.len());
    bytes.extend_from_slice(&value.len().to_ne_bytes());
    bytes.extend_from_slice(&value);
    let lent = Box::into_raw(bytes.into_boxed_slice()).cast::<u8>();
    // SAFETY: the allocation has the size before the value.
    unsafe { lent.add(SIZE) }.cast()
}

/// Frees a value of [`lend`].
unsafe extern "C" fn take_back(value: *mut c_char) {
    if value.is_null() {
        return;
    }
    // SAFETY: the address is one of `lend`, where the size precedes the value.
    let lent = unsafe { value.cast::<u8>().sub(SIZE) };
    // SAFETY: the allocation begins with the size.
    let size = usize::from_ne_bytes(unsafe { lent.cast::<[u8; SIZE]>().read() });
    // SAFETY: this is the allocation, which is given back once.
    drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(lent, SIZE + size)) });
}

const SIZE: usize = size_of::<usize>();
