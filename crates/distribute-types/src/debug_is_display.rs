//! A macro for errors that are printed by `Debug`.

/// Implements `Debug` for an error as its `Display`, so that a program whose `main` returns the error prints a
/// sentence.
///
/// # Examples
/// ```
/// #[derive(thiserror::Error)]
/// #[error("{path} is not a folder; give one")]
/// struct NoFolder { path: String }
///
/// distribute_types::debug_is_display!(NoFolder);
///
/// let error = NoFolder { path: "run".to_owned() };
/// assert_eq!(format!("{error:?}"), "run is not a folder; give one");
/// ```
#[macro_export]
macro_rules! debug_is_display {
    ($error:ty) => {
        impl ::std::fmt::Debug for $error {
            fn fmt(&self, f: &mut ::std::fmt::Formatter<'_>) -> ::std::fmt::Result {
                ::std::fmt::Display::fmt(self, f)
            }
        }
    };
}
