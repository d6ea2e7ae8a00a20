//! `cargo xtask package`: packs the published crates, builds each from its package alone, and runs programs outside of
//! the workspace that depend on the packages.
//!
//! The builds are not those that `cargo package` makes itself. They would find the packages of other crates unpacked in
//! cargo's home by name and version, and an earlier run's there are taken for the new ones.

mod archive;
mod manifest;
mod order;
mod outside;
mod programs;
mod readme;

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use clap::Args;

use self::archive::Archive;
use self::outside::Outside;
use crate::workspace::{Package, Workspace};

#[derive(Args, Default)]
pub(crate) struct Flags {
    /// Prints the crates in the order of their publication, and packs nothing.
    #[arg(long)]
    list: bool,
    /// Packs the crates, and builds nothing from the packages.
    #[arg(long, conflicts_with = "list")]
    no_verify: bool,
}

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let workspace = Workspace::load()?;
    let problems = manifest::problems(&workspace)?;
    if !problems.is_empty() {
        return Err(format!("these crates are not ready to be published:\n  {}", problems.join("\n  ")));
    }
    let crates = order::of_publication(&workspace)?;
    if flags.list {
        crates.iter().for_each(|package| println!("{}", package.name));
        return Ok(());
    }
    let target = workspace.target("packed");
    pack(&workspace, &target)?;
    let archives = crates.iter().map(|package| Archive::read(package, &target)).collect::<Result<Vec<_>, _>>()?;
    let outside = Outside::new(&workspace, &crates, &target)?;
    for archive in &archives {
        outside.unpack(archive)?;
    }
    println!("{:<28} {:>6} {:>12} {:>12} {:>9}", "crate", "files", "unpacked", "packed", "built in");
    for (package, archive) in crates.iter().zip(&archives) {
        let began = Instant::now();
        if !flags.no_verify {
            outside.build(package)?;
        }
        let took = (!flags.no_verify).then(|| began.elapsed());
        line(&package.name, (archive.files.len(), archive.bytes, archive.packed_bytes), took);
    }
    let sum = |size: fn(&Archive) -> u64| archives.iter().map(size).sum();
    let files = archives.iter().map(|archive| archive.files.len()).sum();
    let all = (files, sum(|archive| archive.bytes), sum(|archive| archive.packed_bytes));
    line(&format!("{} crates", crates.len()), all, None);
    if flags.no_verify {
        return Ok(());
    }
    programs::reduce(&outside)?;
    programs::train(&outside)
}

/// Packs all published crates at once: cargo lets each find the others in a registry of its own making.
fn pack(workspace: &Workspace, target: &Path) -> Result<(), String> {
    let mut cargo = Command::new("cargo");
    // What is packed is what lies here, committed or not; publishing is another command.
    cargo.args(["package", "--quiet", "--locked", "--allow-dirty", "--no-verify", "--workspace"]);
    for package in workspace.packages.iter().filter(|package| !package.is_published()) {
        cargo.args(["--exclude", &package.name]);
    }
    cargo.arg("--target-dir").arg(target);
    match cargo.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("cargo package failed: {status}")),
        Err(error) => Err(format!("cargo package could not be started: {error}")),
    }
}

fn line(name: &str, (files, bytes, packed_bytes): (usize, u64, u64), took: Option<Duration>) {
    let kib = |bytes: u64| format!("{:.1} KiB", bytes as f64 / 1024.0);
    let took = took.map_or_else(String::new, |took| format!("{:.1} s", took.as_secs_f64()));
    println!("{name:<28} {files:>6} {:>12} {:>12} {took:>9}", kib(bytes), kib(packed_bytes));
}

/// The name of a package with its version, as cargo names its archive.
fn full_name(package: &Package) -> String {
    format!("{}-{}", package.name, package.version)
}
