//! Tests that have a short and a long form.

use std::env;

/// Returns `long` if `DISTRIBUTE_TEST_LONG` is 1, otherwise `short`. `cargo test` alone takes the short form of tests
/// that try many combinations or train for long; `cargo xtask ci` takes the long one.
///
/// # Examples
///
/// ```
/// use distribute_testkit::short_or_long;
///
/// for replicas in short_or_long(&[2][..], &[2, 3, 4]) {
///     println!("{replicas} replicas");
/// }
/// ```
pub fn short_or_long<T>(short: T, long: T) -> T {
    if env::var_os("DISTRIBUTE_TEST_LONG").is_some_and(|set| set == "1") { long } else { short }
}
