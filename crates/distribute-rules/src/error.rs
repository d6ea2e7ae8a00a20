//! Errors of descriptions of optimizers.

use distribute_types::{Class, ErrorClass};

/// The errors of an optimizer's settings.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A setting of an optimizer is out of range.
    #[error("{what} is {given}; expected {expected}")]
    Setting {
        /// The setting.
        what: &'static str,
        /// Its value.
        given: f64,
        /// The expected range.
        expected: &'static str,
    },
}

distribute_types::debug_is_display!(Error);

impl ErrorClass for Error {
    fn class(&self) -> Class {
        Class::PERMANENT
    }
}

/// The result of operations that fail with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Checks a setting of an optimizer, which must be finite.
///
/// # Errors
/// [`Error::Setting`] unless `fits` holds.
///
/// # Examples
/// ```
/// use distribute_rules::check_setting;
///
/// let decay = 1.0;
/// let error = check_setting("the decay", decay, decay < 1.0, "below 1").unwrap_err();
/// assert_eq!(error.to_string(), "the decay is 1; expected below 1");
/// ```
pub fn check_setting(what: &'static str, given: f64, fits: bool, expected: &'static str) -> Result<()> {
    if fits && given.is_finite() { Ok(()) } else { Err(Error::Setting { what, given, expected }) }
}
