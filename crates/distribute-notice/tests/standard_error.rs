//! The destination of warnings, tested in separate processes, since a subscriber is process-wide.

use std::process::Command;

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

/// Accepts everything and shows nothing.
struct Silent;

impl Subscriber for Silent {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

const ROLE: &str = "NOTICE_TEST_SUBSCRIBER";

/// The body of the processes that the test starts.
#[test]
#[ignore = "a process that other tests start"]
fn says_two_things_twice() {
    match std::env::var(ROLE).as_deref() {
        Ok("yes") => tracing::subscriber::set_global_default(Silent).unwrap(),
        Ok(_) => {}
        Err(_) => return,
    }
    for _ in 0..2 {
        for option in ["first", "second"] {
            distribute_notice::warn!("option {option} does not act");
        }
    }
}

#[test]
fn a_text_is_said_once_on_standard_error_unless_a_subscriber_takes_it() {
    let standard_error = |subscriber: &str| {
        let test = ["--exact", "says_two_things_twice", "--ignored", "--nocapture"];
        let output = Command::new(std::env::current_exe().unwrap()).args(test).env(ROLE, subscriber).output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let without = standard_error("no");
    for option in ["first", "second"] {
        assert_eq!(without.matches(&format!("warning: option {option} does not act\n")).count(), 1, "{without}");
    }
    assert!(!standard_error("yes").contains("does not act"));
}
