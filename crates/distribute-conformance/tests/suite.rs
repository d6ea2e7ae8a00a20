//! The suite in its brief form; `cargo xtask conformance` runs the whole.

use std::process::Command;

#[test]
fn every_promise_holds_under_every_kind_of_strategy() {
    let output = Command::new(env!("CARGO_BIN_EXE_distribute-conformance")).arg("--brief").output().unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{printed}{}", String::from_utf8_lossy(&output.stderr));
    assert!(printed.contains(" 0 failed"), "{printed}");
}
