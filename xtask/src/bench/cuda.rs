//! `cargo xtask bench cuda`: copies, kernels and collectives of the GPUs here, each against the rate of a copy.

use std::process::Stdio;

use clap::Args;
use serde_json::Value;

use crate::error::text;
use crate::gpu::{checks, succeeded};

#[derive(Args)]
pub(crate) struct Flags {
    /// One JSON object a line.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(flags: &Flags) -> Result<(), String> {
    if !flags.json {
        return succeeded(checks(&["--bench-only"]).status().map_err(text)?);
    }
    let folder = tempfile::tempdir().map_err(text)?;
    let mut checks = checks(&["--bench-only", "--report", &folder.path().to_string_lossy()]);
    let output = checks.stderr(Stdio::inherit()).output().map_err(text)?;
    match std::fs::read_to_string(folder.path().join("report.json")) {
        Ok(report) => {
            let report: Value = serde_json::from_str(&report).map_err(text)?;
            lines(&report).for_each(|line| println!("{line}"));
        }
        // It says why there is none.
        Err(_) => print!("{}", String::from_utf8_lossy(&output.stdout)),
    }
    succeeded(output.status)
}

fn lines(report: &Value) -> impl Iterator<Item = &Value> {
    report["measurements"].as_array().into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_for_each_measurement() {
        let report = serde_json::json!({ "gpus": [], "measurements": [{ "what": "a" }, { "what": "b" }] });
        let lines: Vec<String> = lines(&report).map(Value::to_string).collect();
        assert_eq!(lines, [r#"{"what":"a"}"#, r#"{"what":"b"}"#]);
    }
}
