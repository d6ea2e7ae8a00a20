//! `cargo xtask gpu`: the checks of GPUs here, or in a folder to carry to a machine that has one.

use std::path::PathBuf;
use std::process::{Command, ExitStatus};

use clap::Args;

use crate::error::text;

mod bundle;
#[cfg(unix)]
mod compiles;
mod stubs;
mod toolkit;

#[derive(Args)]
pub(crate) struct Flags {
    /// Instead of checking here: what runs the checks and measurements elsewhere, without Rust and without a network.
    #[arg(long, value_name = "FOLDER")]
    bundle: Option<PathBuf>,
    /// With --bundle: training with candle on the GPU too, compiled by NVIDIA's compiler (see --toolkit).
    #[arg(long, requires = "bundle")]
    candle: bool,
    /// The compute capability that candle's kernels are compiled for, times ten.
    #[arg(long, value_name = "CAPABILITY", default_value_t = 90)]
    compute_cap: u32,
    /// Installs NVIDIA's compiler into target/peers/cuda-toolkit, from Python packages and without root, and says how
    /// to use it.
    #[arg(long, conflicts_with = "bundle")]
    toolkit: bool,
    /// Checks that the code for candle on GPUs compiles. Neither a GPU nor NVIDIA's compiler is needed.
    #[arg(long, conflicts_with_all = ["bundle", "toolkit"])]
    compiles: bool,
}

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    if flags.toolkit {
        let toolkit = toolkit::Toolkit::install()?;
        for (name, value) in toolkit.environment(flags.compute_cap)? {
            println!("export {name}='{value}'");
        }
        return Ok(());
    }
    if flags.compiles {
        return compiles();
    }
    match &flags.bundle {
        Some(folder) => bundle::run(folder, flags.candle.then_some(flags.compute_cap)),
        // Says itself where there is not a GPU.
        None => succeeded(checks(&["--no-bench"]).status().map_err(text)?),
    }
}

/// Checks that the code for candle on GPUs compiles.
#[cfg(unix)]
pub(crate) fn compiles() -> Result<(), String> {
    compiles::run()
}

/// Says that the check is for Unix.
#[cfg(not(unix))]
pub(crate) fn compiles() -> Result<(), String> {
    println!("skipped: the check of candle's code for GPUs uses a shell script as its compiler");
    Ok(())
}

/// The program that checks and measures GPUs, built with optimisation.
pub(crate) fn checks(arguments: &[&str]) -> Command {
    let mut cargo = Command::new("cargo");
    cargo.args(["run", "--quiet", "--release", "--locked", "--package", "distribute-gpu-checks", "--"]).args(arguments);
    cargo
}

/// An error where a program failed.
pub(crate) fn succeeded(status: ExitStatus) -> Result<(), String> {
    if status.success() { Ok(()) } else { Err(format!("distribute-gpu-checks failed: {status}")) }
}
