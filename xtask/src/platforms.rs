//! `cargo xtask platforms`: checks the crates that do not need Linux for other systems.

use std::process::Command;

use clap::Args;

use crate::dist::has_library;
use crate::workspace::Workspace;

#[derive(Args, Default)]
pub(crate) struct Flags {
    /// Checks for this target only.
    #[arg(long, value_name = "TRIPLE", value_parser = TARGETS)]
    target: Option<String>,
}

/// Systems on which nothing of ours runs yet, and for which it must compile.
const TARGETS: [&str; 3] = ["aarch64-apple-darwin", "x86_64-pc-windows-gnu", "aarch64-unknown-linux-gnu"];

/// Crates that compile without a C compiler for the target, with their features.
const CRATES: [(&str, &str); 4] = [
    ("distribute-collectives", "grpc"),
    ("distribute-input", "csv,tfrecord"),
    ("distribute-estimator", ""),
    ("distribute", "data-service,parameter-server,estimator,grpc,prometheus"),
];

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    let workspace = Workspace::load()?;
    for target in TARGETS.into_iter().filter(|target| flags.target.as_deref().is_none_or(|only| only == *target)) {
        if !has_library(target)? {
            println!("skipped: {target}, for which Rust is not installed (rustup target add {target})");
            continue;
        }
        for (package, features) in CRATES {
            let mut cargo = Command::new("cargo");
            cargo.args(["clippy", "--quiet", "--locked", "--target", target, "--package", package]);
            cargo.args(["--features", features, "--target-dir"]).arg(workspace.target("platforms"));
            cargo.args(["--", "-D", "warnings"]);
            let status = cargo.status().map_err(|error| format!("cargo could not be started: {error}"))?;
            if !status.success() {
                return Err(format!("{package} does not compile for {target}: {status}"));
            }
            println!("passed: {package} for {target}");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches;

    use super::*;

    #[test]
    fn a_target_that_is_not_checked_is_refused() {
        let parse = |target: &str| {
            let command = Flags::augment_args(clap::Command::new("platforms").no_binary_name(true));
            command.try_get_matches_from(["--target", target]).map(|matches| Flags::from_arg_matches(&matches).unwrap())
        };
        assert_eq!(parse(TARGETS[0]).unwrap().target.as_deref(), Some(TARGETS[0]));
        assert!(parse("x86_64-apple-darwin").err().unwrap().to_string().contains(TARGETS[1]));
    }
}
