//! NVIDIA's compiler from its Python packages, as one tree that build scripts take for an installed CUDA toolkit.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::stubs;
use crate::error::text;

/// A CUDA toolkit that compiles and links.
pub(crate) struct Toolkit {
    root: PathBuf,
}

/// Where it goes.
const FOLDER: &str = "target/peers/cuda-toolkit";

/// The compiler, what it calls, and the headers that it includes. All of one version: its parts check each other's.
const PACKAGES: [&str; 6] = [
    "nvidia-cuda-nvcc==13.0.*",
    "nvidia-nvvm==13.0.*",
    "nvidia-cuda-crt==13.0.*",
    "nvidia-cuda-cccl==13.0.*",
    "nvidia-cuda-runtime==13.0.*",
    "nvidia-cuda-nvrtc==13.0.*",
];

impl Toolkit {
    /// Installs what is missing of it.
    pub(crate) fn install() -> Result<Toolkit, String> {
        let toolkit = Toolkit { root: Path::new(FOLDER).join("nvidia/cu13") };
        if !toolkit.has_compiler() {
            eprintln!("installing {} into {FOLDER}", PACKAGES.join(" "));
            let mut pip = Command::new("python3");
            pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--upgrade", "--target", FOLDER]);
            let status =
                pip.args(PACKAGES).status().map_err(|error| format!("python3 could not be started: {error}"))?;
            if !status.success() {
                return Err(format!("pip could not install NVIDIA's compiler: {status}"));
            }
        }
        toolkit.lay_out()?;
        if !toolkit.has_compiler() {
            return Err(format!("{} does not run after its installation", toolkit.compiler().display()));
        }
        Ok(toolkit)
    }

    /// Environment variables of a build that uses it.
    pub(crate) fn environment(&self, compute_cap: u32) -> Result<Vec<(&'static str, String)>, String> {
        let root = self.root.canonicalize().map_err(text)?;
        let bin = root.join("bin");
        let path = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths([bin].into_iter().chain(std::env::split_paths(&path))).map_err(text)?;
        Ok(vec![
            ("CUDA_HOME", root.display().to_string()),
            ("PATH", path.to_string_lossy().into_owned()),
            ("CUDA_COMPUTE_CAP", compute_cap.to_string()),
            // Kernels for tensors that training does not have are two thirds of a program, and shrink to a third.
            ("NVCC_APPEND_FLAGS", "--compress-mode=size".to_owned()),
        ])
    }

    fn compiler(&self) -> PathBuf {
        self.root.join("bin/nvcc")
    }

    fn has_compiler(&self) -> bool {
        Command::new(self.compiler()).arg("--version").output().is_ok_and(|output| output.status.success())
    }

    /// Adds what an installed toolkit has and the packages lack.
    fn lay_out(&self) -> Result<(), String> {
        link("lib", &self.root.join("lib64"))?;
        let folder = self.root.join("lib/stubs");
        stubs::make(&cudarc()?, &folder)?;
        // Under this name the runtime becomes part of the program.
        link("../libcudart_static.a", &folder.join("libcudart.a"))
    }
}

/// A link, made anew.
fn link(target: &str, at: &Path) -> Result<(), String> {
    if at.symlink_metadata().is_ok() {
        std::fs::remove_file(at).map_err(|error| format!("{}: {error}", at.display()))?;
    }
    std::os::unix::fs::symlink(target, at).map_err(|error| format!("{}: {error}", at.display()))
}

/// The sources of the bindings that this workspace is built with.
fn cudarc() -> Result<PathBuf, String> {
    let arguments = ["metadata", "--format-version", "1", "--locked"];
    let output = Command::new("cargo").args(arguments).output().map_err(text)?;
    let metadata: Value = serde_json::from_slice(&output.stdout).map_err(text)?;
    let package = metadata["packages"].as_array().into_iter().flatten().find(|package| package["name"] == "cudarc");
    let manifest = package.and_then(|package| package["manifest_path"].as_str()).map(Path::new);
    manifest.and_then(Path::parent).map(Path::to_owned).ok_or_else(|| "cargo metadata names no cudarc".to_owned())
}
