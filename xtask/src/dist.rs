//! `cargo xtask dist`: archives of the `distribute` program for other machines, with its manual pages and completions.

mod archive;
mod zig;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use clap::Args;

use self::archive::Archive;
use self::zig::Zig;
use crate::ci::installed;
use crate::elf::{Needs, Version};
use crate::error::text;
use crate::workspace::Workspace;

#[derive(Args)]
pub(crate) struct Flags {
    /// Builds for this target only.
    #[arg(long, value_name = "TRIPLE")]
    target: Option<String>,
    /// The folder for the archives; it is created.
    #[arg(long, default_value = "target/dist")]
    folder: PathBuf,
}

/// A kind of machine.
struct Target {
    triple: &'static str,
    /// The oldest glibc that the program must start with; `None` for a program that needs none.
    glibc: Option<Version>,
    /// Features of the program. A static one cannot open NVIDIA's libraries.
    features: &'static str,
}

const TARGETS: [Target; 3] = [
    Target { triple: "x86_64-unknown-linux-gnu", glibc: Some((2, 28)), features: "cuda" },
    Target { triple: "x86_64-unknown-linux-musl", glibc: None, features: "" },
    Target { triple: "aarch64-unknown-linux-gnu", glibc: Some((2, 28)), features: "cuda" },
];

/// The loader of 64-bit ARM, in addition to the libraries of every Linux.
const ARM_LOADER: &str = "ld-linux-aarch64.so.1";

const PROGRAM: &str = "distribute";

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let known = TARGETS.map(|target| target.triple);
    if let Some(other) = flags.target.as_deref().filter(|target| !known.contains(target)) {
        return Err(format!("{other:?} is not a target of releases; these are: {}", known.join(", ")));
    }
    let workspace = Workspace::load()?;
    let zig = Zig::install(&workspace.target("peers/zig"))?;
    let is_auditable = installed("auditable");
    if !is_auditable {
        println!("skipped: the list of dependencies in each program (cargo install cargo-auditable)");
    }
    let folder = workspace.root.join(&flags.folder);
    fs::create_dir_all(&folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    let pages = Pages::write(&workspace)?;
    let mut archives = Vec::new();
    for target in TARGETS.iter().filter(|target| flags.target.as_deref().is_none_or(|only| only == target.triple)) {
        if !has_library(target.triple)? {
            println!("skipped: {}, for which Rust is not installed (rustup target add {0})", target.triple);
            continue;
        }
        let program = target.build(&workspace, &zig, is_auditable)?;
        let needs = target.check(&program)?;
        let version = workspace.package("distribute-cli").map_or("0", |package| package.version.as_str());
        let name = format!("{PROGRAM}-{version}-{}", target.triple);
        let mut archive = Archive::new(&folder, &name)?;
        archive.add(PROGRAM, &program, true)?;
        for (name, path) in &pages.0 {
            archive.add(name, path, false)?;
        }
        for name in ["README.md", "CHANGELOG.md", "LICENSE-APACHE", "LICENSE-MIT"] {
            archive.add(name, &workspace.root.join(name), false)?;
        }
        let (bytes, line) = archive.finish()?;
        let glibc = needs.glibc_in_words();
        let started = if target.starts_here() { "started here" } else { "not started here" };
        println!("{name}.tar.gz  {:.1} MiB, {glibc}, {started}", bytes as f64 / f64::from(1 << 20));
        archives.push(line);
    }
    let sums = folder.join("SHA256SUMS");
    fs::write(&sums, archives.concat()).map_err(|error| format!("{}: {error}", sums.display()))
}

impl Target {
    /// Whether this machine runs programs of the target.
    fn starts_here(&self) -> bool {
        self.triple.starts_with(std::env::consts::ARCH) && cfg!(target_os = "linux")
    }

    /// Builds the program; returns its file.
    fn build(&self, workspace: &Workspace, zig: &Zig, is_auditable: bool) -> Result<PathBuf, String> {
        let target_folder = workspace.target("release-builds");
        let mut cargo = zig.cargo();
        if is_auditable {
            cargo.arg("auditable");
        }
        cargo.args(["zigbuild", "--quiet", "--locked", "--profile", "bundle", "--package", "distribute-cli"]);
        let triple = match self.glibc {
            Some((major, minor)) => format!("{}.{major}.{minor}", self.triple),
            None => self.triple.to_owned(),
        };
        cargo.args(["--target", &triple, "--features", self.features, "--target-dir"]).arg(&target_folder);
        let status = cargo.status().map_err(|error| format!("cargo could not be started: {error}"))?;
        match status.success() {
            true => Ok(target_folder.join(self.triple).join("bundle").join(PROGRAM)),
            false => Err(format!("{PROGRAM} could not be built for {}: {status}", self.triple)),
        }
    }

    /// Checks that the program starts on the machines that it is for, and starts it if this is one.
    fn check(&self, program: &Path) -> Result<Needs, String> {
        let bytes = fs::read(program).map_err(|error| format!("{}: {error}", program.display()))?;
        let needs = Needs::of(&bytes).map_err(|error| format!("{}: {error}", program.display()))?;
        self.accepts(&needs)?;
        if self.starts_here() {
            let output = Command::new(program).arg("--version").output().map_err(text)?;
            let version = String::from_utf8_lossy(&output.stdout);
            if !output.status.success() || !version.starts_with(PROGRAM) {
                return Err(format!("{} --version failed: {}", program.display(), output.status));
            }
        }
        Ok(needs)
    }

    fn accepts(&self, needs: &Needs) -> Result<(), String> {
        let triple = self.triple;
        if needs.is_x86_64 != triple.starts_with("x86_64") {
            return Err(format!("the program for {triple} is for another processor"));
        }
        if needs.glibc > self.glibc {
            let show = |version: Option<Version>| version.map_or("none".to_owned(), |(a, b)| format!("{a}.{b}"));
            let (needs, limit) = (show(needs.glibc), show(self.glibc));
            return Err(format!("the program for {triple} needs glibc {needs}, and must need at most {limit}"));
        }
        let foreign = match self.glibc {
            Some(_) => needs.foreign_library(&[ARM_LOADER]),
            None => needs.libraries.first().map(String::as_str),
        };
        match foreign {
            Some(library) => Err(format!("the program for {triple} needs {library}, which machines may not have")),
            None => Ok(()),
        }
    }
}

/// Manual pages and completions: names in the archive, and files.
struct Pages(Vec<(String, PathBuf)>);

impl Pages {
    /// Has the program of this machine write them.
    fn write(workspace: &Workspace) -> Result<Pages, String> {
        let folder = workspace.target("dist-pages");
        fs::create_dir_all(&folder).map_err(text)?;
        let mut pages = Vec::new();
        for line in program(&["man".as_ref(), folder.join("man").as_os_str()])?.lines() {
            let path = PathBuf::from(line);
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            pages.push((format!("man/{name}"), path));
        }
        for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
            let path = folder.join(shell);
            fs::write(&path, program(&["completions".as_ref(), shell.as_ref()])?).map_err(text)?;
            pages.push((format!("completions/{PROGRAM}.{shell}"), path));
        }
        Ok(Pages(pages))
    }
}

/// Runs the program of this machine; returns its output.
fn program(arguments: &[&std::ffi::OsStr]) -> Result<String, String> {
    let mut cargo = Command::new("cargo");
    cargo.args(["run", "--quiet", "--locked", "--package", "distribute-cli", "--"]).args(arguments);
    let output = cargo.stderr(Stdio::inherit()).output().map_err(text)?;
    match output.status.success() {
        true => String::from_utf8(output.stdout).map_err(text),
        false => Err(format!("{PROGRAM} {arguments:?} failed: {}", output.status)),
    }
}

/// Whether Rust's own libraries are installed for a target.
pub(crate) fn has_library(triple: &str) -> Result<bool, String> {
    let output = Command::new("rustc").args(["--print", "target-libdir", "--target", triple]).output().map_err(text)?;
    let folder = String::from_utf8_lossy(&output.stdout);
    Ok(output.status.success() && fs::read_dir(folder.trim()).is_ok_and(|mut entries| entries.next().is_some()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn needs(glibc: Option<Version>, libraries: &[&str]) -> Needs {
        Needs { libraries: libraries.iter().map(|name| (*name).to_owned()).collect(), glibc, is_x86_64: true }
    }

    #[test]
    fn programs_need_what_their_machines_have() {
        let [gnu, musl, arm] = TARGETS;
        assert_eq!(gnu.accepts(&needs(Some((2, 28)), &["libc.so.6"])), Ok(()));
        assert_eq!(musl.accepts(&needs(None, &[])), Ok(()));
        let refused = [
            (&gnu, needs(Some((2, 29)), &["libc.so.6"]), "needs glibc 2.29, and must need at most 2.28"),
            (&gnu, needs(Some((2, 17)), &["libssl.so.3"]), "needs libssl.so.3"),
            (&musl, needs(Some((2, 17)), &[]), "needs glibc 2.17, and must need at most none"),
            (&musl, needs(None, &["libc.so.6"]), "needs libc.so.6"),
            (&arm, needs(Some((2, 28)), &[]), "is for another processor"),
        ];
        for (target, needs, problem) in refused {
            let error = target.accepts(&needs).unwrap_err();
            assert!(error.contains(problem), "{error}");
        }
    }
}
