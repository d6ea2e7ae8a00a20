//! Pointers to objects of a plugin.
#![expect(unsafe_code, reason = "pointers to a plugin's objects go from thread to thread")]

use std::ptr::NonNull;

use crate::{Error, Result};

/// A pointer to an object of a plugin, which is not null.
#[derive(Debug)]
pub(super) struct Handle<T>(NonNull<T>);

// SAFETY: PJRT's objects are not bound to a thread, and its functions may be called from several threads at once, as
// XLA documents for the classes behind them. The pointer is only passed to these functions.
unsafe impl<T> Send for Handle<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Handle<T> {}

impl<T> Handle<T> {
    /// Takes the pointer that a call has returned.
    pub(super) fn new(pointer: *mut T, call: &'static str) -> Result<Self> {
        let missing = || Error::PjrtPlugin {
            problem: format!("the PJRT plugin returned null from {call}, without an error; use another version of it"),
        };
        NonNull::new(pointer).map(Self).ok_or_else(missing)
    }

    pub(super) fn as_ptr(&self) -> *mut T {
        self.0.as_ptr()
    }
}

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Handle<T> {}
