//! The whole suite, as `cargo xtask conformance` runs it.

use std::process::Command;

#[test]
fn every_promise_holds_under_every_strategy() {
    let output = Command::new(env!("CARGO_BIN_EXE_distribute-conformance")).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    assert!(printed.contains(" 0 failed"), "{printed}");
}
