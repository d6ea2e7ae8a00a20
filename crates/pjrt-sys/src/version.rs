//! Versions of the interface.

use std::ffi::c_int;
use std::fmt;

/// A version of PJRT's interface, as a plugin tells it.
///
/// # Examples
/// ```
/// use pjrt_sys::Version;
/// assert_eq!(Version::HEADER.to_string(), "0.81");
/// assert!(Version { major: 0, minor: 116 } > Version::HEADER);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Changes with incompatible changes; a plugin must have that of [`Version::HEADER`].
    pub major: c_int,
    /// Grows with additions.
    pub minor: c_int,
}

impl Version {
    /// The version of the header that the structs of this crate follow.
    pub const HEADER: Self = Self { major: 0, minor: 81 };
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
