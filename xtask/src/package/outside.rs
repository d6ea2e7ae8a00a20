//! A place outside of the workspace, where the packages are all that cargo finds of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use super::archive::Archive;
use super::full_name;
use crate::error::text;
use crate::workspace::{Package, Workspace};

/// The unpacked packages, as a workspace of their own, and an empty folder for programs that depend on them.
pub(super) struct Outside<'a> {
    pub(super) workspace: &'a Workspace,
    crates: &'a [&'a Package],
    /// Where the packages are unpacked. It stays the same, so that builds of other crates are used again.
    packages: PathBuf,
    target: &'a Path,
    /// Removed with all programs at the end.
    programs: TempDir,
}

impl<'a> Outside<'a> {
    pub(super) fn new(workspace: &'a Workspace, crates: &'a [&'a Package], target: &'a Path) -> Result<Self, String> {
        let packages = target.join("unpacked");
        if packages.exists() {
            fs::remove_dir_all(&packages).map_err(|error| format!("{}: {error}", packages.display()))?;
        }
        fs::create_dir_all(&packages).map_err(|error| format!("{}: {error}", packages.display()))?;
        let outside = Outside { workspace, crates, packages, target, programs: tempfile::tempdir().map_err(text)? };
        let names: Vec<String> = crates.iter().map(|package| format!("{:?}", full_name(package))).collect();
        let manifest =
            format!("[workspace]\nresolver = \"3\"\nmembers = [{}]\n{}", names.join(", "), outside.patches());
        outside.write(&outside.packages, &manifest)?;
        Ok(outside)
    }

    pub(super) fn unpack(&self, archive: &Archive) -> Result<(), String> {
        archive.unpack(&self.packages.join(archive.name()))
    }

    /// Builds a package with its default features, and with what those of the others have that it needs.
    pub(super) fn build(&self, package: &Package) -> Result<(), String> {
        let mut cargo = self.cargo("build");
        cargo.arg("--manifest-path").arg(self.packages.join("Cargo.toml")).args(["--package", &package.name]);
        run(cargo, &format!("{} does not build from its package", package.name))
    }

    /// Builds a program from its one source and the lines of its dependencies; returns the program.
    pub(super) fn program(&self, name: &str, dependencies: &[String], main: &str) -> Result<PathBuf, String> {
        let folder = self.programs.path().join(name);
        let package = format!("[package]\nname = \"{name}\"\nversion = \"0.1.0\"\nedition = \"2024\"\n");
        let manifest = format!("{package}\n[dependencies]\n{}\n{}", dependencies.join("\n"), self.patches());
        fs::create_dir_all(folder.join("src")).map_err(text)?;
        self.write(&folder, &manifest)?;
        fs::write(folder.join("src/main.rs"), main).map_err(text)?;
        let mut cargo = self.cargo("build");
        cargo.arg("--manifest-path").arg(folder.join("Cargo.toml"));
        run(cargo, &format!("the program {name:?} does not build from the packages"))?;
        Ok(self.target.join("debug").join(name))
    }

    /// The line by which a program depends on a crate: on a published one, or on another in the versions that the
    /// facade accepts.
    pub(super) fn dependency(&self, name: &str) -> Result<String, String> {
        let published = self.crates.iter().find(|package| package.name == name).map(|package| &package.version);
        let facade = self.workspace.package("distribute").map_or(&[][..], |facade| &facade.dependencies);
        let accepted = facade.iter().find(|dependency| dependency.name == name).map(|dependency| &dependency.req);
        let version = published.or(accepted).ok_or_else(|| format!("the facade does not depend on {name}"))?;
        Ok(format!("{name} = {{ version = \"{version}\" }}"))
    }

    /// Where the registry's crates are found instead.
    fn patches(&self) -> String {
        let folder = |package: &Package| self.packages.join(full_name(package));
        let patch = |package: &&Package| format!("{} = {{ path = {:?} }}\n", package.name, folder(package));
        format!("\n[patch.crates-io]\n{}", self.crates.iter().map(patch).collect::<String>())
    }

    /// Writes a manifest, with other crates in the versions that are here already: nothing is downloaded.
    fn write(&self, folder: &Path, manifest: &str) -> Result<(), String> {
        let describe = |error: std::io::Error| format!("{}: {error}", folder.display());
        fs::write(folder.join("Cargo.toml"), manifest).map_err(describe)?;
        fs::copy(self.workspace.root.join("Cargo.lock"), folder.join("Cargo.lock")).map_err(describe)?;
        Ok(())
    }

    /// cargo as a user of the packages has it, without the settings of the workspace.
    fn cargo(&self, command: &str) -> Command {
        let mut cargo = Command::new("cargo");
        cargo
            .args([command, "--quiet", "--offline", "--target-dir"])
            .arg(self.target)
            .current_dir(self.programs.path());
        cargo.env_remove("CUDARC_CUDA_VERSION").env("CARGO_PROFILE_DEV_DEBUG", "0");
        cargo
    }
}

fn run(mut cargo: Command, problem: &str) -> Result<(), String> {
    match cargo.status() {
        Ok(status) if status.success() => Ok(()),
        Ok(status) => Err(format!("{problem}: {status}")),
        Err(error) => Err(format!("cargo could not be started: {error}")),
    }
}
