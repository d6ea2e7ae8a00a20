//! What must pass before a change lands.

use std::process::Command;

/// Runs every check, cheapest first, and stops at the first that fails.
pub(crate) fn run() -> Result<(), String> {
    cargo(&["fmt", "--all", "--check"])?;
    cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"])?;
    match installed("deny") {
        // Not the advisories: their database comes from the network.
        true => cargo(&["deny", "--workspace", "check", "bans", "licenses", "sources"])?,
        false => println!("skipped: cargo deny is not installed (cargo install cargo-deny)"),
    }
    test()?;
    doc()
}

/// Runs all tests.
pub(crate) fn test() -> Result<(), String> {
    cargo(&["test", "--workspace", "--locked"])
}

/// Builds the launcher and the examples, then runs the tests that start them.
pub(crate) fn multiprocess(filter: Option<&str>) -> Result<(), String> {
    cargo(&["build", "--workspace", "--bins", "--examples", "--locked"])?;
    let mut arguments = vec!["test", "--workspace", "--locked"];
    arguments.extend(MULTIPROCESS.iter().flat_map(|name| ["--test", *name]));
    arguments.extend(filter);
    cargo(&arguments)
}

/// Test targets that start processes.
const MULTIPROCESS: [&str; 3] = ["mnist", "processes", "run"];

fn doc() -> Result<(), String> {
    let mut command = Command::new(env!("CARGO"));
    command.args(["doc", "--workspace", "--no-deps", "--locked"]).env("RUSTDOCFLAGS", "-D warnings");
    status(command, "cargo doc")
}

fn installed(subcommand: &str) -> bool {
    Command::new(env!("CARGO")).args([subcommand, "--version"]).output().is_ok_and(|output| output.status.success())
}

fn cargo(arguments: &[&str]) -> Result<(), String> {
    println!("cargo {}", arguments.join(" "));
    let mut command = Command::new(env!("CARGO"));
    command.args(arguments);
    status(command, &format!("cargo {}", arguments.join(" ")))
}

fn status(mut command: Command, name: &str) -> Result<(), String> {
    match command.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{name} failed: {status}")),
        Err(error) => Err(format!("{name} could not be started: {error}")),
    }
}
