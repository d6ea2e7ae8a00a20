//! Setters of option structs.

/// Adds a setter for each field of an option struct, which returns the options. Setters of fields after `into` convert
/// their argument, so that an optional field takes a value, and a name takes a `&str`.
///
/// Option structs are `#[non_exhaustive]`: other crates create them from the default and setters, so a new option
/// breaks no program.
///
/// # Examples
/// ```
/// #[derive(Default)]
/// #[non_exhaustive]
/// pub struct Options {
///     /// The number of attempts.
///     pub attempts: u32,
///     /// The name, if it has one.
///     pub name: Option<String>,
/// }
///
/// distribute_types::setters! {
///     Options { attempts: u32 } into { name: Option<String> }
/// }
///
/// let options = Options::default().attempts(3).name("first".to_owned());
/// assert_eq!((options.attempts, options.name.as_deref()), (3, Some("first")));
/// ```
#[macro_export]
macro_rules! setters {
    ($options:ident { $($field:ident: $kind:ty),* $(,)? } $(into { $($into:ident: $into_kind:ty),* $(,)? })?) => {
        impl $options {
            $(
                #[doc = concat!("Sets [`", stringify!($field), "`](field@Self::", stringify!($field), ").")]
                #[must_use]
                pub fn $field(self, $field: $kind) -> Self {
                    Self { $field, ..self }
                }
            )*
            $($(
                #[doc = concat!("Sets [`", stringify!($into), "`](field@Self::", stringify!($into), ").")]
                #[must_use]
                pub fn $into(self, $into: impl Into<$into_kind>) -> Self {
                    Self { $into: $into.into(), ..self }
                }
            )*)?
        }
    };
}
