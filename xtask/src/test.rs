//! `cargo xtask test`: all tests as the README's command runs them, or the slowest of them.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Deserialize;

use crate::error::text;

#[derive(Args, Default)]
pub(crate) struct Flags {
    /// Runs the programs of the tests, without examples of the documentation, and prints the tests that took longest.
    #[arg(long)]
    slowest: bool,
}

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    if !flags.slowest {
        return crate::ci::test();
    }
    let programs = build()?;
    let (mut all, mut failed, began) = (Vec::new(), Vec::new(), Instant::now());
    for program in &programs {
        let (tests, passed) = program.run()?;
        all.extend(tests);
        if !passed {
            failed.push(program.name());
        }
    }
    all.sort_by(|a, b| b.took.total_cmp(&a.took));
    println!("{:>8}  test", "s");
    for Timed { program, test, took } in all.iter().take(SHOWN) {
        println!("{took:>8.2}  {program} {test}");
    }
    println!("{} tests of {} programs in {:.0} s", all.len(), programs.len(), began.elapsed().as_secs_f64());
    match failed.is_empty() {
        true => Ok(()),
        false => Err(format!("tests failed in {}", failed.join(", "))),
    }
}

/// The number of tests that are printed.
const SHOWN: usize = 20;

/// A program of tests.
struct Program {
    package: String,
    target: String,
    path: PathBuf,
    folder: PathBuf,
}

/// A test and how long it ran, in seconds.
#[derive(Debug, PartialEq)]
struct Timed {
    program: String,
    test: String,
    took: f64,
}

/// A message of cargo about something that it has built.
#[derive(Deserialize)]
struct Artifact {
    reason: String,
    #[serde(default)]
    executable: Option<PathBuf>,
    #[serde(default)]
    manifest_path: PathBuf,
    target: Option<Target>,
    profile: Option<Profile>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// Builds all tests, and what they start.
fn build() -> Result<Vec<Program>, String> {
    let mut cargo = Command::new("cargo");
    cargo.args(["test", "--workspace", "--locked", "--no-run", "--message-format", "json-render-diagnostics"]);
    let output = cargo.stderr(Stdio::inherit()).output().map_err(text)?;
    if !output.status.success() {
        return Err(format!("the tests do not build: {}", output.status));
    }
    String::from_utf8_lossy(&output.stdout).lines().filter_map(|line| program(line).transpose()).collect()
}

/// Returns the program of tests that a message of cargo announces, if it does.
fn program(message: &str) -> Result<Option<Program>, String> {
    let artifact: Artifact = serde_json::from_str(message).map_err(text)?;
    let Artifact { reason, executable: Some(path), manifest_path, target: Some(target), profile } = artifact else {
        return Ok(None);
    };
    if reason != "compiler-artifact" || !profile.is_some_and(|profile| profile.test) {
        return Ok(None);
    }
    let folder = manifest_path.parent().map(PathBuf::from).unwrap_or_default();
    let package = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Ok(Some(Program { package, target: target.name, path, folder }))
}

impl Program {
    fn name(&self) -> String {
        format!("{} {}", self.package, self.target)
    }

    /// Runs the tests; returns them, and whether all passed.
    fn run(&self) -> Result<(Vec<Timed>, bool), String> {
        println!("{}", self.name());
        let mut command = Command::new(&self.path);
        // Times are an unstable option of the harness, which this variable allows on a stable one.
        command.args(["-Zunstable-options", "--report-time"]).env("RUSTC_BOOTSTRAP", "1");
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder).stdout(Stdio::piped());
        let mut running = command.spawn().map_err(text)?;
        let mut tests = Vec::new();
        for line in running.stdout.take().into_iter().flat_map(|stdout| BufReader::new(stdout).lines()) {
            let line = line.map_err(text)?;
            match timed(&line) {
                Some((test, took)) => {
                    tests.push(Timed { program: self.name(), test: test.to_owned(), took: took.as_secs_f64() });
                }
                None if line.contains("FAILED") || line.starts_with("test result") => println!("  {line}"),
                None => {}
            }
        }
        Ok((tests, running.wait().map_err(text)?.success()))
    }
}

/// Returns the test and its time from a line such as `test a::b ... ok <0.123s>`.
fn timed(line: &str) -> Option<(&str, Duration)> {
    let (test, rest) = line.strip_prefix("test ")?.split_once(" ... ")?;
    let seconds = rest.split_once('<')?.1.strip_suffix("s>")?.parse().ok()?;
    Some((test, Duration::try_from_secs_f64(seconds).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_and_their_times_are_found() {
        let found = timed("test a::b ... ok <0.250s>");
        assert_eq!(found, Some(("a::b", Duration::from_millis(250))));
        for other in ["test a::b ... ok", "test result: ok. 1 passed; finished in 0.25s", "test a ... ok <soon>"] {
            assert_eq!(timed(other), None, "{other}");
        }
    }

    #[test]
    fn of_cargos_messages_those_of_programs_of_tests_count() {
        let of = |test: bool, executable: &str| {
            let target = r#""manifest_path":"/w/crates/x/Cargo.toml","target":{"name":"all"}"#;
            format!(
                r#"{{"reason":"compiler-artifact",{target},"profile":{{"test":{test}}},"executable":{executable}}}"#
            )
        };
        let found = program(&of(true, r#""/t/all-1""#)).unwrap().unwrap();
        assert_eq!((found.name(), found.folder), ("x all".to_owned(), PathBuf::from("/w/crates/x")));
        for other in [of(false, r#""/t/all-1""#), of(true, "null"), r#"{"reason":"build-finished"}"#.to_owned()] {
            assert!(program(&other).unwrap().is_none(), "{other}");
        }
    }
}
