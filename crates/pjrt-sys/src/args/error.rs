//! Errors.

use std::ffi::c_char;

use crate::{Code, PjrtError};

arguments! {
    /// Arguments of `PJRT_Error_Destroy`.
    struct ErrorDestroyArgs for PJRT_Error_Destroy {
        input error: *mut PjrtError,
    }

    /// Arguments of `PJRT_Error_Message`.
    struct ErrorMessageArgs for PJRT_Error_Message {
        input error: *const PjrtError,
        output message: *const c_char,
        output message_size: usize,
    }

    /// Arguments of `PJRT_Error_GetCode`.
    struct ErrorGetCodeArgs for PJRT_Error_GetCode {
        input error: *const PjrtError,
        output code: Code,
    }
}
