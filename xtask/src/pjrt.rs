//! `cargo xtask pjrt`: PJRT plugins for tests, the tests that use them, and programs compiled for TPUs that are not
//! there.

mod aot;
mod collectives;
mod examples;
mod groups;
mod install;
mod sample;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use clap::Args;

use self::install::Plugin;
use crate::error::text;
use crate::workspace::Workspace;

#[derive(Args)]
pub(crate) struct Flags {
    /// Installs the plugins that are missing into target/pjrt, from Python packages and without root.
    #[arg(long)]
    fetch: bool,
    /// Compiles StableHLO files for the devices of TPU slices, by libtpu and without a TPU; without a file, the
    /// training steps of the examples, which are run on XLA's plugin for CPUs. A file for another number of replicas is
    /// changed to the number of devices.
    #[arg(long, value_name = "FILE", num_args = 0.., conflicts_with = "fetch")]
    aot: Option<Vec<PathBuf>>,
    /// With --aot: only for topologies whose names contain this, such as v5e.
    #[arg(long, value_name = "NAME", requires = "aot")]
    only: Option<String>,
    /// With --aot: the programs are training steps, which reduce gradients and update variables in place.
    #[arg(long, requires = "aot")]
    train: bool,
}

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let workspace = Workspace::load()?;
    let folder = workspace.target("pjrt");
    match &flags.aot {
        Some(files) => ahead_of_time(&folder, files, (flags.only.as_deref(), flags.train)),
        None if flags.fetch => install::fetch(&folder),
        None => tests(&workspace, &folder),
    }
}

/// Prints what is installed, and runs the tests of plugins with it.
fn tests(workspace: &Workspace, folder: &Path) -> Result<(), String> {
    let mut variables = Vec::new();
    for plugin in install::PLUGINS {
        match (given(plugin.variable), plugin.installed(folder)) {
            (Some(file), _) => println!("{}: {} is set to {}", plugin.package, plugin.variable, file.display()),
            (None, Some(file)) => {
                println!("{} {} is installed; to use it:", plugin.package, plugin.version);
                println!("export {}='{}'", plugin.variable, file.display());
                variables.push((plugin.variable, file.display().to_string()));
            }
            (None, None) => println!(
                "{} {} is not installed, and its tests will be skipped; install it by `cargo xtask pjrt --fetch`, or \
                 name the plugin's file in {}",
                plugin.package, plugin.version, plugin.variable
            ),
        }
    }
    println!("for libtpu without a TPU also:");
    for (name, value) in WITHOUT_TPU {
        println!("export {name}={value}");
        variables.push((name, value.to_owned()));
    }
    for (package, arguments) in TESTS {
        if workspace.package(package).is_none() {
            println!("skipped: {package} is not a crate of this workspace");
            continue;
        }
        let mut cargo = Command::new("cargo");
        cargo.args(["test", "--locked", "--package", package]).args(*arguments);
        println!("cargo test --locked --package {package} {}", arguments.join(" "));
        let status = cargo.envs(variables.iter().map(|(name, value)| (*name, value))).status().map_err(text)?;
        if !status.success() {
            return Err(format!("the tests of {package} with PJRT plugins failed: {status}"));
        }
    }
    Ok(())
}

/// Compiles programs by libtpu, in a process whose variables keep it from asking a metadata server.
fn ahead_of_time(folder: &Path, files: &[PathBuf], (only, trains): (Option<&str>, bool)) -> Result<(), String> {
    let (cpu, plugin) = (Plugin::cpu(), Plugin::libtpu());
    let Some(file) = given(plugin.variable).or_else(|| plugin.installed(folder)) else {
        return Err(format!(
            "libtpu is not installed; install it by `cargo xtask pjrt --fetch`, or name its file in {}",
            plugin.variable
        ));
    };
    let is_child = WITHOUT_TPU.iter().all(|(name, _)| given(name).is_some());
    if is_child {
        return aot::run(&file, files, only, trains);
    }
    let (mut files, mut trains) = (files.to_vec(), trains);
    match given(cpu.variable).or_else(|| cpu.installed(folder)) {
        Some(cpu) if files.is_empty() => (files, trains) = (examples::programs(&cpu, folder)?, true),
        None if files.is_empty() => println!(
            "skipped: the examples, which need {}; install it by `cargo xtask pjrt --fetch`, or name its file in {}",
            cpu.package, cpu.variable
        ),
        _ => {}
    }
    // The variables of a running process cannot be changed safely.
    let mut child = Command::new(std::env::current_exe().map_err(text)?);
    child.args(["pjrt", "--aot"]).args(files);
    if let Some(only) = only {
        child.args(["--only", only]);
    }
    if trains {
        child.arg("--train");
    }
    child.env(plugin.variable, &file).envs(WITHOUT_TPU.into_iter().filter(|(name, _)| given(name).is_none()));
    match within(&mut child, COMPILATION)? {
        status if !status.success() => {
            Err(format!("the process that compiles by libtpu ended with {status}; see its message above"))
        }
        _ => Ok(()),
    }
}

/// Returns the value of a variable that is not empty.
fn given(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Runs a program to its end; one that takes too long is killed.
fn within(command: &mut Command, patience: Duration) -> Result<ExitStatus, String> {
    let name = command.get_program().display().to_string();
    let mut child = command.spawn().map_err(|error| format!("{name} could not be started: {error}"))?;
    let deadline = Instant::now() + patience;
    loop {
        match child.try_wait().map_err(text)? {
            Some(status) => return Ok(status),
            None if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(20)),
            None => {
                child.kill().map_err(text)?;
                child.wait().map_err(text)?;
                return Err(format!("{name} had not ended after {} s, and was killed", patience.as_secs()));
            }
        }
    }
}

/// Variables with which libtpu starts where there is not a TPU: it asks no metadata server, knows what it would have
/// asked for, and may be opened by several processes.
const WITHOUT_TPU: [(&str, &str); 5] = [
    ("TPU_SKIP_MDS_QUERY", "1"),
    ("TPU_ACCELERATOR_TYPE", "v5litepod-8"),
    ("TPU_WORKER_ID", "0"),
    ("TPU_WORKER_HOSTNAMES", "localhost"),
    ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
];

/// Crates whose tests use plugins, each with the rest of cargo's arguments.
const TESTS: &[(&str, &[&str])] = &[
    ("distribute-device", &["--features", "pjrt", "--test", "pjrt"]),
    ("hlo-evaluator", &[]),
    ("distribute-cli", &["--features", "pjrt", "pjrt"]),
    ("distribute-burn", &["--features", "pjrt", "--test", "pjrt"]),
    ("distribute-burn-hlo", &[]),
];

/// Longest time of all compilations together.
const COMPILATION: Duration = Duration::from_secs(900);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_end_is_killed() {
        let shell = |script: &str, patience| within(Command::new("sh").args(["-c", script]), patience);
        assert_eq!(shell("exit 3", Duration::from_secs(60)).unwrap().code(), Some(3));
        let began = Instant::now();
        let problem = shell("exec sleep 60", Duration::from_millis(50)).unwrap_err();
        assert!(problem.contains("sh had not ended after 0 s, and was killed"), "{problem}");
        assert!(began.elapsed() < Duration::from_secs(30));
        assert!(within(&mut Command::new("/no/such/program"), COMPILATION).unwrap_err().contains("/no/such/program"));
    }
}
