//! The boundary to C: typed arguments, and the wrapper around each exported function.

use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::thread;

use crate::device::is_initialised;
use crate::error::{Code, Result};
use crate::registry::locked;
use crate::settings::settings;

/// The destination of a result. Created only from C callers' arguments, which are null or valid for writes.
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

/// An array argument. Created only from C callers' arguments, which are null or have the given length.
#[repr(transparent)]
pub(crate) struct Array<T>(*const T);

/// A text argument. Created only from C callers' arguments, which are null or zero-terminated.
#[repr(transparent)]
pub(crate) struct Text(*const c_char);

/// The address of host memory, which C callers promise to be valid for the requested access.
pub(crate) type Address = usize;

impl<T> Out<T> {
    /// Writes the result.
    ///
    /// # Errors
    /// `INVALID_VALUE` if the caller passed null.
    pub(crate) fn set(&self, value: T) -> Result {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: it is not null, and C callers promise that it may be written.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Writes the result unless the caller passed null.
    pub(crate) fn set_if_wanted(&self, value: T) {
        let _ = self.set(value);
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// Casts the destination to another type, which depends on another argument.
    pub(crate) fn cast<U>(&self) -> Out<U> {
        Out(self.0.cast())
    }
}

impl<T: Copy> Out<T> {
    /// Writes as many of `values` as fit into `room`, which the caller passed with the destination.
    pub(crate) fn set_all(&self, values: &[T], room: usize) -> Result {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let count = values.len().min(room);
        // SAFETY: it is not null, C callers promise that `room` values may be written, and no Rust value lies there.
        unsafe { self.0.copy_from_nonoverlapping(values.as_ptr(), count) };
        Ok(())
    }
}

impl<T: Copy> Out<T> {
    /// Returns the value that the caller stored there.
    pub(crate) fn value(&self) -> Result<T> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: it is not null, and C callers promise that it holds a value where a function reads one.
        Ok(unsafe { self.0.read_unaligned() })
    }
}

impl<T> Array<T> {
    pub(crate) fn items(&self, count: usize) -> Result<&[T]> {
        if count == 0 {
            return Ok(&[]);
        }
        if self.0.is_null() || !self.0.is_aligned() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: it is neither null nor misaligned, and C callers promise `count` items for the duration of the call.
        Ok(unsafe { std::slice::from_raw_parts(self.0, count) })
    }
}

impl Text {
    pub(crate) fn get(&self) -> Option<&CStr> {
        // SAFETY: it is not null, and C callers promise a zero-terminated text for the duration of the call.
        (!self.0.is_null()).then(|| unsafe { CStr::from_ptr(self.0) })
    }
}

/// The wrapper around every driver function: injected delays and failures, the check that `cuInit` was called, and a
/// boundary for panics.
pub(crate) fn call(name: &'static str, body: impl FnOnce() -> Result) -> Code {
    let result = catch_unwind(AssertUnwindSafe(|| {
        delay(name);
        inject(name)?;
        if !NEED_NO_INIT.contains(&name) && !is_initialised() {
            return Err(Code::NOT_INITIALIZED);
        }
        body()
    }));
    let code = match result {
        Ok(Ok(())) => Code::SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => Code::UNKNOWN,
    };
    if result.is_ok() && settings().trace {
        report(format_args!("{name} -> {}", code.name().unwrap_or_default().to_string_lossy()));
    }
    code
}

/// Defines exported functions of the driver, each body of which is a `Result`, and `NAMES`.
macro_rules! exports {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => {
        /// The functions of this module.
        #[cfg(test)]
        pub(super) const NAMES: &[&str] = &[$(stringify!($name)),*];

        $(
            $(#[$attribute])*
            #[unsafe(no_mangle)]
            extern "C" fn $name($($argument: $type),*) -> $crate::error::Code {
                $crate::ffi::call(stringify!($name), move || $body)
            }
        )*
    };
}
pub(crate) use exports;

/// Lets the call take time if the settings ask for it.
pub(crate) fn delay(name: &str) {
    if let Some(slow) = settings().slow.iter().find(|slow| slow.function == name) {
        thread::sleep(slow.time);
    }
}

/// Fails the call if the settings ask for it.
pub(crate) fn inject(name: &'static str) -> Result {
    static CALLS: Mutex<Option<HashMap<&'static str, u64>>> = Mutex::new(None);
    let failures = &settings().failures;
    if failures.is_empty() {
        return Ok(());
    }
    let mut calls = locked(&CALLS);
    let count = calls.get_or_insert_default().entry(name).or_default();
    *count += 1;
    match failures.iter().find(|failure| failure.function == name && failure.nth == *count) {
        Some(failure) => Err(failure.code),
        None => Ok(()),
    }
}

/// Reports a problem on standard error, since a code alone says little.
pub(crate) fn report(what: std::fmt::Arguments<'_>) {
    eprintln!("simulated-cuda: {what}");
}

const NEED_NO_INIT: &[&str] = &["cuInit", "cuDriverGetVersion", "cuGetErrorName", "cuGetErrorString"];
