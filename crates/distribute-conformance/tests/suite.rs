//! The suite in its short form; `cargo xtask conformance` runs all of it.

use std::process::Command;

#[test]
fn every_promise_holds_under_every_strategy() {
    let output = Command::new(env!("CARGO_BIN_EXE_distribute-conformance")).arg("--short").output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    assert!(printed.contains(" 0 failed"), "{printed}");
}
