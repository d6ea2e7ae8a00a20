//! `cargo xtask protos`: the Rust that protocol files compile to. It is kept next to them, so that no build runs their
//! compiler.

use std::process::Command;

use clap::Args;

use crate::workspace::Workspace;

#[derive(Args, Default)]
pub(crate) struct Flags {
    /// Writes nothing; fails where a file is not what its protocol files compile to.
    #[arg(long)]
    pub(crate) check: bool,
}

/// Runs the crate that compiles them, which is not part of the workspace.
pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let workspace = Workspace::load()?;
    let manifest = workspace.root.join("xtask/protos/Cargo.toml");
    let mut cargo = Command::new("cargo");
    cargo.args(["run", "--quiet", "--locked", "--manifest-path"]).arg(manifest);
    cargo.arg("--target-dir").arg(workspace.target("protos")).arg("--").arg(&workspace.root);
    if flags.check {
        cargo.arg("--check");
    }
    match cargo.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("compiling the protocol files failed: {status}")),
        Err(error) => Err(format!("cargo could not be started: {error}")),
    }
}
