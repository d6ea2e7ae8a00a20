//! The suite in its brief form; `cargo xtask conformance` runs the whole.

use std::time::Duration;

use distribute_testkit::{Job, show_skips};

/// Longest time of the suite, which takes some two minutes of one core in an optimized build.
const DEADLINE: Duration = Duration::from_secs(1800);

#[test]
fn every_promise_holds_under_every_kind_of_strategy() {
    let suite = Job::builder(env!("CARGO_BIN_EXE_distribute-conformance")).arg("--brief");
    let outcome = suite.start().unwrap().wait(0, DEADLINE).unwrap();
    assert!(outcome.success(), "{}{}", outcome.stdout, outcome.stderr);
    assert!(outcome.stdout.contains(" 0 failed"), "{}", outcome.stdout);
    show_skips(&outcome.stderr);
}
