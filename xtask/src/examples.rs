//! The examples that commands run as real processes.

use std::path::PathBuf;
use std::process::Command;

use clap::ValueEnum;

use crate::workspace::Workspace;

/// A build of the examples.
#[derive(Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Profile {
    #[default]
    Release,
    Dev,
}

impl Profile {
    /// Builds examples, unless `no_build` says that they are there; returns their folder.
    pub(crate) fn examples(self, names: &[&str], features: &str, no_build: bool) -> Result<PathBuf, String> {
        let release = self == Profile::Release;
        if !no_build {
            let mut command = Command::new("cargo");
            command.args(["build", "--locked", "--package", "distribute", "--features", features]);
            command.args(names.iter().flat_map(|name| ["--example", *name])).args(release.then_some("--release"));
            match command.status() {
                Ok(status) if status.success() => {}
                Ok(status) => return Err(format!("cargo build of the examples failed: {status}")),
                Err(error) => return Err(format!("cargo build could not be started: {error}")),
            }
        }
        let folder = Workspace::load()?.target(if release { "release" } else { "debug" }).join("examples");
        match names.iter().find(|name| !folder.join(name).is_file()) {
            None => Ok(folder),
            Some(name) => Err(format!("{name} is not in {}; run without --no-build", folder.display())),
        }
    }
}
