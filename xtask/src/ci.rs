//! Everything that must pass before a change lands.

use std::process::Command;

use crate::{api, attack, docs, gpu, layers, package, platforms, powerset, prose, protos};

/// Runs every check, cheapest first, and stops at the first that fails.
pub(crate) fn run() -> Result<(), String> {
    cargo(&["fmt", "--all", "--check"])?;
    // The fuzz targets are a workspace of their own. Their corpora are replayed by the tests.
    cargo(&["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"])?;
    layers::run(&layers::Flags::default())?;
    prose::run(&prose::Flags::default())?;
    docs::run(&docs::Flags::default())?;
    protos::run(&protos::Flags { check: true })?;
    cargo(&["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"])?;
    cargo(&["clippy", "--package", "distribute-cli", "--features", "cuda,pjrt", "--locked", "--", "-D", "warnings"])?;
    // In the workspace the checks of GPUs turn CUDA on for all.
    for package in ["distribute-device", "distribute-collectives", "distribute-cli"] {
        cargo(&["clippy", "--package", package, "--all-targets", "--locked", "--", "-D", "warnings"])?;
    }
    println!("cargo xtask gpu --compiles");
    gpu::compiles()?;
    match installed("deny") {
        // Not the advisories: their database comes from the network.
        true => cargo(&["deny", "--workspace", "check", "bans", "licenses", "sources"])?,
        false => println!("skipped: cargo deny is not installed (cargo install cargo-deny)"),
    }
    match installed("machete") {
        true => cargo(&["machete"])?,
        false => println!("skipped: cargo machete is not installed (cargo install cargo-machete)"),
    }
    println!("cargo xtask platforms");
    platforms::run(&platforms::Flags::default())?;
    test_at_length()?;
    // In the workspace no other crate turns this feature on.
    cargo(&["test", "--package", "distribute-cli", "--features", "pjrt", "--locked", "pjrt"])?;
    println!("cargo xtask conformance");
    conformance(&[])?;
    // The comparisons that GPUs are to pass, on parts of the CPU.
    let agreement = ["--package", "distribute-gpu-training", "--", "--device", "cpu", "--check"];
    cargo(&[&["run", "--quiet", "--locked"], &agreement[..]].concat())?;
    long()?;
    benches()?;
    loom()?;
    miri()?;
    doc()?;
    api::run(&api::Flags::default())?;
    powerset::run(&powerset::Flags::default())?;
    println!("cargo xtask package");
    package::run(&package::Flags::default())?;
    attack::run(&attack::Flags::default())
}

/// Runs all tests.
pub(crate) fn test() -> Result<(), String> {
    cargo(&["test", "--workspace", "--locked"])
}

/// Runs all tests, in their long form.
fn test_at_length() -> Result<(), String> {
    println!("DISTRIBUTE_TEST_LONG=1 cargo test --workspace --locked");
    let mut command = Command::new("cargo");
    command.args(["test", "--workspace", "--locked"]).env("DISTRIBUTE_TEST_LONG", "1");
    status(command, "cargo test with DISTRIBUTE_TEST_LONG=1")
}

/// Runs the tests whose length the environment sets again, longer.
fn long() -> Result<(), String> {
    for (name, value, filter) in LONG {
        let arguments = ["test", "--workspace", "--locked", "--test", "all", filter];
        println!("{name}={value} cargo {}", arguments.join(" "));
        let mut command = Command::new("cargo");
        command.args(arguments).env(name, value);
        status(command, &format!("cargo test {filter} with {name}={value}"))?;
    }
    Ok(())
}

/// Variables of tests, their values in `cargo xtask ci`, and the tests.
const LONG: [(&str, &str, &str); 2] = [
    ("DISTRIBUTE_TEST_KILLS", "6", "checkpoints::a_run_that_is_killed_again_and_again_ends_as_one_that_is_not"),
    ("DISTRIBUTE_TEST_SOAK_SECONDS", "10", "soak::"),
];

/// Makes the measurements of jobs, each as short as it can be, so that the commands of docs/benchmarks.md work.
fn benches() -> Result<(), String> {
    let program = std::env::current_exe().map_err(|error| format!("this program is not known: {error}"))?;
    for bench in BENCHES {
        println!("cargo xtask bench {bench}");
        let mut command = Command::new(&program);
        command.arg("bench").args(bench.split(' '));
        status(command, &format!("cargo xtask bench {bench}"))?;
    }
    Ok(())
}

const BENCHES: [&str; 10] = [
    "train --seconds 0.05 --rounds 1",
    "train --seconds 0.05 --rounds 1 --library burn",
    "train --seconds 0.05 --rounds 1 --model embedding",
    "train --seconds 0.05 --rounds 1 --api fit",
    "train --seconds 0.05 --rounds 1 --api audit",
    "train --seconds 0.05 --rounds 1 --api elastic",
    "train --seconds 0.05 --rounds 1 --api scaling",
    "ps --seconds 0.3 --rounds 1 --workers 2",
    "latency --ranks 2 --reps 50",
    "alltoall --ranks 2 --sizes 1K",
];

/// Builds the launcher and the examples, then runs the tests that start them.
pub(crate) fn multiprocess(filter: Option<&str>) -> Result<(), String> {
    cargo(&["build", "--workspace", "--bins", "--examples", "--locked"])?;
    let mut arguments = vec!["test", "--workspace", "--locked"];
    arguments.extend(MULTIPROCESS.iter().flat_map(|name| ["--test", *name]));
    arguments.extend(filter);
    cargo(&arguments)
}

/// Runs the conformance suite, with arguments of its own.
pub(crate) fn conformance(arguments: &[String]) -> Result<(), String> {
    let mut all = vec!["run", "--quiet", "--release", "--locked", "--package", "distribute-conformance", "--"];
    all.extend(arguments.iter().map(String::as_str));
    cargo(&all)
}

/// Test targets that start processes.
const MULTIPROCESS: [&str; 6] = ["all", "doctor", "estimator", "processes", "run", "suite"];

/// Interprets the tests of memory that threads share, under several orders of threads and of memory accesses.
pub(crate) fn miri() -> Result<(), String> {
    if !Command::new("cargo").args(["+nightly", "miri", "--version"]).output().is_ok_and(|out| out.status.success()) {
        println!("skipped: Miri is not installed (rustup toolchain install nightly --component miri,rust-src)");
        return Ok(());
    }
    // Segments that stand for shared memory are never given back.
    let flags = "-Zmiri-disable-isolation -Zmiri-ignore-leaks -Zmiri-many-seeds=0..8";
    for what in [["--test", "threads"].as_slice(), &["--lib", "ring::"]] {
        let mut command = Command::new("cargo");
        command.args(["+nightly", "miri", "test", "--package", "distribute-collectives", "--no-default-features"]);
        command.args(["--target-dir", "target/miri"]).args(what);
        command.env("MIRIFLAGS", flags).env("RUSTFLAGS", "-Awarnings").env_remove("RUSTUP_TOOLCHAIN");
        status(command, "cargo miri test")?;
    }
    Ok(())
}

/// Runs the models of the engine's states and of the shared-memory ring through the interleavings that loom knows.
pub(crate) fn loom() -> Result<(), String> {
    let mut command = Command::new("cargo");
    command.args(["test", "--release", "--locked", "--package", "distribute-collectives", "--no-default-features"]);
    command.args(["--lib", "--target-dir", "target/loom", "model::"]);
    command.env("RUSTFLAGS", "--cfg distribute_loom -Awarnings");
    status(command, "cargo test with loom")
}

fn doc() -> Result<(), String> {
    let mut command = Command::new("cargo");
    // All features but candle-cuda, which needs nvcc.
    let features = [
        "distribute/cuda",
        "distribute/pjrt",
        "distribute/prometheus",
        "distribute-cli/cuda",
        "distribute-cli/pjrt",
        "distribute-input/full",
    ]
    .join(",");
    command.args(["doc", "--workspace", "--no-deps", "--locked", "--features", &features]);
    command.env("RUSTDOCFLAGS", "-D warnings");
    status(command, "cargo doc")
}

/// Returns whether cargo has a subcommand.
pub(crate) fn installed(subcommand: &str) -> bool {
    Command::new("cargo").args([subcommand, "--version"]).output().is_ok_and(|output| output.status.success())
}

fn cargo(arguments: &[&str]) -> Result<(), String> {
    println!("cargo {}", arguments.join(" "));
    let mut command = Command::new("cargo");
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
