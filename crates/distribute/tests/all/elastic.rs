//! The example that kills and freezes its own workers.

use std::time::Duration;

use distribute_testkit::{Job, Outcome, target_binary};

#[track_caller]
fn disturbed(args: &[&str]) -> Outcome {
    let mut job = Job::builder(target_binary("elastic").unwrap()).args(args).start().unwrap();
    let outcome = job.wait(0, Duration::from_secs(150)).unwrap();
    assert!(outcome.success(), "{outcome:?}");
    outcome
}

#[test]
fn workers_that_are_killed_and_frozen_lose_no_step_and_change_no_bit() {
    let outcome = disturbed(&[
        "--workers",
        "3",
        "--seconds",
        "4",
        "--every",
        "1.1",
        "--heartbeat",
        "0.5",
        "--freeze",
        "--verify",
    ]);
    let told = &outcome.stdout;
    assert!(told.contains("each with all of its examples") && told.contains("equal bit for bit"), "{outcome:?}");
    let faults: Vec<&str> = told.lines().filter(|line| line.contains(" in generation ")).collect();
    // One killed and one frozen, and more where the machine is quick.
    assert!(faults.len() >= 2, "{outcome:?}");
    // The last one may find the training at its end.
    assert!(faults[..faults.len() - 1].iter().all(|fault| fault.ends_with(" ms later")), "{outcome:?}");
}
