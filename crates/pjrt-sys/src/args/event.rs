//! Events.

use std::ffi::c_void;

use crate::{Event, OnReadyCallback};

arguments! {
    /// Arguments of `PJRT_Event_Destroy`.
    struct EventDestroyArgs for PJRT_Event_Destroy {
        input event: *mut Event,
    }

    /// Arguments of `PJRT_Event_IsReady`.
    struct EventIsReadyArgs for PJRT_Event_IsReady {
        input event: *mut Event,
        output is_ready: bool,
    }

    /// Arguments of `PJRT_Event_Error`.
    struct EventErrorArgs for PJRT_Event_Error {
        input event: *mut Event,
    }

    /// Arguments of `PJRT_Event_Await`.
    struct EventAwaitArgs for PJRT_Event_Await {
        input event: *mut Event,
    }

    /// Arguments of `PJRT_Event_OnReady`.
    struct EventOnReadyArgs for PJRT_Event_OnReady {
        input event: *mut Event,
        input callback: Option<OnReadyCallback>,
        input user_arg: *mut c_void,
    }
}
