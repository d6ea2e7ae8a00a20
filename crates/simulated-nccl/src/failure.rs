//! Failures of calls, and NCCL's last error message.

use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use nccl_sys::Code;
use serde::{Deserialize, Serialize};

/// Why a call, or a communicator, failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    code: i32,
    pub(crate) text: String,
}

impl Failure {
    pub(crate) fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code: code.0, text: text.into() }
    }

    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Self::new(Code::INVALID_ARGUMENT, text)
    }

    pub(crate) fn code(&self) -> Code {
        Code(self.code)
    }
}

static LAST: AtomicPtr<c_char> = AtomicPtr::new(ptr::null_mut());

/// Stores a message for `ncclGetLastError`. Failures are rare: messages are never freed, so readers need no
/// synchronization with later ones.
pub(crate) fn remember(text: &str) {
    if let Ok(text) = CString::new(text) {
        // Release: a reader of the pointer sees the text.
        LAST.store(text.into_raw(), Ordering::Release);
    }
}

/// Returns the last message, or an empty text.
pub(crate) fn last() -> *const c_char {
    let last = LAST.load(Ordering::Acquire);
    if last.is_null() { c"".as_ptr() } else { last }
}
