//! Examples as the programs that launchers start.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::text;
use crate::workspace::Workspace;

/// Builds an example and `distribute`; returns their folder.
pub(crate) fn build(example: &str) -> Result<PathBuf, String> {
    let workspace = Workspace::load()?;
    let mut cargo = Command::new("cargo");
    cargo.args(["build", "--release", "--quiet", "--locked", "--package", "distribute-cli"]);
    cargo.args(["--package", "distribute", "--bin", "distribute", "--example", example]);
    match cargo.status().map_err(text)? {
        status if status.success() => Ok(workspace.target("release")),
        status => Err(format!("the programs could not be built: {status}")),
    }
}

/// Returns the bits of the losses in a file that the example wrote.
pub(crate) fn read(file: &Path) -> Result<Vec<u32>, String> {
    let losses = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    losses.lines().map(|line| line.parse::<f32>().map(f32::to_bits).map_err(text)).collect()
}

/// Returns the last loss as text.
pub(crate) fn shown(losses: &[u32]) -> String {
    losses.last().map_or("none".to_owned(), |bits| format!("{:.6}", f32::from_bits(*bits)))
}

/// Compares losses with those of an undisturbed run; the error says where they part.
pub(crate) fn compare(losses: &[u32], expected: &[u32]) -> Result<(), String> {
    let part = losses.iter().zip(expected).position(|(one, other)| one != other);
    match part {
        None if losses.len() == expected.len() => Ok(()),
        None => Err(format!("{} losses instead of {}", losses.len(), expected.len())),
        Some(at) => {
            let [one, other] = [losses[at], expected[at]].map(f32::from_bits);
            Err(format!("the losses part at {at} of {}: {one:?} instead of {other:?}", expected.len()))
        }
    }
}
