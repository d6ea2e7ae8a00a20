//! Time limits for tests.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// Runs `body` on a separate thread and returns its result.
///
/// Processes that `body` starts through this crate die with that thread, so it should not return them.
///
/// # Panics
/// With the panic of `body`, if it panics; with a message that names the test, if `body` takes longer than `limit`. In
/// that case the thread continues until the test program ends.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// assert_eq!(distribute_testkit::within(Duration::from_secs(5), || 6 * 7), 42);
/// ```
pub fn within<T: Send + 'static>(limit: Duration, body: impl FnOnce() -> T + Send + 'static) -> T {
    let test = thread::current().name().unwrap_or("a test").to_owned();
    let (done, is_done) = mpsc::channel();
    let run = move || {
        let value = body();
        // Fails only if the limit has passed and the receiver is gone.
        let _ = done.send(value);
    };
    let thread = match thread::Builder::new().name(test.clone()).spawn(run) {
        Ok(thread) => thread,
        Err(error) => panic!("{test}: no thread for it: {error}"),
    };
    match is_done.recv_timeout(limit) {
        Ok(value) => value,
        Err(RecvTimeoutError::Timeout) => panic!("{test}: not done within its limit of {limit:?}"),
        Err(RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => panic!("{test}: ended without a result"),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    fn message(panic: &(dyn std::any::Any + Send)) -> String {
        let owned = panic.downcast_ref::<String>().cloned();
        owned.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
    }

    #[test]
    fn a_body_that_is_too_slow_is_named() {
        let (_hold, held) = mpsc::channel::<()>();
        let panic = catch_unwind(|| within(Duration::from_millis(20), move || held.recv().is_ok()));
        let text = message(&*panic.unwrap_err());
        assert!(text.contains("a_body_that_is_too_slow_is_named") && text.contains("20ms"), "{text}");
    }

    #[test]
    fn a_panic_comes_through() {
        let panic = catch_unwind(|| within(Duration::from_secs(10), || panic!("as planned")));
        assert_eq!(message(&*panic.unwrap_err()), "as planned");
    }
}
