//! The results of checks and measurements, as text and as JSON.

use std::fmt::Write;
use std::path::Path;

use serde::Serialize;

use crate::bench::Measurement;
use crate::gpu::Gpus;
use crate::{Check, Error, Outcome, Result};

/// The results of checks and measurements.
#[derive(Debug, Default, Serialize)]
pub struct Report {
    gpus: Vec<Gpu>,
    checks: Vec<Checked>,
    measurements: Vec<Measurement>,
    problems: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Gpu {
    name: String,
    memory_bytes: u64,
    capability: String,
    multiprocessors: u32,
    driver_cuda: String,
    uuid: String,
}

#[derive(Debug, Serialize)]
struct Checked {
    name: &'static str,
    status: &'static str,
    detail: String,
    seconds: f64,
}

impl Report {
    /// Creates an empty report on these GPUs.
    pub fn new(gpus: &Gpus) -> Report {
        let gpus = gpus.infos().iter().map(|info| Gpu {
            name: info.name.clone(),
            memory_bytes: info.memory_bytes,
            capability: format!("{}.{}", info.capability.0, info.capability.1),
            multiprocessors: info.multiprocessors,
            driver_cuda: format!("{}.{}", info.driver_cuda.0, info.driver_cuda.1),
            uuid: info.uuid.clone(),
        });
        Report { gpus: gpus.collect(), ..Report::default() }
    }

    /// Runs a check and records its outcome; returns a line that describes it.
    pub fn check(&mut self, check: &Check, gpus: &Gpus) -> String {
        let (outcome, took) = check.run(gpus);
        let (status, detail) = match outcome {
            Ok(Outcome::Passed(tried)) => ("passed", tried),
            Ok(Outcome::Skipped(reason)) => ("skipped", reason),
            Err(error) => ("FAILED", error.to_string()),
        };
        let line = format!("{status:<8} {} ({detail}; {:.1} s)", check.name, took.as_secs_f64());
        self.checks.push(Checked { name: check.name, status, detail, seconds: took.as_secs_f64() });
        line
    }

    /// Adds measurements.
    pub fn measure(&mut self, measurements: Vec<Measurement>) {
        self.measurements.extend(measurements);
    }

    /// Records a measurement that failed.
    pub fn problem(&mut self, problem: String) {
        self.problems.push(problem);
    }

    /// Returns whether a check or a measurement failed.
    pub fn has_failures(&self) -> bool {
        !self.problems.is_empty() || self.checks.iter().any(|check| check.status == "FAILED")
    }

    /// Formats the report for people.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for gpu in &self.gpus {
            let Gpu { name, memory_bytes, capability, multiprocessors, driver_cuda, .. } = gpu;
            let gib = *memory_bytes as f64 / f64::from(1 << 30);
            // Writing to a string cannot fail.
            let _ = writeln!(
                text,
                "{name}, {gib:.1} GiB, compute capability {capability}, {multiprocessors} SMs, driver for CUDA \
                {driver_cuda}"
            );
        }
        for check in &self.checks {
            let _ = writeln!(text, "{:<8} {} ({}; {:.1} s)", check.status, check.name, check.detail, check.seconds);
        }
        text += &Measurement::table(&self.measurements);
        for problem in &self.problems {
            let _ = writeln!(text, "PROBLEM  {problem}");
        }
        let count = |status| self.checks.iter().filter(|check| check.status == status).count();
        let (passed, failed, skipped) = (count("passed"), count("FAILED"), count("skipped"));
        let measured = self.measurements.len();
        let _ = writeln!(text, "{passed} passed, {failed} failed, {skipped} skipped, {measured} measured");
        text
    }

    /// Writes `report.txt` and `report.json` into a folder.
    ///
    /// # Errors
    /// [`Error::File`] if a file cannot be written.
    /// [`Error::File`].
    pub fn write(&self, folder: &Path) -> Result<()> {
        let json = serde_json::to_string_pretty(self).unwrap_or_default();
        for (name, text) in [("report.txt", self.to_text()), ("report.json", json)] {
            let path = folder.join(name);
            let written = std::fs::create_dir_all(folder).and_then(|()| std::fs::write(&path, text));
            written.map_err(|source| Error::File { path: path.display().to_string(), source })?;
        }
        Ok(())
    }
}
