//! The codes of errors.

use std::ffi::c_int;
use std::fmt;

/// `PJRT_Error_Code`, open to codes of future versions.
///
/// # Examples
/// ```
/// use pjrt_sys::Code;
/// assert_eq!(Code::INVALID_ARGUMENT.to_string(), "INVALID_ARGUMENT (code 3)");
/// assert_eq!(Code(99).name(), "an unknown error");
/// ```
///
/// # Source
/// The status codes of Abseil.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Code(pub c_int);

macro_rules! codes {
    ($($(#[$meta:meta])* $name:ident = $code:literal;)*) => {
        impl Code {
            $($(#[$meta])* pub const $name: Self = Self($code);)*

            /// Returns the code's name, or `"an unknown error"`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self.0 {
                    $($code => stringify!($name),)*
                    _ => "an unknown error",
                }
            }
        }
    };
}

codes! {
    /// Not an error.
    OK = 0;
    /// The operation was cancelled.
    CANCELLED = 1;
    /// The cause is unknown.
    UNKNOWN = 2;
    /// An argument has an invalid value, or a program is malformed.
    INVALID_ARGUMENT = 3;
    /// A time limit passed.
    DEADLINE_EXCEEDED = 4;
    /// A file, key or device does not exist.
    NOT_FOUND = 5;
    /// It exists already.
    ALREADY_EXISTS = 6;
    /// Access is denied.
    PERMISSION_DENIED = 7;
    /// Memory, or another resource, is exhausted.
    RESOURCE_EXHAUSTED = 8;
    /// The state does not permit the operation.
    FAILED_PRECONDITION = 9;
    /// The operation was aborted.
    ABORTED = 10;
    /// A value is out of its range.
    OUT_OF_RANGE = 11;
    /// The plugin does not support the operation.
    UNIMPLEMENTED = 12;
    /// A bug of the plugin.
    INTERNAL = 13;
    /// A device or service is not available, as after its loss.
    UNAVAILABLE = 14;
    /// Data was lost.
    DATA_LOSS = 15;
    /// The caller is not authenticated.
    UNAUTHENTICATED = 16;
}

/// Formats the name and the number.
impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (code {})", self.name(), self.0)
    }
}
