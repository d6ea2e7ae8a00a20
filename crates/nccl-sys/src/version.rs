//! NCCL's version numbers.

use std::ffi::c_int;
use std::fmt;

/// A version of NCCL.
///
/// # Examples
/// ```
/// use nccl_sys::Version;
/// assert_eq!(Version::from_code(22809), Version::new(2, 28, 9));
/// assert_eq!(Version::new(2, 28, 9).to_string(), "2.28.9");
/// ```
///
/// # Source
/// `NCCL_VERSION` of nccl.h.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(c_int);

impl Version {
    /// The oldest version that this crate accepts: the first with `ncclCommSplit`.
    pub const OLDEST: Self = Self::new(2, 18, 0);

    /// Creates a version from its parts.
    #[must_use]
    pub const fn new(major: c_int, minor: c_int, patch: c_int) -> Self {
        if major <= 2 && minor <= 8 {
            Self(major * 1000 + minor * 100 + patch)
        } else {
            Self(major * 10_000 + minor * 100 + patch)
        }
    }

    /// Creates a version from the form of `ncclGetVersion`, such as 22809.
    #[must_use]
    pub const fn from_code(code: c_int) -> Self {
        Self(code)
    }

    /// Returns the version in the form of `ncclGetVersion`.
    #[must_use]
    pub const fn code(self) -> c_int {
        self.0
    }
}

/// Formats the usual notation: 2.28.9.
impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Up to 2.8, the major version was multiplied by 1000.
        let major = if self.0 < 10_000 { 1000 } else { 10_000 };
        let rest = self.0 % major;
        write!(f, "{}.{}.{}", self.0 / major, rest / 100, rest % 100)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_ordered_and_written_across_the_change_of_scale() {
        let versions = [(2, 4, 8), (2, 8, 4), (2, 9, 6), (2, 18, 0), (2, 28, 9), (2, 32, 3), (3, 0, 0)]
            .map(|(major, minor, patch)| Version::new(major, minor, patch));
        assert!(versions.is_sorted());
        assert_eq!(versions.map(Version::code), [2408, 2804, 20906, 21800, 22809, 23203, 30000]);
        assert_eq!(
            versions.map(|version| version.to_string()),
            ["2.4.8", "2.8.4", "2.9.6", "2.18.0", "2.28.9", "2.32.3", "3.0.0"]
        );
    }
}
