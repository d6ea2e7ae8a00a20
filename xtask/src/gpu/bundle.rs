//! A folder that checks and measures GPUs on a machine with a driver and nothing else of ours.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::toolkit::Toolkit;
use crate::elf::{Needs, Version};
use crate::error::text;

/// A program of the bundle.
struct Program {
    name: &'static str,
    package: &'static str,
    features: &'static str,
    /// Libraries of CUDA that it cannot start without.
    cuda: &'static [&'static str],
}

const PROGRAMS: [Program; 2] = [
    Program { name: "distribute", package: "distribute-cli", features: "cuda", cuda: &[] },
    Program { name: "distribute-gpu-checks", package: "distribute-gpu-checks", features: "", cuda: &[] },
];

/// Only where NVIDIA's compiler is; apart from the others, which look for CUDA when they run.
const TRAINING: Program = Program {
    name: "distribute-gpu-training",
    package: "distribute-gpu-training",
    features: "distribute/candle-cuda",
    cuda: &["libcuda.so.1", "libcublas.so.13", "libcublasLt.so.13", "libcurand.so.10", "libnvrtc.so.13"],
};

/// Files of a bundle that are not programs.
const FILES: [(&str, &str); 2] =
    [("run.sh", include_str!("run.sh")), ("torch_cuda.py", include_str!("../../peers/torch_cuda.py"))];

/// Limit of all files together: the transport may take no more than 64 MiB.
const LIMIT_BYTES: u64 = 60 << 20;

/// The oldest glibc that it must run on.
const GLIBC: Version = (2, 36);

/// A library that machines with GPUs have as well.
const CPP_LIBRARY: &str = "libstdc++.so.6";

/// Makes the bundle; with candle where a compute capability is given for its kernels.
pub(super) fn run(folder: &Path, candle: Option<u32>) -> Result<(), String> {
    if (std::env::consts::OS, std::env::consts::ARCH) != ("linux", "x86_64") {
        return Err("a bundle is for Linux on x86-64 and is built there".to_owned());
    }
    let mut programs = PROGRAMS.map(|program| (program, Vec::new())).into_iter().collect::<Vec<_>>();
    if let Some(compute_cap) = candle {
        programs.push((TRAINING, Toolkit::install()?.environment(compute_cap)?));
    }
    let programs_folder = folder.join("bin");
    if programs_folder.exists() {
        fs::remove_dir_all(&programs_folder).map_err(text)?;
    }
    fs::create_dir_all(&programs_folder).map_err(text)?;
    for (program, environment) in programs {
        let built = program.build(&environment)?;
        let bytes = fs::read(&built).map_err(|error| format!("{}: {error}", built.display()))?;
        let needs = Needs::of(&bytes).map_err(|error| format!("{}: {error}", built.display()))?;
        program.can_start(&needs)?;
        place(&programs_folder.join(program.name), &bytes)?;
        let glibc = needs.glibc_in_words();
        println!("{:<24} {:>6.1} MiB, {glibc}", program.name, mib(bytes.len() as u64));
    }
    for (name, content) in FILES {
        place(&folder.join(name), content.as_bytes())?;
    }
    let bytes = total(folder)?;
    fits(bytes)?;
    println!("{}: {:.1} MiB; run {}/run.sh where a GPU is", folder.display(), mib(bytes), folder.display());
    Ok(())
}

impl Program {
    /// Builds it without anything that only debuggers need; its file.
    fn build(&self, environment: &[(&str, String)]) -> Result<PathBuf, String> {
        let mut cargo = Command::new("cargo");
        cargo.args([
            "build",
            "--quiet",
            "--profile",
            "bundle",
            "--locked",
            "--message-format",
            "json-render-diagnostics",
        ]);
        cargo.args(["--package", self.package, "--bin", self.name, "--features", self.features]);
        cargo.envs(environment.iter().map(|(name, value)| (name, value))).stderr(Stdio::inherit());
        let output = cargo.output().map_err(text)?;
        if !output.status.success() {
            return Err(format!("{} could not be built: {}", self.name, output.status));
        }
        let messages = String::from_utf8_lossy(&output.stdout);
        executable(&messages, self.name).ok_or_else(|| format!("cargo named no file of {}", self.name))
    }

    /// Fails where a machine with the driver, or with CUDA's libraries for a program that names them, may lack
    /// something.
    fn can_start(&self, needs: &Needs) -> Result<(), String> {
        let name = self.name;
        if let Some((major, minor)) = needs.glibc.filter(|glibc| *glibc > GLIBC) {
            let (oldest_major, oldest_minor) = GLIBC;
            return Err(format!(
                "{name} needs glibc {major}.{minor}, and bundles must run on {oldest_major}.{oldest_minor}; \
                build on an older system"
            ));
        }
        match needs.foreign_library(&[self.cuda, &[CPP_LIBRARY]].concat()) {
            Some(library) => Err(format!("{name} needs {library}, which other machines may not have")),
            None => Ok(()),
        }
    }
}

/// The file that cargo's messages name for a program.
fn executable(messages: &str, name: &str) -> Option<PathBuf> {
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let mut built = messages.filter(|message| message["target"]["name"] == name);
    built.find_map(|message| message["executable"].as_str().map(PathBuf::from))
}

/// Writes a file that can be started.
fn place(path: &Path, content: &[u8]) -> Result<(), String> {
    let named = |error: std::io::Error| format!("{}: {error}", path.display());
    fs::write(path, content).map_err(named)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).map_err(named)
}

/// Bytes of all files in a folder.
fn total(folder: &Path) -> Result<u64, String> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))? {
        let entry = entry.map_err(text)?;
        let about = entry.metadata().map_err(text)?;
        bytes += if about.is_dir() { total(&entry.path())? } else { about.len() };
    }
    Ok(bytes)
}

fn fits(bytes: u64) -> Result<(), String> {
    if bytes <= LIMIT_BYTES {
        return Ok(());
    }
    Err(format!(
        "the folder holds {:.1} MiB, more than the {:.0} MiB of a bundle; leave out --candle, or empty the \
        folder before",
        mib(bytes),
        mib(LIMIT_BYTES)
    ))
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

#[cfg(test)]
mod tests;
