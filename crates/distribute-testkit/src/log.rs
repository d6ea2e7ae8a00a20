//! The log of a test.

use std::sync::Once;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// Prints events of the level of warnings and above, or those of `RUST_LOG`, where `cargo test` shows them if the test
/// fails: that of the thread that an event happens on, or that has started it. In a process that a test starts, a
/// [`Job`](crate::Job) captures them. Later calls in the same process do nothing.
pub fn show_log() {
    static SHOWN: Once = Once::new();
    SHOWN.call_once(|| {
        let filter = EnvFilter::builder().with_default_directive(LevelFilter::WARN.into()).from_env_lossy();
        let lines = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_test_writer();
        // Fails only if the test has a subscriber of its own, which is to stay.
        let _ = lines.try_init();
    });
}
