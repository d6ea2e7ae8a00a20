//! zig as the C compiler and linker for other machines, and cargo-zigbuild, which tells cargo of it, from their Python
//! packages.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::text;

/// Both, installed in a folder.
pub(super) struct Zig(PathBuf);

const PACKAGES: [&str; 2] = ["cargo-zigbuild==0.24.*", "ziglang==0.15.*"];

impl Zig {
    /// Installs what is missing.
    pub(super) fn install(folder: &Path) -> Result<Zig, String> {
        let zig = Zig(folder.join("bin"));
        if !zig.0.join("cargo-zigbuild").exists() {
            eprintln!("installing {} into {}", PACKAGES.join(" "), folder.display());
            step(Command::new("python3").args(["-m", "venv", "--clear"]).arg(folder))?;
            step(Command::new(zig.0.join("python")).args(["-m", "pip", "install", "--quiet"]).args(PACKAGES))?;
        }
        Ok(zig)
    }

    /// A cargo that finds both.
    pub(super) fn cargo(&self) -> Command {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(std::iter::once(self.0.clone()).chain(std::env::split_paths(&path)));
        let mut cargo = Command::new("cargo");
        if let Ok(path) = path {
            cargo.env("PATH", path);
        }
        cargo
    }
}

fn step(command: &mut Command) -> Result<(), String> {
    let name = format!("{command:?}");
    match command.status().map_err(text)? {
        status if status.success() => Ok(()),
        status => Err(format!("{name} failed: {status}")),
    }
}
