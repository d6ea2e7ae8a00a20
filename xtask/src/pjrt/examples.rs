//! The programs of the examples that train on TPUs.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::within;
use crate::error::text;

/// The examples, with the arguments of a short run.
const EXAMPLES: [(&str, &[&str]); 4] = [
    ("tpu", &["--epochs", "1"]),
    ("burn_mnist", &["--tpu", "--epochs", "1", "--model", "mlp"]),
    ("burn_mnist", &["--tpu", "--epochs", "1", "--model", "cnn"]),
    ("burn_char_lm", &["--tpu", "--epochs", "1", "--steps", "2", "--sample", "0"]),
];

/// Longest time of a build and a run together.
const PATIENCE: Duration = Duration::from_secs(900);

/// Runs each example on XLA's plugin for CPUs, and returns the files of the programs of their training steps.
pub(super) fn programs(cpu: &Path, folder: &Path) -> Result<Vec<PathBuf>, String> {
    let mut files = Vec::with_capacity(EXAMPLES.len());
    for (place, (name, arguments)) in EXAMPLES.iter().enumerate() {
        let own = folder.join(format!("programs/{place}-{name}"));
        if own.exists() {
            std::fs::remove_dir_all(&own).map_err(text)?;
        }
        println!("the example {name} {} on XLA's plugin for CPUs:", arguments.join(" "));
        let mut cargo = Command::new("cargo");
        cargo.args(["run", "--quiet", "--locked", "--package", "distribute", "--features", "burn,logging,pjrt"]);
        cargo.args(["--example", name, "--"]).args(*arguments).args(["--replicas", "2", "--dump-programs"]).arg(&own);
        let status = within(cargo.env("DISTRIBUTE_PJRT_PLUGIN", cpu), PATIENCE)?;
        if !status.success() {
            return Err(format!("the example {name} ended with {status}; see its message above"));
        }
        files.push(largest(&own)?);
    }
    Ok(files)
}

/// Returns the largest program of a folder. Those of evaluations have neither backward nor an update.
fn largest(folder: &Path) -> Result<PathBuf, String> {
    let mut largest = None;
    for entry in std::fs::read_dir(folder).map_err(|error| format!("{}: {error}", folder.display()))? {
        let entry = entry.map_err(text)?;
        let bytes = entry.metadata().map_err(text)?.len();
        if largest.as_ref().is_none_or(|(most, _)| bytes > *most) {
            largest = Some((bytes, entry.path()));
        }
    }
    largest.map(|(_, path)| path).ok_or_else(|| format!("{} has no programs", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_program_is_the_training_step() {
        let folder = tempfile::tempdir().unwrap();
        assert!(largest(folder.path()).unwrap_err().contains("has no programs"));
        for (name, length) in [("evaluate-1.mlir", 5), ("train-1.mlir", 9), ("predict-1.mlir", 3)] {
            std::fs::write(folder.path().join(name), "x".repeat(length)).unwrap();
        }
        assert_eq!(largest(folder.path()).unwrap(), folder.path().join("train-1.mlir"));
        assert!(largest(Path::new("/no/such/folder")).unwrap_err().contains("/no/such/folder"));
    }
}
